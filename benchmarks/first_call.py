"""How long the first call of a shape takes, and whether it was tuned.

    python -m benchmarks.first_call [2x3000x6x128] [--bfloat16] [--policies unset,heuristics,autotune]

The call has a gate per key channel. Each policy is tried in a process of its own with an empty cache folder, then again with
the folder that the first one left.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time


def one(shape: tuple[int, ...], dtype: str) -> None:
    """Makes the call three times in this process and says what it took."""
    import jax
    import jax.numpy as jnp

    from ejkernel import ops
    from ejkernel.modules import gla_attention

    q, k, v = (jax.random.normal(jax.random.key(i), shape).astype(dtype) for i in range(3))
    g = (jax.nn.log_sigmoid(jax.random.normal(jax.random.key(3), shape)) / 16).astype(dtype)
    jax.block_until_ready((q, k, v, g, jnp.ones(3) + 1))
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        jax.block_until_ready(gla_attention(q, k, v, g))
        seconds.append(time.perf_counter() - start)
    print("  " + ", ".join(f"{1e3 * one:.1f} ms" for one in seconds))
    chosen = ops.report()[-1]
    print(f"  {chosen.level}: {chosen.why or '-'}; route: {chosen.route}")
    for candidate in chosen.record.get("candidates", ()):
        print(f"    {candidate['config']}: {candidate.get('reason') or candidate['seconds']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", nargs="?", default="2x3000x6x128")
    parser.add_argument("--bfloat16", action="store_true")
    parser.add_argument("--policies", default="unset,heuristics,autotune")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        one(tuple(map(int, options.shape.split("x"))), "bfloat16" if options.bfloat16 else "float32")
        return
    for policy in options.policies.split(","):
        with tempfile.TemporaryDirectory() as folder:
            environment = {name: x for name, x in os.environ.items() if name != "EJKERNEL_AUTOTUNE_POLICY"}
            environment |= {"EJKERNEL_CACHE_DIR": folder, "TRITON_CACHE_DIR": f"{folder}/triton"}
            environment |= {} if policy == "unset" else {"EJKERNEL_AUTOTUNE_POLICY": policy}
            for used in ("empty", "used"):
                print(f"policy {policy}, {used} cache folder", flush=True)
                subprocess.run(
                    [sys.executable, "-m", "benchmarks.first_call", *sys.argv[1:], "--here"], env=environment, check=True
                )


if __name__ == "__main__":
    main()
