"""The short causal convolution on a GPU: as XLA compiles it and by Triton kernels, beside its byte floor.

    python -m benchmarks.causal_conv_gpu [--kernels] [--json FILE] [--rows TEXT ...] [--seconds-in-all S]

bfloat16, width 4, silu. Times are kernel times (CUPTI), forward and forward+backward, in ms. The floor is what must be read and
written once at the bandwidth of a copy: x and y forward, and x, dy and dx more with the gradient. "Differs" is the largest
relative RMS difference of the two sides' results. --kernels lists what each side launches, one by one.
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernel_times import BANDWIDTH, difference, kernel_ms, kernels_ms
from ejkernel.kernels._xla.causal_conv1d import activated
from ejkernel.modules import causal_conv1d
from ejkernel.testing.bench_run import Run
from ejkernel.testing.linear_gpu import LENGTHS

WIDTH = 4
ROWS = {  # batch, tokens, channels
    "8x2048x2048": (8, 2048, 2048),
    "1x16384x6144": (1, 16384, 6144),
    "packed 32768x2048": (1, 32768, 2048),
}


SIDES: dict[str, Callable[[Any], Callable[..., jax.Array]]] = {
    "xla": lambda cu: lambda x, weight, bias: activated("silu", {"x": x, "weight": weight, "bias": bias}, cu),
    "triton": lambda cu: lambda x, weight, bias: causal_conv1d(x, weight, bias, cu_seqlens=cu, activation="silu"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    Run.add_options(parser, rows="call")
    parser.add_argument("--kernels", action="store_true", help="forward+backward kernel by kernel")
    options = parser.parse_args()
    run = Run(options)
    print("| call | direction | xla, ms | triton, ms | byte floor, ms | times the floor | differs |\n" + "|---" * 7 + "|")
    for name in ROWS:
        for direction, passes in (("forward", 2), ("forward+backward", 5)) if run.asks_for(name) else ():
            floor = passes * math.prod(ROWS[name]) * jnp.dtype(jnp.bfloat16).itemsize / BANDWIDTH * 1e3
            measure = functools.partial(measured, name, direction, kernels=options.kernels)
            lines = [run.part(side, functools.partial(measure, side), call=name, direction=direction) for side in SIDES]
            found = {line["side"]: line for line in lines if line is not None}
            cells = [f"{found[side]['ms']:.4f}" if side in found else "-" for side in SIDES]
            times = " / ".join(f"{found[side]['ms'] / floor:.2f}" if side in found else "-" for side in SIDES)
            differs = f"{found['triton']['differs by']:.0e}" if "triton" in found else "-"
            print("| " + " | ".join([name, direction, *cells, f"{floor:.4f}", times, differs]) + " |", flush=True)


def measured(name: str, direction: str, side: str, kernels: bool) -> dict[str, float]:
    """Milliseconds of a side, and how far its results are from XLA's."""
    B, T, C = ROWS[name]
    normal = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(jnp.bfloat16)
    x, dy, weight, bias = normal(0, B, T, C), normal(1, B, T, C), normal(2, WIDTH, C), normal(3, C)
    cu = jnp.asarray(np.cumsum([0, *LENGTHS]), jnp.int32) if name.startswith("packed") else None
    call, usual = (_call(SIDES[which](cu), direction, (x, weight, bias), dy) for which in (side, "xla"))
    ms = kernel_ms(call, jax.block_until_ready)
    if kernels:
        for label, part in kernels_ms(call, jax.block_until_ready).items():
            print(f"    {side:8}{label:40} {part:.4f}", flush=True)
    if side == "xla":
        return {"ms": ms}
    pairs = zip(*(jax.tree.leaves(run()) for run in (call, usual)), strict=True)
    return {"ms": ms, "differs by": max(float(difference(a, b)) for a, b in pairs)}


def _call(run: Callable[..., jax.Array], direction: str, args: tuple[jax.Array, ...], dy: jax.Array) -> Callable[[], Any]:
    if direction == "forward":
        forward = jax.jit(run)
        return lambda: forward(*args)

    @jax.jit
    def both(args: tuple[jax.Array, ...], dy: jax.Array) -> Any:
        y, pull = jax.vjp(run, *args)
        return y, pull(dy)

    return lambda: both(args, dy)


if __name__ == "__main__":
    main()
