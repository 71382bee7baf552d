"""The short causal convolution's Triton kernels, interpreted, against plain JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.modules import causal_conv1d
from ejkernel.testing.compare import relative_rms

pytest.importorskip("triton")


def both(run, arrays, cu):
    y, pull = jax.vjp(lambda arrays: run(arrays, cu), arrays)
    return {"y": y, **pull(jnp.cos(3 * y))[0]}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize(("width", "lengths"), [(4, None), (3, (5, 0, 1, 34, 0)), (1, None)])
def test_values_and_gradients(width, lengths, activation, bias):
    from ejkernel.kernels._triton.causal_conv1d import convolved

    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    shape = (2, 37, 130) if lengths is None else (1, 40, 130)
    arrays = {"x": normal(*shape), "weight": normal(width, 130)} | ({"bias": normal(130)} if bias else {})
    if lengths is not None:  # the last two tokens are in no sequence
        arrays["x"] = jnp.pad(arrays["x"], [(0, 0), (0, 2), (0, 0)], constant_values=jnp.nan)
    cu = None if lengths is None else jnp.asarray(np.cumsum([0, *lengths]), jnp.int32)
    ours = lambda arrays, cu: convolved(activation, arrays["x"], arrays["weight"], arrays.get("bias"), cu)
    plain = lambda arrays, cu: causal_conv1d(**arrays, cu_seqlens=cu, activation=activation)
    results = []
    for run in (ours, plain):
        results.append(jax.jit(both, static_argnums=0)(run, arrays, cu))
    got, want = results
    assert all(relative_rms(got[name], want[name]) < 2e-6 for name in want)
