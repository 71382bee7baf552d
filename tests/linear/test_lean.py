"""What a call must not cost: states per token, copies of k and v, quadratic work."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels._linear import LinearConfig
from ejkernel.modules import recurrent_attention
from ejkernel.testing.hand_written import scan_attention

STATE = 64 * 64 * 4  # bytes of one state


def temporary_bytes(function, *arguments) -> int:
    return jax.jit(function).lower(*arguments).compile().memory_analysis().temp_size_in_bytes


def call(tokens: int, heads: int = 1, kv_heads: int = 1, batch: int = 1) -> list[jax.ShapeDtypeStruct]:
    shape = lambda h: jax.ShapeDtypeStruct((batch, tokens, h, 64), jnp.float32)
    return [shape(heads), shape(kv_heads), shape(kv_heads), shape(heads)]


@pytest.mark.parametrize("schedule", ["chunked", "recurrent"])
def test_the_gradient_keeps_one_state_per_chunk(schedule):
    cfg = LinearConfig(schedule, 64)
    loss = lambda q, k, v, gk: jnp.sum(recurrent_attention(q, k, v, gk=gk, cfg=cfg) ** 2)
    tokens = 4096
    used = temporary_bytes(jax.grad(loss, (0, 1, 2, 3)), *call(tokens))
    rows = tokens * 64 * 4
    assert used < (tokens // 64) * STATE + 8 * rows  # states per token would be 64 times the first term


def test_temporary_memory_against_autodiff_of_the_scan():
    arguments = call(8192, heads=4, kv_heads=4, batch=2)
    weighted = lambda function: jax.grad(lambda q, k, v, gk: jnp.sum(jnp.sin(function(q, k, v, gk=gk))), (0, 1, 2, 3))
    ours = temporary_bytes(weighted(recurrent_attention), *arguments)
    scan = temporary_bytes(weighted(lambda *a, **k: scan_attention(*a, **k)[0]), *arguments)
    assert ours <= 0.05 * scan, (ours, scan)


@pytest.mark.parametrize("schedule", ["chunked", "recurrent"])
def test_grouped_heads_are_not_repeated_in_memory(schedule):
    cfg = LinearConfig(schedule, 64)
    run = lambda q, k, v, gk: recurrent_attention(q, k, v, cfg=cfg)
    tokens = 8192
    used = temporary_bytes(run, *call(tokens, heads=8, kv_heads=1))
    assert used < tokens * 64 * 4 * 2, "k and v of one head would fit twice; eight heads' would not"


def test_the_recurrent_schedule_has_nothing_quadratic():
    cfg = LinearConfig("recurrent", 64)
    compiled = jax.jit(lambda q, k, v, gk: recurrent_attention(q, k, v, gk=gk, cfg=cfg)).lower(*call(4096)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 16 * STATE


def test_a_decode_step_is_one_pass_without_loops():
    text = jax.jit(lambda q, k, v, gk: recurrent_attention(q, k, v, gk=gk)).lower(*call(1)).as_text()
    assert "while" not in text


def test_a_donated_state_is_updated_in_place():
    state = jax.ShapeDtypeStruct((1, 1, 64, 64), jnp.float32)
    step = lambda state, q, k, v, gk: recurrent_attention(q, k, v, gk=gk, initial_state=state, return_state=True)
    compiled = jax.jit(step, donate_argnums=0).lower(state, *call(1)).compile()
    assert compiled.memory_analysis().alias_size_in_bytes == STATE


def test_no_gradient_is_computed_that_nobody_asked_for():
    loss = lambda v, q, k, gk: jnp.sum(recurrent_attention(q, k, v, gk=gk))
    q, k, v, gk = call(256)
    only_v, _ = jax.make_jaxpr(jax.grad(loss))(v, q, k, gk), None
    _, equation = [e for e in only_v.eqns if e.primitive.name == "linear_map"]  # the forward pass, and its derivative
    assert equation.params["fun"].moving == ("value",)


def test_long_and_short_calls_cost_the_same_per_token():
    flops = lambda tokens: (
        jax.jit(lambda q, k, v, gk: recurrent_attention(q, k, v, gk=gk)).lower(*call(tokens)).cost_analysis()["flops"]
    )
    assert np.isclose(flops(65536), flops(2048), rtol=0.05), "a loop's cost is counted once, so equal bodies mean equal counts"
