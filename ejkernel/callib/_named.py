"""A kernel's arguments and outputs, given by the names of its parameters, in the order that `triton_call` fills them."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple


class Ordered(NamedTuple):
    """What `triton_call` takes by position."""

    args: list[Any]
    outputs: dict[str, Any]  # in the kernel's order
    aliases: dict[int, int]
    zeroed: list[int]
    constants: dict[str, Any]  # with the outputs that the kernel does without


def in_order(
    function: Any,
    from_heuristics: Collection[str],
    arguments: Mapping[str, Any],
    out_shape: Any,
    aliases: Mapping[str, str],
    zeroed: Collection[str],
    constants: Mapping[str, Any],
) -> Ordered:
    """Arguments and outputs by position.

    Raises:
        TypeError: a name is no parameter, is given twice or is missing, or an output stands before an argument.
    """
    if not isinstance(out_shape, Mapping):
        raise TypeError(f"out_shape must be a dict by name, as arguments are; got {type(out_shape).__name__}.")
    name, parameters = function.__name__, list(inspect.signature(function).parameters)
    groups = {"arguments": arguments, "out_shape": out_shape, "the constants": constants}
    given = [parameter for group in groups.values() for parameter in group]
    if twice := sorted({parameter for parameter in given if given.count(parameter) > 1}):
        raise TypeError(f"{', '.join(twice)} of {name} must be given once: in {', '.join(groups)}.")
    if unknown := [parameter for parameter in given if parameter not in parameters]:
        raise TypeError(f"{name} has no parameter {', '.join(unknown)}; it has {', '.join(parameters)}.")
    if missing := [parameter for parameter in parameters if parameter not in given and parameter not in from_heuristics]:
        raise TypeError(f"{name} also needs {', '.join(missing)}; None stands for a pointer that it does without.")
    outputs = {parameter: out_shape[parameter] for parameter in parameters if out_shape.get(parameter) is not None}
    inputs = [parameter for parameter in parameters if parameter in arguments]
    pointers = [parameter for parameter in parameters if parameter in arguments or parameter in outputs]
    if pointers != [*inputs, *outputs]:
        raise TypeError(f"the outputs of {name} ({', '.join(outputs)}) must be its last parameters but for constants.")
    if wrong := [x for x in [*aliases, *aliases.values(), *zeroed] if x not in inputs and x not in outputs]:
        raise TypeError(f"aliases and zeroed outputs must name arguments and outputs of {name}; got {', '.join(wrong)}.")
    places = list(outputs)
    return Ordered(
        [arguments[parameter] for parameter in inputs],
        outputs,
        {inputs.index(i): places.index(o) for i, o in aliases.items()},
        [places.index(o) for o in zeroed],
        {**constants, **{parameter: None for parameter, x in out_shape.items() if x is None}},
    )
