"""`triton_call`: a Triton kernel as a JAX function of arrays, compiled on a GPU or interpreted on the host."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ejkernel._device import Device, on_device
from ejkernel._numbers import is_int
from ejkernel._varying import vary, varying_axes
from ejkernel.callib._decorated import COMPILE_OPTIONS, evaluated, is_gluon, undecorated
from ejkernel.callib._named import in_order

_target: contextvars.ContextVar[int | None] = contextvars.ContextVar("ejkernel_triton_target", default=None)


@contextlib.contextmanager
def compile_for(compute_capability: int) -> Iterator[None]:
    """Inside, calls are planned and kernels compiled for this compute capability (90: Hopper) instead of the GPU at hand.

    For lowering on a machine without a GPU: `jax.jit(f).trace(x).lower(lowering_platforms=("cuda",))`.
    """
    token = _target.set(compute_capability)
    try:
        with on_device(Device("gpu", f"NVIDIA GPU of compute capability {compute_capability / 10}", compute_capability)):
            yield
    finally:
        _target.reset(token)


@dataclasses.dataclass(frozen=True)
class Launch:
    """One call of a kernel, as it would be compiled and run."""

    kernel: Any
    names: Sequence[str]  # the parameters that args and outputs fill
    args: Sequence[Any]
    outputs: Sequence[jax.ShapeDtypeStruct]
    grid: tuple[int, int, int]
    constants: dict[str, Any]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return self.kernel.fn.__name__

    def compile(self, compute_capability: int) -> Any:
        """The compiled kernel; needs no GPU. RuntimeError where it takes more shared memory than such a GPU has."""
        from ejkernel.callib._compiled import Options, compile_to_fit, signature_of

        signature, absent = signature_of(self.names, [*self.args, *self.outputs])
        return compile_to_fit(self.kernel, signature, {**self.constants, **absent}, Options(**self.options), compute_capability)


_observer: contextvars.ContextVar[Callable[[Launch], None] | None] = contextvars.ContextVar("ejkernel_launches", default=None)


@contextlib.contextmanager
def instead_of_launching(observe: Callable[[Launch], None]) -> Iterator[None]:
    """Inside, `triton_call` hands every launch to `observe` and returns zeros: to see what a function would launch.

    Only for functions that are traced anew: what `jax.jit` has traced already launches nothing here, and what it traces here
    would launch nothing afterwards.
    """
    token = _observer.set(observe)
    try:
        yield
    finally:
        _observer.reset(token)


def triton_call(
    *args: Any,
    kernel: Any,
    out_shape: Any,
    grid: int | Sequence[int] | Callable[[dict[str, Any]], Sequence[int]],
    num_warps: int = 4,
    num_stages: int = 3,
    maxnreg: int | None = None,
    shrink_stages: bool = False,
    input_output_aliases: Mapping[Any, Any] | None = None,
    zeroed_outputs: Sequence[Any] = (),
    name: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    **constants: Any,
) -> Any:
    """Runs `kernel` (a `@triton.jit` function) on JAX arrays; works under `jit`, `shard_map` and `vmap` (one by one).

    A `@gluon.jit` function runs compiled, too (Triton's interpreter knows no Gluon); num_warps are those that it starts with,
    before it is split into partitions.

    `@triton.heuristics` over it are evaluated: their functions get arrays, numbers and constants by name, and outputs as
    shapes. `@triton.autotune` is refused: pass one of its configurations, or choose with an `ejkernel.ops.Kernel`.

    The kernel's parameters are filled in their order: first `args`, then one pointer for each output, skipping those that
    `constants` or a heuristic gives by name (its `tl.constexpr` parameters; an optional pointer may be given there as None).

    Args:
        args: arrays (passed as pointers), Python numbers (ints as i32, or i64 when they need it; floats as f32; never
            specialised on their value) or None (a pointer the kernel does without).
        out_shape: a `jax.ShapeDtypeStruct` or a pytree of them; the result has its structure.
        grid: the number of programs along up to three axes, or a function of `constants` (and heuristics) that gives it.
        num_warps, num_stages, maxnreg: Triton's compile options; without meaning when interpreted.
        shrink_stages: where the GPU's shared memory is too small, lower num_stages and a constant named STAGES until it is not.
        input_output_aliases: {index in `args`: index of the output} that share one buffer: the output starts with the
            input's contents. The input is copied first unless it is donated or no longer needed.
        zeroed_outputs: indices of outputs that are zero when the kernel starts. All others hold anything (interpreted: NaN),
            unless `jax_debug_nans` or `jax_debug_infs` is set.
        arguments: instead of `args`, the same by the names of the kernel's parameters. `out_shape` is then a dict by name too
            (None: an output that the kernel does without), the result a dict of the outputs that are there, and
            input_output_aliases and zeroed_outputs hold names. Every parameter must be named: nothing is filled by its place.
        name: what profiles call the kernel; None: its own name. The compiled program has it in the operation's name
            (`jax.named_scope`) and, with `_` for what is no letter or digit, as the GPU function's symbol.

    A kernel decorated while `TRITON_INTERPRET=1` was set is interpreted on the host, for tests without a GPU.

    Raises:
        ImportError: Triton, or compiled: JAX's CUDA plugin, is not installed.
        TypeError: the arguments do not fit the kernel's parameters.
        RuntimeError: the kernel needs more shared memory than the GPU has, or compiled: there is no GPU.

    Example:
        >>> triton_call(x, y, n, kernel=add, out_shape=x, grid=cdiv(n, 128), BLOCK=128)   # doctest: +SKIP
    """
    _require_triton()
    kernel, heuristics = undecorated(kernel)
    if arguments is not None:
        if args:
            raise TypeError(f"triton_call takes arguments by position or by name; got {len(args)} by position and `arguments`.")
        given = in_order(kernel.fn, heuristics, arguments, out_shape, input_output_aliases or {}, zeroed_outputs, constants)
        args, out_shape, constants = tuple(given.args), list(given.outputs.values()), given.constants
        input_output_aliases, zeroed_outputs = given.aliases, given.zeroed
    name = _checked_name(kernel, name)
    outputs, tree = jax.tree.flatten(out_shape)
    outputs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outputs]
    args = tuple(_as_argument(x) for x in args)
    axes = varying_axes(*(x for x in args if isinstance(x, jax.Array)))  # of a shard_map around the call
    args = tuple(vary(x, axes) if isinstance(x, jax.Array) else x for x in args)
    aliases = _checked_aliases(args, outputs, input_output_aliases or {})
    for index in zeroed_outputs:
        if not 0 <= index < len(outputs) or index in aliases.values():
            raise TypeError(f"zeroed_outputs must name outputs 0 to {len(outputs) - 1} that alias no input; got {index}.")
    options = {"num_warps": num_warps, "num_stages": num_stages, "maxnreg": maxnreg, "shrink_stages": shrink_stages}
    if heuristics:
        found = evaluated(heuristics, list(inspect.signature(kernel.fn).parameters), [*args, *outputs], constants)
        options |= {option: found.pop(option) for option in COMPILE_OPTIONS if option in found}
        constants |= found
    names = _bound_names(kernel, len(args) + len(outputs), constants)
    launch = Launch(kernel, names, args, outputs, _grid(grid, constants), constants, options)
    if (observe := _observer.get()) is not None:
        observe(launch)
        results = [jax.numpy.zeros(x.shape, x.dtype) for x in outputs]
    else:
        with jax.named_scope(name):
            results = _run(launch, aliases, frozenset(zeroed_outputs), name)
    results = [vary(x, axes) for x in results]
    return jax.tree.unflatten(tree, results) if arguments is None else dict(zip(given.outputs, results, strict=True))


def _run(launch: Launch, aliases: dict[int, int], zeroed: frozenset[int], name: str) -> list[jax.Array]:
    if any(getattr(jax.config, f"jax_debug_{kind}") for kind in ("nans", "infs")):  # they would find what no program writes
        zeroed = frozenset(range(len(launch.outputs))) - set(aliases.values())
    call = (launch.kernel, launch.names, launch.args, launch.outputs, launch.grid, launch.constants, aliases, zeroed)
    if is_interpreted(launch.kernel):
        from ejkernel.callib._interpreted import run

        return run(*call, launch.options["num_warps"])
    from ejkernel.callib._compiled import Options, run_compiled

    return run_compiled(*call, Options(**launch.options), _target.get(), name)


def _require_triton() -> None:
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "triton_call needs Triton: pip install triton (3.6 to 3.9). The other platforms of ejkernel do without it."
        ) from error


def is_interpreted(kernel: Any) -> bool:
    """Whether a kernel was decorated under TRITON_INTERPRET=1 and runs on the host; a Gluon kernel: whether that is set now."""
    if is_gluon(kernel):
        import triton

        return bool(triton.knobs.runtime.interpret)
    return type(kernel).__name__ == "InterpretedFunction"


def _checked_name(kernel: Any, name: str | None) -> str:
    if name is None:
        return kernel.fn.__name__
    if not isinstance(name, str) or not name.strip():
        raise TypeError(f"name must be a string that profiles can show, or None; got {name!r}.")
    return name


def _as_argument(x: Any) -> Any:
    if x is None or isinstance(x, (bool, int, float, jax.Array)):
        return x
    if isinstance(x, np.ndarray):
        return jax.numpy.asarray(x)
    if isinstance(x, (np.integer, np.floating, np.bool_)):
        return x.item()
    raise TypeError(f"triton_call takes arrays, numbers and None; got {type(x).__name__}.")


def _checked_aliases(args: Sequence[Any], outputs: Sequence[Any], aliases: Mapping[int, int]) -> dict[int, int]:
    for i, o in aliases.items():
        if not (0 <= i < len(args) and isinstance(args[i], jax.Array) and 0 <= o < len(outputs)):
            raise TypeError(f"input_output_aliases must map an array argument to an output; got {i}: {o}.")
        if (args[i].shape, args[i].dtype) != (outputs[o].shape, outputs[o].dtype):
            raise TypeError(
                f"argument {i} ({args[i].dtype}{list(args[i].shape)}) cannot share memory with output {o} "
                f"({outputs[o].dtype}{list(outputs[o].shape)})."
            )
    return dict(aliases)


def _bound_names(kernel: Any, positional: int, constants: dict[str, Any]) -> list[str]:
    """The parameters that args and outputs fill, in order."""
    function = kernel.fn
    parameters = list(inspect.signature(function).parameters)
    if unknown := [name for name in constants if name not in parameters]:
        raise TypeError(f"{function.__name__} has no parameter {', '.join(unknown)}; it has {', '.join(parameters)}.")
    names = [name for name in parameters if name not in constants]
    if len(names) != positional:
        raise TypeError(
            f"{function.__name__} needs {len(names)} arguments and outputs ({', '.join(names)}) besides its constants; "
            f"got {positional}."
        )
    return names


def _grid(grid: Any, constants: dict[str, Any]) -> tuple[int, int, int]:
    size = grid(constants) if callable(grid) else grid
    size = (size,) if is_int(size) else tuple(size)
    if not 1 <= len(size) <= 3 or any(not is_int(n) or n < 1 for n in size):
        raise ValueError(f"grid must be one to three positive ints; got {size}.")
    size = tuple(int(n) for n in size)
    if any(n > 65535 for n in size[1:]) or size[0] > 2**31 - 1:
        raise ValueError(f"grid is limited to (2^31 - 1, 65535, 65535) programs; got {size}.")
    return (*size, 1, 1)[:3]
