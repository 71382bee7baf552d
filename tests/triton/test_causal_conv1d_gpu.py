"""The short causal convolution's Triton kernels on a GPU: against XLA's form at odd sizes; determinism."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton", reason="the triton platform needs Triton")

from ejkernel._device import device_of
from ejkernel.kernels._triton.causal_conv1d import covers
from ejkernel.kernels._xla import causal_conv1d as xla
from ejkernel.modules import causal_conv1d
from ejkernel.testing.compare import relative_rms

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(device_of(()).backend != "gpu", reason="needs an NVIDIA GPU"),
]
CASES = [  # shape, width, lengths, dtype
    ((3, 1000, 300), 4, None, "bfloat16"),
    ((1, 601, 131), 4, (100, 0, 157, 343, 1), "bfloat16"),
    ((2, 17, 1), 1, None, "float32"),
    ((2, 300, 130), 2, None, "float16"),
    ((1, 700, 2048), 3, (1, 2, 3, 690), "float32"),  # the last four tokens are in no sequence
    ((2, 500, 70), 8, None, "float32"),
]


def both(run, arrays, *rest):
    y, pull = jax.vjp(lambda arrays: run(arrays, *rest), arrays)
    return {"y": y, **pull((1 + jnp.cos(jnp.arange(y.size))).reshape(y.shape).astype(y.dtype))[0]}


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients_are_those_of_xla(case, activation, state):
    shape, width, lengths, dtype = case
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
    N = shape[0] if lengths is None else len(lengths)
    arrays = {"x": normal(*shape), "weight": normal(width, shape[2]), "bias": normal(shape[2])}
    arrays |= {"state": normal(N, width - 1, shape[2])} if state else {}
    offsets = None if lengths is None else jnp.asarray(np.cumsum([0, *lengths]), jnp.int32)
    assert covers(device_of(arrays.values()), arrays)

    def ours(arrays, offsets):
        named = {"initial_state" if name == "state" else name: x for name, x in arrays.items()}
        return causal_conv1d(**named, cu_seqlens=offsets, activation=activation)

    plain = functools.partial(xla.activated, activation)
    got, again = (jax.jit(functools.partial(both, ours))(arrays, offsets) for _ in range(2))
    want = jax.jit(functools.partial(both, plain))({name: x.astype(jnp.float32) for name, x in arrays.items()}, offsets)
    jax.tree.map(np.testing.assert_array_equal, got, again)
    errors = {name: relative_rms(got[name], want[name]) for name in want}
    assert max(errors.values()) < {"float32": 1e-5, "bfloat16": 6e-3, "float16": 1e-3}[dtype], errors
