"""Calls on 8 simulated devices, batch and heads split: each device computes its part. Prints what is wrong, as JSON.

JAX interprets no kernel whose types say over which mesh axes it varies (explicit axes, `shard_map` with `check_vma`): such
programs are lowered for TPUs.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ejkernel._device import on_device
from ejkernel.kernels._linear import LinearConfig
from ejkernel.kernels._pallas import attention, gated_delta_rule, recurrent
from ejkernel.kernels._pallas._chips import CHIPS, interpreted
from ejkernel.kernels._xla import recurrent as on_xla
from ejkernel.modules import GatedDeltaRuleConfig
from ejkernel.testing.compare import relative_rms
from ejkernel.testing.linear_cases import LinearCase
from tests.sharding.partitions import HEADS, SPLIT, delta, drawn, packed_delta, split
from tests.sharding.sequences import LENGTHS, Case, compare, values_and_gradients

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
CHUNKS, STEPS = LinearConfig(block_q=16), LinearConfig("recurrent")
small = functools.partial(
    LinearCase, batch=4, time=20, heads=4, kv_heads=2, key_channels=8, value_channels=8, initial_state=True
)
CASES = {
    "g": (small("g", gates=("g",)), CHUNKS),
    "gk": (small("gk", gates=("gk", "gv", "g_gamma")), CHUNKS),
    "packed": (small("packed", gates=("g", "g_gamma"), lengths=(5, 0, 15)), CHUNKS),
    "decode": (small("decode", gates=("g",), time=2), STEPS),
}

rule = functools.partial(gated_delta_rule, cfg=GatedDeltaRuleConfig(block_q=16))
attend = lambda **arrays: attention(**arrays, causal=True, dtype=None, return_weights=False)[0]
soft = functools.partial(drawn, query=(4, 12, 4, 16), key=(4, 12, 2, 16), value=(4, 12, 2, 16), softmax_aux=(4, 1))
OTHERS = {  # call, arrays, how they are split, what is sent: of attention the sinks' gradient, a sum over the batch
    "delta": (rule, functools.partial(delta, g=(4, 12, 4)), SPLIT, {}),
    "delta-packed": (rule, packed_delta, HEADS, {}),
    "attention": (attend, soft, SPLIT, {"all-reduce": 1}),
}
SEQUENCES = {
    "linear": Case("recurrent", ("g_gamma", "gk"), mesh=(1, 2, 1), lengths=LENGTHS, platform="pallas"),
    "delta": Case("delta", ("g",), mesh=(1, 2, 2), reverse=True, resets=True, exchange="steps", platform="pallas"),
}


def spec(name, packed):
    rows = None if packed else "b"
    return P(rows, "h") if name in ("initial_state", "g_gamma") else P(rows, None, "h")


def loss(function, arrays, cu_seqlens):
    output, state = function(**arrays, cu_seqlens=cu_seqlens)
    return jnp.sum(jnp.sin(output)) + jnp.sum(jnp.sin(state))


def wrong(got, want):
    return [f"{name}: {error:.1e}" for name in want if (error := relative_rms(got[name], want[name])) > 1e-5]


def mesh_of(axis_type):
    return jax.make_mesh((4, 2), ("b", "h"), axis_types=(axis_type,) * 2)


def under_jit(case, cfg):
    mesh = mesh_of(AxisType.Auto)
    arrays, options = case.arguments()
    cu_seqlens = options.get("cu_seqlens")
    want = jax.jit(jax.grad(functools.partial(loss, on_xla)))(arrays, cu_seqlens)
    placed = {n: jax.device_put(x, NamedSharding(mesh, spec(n, cu_seqlens is not None))) for n, x in arrays.items()}
    run = jax.jit(jax.grad(functools.partial(loss, functools.partial(recurrent, cfg=cfg))))
    with jax.set_mesh(mesh), interpreted():
        compiled = run.lower(placed, cu_seqlens).compile()
        found = wrong(compiled(placed, cu_seqlens), want)
    sent = sorted({name for name in COLLECTIVES if re.search(rf" {name}[(-]", compiled.as_text())})
    return found + sent


def other_under_jit(call, arrays, specs, expected):
    with interpreted():
        return complaint(split, call, arrays(), specs, expected)


def along_time(case):
    """Compared with the whole call where JAX can interpret the kernels; with its checks, that the program can be made."""
    with interpreted():
        found = complaint(compare, dataclasses.replace(case, check=False), None)
    with on_device(CHIPS["v5e"].device):
        run = jax.jit(functools.partial(values_and_gradients, case.split()[0]))
        text = run.trace(case.arrays()).lower(lowering_platforms=("tpu",)).as_text()
    return found + ([] if "tpu_custom_call" in text else ["no kernel"])


def complaint(check, *args):
    try:
        check(*args)
    except AssertionError as error:
        return [str(error)]
    return []


def explicit(case, cfg):
    mesh = mesh_of(AxisType.Explicit)
    arrays, _ = case.arguments()
    placed = {n: jax.device_put(x, NamedSharding(mesh, spec(n, False))) for n, x in arrays.items()}
    run = jax.jit(jax.grad(functools.partial(loss, functools.partial(recurrent, cfg=cfg))))
    with jax.set_mesh(mesh), on_device(CHIPS["v5e"].device):
        return missing(run.trace(placed, None))


def in_shard_map(case, cfg):
    arrays, _ = case.arguments()
    specs = {name: spec(name, False) for name in arrays}

    def part(arrays):
        return jax.grad(functools.partial(loss, functools.partial(recurrent, cfg=cfg)))(arrays, None)

    split = functools.partial(jax.shard_map, part, mesh=mesh_of(AxisType.Auto), in_specs=(specs,), out_specs=specs)
    with on_device(CHIPS["v5e"].device):
        found = missing(jax.jit(split()).trace(arrays))
    with interpreted():
        got = jax.jit(split(check_vma=False))(arrays)
    return found + wrong(got, jax.jit(jax.grad(functools.partial(loss, on_xla)))(arrays, None))


def missing(traced):
    """What a program lowered for TPUs lacks."""
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    wanted = "head_gate_forward", "head_gate_backward"
    return [f"no {name}" for name in wanted if name not in text]


def main():
    found = {f"jit-{name}": under_jit(*case) for name, case in CASES.items()}
    found |= {f"jit-{name}": other_under_jit(*given) for name, given in OTHERS.items()}
    found |= {f"time-{name}": along_time(case) for name, case in SEQUENCES.items()}
    found["explicit-g"] = explicit(*CASES["g"])
    found["shard_map-g"] = in_shard_map(*CASES["g"])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
