"""Triton kernels compiled here and launched by JAX's own GPU runtime (jaxlib's Triton custom call)."""

from __future__ import annotations

import dataclasses
import functools
import re
import zlib
from collections.abc import Sequence
from typing import Any

import jax

from ejkernel.callib._decorated import is_gluon

POINTER_ALIGNMENT = 16  # bytes; XLA's buffers are aligned to more, and this is what Triton vectorises by
_DTYPES = {
    "float8_e4m3fn": "fp8e4nv", "float8_e5m2": "fp8e5", "bfloat16": "bf16", "float16": "fp16", "float32": "fp32",
    "float64": "fp64", "bool": "i1", "int8": "i8", "int16": "i16", "int32": "i32", "int64": "i64",
    "uint8": "u8", "uint16": "u16", "uint32": "u32", "uint64": "u64",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Options:
    """What the compiler is told besides the source."""

    num_warps: int
    num_stages: int
    maxnreg: int | None
    shrink_stages: bool = False  # lower the stages where the shared memory is too small for them


def pointer_type(dtype: Any) -> str:
    """Triton's name of a pointer to this dtype."""
    return "*" + _DTYPES[jax.numpy.dtype(dtype).name]


def _scalar_type(x: bool | int | float) -> str:
    if isinstance(x, bool):
        return "i1"
    if isinstance(x, float):
        return "fp32"
    return "i32" if -(2**31) <= x < 2**31 else "i64"


@functools.cache
def compile_kernel(
    kernel: Any,
    signature: tuple[tuple[str, str], ...],
    constants: tuple[tuple[str, Any], ...],
    options: Options,
    capability: int,
) -> Any:
    """The compiled kernel (metadata, asm) for a compute capability; needs no GPU. Compiled once for equal arguments."""
    import triton
    from triton.backends.compiler import GPUTarget

    types, values = dict(signature), dict(constants)
    parameters = kernel.arg_names
    full = {name: types.get(name, "constexpr") for name in parameters}
    attrs = {
        (i,): [["tt.divisibility", POINTER_ALIGNMENT]]
        for i, name in enumerate(parameters)
        if types.get(name, "").startswith("*")
    }
    constexprs = {(parameters.index(n),): v for n, v in values.items()}
    source = _language_of(kernel)(kernel, signature=full, constexprs=constexprs, attrs=attrs)
    # Fused multiply-adds are said to be wanted because Triton 3.10 is to change its mind about them.
    flags: dict[str, Any] = {"num_warps": options.num_warps, "num_stages": options.num_stages, "enable_fp_fusion": True}
    if options.maxnreg is not None:
        flags["maxnreg"] = options.maxnreg
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=flags)


def _language_of(kernel: Any) -> Any:
    """What reads a kernel's source: Triton, or Gluon for a `@gluon.jit` function."""
    if is_gluon(kernel):
        from triton.experimental.gluon._runtime import GluonASTSource

        return GluonASTSource
    from triton.compiler import ASTSource

    return ASTSource


def compile_to_fit(
    kernel: Any,
    signature: tuple[tuple[str, str], ...],
    constants: dict[str, Any],
    options: Options,
    capability: int,
) -> Any:
    """`compile_kernel` with as many stages as asked for, or, with `shrink_stages`, as that GPU's shared memory has room for.

    Raises:
        RuntimeError: it has not.
    """
    room = shared_memory_of(capability)
    while True:
        compiled = compile_kernel(kernel, signature, tuple(sorted(constants.items())), options, capability)
        if compiled.metadata.shared <= room:
            return compiled
        stages = max(options.num_stages, constants.get("STAGES", 1))
        if stages <= 1 or not options.shrink_stages:
            raise RuntimeError(
                f"{kernel.fn.__name__} needs {compiled.metadata.shared} bytes of shared memory with these tiles; a GPU of "
                f"compute capability {capability / 10} has {room}. Give smaller tiles or fewer stages (to an "
                f"operation: a cfg with other block_q, block_k, block_d or num_stages, or platform='xla')."
            )
        options = dataclasses.replace(options, num_stages=min(options.num_stages, stages - 1))
        if "STAGES" in constants:
            constants = {**constants, "STAGES": min(constants["STAGES"], stages - 1)}


# Bytes of shared memory that one program may take, by compute capability. Of newer ones: the least of these.
_SHARED = {n: kib << 10 for n, kib in ((80, 163), (86, 99), (87, 163), (89, 99), (90, 227), (100, 227), (103, 227), (120, 99))}


