"""Every kernel lowers for a TPU, forward and backward, on a machine without one: bad blocks and operations fail here."""

from __future__ import annotations

import jax
import jax.export
import jax.numpy as jnp
import pytest

from ejkernel._device import on_device
from ejkernel.kernels._linear import LinearConfig
from ejkernel.kernels._pallas import recurrent
from ejkernel.kernels._pallas._chips import CHIPS

B, T, H = 1, 64, 4


def shapes(gates=(), K=128, V=128, time=T, dtype=jnp.bfloat16, kv_heads=H, sequences=None):
    of = lambda *shape, dtype=dtype: jax.ShapeDtypeStruct(shape, dtype)
    given = {"query": of(B, time, H, K), "key": of(B, time, kv_heads, K), "value": of(B, time, kv_heads, V)}
    gate = {"g": of(B, time, H, dtype=jnp.float32), "gk": of(B, time, H, K), "gv": of(B, time, kv_heads, V)}
    given |= {name: gate[name] for name in gates}
    if sequences is not None:
        given["cu_seqlens"] = of(sequences + 1, dtype=jnp.int32)
    return given


def lowered(arrays, cfg, backward):
    def forward(arrays):
        return recurrent(**arrays, cfg=cfg)

    def loss(floats, rest):
        output, state = forward({**floats, **rest})
        return jnp.sum(output.astype(jnp.float32)) + jnp.sum(state)

    rest = {name: x for name, x in arrays.items() if name == "cu_seqlens"}
    floats = {name: x for name, x in arrays.items() if name not in rest}
    call = jax.jit(jax.grad(loss)) if backward else jax.jit(lambda floats, rest: forward({**floats, **rest}))
    with on_device(CHIPS["v5e"].device):
        return jax.export.export(call, platforms=("tpu",))(floats, rest).mlir_module()


HEAD, CHANNELS = ("head_gate_forward", "head_gate_backward"), ("channel_gates_forward", "channel_gates_backward")
CALLS = {
    "ungated": (shapes(), LinearConfig(block_q=32), HEAD),
    "g": (shapes(("g",)), LinearConfig(block_q=32, block_h=2), HEAD),
    "g-float32": (shapes(("g",), dtype=jnp.float32, K=64, V=96), LinearConfig(block_q=16), HEAD),
    "g-packed": (shapes(("g",), K=40, sequences=3), LinearConfig(block_q=16), HEAD),
    "gk": (shapes(("gk",)), LinearConfig(block_q=64), CHANNELS),
    "gk-gv-grouped": (shapes(("gk", "gv"), kv_heads=1, K=64), LinearConfig(block_q=32, block_h=2), CHANNELS),
    "gv-float32": (shapes(("gv",), dtype=jnp.float32, K=5, V=9), LinearConfig(block_q=16), CHANNELS),
    "one-channel": (shapes(("gk",), K=1, V=9, time=20), LinearConfig(block_q=16), CHANNELS),
    "decode": (shapes(("g", "gk", "gv"), time=1), LinearConfig("recurrent"), ("decode_step", "channel_gates_backward")),
}  # fmt: skip
SHORT = ("g", "one-channel", "decode")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in SHORT else [pytest.mark.slow]) for n in CALLS])
def test_lowers_for_a_tpu(name):
    arrays, cfg, (forward, backward) = CALLS[name]
    assert forward in lowered(arrays, cfg, backward=False)
    text = lowered(arrays, cfg, backward=True)
    assert forward in text or name == "decode"
    assert backward in text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["g-packed", "gk-gv-grouped", "decode"])
def test_lowers_with_sixty_four_bits(name):
    arrays, cfg, (_, backward) = CALLS[name]
    with jax.enable_x64(True):
        assert backward in lowered(arrays, cfg, backward=True)


def index_dtypes(jaxpr):
    """Of what the index maps of a program's kernels give."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            for mapping in eqn.params["grid_mapping"].block_mappings:
                yield from (str(x.dtype) for x in mapping.index_map_jaxpr.out_avals)
            continue
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "jaxpr") or hasattr(x, "eqns")):
            if hasattr(inner, "jaxpr") or hasattr(inner, "eqns"):
                yield from index_dtypes(getattr(inner, "jaxpr", inner))


@pytest.mark.parametrize("name", ["g", "decode"])
def test_indices_have_thirty_two_bits(name):
    """Indices of 64 bits lower, but no TPU compiler takes them."""
    arrays, cfg, _ = CALLS[name]
    with jax.enable_x64(True), on_device(CHIPS["v5e"].device):
        traced = jax.make_jaxpr(lambda arrays: recurrent(**arrays, cfg=cfg))(arrays)
    assert set(index_dtypes(traced.jaxpr)) == {"int32"}
