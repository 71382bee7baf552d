"""Calls under `jit` with arrays split over 8 simulated devices: what the compiled program sends, and that results are right.

Run as a program, with Triton's interpreter, it prints what was found as JSON.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ejkernel.kernels._xla import attention as xla_attention
from ejkernel.kernels._xla import gated_delta_rule as xla_delta
from ejkernel.kernels._xla import recurrent as xla_recurrent
from ejkernel.modules import AttentionConfig, GatedDeltaRuleConfig, RecurrentAttentionConfig
from ejkernel.testing.compare import relative_rms
from ejkernel.types.mask import MaskInfo

P = PartitionSpec
Arrays = dict[str, jax.Array]
B, T, H, HKV, K, V = 4, 12, 4, 2, 16, 16
CHUNKS = 20  # tokens: more than one chunk, which lie in the order of the batch
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
TOKENS, STATE = P("b", None, "h"), P("b", "h")
SPLIT = dict.fromkeys(("query", "key", "value", "beta", "g", "gk", "gv"), TOKENS) | {
    "initial_state": STATE, "g_gamma": STATE, "bias": STATE, "softmax_aux": P("h"),
}  # fmt: skip
HEADS = {name: P(None, *spec[1:]) for name, spec in SPLIT.items()}


def drawn(**shapes: tuple[int, ...]) -> Arrays:
    """Random arrays by name; gates are log decays, beta is from 0 to 1."""
    rng = np.random.default_rng(0)
    normal = {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}
    made = {name: -jnp.abs(x) if name.startswith("g") else x for name, x in normal.items()}
    return made | ({"beta": jax.nn.sigmoid(made["beta"])} if "beta" in made else {})


linear = functools.partial(drawn, query=(B, T, H, K), key=(B, T, HKV, K), value=(B, T, HKV, V), initial_state=(B, H, K, V))
delta = functools.partial(
    drawn, query=(B, T, HKV, K), key=(B, T, HKV, K), value=(B, T, H, V), beta=(B, T, H), initial_state=(B, H, K, V)
)


def packed() -> Arrays:
    arrays = drawn(query=(1, T, H, K), key=(1, T, HKV, K), value=(1, T, HKV, V), g=(1, T, H), initial_state=(3, H, K, V))
    return arrays | {"cu_seqlens": jnp.array([0, 5, 5, T], jnp.int32)}


def packed_delta() -> Arrays:
    arrays = drawn(query=(1, T, HKV, K), key=(1, T, HKV, K), value=(1, T, H, V), beta=(1, T, H), initial_state=(3, H, K, V))
    return arrays | {"cu_seqlens": jnp.array([0, 5, 5, T], jnp.int32)}


def values_and_gradients(call: Callable[..., Any], arrays: Arrays) -> Any:
    floats = {name: x for name, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)}
    outputs, pull = jax.vjp(lambda some: call(**{**arrays, **some}), floats)
    return outputs, pull(jax.tree.map(jnp.sin, outputs))[0]


def sent(text: str) -> dict[str, int]:
    """The collectives of a compiled program that are there, and how many of each."""
    found = {name: len(re.findall(rf"\b{name}(?:-start)?\(", text)) for name in COLLECTIVES}
    return {name: count for name, count in found.items() if count}


def split(
    call: Callable[..., Any], arrays: Arrays, specs: dict[str, PartitionSpec], expected: dict[str, int],
    kind: Any = AxisType.Auto, warns: tuple[str, ...] = (), sizes: tuple[int, int] = (4, 2),
    output: PartitionSpec | None = None,
) -> None:  # fmt: skip
    """The program sends what is expected, warns as expected and no more, and computes what one device computes."""
    run = jax.jit(functools.partial(values_and_gradients, call))
    want = run(arrays)
    mesh = jax.make_mesh(sizes, ("b", "h"), axis_types=(kind, kind))
    placed = {name: jax.device_put(x, NamedSharding(mesh, specs.get(name, P()))) for name, x in arrays.items()}
    with jax.set_mesh(mesh), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        compiled = run.lower(placed).compile()
        got = compiled(placed)
    assert sent(compiled.as_text()) == expected, sent(compiled.as_text())
    said = [str(w.message) for w in seen if w.category.__name__ == "GatheredWarning"]
    assert len(said) == bool(warns), said
    assert all(word in said[0] for word in warns), said
    errors = jax.tree.map(lambda x, y: relative_rms(np.asarray(x), np.asarray(y)), got, want)
    assert all(error < 1e-5 for error in jax.tree.leaves(errors)), errors
    first = jax.tree.leaves(got[0])[0]
    whole = specs["query"] if output is None else output
    assert first.sharding.is_equivalent_to(NamedSharding(mesh, whole), first.ndim), first.sharding


TIME = "key, query, value: split over time", "PartitionSpec('data', None, 'model')", "sequence_axis"
GROUPS = "query: split over heads", "2 at most (whole groups of heads)"


def triton_checks() -> dict[str, Callable[[], None]]:
    from ejkernel.kernels._triton import attention, gated_delta_rule, recurrent
    from ejkernel.kernels._triton.gated_delta_rule import _platform

    plan = _platform.delta_plan
    in_segments = lambda problem, cfg: dataclasses.replace(plan(problem, cfg), segment=1)
    documents = MaskInfo.from_segments(jnp.arange(T)[None] // 5 + jnp.zeros((B, 1), jnp.int32))
    attend = lambda **arrays: attention(
        **arrays, causal=True, logits_soft_cap=5.0, dtype=None, mask_info=documents, return_weights=False
    )[0]
    shapes = dict.fromkeys(("query", "key"), (B, CHUNKS, HKV, K)) | {"value": (B, CHUNKS, H, V), "initial_state": (B, H, K, V)}
    steps = drawn(**shapes, beta=(B, CHUNKS, H), g=(B, CHUNKS, H))

    def mapped_attention() -> None:
        """On a machine of several devices, whether or not arrays are split; sinks and scale are each call's own.

        All rows of a call share its bias, whose gradient is a sum over them and over no other call's.
        """
        some = {name: jnp.stack([x, 0.5 * x]) for name, x in (soft | shared).items()}
        some["softmax_scale"] = jnp.array([0.3, 0.2])
        options = {"causal": True, "dtype": None, "return_weights": False}
        of = lambda call: jax.vmap(lambda arrays: call(**arrays, **options)[0])
        loss = lambda call: lambda arrays: jnp.sum(of(call)(arrays) ** 2)
        got, want = (jax.grad(loss(call))(some) for call in (attention, xla_attention))
        assert all(relative_rms(got[name], want[name]) < 1e-5 for name in some)

    def without_jit() -> None:
        """Each device computes its part without a `jit` around: by types that say how arrays are split, and by `shard_map`."""
        mesh = jax.make_mesh((4, 2), ("b", "h"), axis_types=(explicit, explicit))
        placed = {name: jax.device_put(x, NamedSharding(mesh, SPLIT[name])) for name, x in plain.items()}
        with jax.set_mesh(mesh):
            got = values_and_gradients(run, placed)
        specs = {name: SPLIT[name] for name in plain}
        by_hand = jax.shard_map(
            lambda arrays: run(**arrays), mesh=mesh, in_specs=(specs,), out_specs=(SPLIT["query"], SPLIT["initial_state"])
        )
        want = jax.jit(functools.partial(values_and_gradients, run))(plain)
        got, want = (got, by_hand(placed)), (want, want[0])
        errors = jax.tree.map(lambda x, y: relative_rms(np.asarray(x), np.asarray(y)), got, want)
        assert all(error < 1e-5 for error in jax.tree.leaves(errors)), errors

    def delta_in_segments() -> None:
        with mock.patch.object(_platform, "delta_plan", in_segments):
            split(rule, steps, SPLIT, {})

    soft = drawn(query=(B, T, H, K), key=(B, T, HKV, K), value=(B, T, HKV, V), bias=(B, H, T, T), softmax_aux=(H, 1))
    shared = {"bias": soft["bias"][:1]}  # its gradient is a sum over the batch, as that of the sinks is
    one_bias = {name: x for name, x in (soft | shared).items() if name != "softmax_aux"}
    run = functools.partial(recurrent, cfg=RecurrentAttentionConfig(block_q=16))
    rule = functools.partial(gated_delta_rule, cfg=GatedDeltaRuleConfig(block_q=16))
    named = lambda call: lambda **arrays: jax.vmap(lambda some: call(**some))(arrays)
    chunks = drawn(
        query=(B, CHUNKS, H, K),
        key=(B, CHUNKS, HKV, K),
        value=(B, CHUNKS, HKV, V),
        g=(B, CHUNKS, H),
        initial_state=(B, H, K, V),
    )
    plain, explicit = linear(), AxisType.Explicit
    mapped = {name: jnp.stack([x, 0.5 * x, x, 0.9 * x]) for name, x in drawn(
        query=(2, T, 2, K), key=(2, T, 2, K), value=(2, T, 2, V), g=(2, T, 2)).items()}  # fmt: skip
    over_time = {name: P(None, "b", "h") for name in plain if name != "initial_state"}
    one_group = drawn(query=(2, T, 8, K), key=(2, T, 2, K), value=(2, T, 2, V))
    return {
        "head-gate": lambda: split(run, chunks, SPLIT, {}),
        "gates-per-channel": lambda: split(run, linear(gk=(B, T, H, K), g_gamma=(B, H)), SPLIT, {}),
        "query-alone": lambda: split(run, plain, {"query": TOKENS}, {"all-gather": 2}),  # gradients of what is whole
        "packed": lambda: split(run, packed(), HEADS, {}),
        "delta": delta_in_segments,
        "delta-packed": lambda: split(rule, packed_delta(), HEADS, {}),
        "attention": lambda: split(attend, soft, SPLIT, {"all-reduce": 1}),  # as on xla: the gradient of the sinks
        "attention-shared-bias": lambda: split(attend, one_bias, SPLIT | {"bias": P(None, "h")}, {"all-reduce": 1}),
        "attention-vmap": mapped_attention,
        "vmap": lambda: split(named(run), mapped, dict.fromkeys(mapped, P("b", None, None, "h")), {}),
        "time": lambda: split(run, plain, over_time, {"all-gather": 3}, warns=TIME, output=P(None, None, "h")),
        "part-of-a-group": lambda: split(
            run, one_group, {"query": TOKENS}, {"all-gather": 3}, warns=GROUPS, sizes=(2, 4), output=TOKENS
        ),
        "explicit": lambda: split(run, linear(gk=(B, T, H, K)), SPLIT, {}, explicit),
        "explicit-without-jit": without_jit,
        "explicit-delta": lambda: split(rule, delta(g=(B, T, H)), SPLIT, {}, explicit),
        "explicit-packed": lambda: split(run, packed(), HEADS, {}, explicit),
        "explicit-attention": lambda: split(attend, soft, SPLIT, {"all-reduce": 1}, explicit),
        "explicit-query-alone": lambda: split(run, plain, {"query": TOKENS}, {"all-gather": 6}, explicit),
    }


def xla_checks() -> dict[str, Callable[[], None]]:
    run = functools.partial(xla_recurrent, cfg=RecurrentAttentionConfig(block_q=8))
    rule = functools.partial(xla_delta, cfg=GatedDeltaRuleConfig(block_q=8))
    attend = lambda cfg: lambda **a: xla_attention(**a, causal=True, dtype=None, cfg=cfg)[0]
    soft = drawn(query=(B, T, H, K), key=(B, T, HKV, K), value=(B, T, HKV, V), bias=(B, H, T, T), softmax_aux=(H, 1))
    sinks = {"all-reduce": 1}  # the gradient of the sinks, which all rows of the batch have in common
    return {
        "xla-head-gate": lambda: split(run, linear(g=(B, T, H)), SPLIT, {}),
        "xla-delta": lambda: split(rule, delta(g=(B, T, H, K)), SPLIT, {}),
        "xla-attention-blockwise": lambda: split(attend(AttentionConfig(block_q=8, block_k=8)), soft, SPLIT, sinks),
    }


NAMES = (
    "head-gate", "gates-per-channel", "query-alone", "packed", "delta", "delta-packed", "attention", "attention-shared-bias",
    "attention-vmap", "vmap", "time", "part-of-a-group", "explicit", "explicit-query-alone", "explicit-delta",
    "explicit-packed", "explicit-without-jit", "explicit-attention", "xla-head-gate", "xla-delta", "xla-attention-blockwise",
)  # fmt: skip


def main() -> None:
    from tests.interpreter import quicken

    quicken()
    found = {}
    checks = triton_checks() | xla_checks()
    for name in sys.argv[1:] or NAMES:
        try:
            checks[name]()
            found[name] = ""
        except Exception:  # every check reports, whatever went wrong in another
            found[name] = traceback.format_exc(limit=-6)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
