"""Derivatives of derivatives, as gradient penalties and curvature need them: forward over reverse and reverse over reverse."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.modules import RecurrentAttentionConfig, recurrent_attention
from ejkernel.testing.compare import relative_rms
from ejkernel.testing.linear_cases import LinearCase
from ejkernel.testing.linear_reference import linear_reference

small = functools.partial(LinearCase, batch=1, heads=1, kv_heads=1, key_channels=2, value_channels=3, initial_state=True)
CASES = [
    (small("short", time=3, gates=("g",)), RecurrentAttentionConfig("recurrent", 8)),
    (small("grouped", time=5, heads=2, gates=("gk",), gate_kind="everything"), RecurrentAttentionConfig("recurrent", 4)),
    (small("all-gates", time=3, gates=("g", "g_gamma", "gk", "gv"), reverse=True), RecurrentAttentionConfig("chunked", 2)),
    (small("packed", lengths=(3, 0, 2, 0), gates=("g", "g_gamma")), RecurrentAttentionConfig("chunked", 2)),
    (small("packed-steps", lengths=(0, 3, 1), gates=("gk",)), RecurrentAttentionConfig("recurrent", 2)),
]


def finite_directions(arrays):
    return {name: jnp.cos(3 * jnp.where(jnp.isfinite(x), x, 1)) for name, x in arrays.items()}


def slopes(function, options, arrays):
    """The gradients of a loss of output and state."""
    loss = lambda arrays: sum(jnp.sum(jnp.sin(x)) for x in function(**arrays, **options))
    return jax.grad(loss)(arrays)


def forward_over_reverse(function, options, arrays):
    return jax.jvp(functools.partial(slopes, function, options), (arrays,), (finite_directions(arrays),))[1]


def reverse_over_reverse(function, options, arrays):
    directions = finite_directions(arrays)
    along = lambda arrays: sum(jnp.vdot(x, directions[name]) for name, x in slopes(function, options, arrays).items())
    return jax.grad(along)(arrays)


@pytest.mark.parametrize(("case", "cfg"), CASES, ids=[case.name for case, _ in CASES])
@pytest.mark.long
def test_second_derivatives(case, cfg):
    arrays, options = case.arguments()
    with jax.enable_x64(True):
        wide = {name: jnp.asarray(np.asarray(x, np.float64)) for name, x in arrays.items()}
        want = jax.jit(functools.partial(forward_over_reverse, linear_reference, options))(wide)
    operation = functools.partial(recurrent_attention, return_state=True, cfg=cfg)
    for second in (reverse_over_reverse, forward_over_reverse)[: 2 if case.lengths is None else 1]:
        got = jax.jit(functools.partial(second, operation, options))(arrays)
        errors = {name: relative_rms(got[name], np.asarray(want[name])) for name in want}
        assert max(errors.values()) < 1e-5, (second.__name__, errors)


@pytest.mark.long
def test_a_third_derivative_and_a_gradient_of_a_directional_derivative():
    arrays, options = small("third", time=2, gates=("g",)).arguments()
    cfg = RecurrentAttentionConfig("recurrent", 2)

    def along(function, s):
        moved = {name: x * (1 + s * i) for i, (name, x) in enumerate(arrays.items())}
        return sum(jnp.sum(jnp.sin(x)) for x in function(**moved, **options))

    ours, reference = (
        functools.partial(along, f)
        for f in (functools.partial(recurrent_attention, return_state=True, cfg=cfg), linear_reference)
    )
    step = lambda function, s: jax.jvp(function, (s,), (1.0,))[1]
    third = lambda function: jax.jit(jax.grad(jax.grad(jax.grad(function))))(0.1)
    mixed = lambda function: jax.jit(jax.grad(functools.partial(step, function)))(0.1)
    np.testing.assert_allclose(third(ours), third(reference), rtol=1e-4)
    np.testing.assert_allclose(mixed(ours), mixed(reference), rtol=1e-4)
