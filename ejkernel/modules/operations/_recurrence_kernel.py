"""What operations with a recurrent state share as kernels: the linear ones, and the delta rule."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import jax
import numpy as np

from ejkernel._checking import ValueCheck, checking
from ejkernel._numbers import as_flag
from ejkernel._sizes import unknown_sizes
from ejkernel.kernels._linear.checks import offsets, offsets_in_order
from ejkernel.kernels._linear.config import RecurrenceConfig
from ejkernel.kernels._linear.gates import ARGUMENTS, CONSTANT, PER_TOKEN
from ejkernel.kernels._linear.problem import DECODED_TOKENS
from ejkernel.modules._registry_kernel import CHOSEN_ALREADY, RegistryKernel
from ejkernel.modules.operations._value_checks import recurrence_checks, warn_of_layout, warn_of_time_first
from ejkernel.ops import Invocation
from ejkernel.ops.kernel import named_arguments
from ejkernel.parallel.exchange import axis_size


class RecurrenceKernel(RegistryKernel[RecurrenceConfig, Any]):
    """An operation with a state, as the executor sees it: gives the output, or the output and the final state.

    Attributes:
        per_token: the arrays of its problem whose second axis is time.
        gates: those of its arguments that are log decays.
        order: a word on the order of its arguments, for the check of gates, where other libraries have another.
    """

    not_of_the_problem = ("platform", "return_state", "sequence_axis")
    numbers = ("layer_idx", "num_layers")
    per_token: ClassVar[tuple[str, ...]] = ("query", "key", "value", *PER_TOKEN)
    gates: ClassVar[tuple[str, ...]] = ARGUMENTS
    order: ClassVar[str] = ""

    def problem(self, *args: Any, **kwargs: Any) -> Any:
        """Without what no choice depends on: the scale's value, and the rank that a packed call came in."""
        return dataclasses.replace(super().problem(*args, **kwargs), scale=1.0, packed_rank3=False)

    def results(self, found: tuple[jax.Array, jax.Array], named: Mapping[str, Any]) -> Any:
        return found if as_flag("return_state", named["return_state"]) else found[0]

    def run(self, *args: Any, cfg: RecurrenceConfig, **kwargs: Any) -> Any:
        self.signature.check_config(cfg, CHOSEN_ALREADY)
        if kwargs.get("sequence_axis") is not None:  # which goes by name alone; arguments are bound once, as that takes 20 us
            return self._run_split(named_arguments(self, args, kwargs), cfg)
        if cfg.exchange is not None:
            raise ValueError(f"exchange must be None where no sequence_axis splits time; got {cfg.exchange!r}.")
        return super().run(*args, cfg=cfg, **kwargs)

    def _run_split(self, named: dict[str, Any], cfg: RecurrenceConfig) -> Any:
        """A call whose time is split over a mesh axis."""
        from ejkernel.parallel import local_offsets, over_sequence_axis

        axis, offsets_given = named["sequence_axis"], named["cu_seqlens"]
        given = {name: x for name, x in named.items() if name not in self.not_of_the_problem}
        if offsets_given is not None:
            given["cu_seqlens"] = local_offsets(axis, offsets_given, _shape(named["query"])[-3])
        problem = self.signature.problem(**given)
        implementation = self._implementation(self._chosen(problem, named["platform"], cfg))
        return self.results(over_sequence_axis(problem, implementation, cfg, axis, offsets_given), named)

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Offsets whose values are known are checked; a list of them becomes an array."""
        args, kwargs = super().prepare(args, kwargs)
        place = list(self.parameters().parameters).index("cu_seqlens")
        given = args[place] if len(args) > place else kwargs.get("cu_seqlens")
        axis = kwargs.get("sequence_axis")
        shards = 1 if axis is None else axis_size(axis)
        query = args[0] if args else kwargs.get("query")
        shape = _shape(query)
        if given is None or len(shape) < 3:
            return args, kwargs
        array = offsets(given)
        if len(shape) == 3 or shape[0] == 1:  # where offsets are of the whole row; other batches are refused by name later
            offsets_in_order(array, shards * shape[-3])
        if array is given:
            return args, kwargs
        if len(args) > place:
            return (*args[:place], array, *args[place + 1 :]), kwargs
        return args, {**kwargs, "cu_seqlens": array}

    def value_checks(self, named: Mapping[str, Any]) -> Iterator[ValueCheck]:
        if len(_shape(named["query"])) < 3:  # which is refused by name later
            return
        if unknown_sizes(named):  # a program that jax.export makes for a file, which holds no callbacks
            return
        if checking():
            warn_of_time_first(self.op_id, named["query"], named["initial_state"])
        if checking() and named["initial_state"] is None:  # a call with a state is a decoder's, of few tokens
            warn_of_layout(self.called, named["query"])
        axis = named["sequence_axis"]
        yield from recurrence_checks(named, self.gates, 1 if axis is None else axis_size(axis), self.order)

    def differentiable(self, inv: Invocation[Any, Any]) -> bool:
        """Calls of a few tokens are steps of a decoder, which nobody trains through: they are tuned for the step alone."""
        return bool(inv.problem.shape[1] > DECODED_TOKENS)

    def length_axes(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Tokens are a length, and so is the number of packed sequences."""
        return (1,) if name in self.per_token else (0,) if name == "cu_seqlens" else ()

    def random_inputs(self, inv: Invocation[Any, Any], key: jax.Array) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Gates from weak ones to resets, and sequences of nearly equal length.

        Normal numbers as gates would amplify, and empty sequences would leave nothing to measure.
        """
        from ejkernel.kernels._linear.random import equal_offsets, gate  # only tuning needs these
        from ejkernel.ops.inputs import random_arguments

        args, kwargs = random_arguments(inv, key)
        names = list(self.parameters().parameters)
        named = {**dict(zip(names, args, strict=False)), **kwargs}
        tokens, time_axis = named["query"].shape[-3], named["query"].ndim - 3
        for number, name in enumerate(self.gates):
            if (drawn := named.get(name)) is not None:
                axis = None if name in CONSTANT else time_axis
                named[name] = gate(jax.random.fold_in(key, number), drawn.shape, drawn.dtype, axis)
        if (packed := named.get("cu_seqlens")) is not None:
            named["cu_seqlens"] = equal_offsets(tokens, packed.shape[0] - 1).astype(packed.dtype)
        named = {**self.drawn(named), "sequence_axis": None}  # what is measured is a shard's own call
        return tuple(named[name] for name in names[: len(args)]), {name: named[name] for name in kwargs}

    def drawn(self, named: dict[str, Any]) -> dict[str, Any]:
        """The random arguments by name, with what the operation asks of them beside sensible gates."""
        return named


def _shape(x: Any) -> tuple[int, ...]:
    """The shape of an array, also of one given as a list; () for what is no array, which is refused by name later."""
    try:
        return np.shape(x)
    except ValueError:
        return ()
