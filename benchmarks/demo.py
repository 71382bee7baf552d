"""The library doing its job on this device: for each operation the error against float64 and the speed against the scan.

python -m benchmarks.demo
"""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.hand_written import scan_attention
from benchmarks.linear_attention_cpu import directions, inputs
from benchmarks.timing import best_times
from ejkernel.kernels._linear.platform_function import lightning_decay
from ejkernel.modules import gla_attention, lightning_attention, recurrent_attention
from ejkernel.modules.base import detect_platform
from ejkernel.testing.compare import relative_rms
from ejkernel.testing.linear_reference import linear_reference

TOKENS, CHANNELS, HEADS = 4096, 64, 4


def rows():
    """(name, our function, the scan, the reference, gates) of each line."""
    decay = lightning_decay(HEADS, 1, 12)
    constant = lambda a: a | {"g": jnp.broadcast_to(decay, a["query"].shape[:3])}
    lightning = lambda **a: lightning_attention(**a, layer_idx=1, num_layers=12)
    scan = lambda **a: scan_attention(**a)[0]
    yield "recurrent_attention, ungated", recurrent_attention, scan, linear_reference, ()
    yield "recurrent_attention, g", recurrent_attention, scan, linear_reference, ("g",)
    yield "recurrent_attention, gk and gv", recurrent_attention, scan, linear_reference, ("gk", "gv")
    yield "gla_attention, g per key channel", lambda gk, **a: gla_attention(**a, g=gk), scan, linear_reference, ("gk",)
    yield (
        "lightning_attention",
        lightning,
        lambda **a: scan(**constant(a)),
        lambda **a: linear_reference(**a, g_gamma=decay),
        (),
    )


def errors(ours, reference, gates) -> tuple[float, float]:
    """Relative RMS error of the output and the worst of the gradients, on a shorter call."""
    arrays = inputs(512, CHANNELS, gates, heads=HEADS)
    cotangent = jax.random.normal(jax.random.key(5), arrays["value"].shape)
    output, gradients = jax.jit(directions(ours, "forward+backward"))(arrays, cotangent)
    with jax.enable_x64(True):
        wide = {name: jnp.asarray(np.asarray(x, np.float64)) for name, x in arrays.items()}
        exact = jax.jit(directions(lambda **a: reference(**a)[0], "forward+backward"))
        want, (want_gradients,) = exact(wide, jnp.asarray(np.asarray(cotangent, np.float64)))
    return relative_rms(output, want), max(relative_rms(gradients[0][name], want_gradients[name]) for name in arrays)


def main() -> None:
    begin = time.perf_counter()
    print(f"ejkernel on {jax.devices()[0].device_kind}, platform {detect_platform('recurrent')}, float32, ", end="")
    print(f"(B, T, H, K, V) = (2, {TOKENS}, {HEADS}, {CHANNELS}, {CHANNELS})")
    print("error: relative RMS against float64; speed: times faster than a hand-written lax.scan and its autodiff\n")
    line = "{:34} {:>9} {:>9} {:>9} {:>9}"
    print(line.format("operation", "error", "gradients", "forward", "+backward"))
    for name, ours, scan, reference, gates in rows():
        error, gradient_error = errors(ours, reference, gates)
        arrays = inputs(TOKENS, CHANNELS, gates, heads=HEADS)
        cotangent = jax.random.normal(jax.random.key(5), arrays["value"].shape)
        faster = []
        for direction in ("forward", "forward+backward"):
            functions = {"ours": directions(ours, direction), "scan": directions(scan, direction)}
            times = best_times(functions, arrays, cotangent, seconds=1)
            faster.append(times["scan"] / times["ours"])
        print(line.format(name, f"{error:.1e}", f"{gradient_error:.1e}", *(f"{x:.1f}x" for x in faster)), flush=True)
    print(f"\n{time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
