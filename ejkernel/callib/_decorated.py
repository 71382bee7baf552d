"""Kernels under `@triton.heuristics` and `@triton.autotune`.

Heuristics are functions of a call's arguments, so they are evaluated here, as Triton does. Triton's tuner measures with torch
while a kernel is launched, which has no meaning in a program that JAX compiles ahead; it is refused with what to pass instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

COMPILE_OPTIONS = ("num_warps", "num_stages", "maxnreg")


def is_gluon(kernel: Any) -> bool:
    """Whether a kernel was decorated by `@gluon.jit`."""
    return type(kernel).__name__ == "GluonJITFunction"


def undecorated(kernel: Any) -> tuple[Any, dict[str, Callable[[dict[str, Any]], Any]]]:
    """`(the @triton.jit function, its heuristics by name in the order they are evaluated)`.

    Raises:
        TypeError: Triton is to tune the kernel, or it is no Triton kernel.
    """
    heuristics: dict[str, Callable[[dict[str, Any]], Any]] = {}
    while type(kernel).__name__ in ("Heuristics", "Autotuner"):
        if type(kernel).__name__ == "Autotuner":
            raise TypeError(_tuned_by_triton(kernel))
        heuristics |= {name: rule for name, rule in kernel.values.items() if name not in heuristics}
        kernel = kernel.fn
    if not callable(getattr(kernel, "fn", None)):
        raise TypeError(f"kernel must be a @triton.jit function; got {type(kernel).__name__}.")
    return kernel, heuristics


def evaluated(
    heuristics: Mapping[str, Callable[[dict[str, Any]], Any]],
    parameters: Sequence[str],
    values: Sequence[Any],
    given: Mapping[str, Any],
) -> dict[str, Any]:
    """What the heuristics say, each seeing the arguments by name and what the ones before it said.

    Args:
        parameters: the kernel's parameters in order.
        values: the call's arguments and outputs, which fill those that neither `given` nor a heuristic names.
        given: constants of the call.
    """
    if twice := sorted(given.keys() & heuristics.keys()):
        raise TypeError(
            f"{', '.join(twice)} comes from @triton.heuristics; leave it out, or pass kernel.fn to do without them."
        )
    filled = [name for name in parameters if name not in given and name not in heuristics]
    seen = {**dict(zip(filled, values, strict=False)), **given}
    found: dict[str, Any] = {}
    for name, rule in heuristics.items():
        found[name] = rule({**seen, **found})
    return found


def _tuned_by_triton(kernel: Any) -> str:
    first = kernel.configs[0]
    options = {name: getattr(first, name, None) for name in COMPILE_OPTIONS}
    chosen = {**first.kwargs, **{name: value for name, value in options.items() if value is not None}}
    example = ", ".join(f"{name}={value!r}" for name, value in chosen.items())
    name = getattr(kernel.base_fn, "__name__", "kernel")
    return (
        f"{name} is under @triton.autotune, which measures while it launches and cannot inside a JAX program. Pass the kernel "
        f"under it with one of its {len(kernel.configs)} configurations: triton_call(..., kernel={name}.fn, {example}). To "
        f"choose between them by measurement, make them candidates of an ejkernel.ops.Kernel."
    )
