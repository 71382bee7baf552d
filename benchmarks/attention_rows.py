"""The calls of `benchmarks.attention_options_gpu`, and how each of its sides runs them.

A side gives two functions without arguments, forward and forward + backward. Inputs are made when a side is asked for.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ejkernel
from ejkernel._device import device_of
from ejkernel.testing.linear_gpu import LENGTHS
from ejkernel.types.mask import MaskInfo

SHAPES = ((8, 2048, 16, 128), (2, 8192, 16, 128), (4, 4096, 32, 64))
CAP, WINDOW = 50.0, 512
OPTIONS = ("none", "cap", "sinks", "mask", "bias")
Call = tuple[dict[str, Any], dict[str, Any]]  # arrays as shapes, options
Side = tuple[Callable[[], Any], Callable[[], Any]]


@dataclasses.dataclass(frozen=True)
class Row:
    """One call: a shape (B, T, H, D), an option, and the lengths of its documents where it is packed."""

    shape: tuple[int, int, int, int]
    option: str
    lengths: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape))} {self.option}"

    @property
    def window(self) -> int | None:
        """Keys before a query that it sees, at most a quarter of them in a tiny row."""
        return min(WINDOW, self.shape[1] // 4) if "window" in self.option else None


def rows(tiny: bool = False) -> list[Row]:
    """Tiny: the same options for a few tokens, to see that every row runs."""
    small = lambda B, T, H, D: (1, T // 128, 2, 16) if tiny else (B, T, H, D)
    lengths = tuple(max(1, n // 1000) for n in LENGTHS) if tiny else LENGTHS
    found = [Row(small(*shape), option) for shape in SHAPES for option in OPTIONS]
    found += [Row(small(2, T, 16, 128), f"cap, window {WINDOW}") for T in (4096, 8192, 16384)]
    return [*found, Row((1, sum(lengths), *small(1, 1, 16, 128)[2:]), "packed", lengths)]


def inputs(shape: tuple[int, int, int, int]) -> list[jax.Array]:
    """query, key, value and the adjoint of the output."""
    return [jax.random.normal(key, shape, jnp.bfloat16) for key in jax.random.split(jax.random.key(0), 4)]


def arguments(row: Row) -> tuple[dict[str, jax.Array], dict[str, Any], dict[str, Any]]:
    """(arrays that gradients are taken of beside query, key and value; other arrays; options)."""
    B, T, H, _ = row.shape
    arrays: dict[str, jax.Array] = {}
    others: dict[str, Any] = {}
    options: dict[str, Any] = {"causal": True, "return_weights": False, "dtype": None}
    if row.option == "sinks":
        arrays["softmax_aux"] = jnp.linspace(-1.0, 1.0, H)[:, None]
    if row.option == "bias":
        arrays["bias"] = jax.random.normal(jax.random.key(5), (1, H, T, T), jnp.bfloat16)
    if row.option == "mask":
        others["attention_mask"] = jax.random.bernoulli(jax.random.key(6), 0.9, (B, 1, T, T))
    if row.lengths:
        ends = jnp.asarray(np.concatenate([[0], np.cumsum(row.lengths)]), jnp.int32)
        others["mask_info"] = MaskInfo.from_cu_seqlens(ends, total=T)
    if "cap" in row.option:
        options["logits_soft_cap"] = CAP
    if row.window is not None:
        options["sliding_window"] = (row.window, 0)
    return arrays, others, options


def calls() -> dict[str, Call]:
    """Arguments of `attention` by the row's name: arrays as shapes, and options; two of decoding."""
    found: dict[str, Call] = {}
    for row in rows():
        q, k, v, _ = jax.eval_shape(lambda shape=row.shape: inputs(shape))
        options = dict[str, Any]()

        def arrays(row: Any = row, options: dict[str, Any] = options) -> dict[str, Any]:
            floats, others, static = arguments(row)
            options |= static
            return {**floats, **others}

        found[str(row)] = {"query": q, "key": k, "value": v, **jax.eval_shape(arrays)}, options
    return found | _decoding(64, 8192, 32, 8, 128)


def _decoding(B: int, S: int, H: int, HK: int, D: int) -> dict[str, Call]:
    of = lambda *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(shape, dtype)
    arrays = {"query": of(B, 1, H, D), "key": of(B, S, HK, D), "value": of(B, S, HK, D)}
    ids = (of(B, 1, dtype=jnp.int32), of(B, S, dtype=jnp.int32))
    info = jax.eval_shape(MaskInfo.from_segments, *ids)
    options = {"return_weights": False, "dtype": None}
    return {"decode": (arrays, options), "decode, kv lengths": ({**arrays, "mask_info": info}, options)}


