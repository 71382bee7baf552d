"""A NaN in a gate is no reset: it spoils its own sequence and head from its token on, interpreted and on a GPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton", reason="the triton platform needs Triton")

from ejkernel._device import Device, device_of, on_device
from ejkernel.kernels._linear import LinearConfig
from ejkernel.kernels._triton import gated_delta_rule, recurrent
from ejkernel.testing.delta_cases import DeltaCase
from tests.triton.linear_cases import Case

ON_GPU = device_of(()).backend == "gpu"
pytestmark = [pytest.mark.gpu] if ON_GPU else []
H200 = Device("gpu", "NVIDIA H200", 90)
TOKEN, CHUNK = 100, 64  # the NaN is in the second chunk
KIND = {"shape": (1, 150, 2, 2, 64, 64), "state": True, "block_q": CHUNK}
CASES = [
    Case(gates, strength, dtype=dtype, schedule=schedule, **KIND)
    for gates, strength, dtype, schedule in (
        (("g",), "mild", "bfloat16", "chunked"), (("g",), "resets", "float32", "chunked"),
        (("g_gamma",), "mild", "bfloat16", "chunked"),
        (("gk",), "mild", "bfloat16", "chunked"), (("gk",), "resets", "bfloat16", "chunked"),
        (("gk",), "mild", "float32", "chunked"),
        (("gv",), "mild", "bfloat16", "chunked"), (("gk", "gv"), "mild", "bfloat16", "chunked"),
        (("gk", "gv"), "resets", "bfloat16", "chunked"), (("g", "gk"), "mild", "bfloat16", "recurrent"),
    )
]  # fmt: skip
DELTA = [
    DeltaCase(
        f"{gate}-{kind}-{dtype}", batch=1, time=150, heads=2, key_heads=2, key_channels=64, value_channels=64, gate=gate,
        gate_kind=kind, dtype=dtype,
    )
    for gate, kind, dtype in (
        ("head", "mild", "bfloat16"), ("head", "resets", "float32"), ("channel", "mild", "bfloat16"),
        ("channel", "resets", "bfloat16"), ("channel", "mild", "float32"),
    )
]  # fmt: skip


def spoiled(gate: jnp.ndarray) -> jnp.ndarray:
    """The gate with a NaN in the first head, at the token if it has tokens, in one of its channels if it has channels."""
    at = {2: (0, 0), 3: (0, TOKEN, 0), 4: (0, TOKEN, 0, 5)}[gate.ndim]
    return gate.at[at].set(jnp.nan)


def is_spoiled_from_its_token_on(clean, dirty, *, constant: bool = False, channel: bool = False):
    """Of (output, final state) pairs; channel: only value channel 5 may be."""
    first = 0 if constant else TOKEN
    (o, S), (o_clean, _) = ((np.asarray(x, np.float32) for x in pair) for pair in (dirty, clean))
    own = (..., 5) if channel else ...
    assert np.isnan(o[0, first:, 0][own]).all()
    assert np.isnan(S[0, 0][..., 5] if channel else S[0, 0]).any()
    np.testing.assert_array_equal(o[0, : first // CHUNK * CHUNK], o_clean[0, : first // CHUNK * CHUNK])
    np.testing.assert_array_equal(o[0, :, 1], o_clean[0, :, 1])
    assert np.isfinite(S[0, 1]).all()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_linear(case):
    arrays = case.arrays()
    cfg = LinearConfig(schedule=case.schedule, block_q=case.block_q)
    for name in case.gates:
        dirty = {**arrays, name: spoiled(arrays[name])}
        results = jax.block_until_ready([recurrent(**x, cfg=cfg) for x in (arrays, dirty)])
        is_spoiled_from_its_token_on(*results, constant=name == "g_gamma", channel=name == "gv")


@pytest.mark.parametrize("case", DELTA, ids=str)
def test_delta_rule(case):
    arrays, options = case.arguments()
    dirty = {**arrays, "g": spoiled(arrays["g"])}
    is_spoiled_from_its_token_on(*jax.block_until_ready([gated_delta_rule(**x, **options) for x in (arrays, dirty)]))


@pytest.mark.parametrize("gates", [("g",), ("g_gamma",), ("gk",), ("gk", "gv")], ids="+".join)
@pytest.mark.parametrize("strength", ["mild", "resets"])
def test_by_warpgroups(gates, strength, launched):
    """Gates in bfloat16, for which Hopper has kernels of its own."""
    case = Case(gates, strength, dtype="bfloat16", gate_dtype="bfloat16", **{**KIND, "shape": (1, 150, 2, 2, 128, 128)})
    if ON_GPU:
        test_linear(case)
    else:
        with on_device(H200):
            test_linear(case)
        assert any(name.endswith("_by_warpgroups") for name in launched)


@pytest.mark.skipif(ON_GPU, reason="there the tests above take these kernels")
@pytest.mark.parametrize("case", DELTA, ids=str)
def test_delta_rule_by_warpgroups(case, launched):
    with on_device(H200):
        test_delta_rule(case)
    assert bool(launched) == (case.dtype == "bfloat16")
