"""jax-linear-attention as a rival: what it is called with, on a stand-in that has its interface and computes by a scan."""

from __future__ import annotations

import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.testing import floors, jax_linear
from ejkernel.testing.hand_written import scan_attention, scan_delta_rule
from ejkernel.testing.record import find

GATES = {"simple_gla": {"g"}, "gla": {"g"}, "deltanet": {"beta"}, "gated_deltanet": {"g", "beta"}, "kda": {"g", "beta"}}


@pytest.fixture
def seen(monkeypatch):
    """The calls that the stand-in got: (kind, inputs)."""
    calls: list = []

    def linear_attention(kind, q, k, v, *, impl, segment_ids=None, **gates):
        assert impl == "mosaic_gpu"
        assert set(gates) == GATES[kind]
        calls.append((kind, {"segment_ids": segment_ids, **gates}))
        run = scan_attention if kind.endswith("gla") else scan_delta_rule
        return run(q, k, v, **gates)[0], None

    package, ops = types.ModuleType("jla"), types.ModuleType("jla.ops")
    monkeypatch.setattr(ops, "linear_attention", linear_attention, raising=False)
    monkeypatch.setitem(sys.modules, "jla", package)
    monkeypatch.setitem(sys.modules, "jla.ops", ops)
    monkeypatch.setattr(jax_linear, "missing", lambda: None)
    return calls


@pytest.mark.parametrize(
    ("operation", "gate", "kind"),
    [
        ("recurrent_attention", "none", "simple_gla"),
        ("recurrent_attention", "g", "simple_gla"),
        ("recurrent_attention", "g_gamma", "simple_gla"),
        ("recurrent_attention", "gk", "gla"),
        ("gla_attention", "gk", "gla"),
        ("lightning_attention", None, "simple_gla"),
        ("gated_delta_rule", "none", "deltanet"),
        ("gated_delta_rule", "g", "gated_deltanet"),
        ("gated_delta_rule", "gk", "kda"),
    ],
)
def test_bench_measures_it_beside_ours(run, seen, monkeypatch, operation, gate, kind):
    monkeypatch.setattr(floors, "_copy_rate", lambda size: 1e10)
    monkeypatch.setattr(floors, "_product_rate", lambda dtype: 1e11)
    monkeypatch.setattr(floors, "_rates", {})
    shape = "1x6x2x4x8" + ("" if gate is None else f":{gate}")
    asked = ("bench", "--op", operation, "--shapes", shape, "--direction", "forward", "--compare", "jla")
    found = run(*asked, "--seconds", "0.01", "--json", code=0).json
    (row,) = (one for one in found["measurements"] if one["contender"] == "jla")
    assert row["reason"] == ""
    assert 0 <= row["output_error"] < 2e-6
    assert {name for name, _ in seen} == {kind}
    heads = (1, 6, 2)
    assert seen[0][1].get("g", jnp.zeros(heads)).shape == (heads if kind not in ("gla", "kda") else (*heads, 4))


def test_packed_sequences_are_numbered(seen):
    record = find("recurrent_attention")
    arrays = record.arrays(record.shape("1x6x1x4x4:g"))
    jax_linear.linear(np.array([0, 1, 1, 4, 6], np.int32))(**arrays)
    assert seen[0][1]["segment_ids"].tolist() == [[0, 2, 2, 2, 3, 3]]


@pytest.mark.parametrize(("shape", "said"), [("1x3x2x4x4:gk+gv", "gk, gv"), ("1x3x2/1x4x4:g", "as many key heads")])
def test_what_it_has_no_kernel_for_says_so(seen, shape, said):
    record = find("recurrent_attention")
    with pytest.raises(ValueError, match=said):
        jax_linear.linear()(**record.arrays(record.shape(shape)))


def test_where_it_is_not_installed(run):
    if jax_linear.missing() is None:
        pytest.skip("jax-linear-attention runs here")
    asked = ("bench", "--op", "recurrent", "--shapes", "1x4x1x4", "--direction", "forward", "--no-error", "--seconds", "0.01")
    assert "jla did not run (recurrent_attention):" in run(*asked, "--compare", "jla", code=0).words
