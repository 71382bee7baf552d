"""Calls on 8 simulated devices, each compared with the same call on one: run as a program, it prints what was found as JSON."""

from __future__ import annotations

import functools
import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ejkernel.kernels._attention import AttentionConfig
from ejkernel.modules import RecurrentAttentionConfig, attention, gla_attention, lightning_attention, recurrent_attention
from ejkernel.testing.compare import relative_rms
from ejkernel.testing.linear_cases import LinearCase
from ejkernel.types.mask import MaskInfo

P = PartitionSpec
Arrays = dict[str, Any]
Call = Callable[[Arrays], tuple[jax.Array, ...]]
small = functools.partial(
    LinearCase, batch=4, time=3, heads=4, kv_heads=2, key_channels=2, value_channels=2, initial_state=True
)
CHUNKED, STEPS = RecurrentAttentionConfig("chunked", 2), RecurrentAttentionConfig("recurrent", 2)
BLOCKWISE, DIRECT = AttentionConfig(block_q=4, block_k=4), AttentionConfig("direct")
TOKENS, STATE = P("b", None, "h"), P("b", "h")
DENSE = dict.fromkeys(("query", "key", "value", "g", "gk", "gv"), TOKENS) | {"initial_state": STATE}
PACKED = dict.fromkeys(("query", "key", "value", "g"), P(None, None, "h")) | {
    "initial_state": P(None, "h"),
    "g_gamma": P(None, "h"),
}


def recurrent(arrays: Arrays, cfg: Any = CHUNKED) -> tuple[jax.Array, ...]:
    return recurrent_attention(**arrays, return_state=True, cfg=cfg)


def scaled(arrays: Arrays) -> tuple[jax.Array, ...]:
    rest = {name: x for name, x in arrays.items() if name != "scale"}
    return recurrent_attention(**rest, softmax_scale=arrays["scale"], return_state=True, cfg=CHUNKED)


def attend(arrays: Arrays, cfg: AttentionConfig, dropout: bool = False) -> tuple[jax.Array, ...]:
    names = ("query", "key", "value", "bias", "softmax_aux")
    given = {name: arrays[name] for name in names if name in arrays}
    info = MaskInfo.from_segments(arrays["ids"]) if "ids" in arrays else None
    options = {"dropout_rng": jax.random.key(3), "dropout_prob": 0.3, "deterministic": False} if dropout else {}
    return attention(
        **given, attention_mask=arrays.get("mask"), mask_info=info, softmax_scale=arrays.get("scale"), causal=True, dtype=None,
        cfg=cfg, **options,
    )  # fmt: skip


def linear_arrays(case: LinearCase) -> Arrays:
    arrays, options = case.arguments()
    return arrays | ({"cu_seqlens": options["cu_seqlens"]} if "cu_seqlens" in options else {})


def attention_arrays() -> Arrays:
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    return {
        "query": normal(4, 8, 4, 4), "key": normal(4, 8, 2, 4), "value": normal(4, 8, 2, 4), "bias": normal(1, 4, 8, 8),
        "softmax_aux": normal(2, 1), "mask": jnp.asarray(rng.random((4, 8)) < 0.8), "ids": jnp.asarray([[0] * 3 + [1] * 5] * 4),
        "scale": jnp.float32(0.4),
    }  # fmt: skip


def values_and_gradients(call: Call, arrays: Arrays) -> Any:
    floats = {name: x for name, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)}

    def loss(floats: Arrays) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        outputs = call({**arrays, **floats})
        return sum(jnp.sum(jnp.sin(x)) for x in outputs), outputs

    gradients, outputs = jax.grad(loss, has_aux=True)(floats)
    return outputs, gradients


def explicit_mesh(call: Call, arrays: Arrays, specs: dict[str, PartitionSpec], jit: bool) -> None:
    """Outputs, their types and gradients on a mesh whose axes are explicit."""
    run = functools.partial(values_and_gradients, call)
    want = jax.jit(run)(arrays)
    mesh = jax.make_mesh((4, 2), ("b", "h"), axis_types=(AxisType.Explicit, AxisType.Explicit))
    with jax.set_mesh(mesh):
        placed = {name: jax.device_put(x, NamedSharding(mesh, specs.get(name, P()))) for name, x in arrays.items()}
        got = (jax.jit(run) if jit else run)(placed)
    compare(got, want)
    query, output = jax.typeof(placed["query"]).sharding.spec, jax.typeof(got[0][0]).sharding.spec
    assert (output[0], output[-2]) == (query[0], query[-2]), f"query is {query}, the output {output}"


def replicated(call: Call, arrays: Arrays, split: tuple[str, ...]) -> None:
    """Gradients through `shard_map` with its checks, where all but `split` are the same on every shard."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    local = {name: x if name in split or x.ndim == 0 else x[: x.shape[0] // 2] for name, x in arrays.items()}
    specs = {name: P("x") if name in split else P() for name in local}
    sharded = jax.shard_map(call, mesh=mesh, in_specs=(specs,), out_specs=(P("x"), P("x")))
    got = jax.jit(functools.partial(values_and_gradients, sharded))(local)
    part = lambda n: {name: jnp.split(x, 2)[n] if name in split else x for name, x in local.items()}
    (outputs, gradients), (others, more) = (on_one_device(call)(part(n)) for n in range(2))
    together = {name: jnp.concatenate([x, more[name]]) if name in split else x + more[name] for name, x in gradients.items()}
    compare(got, (tuple(jnp.concatenate(x) for x in zip(outputs, others, strict=True)), together))


@functools.cache
def on_one_device(call: Call) -> Callable[[Arrays], Any]:
    """Compiled once for all that is split: a shard's arrays have the same shapes."""
    return jax.jit(functools.partial(values_and_gradients, call))


