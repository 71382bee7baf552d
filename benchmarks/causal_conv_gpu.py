"""The short causal convolution on a GPU: as XLA compiles it and by Triton kernels, beside its byte floor.

    python -m benchmarks.causal_conv_gpu [--kernels]

bfloat16, width 4, silu. Times are kernel times (CUPTI), forward and forward+backward, in ms. The floor is what must be read and
written once at the bandwidth of a copy: x and y forward, and x, dy and dx more with the gradient. "Differs" is the largest
relative RMS difference of the two sides' results. --kernels lists what each side launches, one by one.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernel_times import BANDWIDTH, difference, kernel_ms, kernels_ms
from ejkernel.kernels._xla.causal_conv1d import activated
from ejkernel.modules import causal_conv1d
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
    parser.add_argument("--kernels", action="store_true", help="forward+backward kernel by kernel")
    options = parser.parse_args()
    print("| call | direction | xla, ms | triton, ms | byte floor, ms | times the floor | differs |\n" + "|---" * 7 + "|")
    for name, (B, T, C) in ROWS.items():
        normal = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(jnp.bfloat16)
        x, dy, weight, bias = normal(0, B, T, C), normal(1, B, T, C), normal(2, WIDTH, C), normal(3, C)
        cu = jnp.asarray(np.cumsum([0, *LENGTHS]), jnp.int32) if name.startswith("packed") else None
        sides = {side: make(cu) for side, make in SIDES.items()}
        for direction, passes in (("forward", 2), ("forward+backward", 5)):
            floor, took, results = passes * x.nbytes / BANDWIDTH * 1e3, {}, {}
            for side, run in sides.items():
                call = _call(run, direction, (x, weight, bias), dy)
                took[side], results[side] = kernel_ms(call, jax.block_until_ready), call()
                if options.kernels:
                    for label, ms in kernels_ms(call, jax.block_until_ready).items():
                        print(f"    {side:8}{label:40} {ms:.4f}", flush=True)
            pairs = zip(*map(jax.tree.leaves, results.values()), strict=True)
            differs = max(float(difference(a, b)) for a, b in pairs)
            times = " / ".join(f"{took[side] / floor:.2f}" for side in sides)
            cells = [name, direction, *(f"{took[side]:.4f}" for side in sides), f"{floor:.4f}", times, f"{differs:.0e}"]
            print("| " + " | ".join(cells) + " |", flush=True)


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
