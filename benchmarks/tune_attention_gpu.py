"""Tunes softmax attention on the GPU at hand and writes the winners as the package ships them.

    python -m benchmarks.tune_attention_gpu [--rows TEXT ...] [--platform triton] [--seconds 30] [--out FILE]
    TRITON_INTERPRET=1 python -m benchmarks.tune_attention_gpu --tiny --out FILE             on a CPU, to see that it runs

The calls are those of benchmarks.attention_options_gpu and two of decoding. Without `--platform` candidates of all platforms
race, and what wins is what `auto` takes; with it those of calls that name the platform. Forward and backward race together,
decoding's forward alone. Without `--out` the file is ejkernel/ops/defaults/<device>.json; entries of other calls in it stay.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.attention_rows import arguments, inputs, rows
from ejkernel.modules import Attention, AttentionConfig
from ejkernel.ops import ConfigCache, Invocation, Tuner
from ejkernel.ops.config.codec import to_fields
from ejkernel.ops.config.shipped import FOLDER, device_name
from ejkernel.ops.key import device_kind
from ejkernel.testing.shipping import write
from ejkernel.types.mask import MaskInfo

Call = tuple[dict[str, Any], dict[str, Any]]  # arrays as shapes, options


def calls(tiny: bool = False) -> dict[str, Call]:
    """By name."""
    found: dict[str, Call] = {}
    for row in rows(tiny):
        q, k, v, _ = jax.eval_shape(lambda shape=row.shape: inputs(shape))
        options = dict[str, Any]()

        def arrays(row: Any = row, options: dict[str, Any] = options) -> dict[str, Any]:
            floats, others, static = arguments(row)
            options |= static
            return {**floats, **others}

        found[str(row)] = {"query": q, "key": k, "value": v, **jax.eval_shape(arrays)}, options
    return found | _decoding(*((2, 64, 4, 2, 16) if tiny else (64, 8192, 32, 8, 128)))


def _decoding(B: int, S: int, H: int, HK: int, D: int) -> dict[str, Call]:
    of = lambda *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(shape, dtype)
    arrays = {"query": of(B, 1, H, D), "key": of(B, S, HK, D), "value": of(B, S, HK, D)}
    ids = (of(B, 1, dtype=jnp.int32), of(B, S, dtype=jnp.int32))
    info = jax.eval_shape(MaskInfo.from_segments, *ids)
    options = {"return_weights": False, "dtype": None}
    return {"decode": (arrays, options), "decode, kv lengths": ({**arrays, "mask_info": info}, options)}


def _also_on_cpus() -> None:
    """Interpreted kernels compute anywhere, which the registry does not know."""
    from ejkernel.kernels._attention.operation import ATTENTION
    from ejkernel.kernels._registry import Backend, Platform, kernel_registry
    from ejkernel.kernels._triton.attention._platform import TritonAttention

    class Anywhere(TritonAttention):
        def heuristic(self, problem: Any) -> AttentionConfig:
            return dataclasses.replace(super().heuristic(problem), backend="any")

        def candidates(self, problem: Any) -> list[AttentionConfig]:
            return [dataclasses.replace(cfg, backend="any") for cfg in super().candidates(problem)]

    ATTENTION.register(Anywhere(), kernel_registry, Platform.TRITON, Backend.CPU)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="*", default=[""], help="only calls whose name contains one of these")
    parser.add_argument("--platform", help="for calls that name this platform")
    parser.add_argument("--seconds", type=float, default=30.0, help="the longest that racing one call may take")
    parser.add_argument("--out", type=Path, help="where the winners go")
    parser.add_argument("--tiny", action="store_true", help="a few tokens")
    options = parser.parse_args()
    device = jax.devices()[0]
    if device.platform != "gpu" and not (options.tiny and options.out):
        parser.error(f"this tunes for NVIDIA GPUs; JAX has {device}. --tiny with --out runs interpreted")
    if device.platform != "gpu":
        _also_on_cpus()
    kind = device_kind(device)
    file = options.out or FOLDER / f"{device_name(kind)}.json"
    tuner, cache = Tuner(warmup=2, iters=7, max_seconds=options.seconds, candidate_seconds=options.seconds / 2), ConfigCache()
    print("| call | heuristic ms | winner ms | gain | winner |\n|---|---|---|---|---|")
    for name, (arrays, static) in calls(options.tiny).items():
        if not any(text in name for text in options.rows):
            continue
        inv = Invocation.of(Attention(), **arrays, **static, platform=options.platform)
        tuned = tuner.tune(inv, validate_backward="decode" not in name)
        cache.put(inv.key, tuned.config, tuned.record)
        slow, fast = tuned.record["heuristic_seconds"] * 1e3, tuned.record["seconds"] * 1e3
        fields = {field: x for field, x in to_fields(tuned.config).items() if x is not None}
        print(f"| {name} | {slow:.3f} | {fast:.3f} | {1 - fast / slow:.0%} | {fields} |", flush=True)
        for candidate in tuned.record["candidates"]:
            if "reason" in candidate:
                print(f"  rejected {candidate['config']}: {str(candidate['reason'])[:200]}", file=sys.stderr)
        write(file, kind, cache)  # after every call: what is measured is kept if a later one fails
    print(f"{len(list(cache.items()))} entries in {file}")


if __name__ == "__main__":
    main()