def compare(got: Any, want: Any) -> None:
    errors = jax.tree.map(lambda x, y: relative_rms(np.asarray(x), np.asarray(y)), got, want)
    assert max(jax.tree.leaves(errors)) < 1e-5, errors


def refused(call: Call, arrays: Arrays, specs: dict[str, PartitionSpec], *words: str) -> None:
    try:
        explicit_mesh(call, arrays, specs, jit=True)
    except ValueError as error:
        message = str(error)
    else:
        message = "no error"
    assert all(word in message for word in words), message


def checks() -> dict[str, Callable[[], None]]:
    every = linear_arrays(small("every", gates=("g", "g_gamma", "gk", "gv")))
    per_head, plain = linear_arrays(small("g", gates=("g",))), linear_arrays(small("plain"))
    long = linear_arrays(small("long", time=4))
    packed = linear_arrays(small("packed", lengths=(3, 0, 2), gates=("g", "g_gamma")))
    mixed = linear_arrays(small("mixed", gates=("g4",), gates_per_kv_head=True)) | {
        "gk": linear_arrays(small("gk", gates=("gk",)))["gk"]
    }
    dense_attention = {"query": TOKENS, "key": TOKENS, "value": TOKENS, "bias": P(None, "h"), "softmax_aux": P("h")}
    dense_attention |= {"mask": P("b"), "ids": P("b")}
    soft = attention_arrays()
    bare = {name: soft[name] for name in ("query", "key", "value")}
    mapped = {name: jnp.stack([x, 0.5 * x, -x, x]) for name, x in per_head.items()}
    lightning = functools.partial(lightning_attention, layer_idx=1, num_layers=3, return_state=True)
    made: dict[str, Callable[[], None]] = {
        "explicit-chunked": lambda: explicit_mesh(recurrent, every, DENSE, jit=True),
        "explicit-steps": lambda: explicit_mesh(functools.partial(recurrent, cfg=STEPS), per_head, DENSE, jit=False),
        "explicit-query-alone": lambda: explicit_mesh(recurrent, per_head, {"query": TOKENS}, jit=True),
        "explicit-gates-added": lambda: explicit_mesh(recurrent, mixed, DENSE, jit=True),
        "explicit-packed": lambda: explicit_mesh(recurrent, packed, PACKED, jit=True),
        "explicit-traced-scale": lambda: explicit_mesh(scaled, plain | {"scale": jnp.float32(0.3)}, DENSE, jit=True),
        "explicit-gla": lambda: explicit_mesh(lambda a: gla_attention(**a, return_state=True), per_head, DENSE, jit=True),
        "explicit-lightning": lambda: explicit_mesh(lambda a: lightning(**a), plain, DENSE, jit=True),
        "explicit-vmap": lambda: explicit_mesh(jax.vmap(recurrent), mapped, dict.fromkeys(mapped, P("b")), jit=True),
        "explicit-blockwise": lambda: explicit_mesh(functools.partial(attend, cfg=BLOCKWISE), soft, dense_attention, jit=True),
        "explicit-direct": lambda: explicit_mesh(functools.partial(attend, cfg=DIRECT), soft, dense_attention, jit=False),
        "explicit-dropout": lambda: explicit_mesh(
            functools.partial(attend, cfg=BLOCKWISE, dropout=True), bare, dense_attention, jit=True
        ),
        "refused-time": lambda: refused(recurrent, long, {"query": P(None, "b")}, "query", "time", "'b'"),
        "refused-channels": lambda: refused(recurrent, plain, {"value": P(None, None, None, "h")}, "value", "value channels"),
        "refused-disagreement": lambda: refused(recurrent, plain, {"query": P("b"), "key": P("h")}, "key and query", "batch"),
        "refused-keys": lambda: refused(functools.partial(attend, cfg=BLOCKWISE), bare, {"key": P(None, "b")}, "key", "keys"),
    }  # fmt: skip
    names = tuple(every)
    for split in (("query",), ("key", "value"), ("initial_state",), ("g_gamma",), tuple(n for n in names if n != "gk")):
        made[f"replicated-all-but-{'-'.join(split)}"] = functools.partial(replicated, recurrent, every, split)
    made["replicated-gla"] = lambda: replicated(lambda a: gla_attention(**a, return_state=True), per_head, ("query",))
    made["replicated-lightning"] = lambda: replicated(lambda a: lightning(**a), plain, ("value",))
    for name, cfg in (("direct", DIRECT), ("blockwise", BLOCKWISE)):
        call = functools.partial(attend, cfg=cfg)
        for split in (("query",), ("query", "key", "value"), ("mask",), ("ids",)):
            rest = {n: x for n, x in soft.items() if n not in ("bias", "softmax_aux")}
            shared = {n: jnp.concatenate([x, x]) for n, x in soft.items() if n in ("bias", "softmax_aux")}
            made[f"replicated-{name}-all-but-{'-'.join(split)}"] = functools.partial(replicated, call, rest | shared, split)
    return made


def main() -> None:
    found = {}
    for name, check in checks().items():
        try:
            check()
            found[name] = ""
        except Exception:  # every check reports, whatever went wrong in another
            found[name] = traceback.format_exc(limit=-6)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