def with_gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    """`(output, gradients of all arguments)` from `(d_output, *args)`."""

    def both(d_output: jax.Array, *args: Any) -> Any:
        output, pull = jax.vjp(function, *args)
        return output, pull(d_output)

    return both


def on_triton(*args: Any, **options: Any) -> jax.Array:
    """The output of the platform itself, which also runs interpreted."""
    from ejkernel.kernels._triton import attention

    return attention(*args, **options)[0]


def ours(row: Row, attend: Callable[..., jax.Array] = on_triton) -> Side:
    q, k, v, do = inputs(row.shape)
    arrays, others, options = arguments(row)

    def run(others: dict[str, Any], q: jax.Array, k: jax.Array, v: jax.Array, arrays: dict[str, jax.Array]) -> jax.Array:
        return attend(q, k, v, **arrays, **others, **options)

    forward = jax.jit(run)
    both = jax.jit(lambda others, do, *args: with_gradient(functools.partial(run, others))(do, *args))
    return lambda: forward(others, q, k, v, arrays), lambda: both(others, do, q, k, v, arrays)


def cudnn(row: Row) -> Side:
    """cuDNN's plain causal call of the row's shape; of the packed row, one for each document."""
    implementation = "cudnn" if device_of(()).backend == "gpu" else "xla"  # a tiny run on a CPU
    run = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation=implementation)
    forward, both = jax.jit(run), jax.jit(with_gradient(run))
    # cuDNN's gradient takes even lengths only.
    each = [inputs((1, n + n % 2, *row.shape[2:])) for n in row.lengths] if row.lengths else [inputs(row.shape)]
    return lambda: [forward(*x[:3]) for x in each], lambda: [both(x[3], *x[:3]) for x in each]


def flex(row: Row) -> Side:
    """torch's FlexAttention, compiled with its own default tiles, with the same option."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()  # every row compiles its own: after eight of them dynamo would stop compiling
    B, T, H, D = row.shape
    on = {"device": "cuda"}
    make = lambda *shape: torch.randn(*shape, dtype=torch.bfloat16, requires_grad=True, **on)
    q, k, v = (make(B, H, T, D) for _ in range(3))
    do = torch.randn_like(q)
    extra = {"sinks": lambda: make(H), "bias": lambda: make(H, T, T)}.get(row.option)
    given = [q, k, v] if extra is None else [q, k, v, extra()]
    mask = create_block_mask(_seen(row, torch), B if row.option == "mask" else None, None, T, T, **on)

    def attend(q: Any, k: Any, v: Any, own: Any = None) -> Any:
        def score(x: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return CAP * torch.tanh(x / CAP) if "cap" in row.option else x + own[h, i, j]

        scored = score if "cap" in row.option or row.option == "bias" else None
        if row.option != "sinks":
            return flex_attention(q, k, v, score_mod=scored, block_mask=mask)
        out, lse = flex_attention(q, k, v, block_mask=mask, return_lse=True)
        return out * torch.sigmoid(lse - own[None, :, None].float())[..., None].to(out.dtype)

    run = torch.compile(attend)

    def forward() -> Any:
        with torch.no_grad():
            return run(*given)

    def both() -> Any:
        out = run(*given)
        return out, torch.autograd.grad(out, given, do)

    return forward, both


def _seen(row: Row, torch: Any) -> Callable[..., Any]:
    """Which keys j a query i sees, as FlexAttention's masks say it."""
    B, T, _, _ = row.shape
    if row.option == "mask":
        kept = torch.rand(B, T, T, device="cuda") < 0.9
        return lambda b, h, i, j: kept[b, i, j] & (i >= j)
    if row.lengths:
        document = torch.repeat_interleave(torch.arange(len(row.lengths)), torch.tensor(row.lengths)).to("cuda")
        return lambda b, h, i, j: (document[i] == document[j]) & (i >= j)
    if row.window is not None:
        window = row.window
        return lambda b, h, i, j: (i >= j) & (i - j <= window)
    return lambda b, h, i, j: i >= j


SIDES: dict[str, Callable[[Row], Side]] = {
    "triton": ours,
    "cudnn": cudnn,
    "flex": flex,
    "auto": functools.partial(ours, attend=functools.partial(ejkernel.attention, platform="auto")),
    "xla": functools.partial(ours, attend=functools.partial(ejkernel.attention, platform="xla")),
}