def shared_memory_of(capability: int) -> int:
    """Bytes of shared memory that one program may take on a GPU of this compute capability."""
    return _SHARED.get(capability, min(_SHARED.values()))


def signature_of(names: Sequence[str], values: Sequence[Any]) -> tuple[tuple[tuple[str, str], ...], dict[str, None]]:
    """(parameter types, parameters that are None) from arrays (or their shapes), numbers and None."""
    signature: list[tuple[str, str]] = []
    absent: dict[str, None] = {}
    for name, x in zip(names, values, strict=True):
        if x is None:
            absent[name] = None
        else:
            signature.append((name, pointer_type(x.dtype) if hasattr(x, "dtype") else _scalar_type(x)))
    return tuple(signature), absent


def run_compiled(
    kernel: Any,
    names: Sequence[str],
    args: Sequence[Any],
    outputs: Sequence[jax.ShapeDtypeStruct],
    grid: tuple[int, int, int],
    constants: dict[str, Any],
    aliases: dict[int, int],
    zeroed: frozenset[int],
    options: Options,
    target: int | None,
    name: str,
) -> list[jax.Array]:
    gpu_triton = _plugin()
    target = capability() if target is None else target
    signature, absent = signature_of(names, [*args, *outputs])
    compiled = compile_to_fit(kernel, signature, {**constants, **absent}, options, target)
    meta = compiled.metadata
    symbol, ptx = renamed(compiled, name)
    program = gpu_triton.TritonKernel(symbol, meta.num_warps, 1, meta.shared, ptx, "", target)
    parameters = []
    for parameter, x in zip(names, [*args, *outputs], strict=True):
        if x is None:
            continue
        if hasattr(x, "dtype"):
            index = len(names) - len(outputs)
            bytes_to_zero = x.size * x.dtype.itemsize if names.index(parameter) - index in zeroed else 0
            parameters.append(gpu_triton.create_array_parameter(bytes_to_zero, POINTER_ALIGNMENT))
        else:
            parameters.append(gpu_triton.create_scalar_parameter(x, _scalar_type(x)))
    call = gpu_triton.TritonKernelCall(program, *grid, parameters)
    arrays = [x for x in args if isinstance(x, jax.Array)]
    place = {i: n for n, i in enumerate(i for i, x in enumerate(args) if isinstance(x, jax.Array))}
    call_on_gpu = jax.ffi.ffi_call(
        "triton_kernel_call_ffi",
        list(outputs),
        vmap_method="sequential",
        input_output_aliases={place[i]: o for i, o in aliases.items()},
    )
    return list(call_on_gpu(*arrays, opaque=zlib.compress(call.to_proto(name, b""))))


def renamed(compiled: Any, name: str) -> tuple[str, str]:
    """`(symbol, PTX)` of a compiled kernel under another name, which is what a profiler of the GPU shows.

    Only the entry's own name is changed: nothing in a kernel refers to it, and a short one may be an instruction's too.
    """
    own, ptx = compiled.metadata.name, compiled.asm["ptx"]
    symbol = re.sub(r"\W", "_", name, flags=re.ASCII)
    symbol = f"_{symbol}" if symbol[0].isdigit() else symbol
    ptx, entries = re.subn(rf"(\.entry\s+){re.escape(own)}(?=\s*\()", rf"\g<1>{symbol}", ptx)
    return (symbol, ptx) if entries == 1 else (own, compiled.asm["ptx"])


def _plugin() -> Any:
    try:
        from jaxlib import gpu_triton
    except ImportError as error:
        raise ImportError(_NO_PLUGIN) from error
    if not hasattr(gpu_triton, "TritonKernel"):  # the module imports without a plugin, but empty
        raise ImportError(_NO_PLUGIN)
    return gpu_triton


_NO_PLUGIN = (
    "compiled Triton kernels need JAX's CUDA plugin: pip install 'jax[cuda13]' (or 'jax[cuda12]'); to lower without a GPU, "
    "jax-cuda13-plugin alone is enough. To interpret kernels instead, set TRITON_INTERPRET=1 before they are imported."
)


@functools.cache
def capability() -> int:
    """The compute capability of the GPU at hand: 90 for 9.0."""
    gpu_triton = _plugin()
    if not any(device.platform == "gpu" for device in jax.devices()):
        raise RuntimeError(
            "no NVIDIA GPU in this process: wrap the call in ejkernel.callib.compile_for(90) to lower for one elsewhere."
        )
    return gpu_triton.get_compute_capability(0)
