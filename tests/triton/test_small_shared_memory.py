"""GPUs with little shared memory (RTX cards: 99 KB): what is planned otherwise for them, and for no other."""

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("triton", reason="the triton platform needs Triton")

from ejkernel._device import Device, on_device
from ejkernel.kernels._delta import DeltaProblem, GatedDeltaRuleConfig
from ejkernel.kernels._linear import LinearProblem
from ejkernel.kernels._triton import _recurrence
from ejkernel.kernels._triton.gated_delta_rule._plan import delta_plan
from ejkernel.kernels._triton.linear._platform import TritonLinear

DEVICES = {80: "NVIDIA A100", 86: "NVIDIA RTX A6000", 89: "NVIDIA L40S", 90: "NVIDIA H200", 120: "NVIDIA RTX PRO 6000"}


def chunks_in_a_segment(capability, K, dtype):
    """Of one sequence of 16384 tokens, which leaves a large GPU to few programs."""
    of = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.dtype(dtype))
    with on_device(Device("gpu", DEVICES[capability], capability)):
        rows = of(1, 16384, 2, K)
        problem = DeltaProblem(query=rows, key=rows, value=rows, beta=of(1, 16384, 2))
    return delta_plan(problem, GatedDeltaRuleConfig("chunked", 64)).segment


@pytest.mark.parametrize(("capability", "K", "dtype", "cut"), [
    (80, 256, "bfloat16", True), (90, 256, "bfloat16", True), (86, 256, "bfloat16", False), (89, 256, "bfloat16", False),
    (120, 256, "bfloat16", False), (89, 128, "bfloat16", True), (89, 128, "float32", True), (90, 256, "float32", False),
])  # fmt: skip
def test_sequences_of_the_delta_rule_are_cut_where_a_transition_fits(capability, K, dtype, cut):
    assert (chunks_in_a_segment(capability, K, dtype) < 16384 // 64) == cut


@pytest.mark.parametrize("capability", [80, 89, 90, 120])
def test_candidates_are_compiled_where_they_may_not_fit(capability, monkeypatch):
    seen = []

    def too_large(route, problem, capability):
        seen.append(route.plan)
        return "too large"

    monkeypatch.setattr(_recurrence, "interpreted", lambda: False)
    monkeypatch.setattr(_recurrence, "does_not_fit", too_large)
    of = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.bfloat16)
    with on_device(Device("gpu", DEVICES[capability], capability)):
        rows = of(1, 2048, 2, 128)
        found = TritonLinear().candidates(LinearProblem(query=rows, key=rows, value=rows, gk=rows))
    small = capability in (89, 120)
    assert bool(seen) == small
    assert (len(found) == 1) == small  # the heuristic's tiles, whose stages are made to fit
