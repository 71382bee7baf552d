"""Every implementation of attention against the float64 reference, with every schedule it has."""

from __future__ import annotations

import functools

import pytest

from ejkernel import kernel_registry
from ejkernel._device import device_of
from ejkernel.kernels._attention import AttentionConfig
from ejkernel.kernels._registry import Backend, backend_of
from ejkernel.testing.attention_cases import CASES, AttentionCase

# What the direct schedule does otherwise than the blockwise one: softmax, sinks, dropout, dtypes; the logits are shared.
DIRECT = {
    "plain",
    "causal",
    "multi-query",
    "other-value-channels",
    "window-past-the-keys",
    "mask-pairs",
    "mask-kv-heads",
    "bias-heads",
    "bias-queries",
    "sinks-heads",
    "soft-cap",
    "dropout-everything",
    "packed-causal",
    "decode",
    "extreme",
    "bfloat16",
    "bfloat16-sinks",
    "float16",
}

SCHEDULES = {
    "xla": [AttentionConfig("direct"), AttentionConfig(block_q=16, block_k=24)],
    "triton": [AttentionConfig("flash")],
}


def _runs() -> list:
    """Every implementation, schedule and case."""
    runs = []
    for entry in kernel_registry.list_implementations("attention"):
        for cfg in SCHEDULES.get(str(entry.platform), [AttentionConfig("fused")]):
            label = cfg.schedule if cfg.block_q is None else f"{cfg.block_q}x{cfg.block_k}"
            marks = [pytest.mark.gpu] if entry.backend is Backend.GPU else []
            cases = [case for case in CASES if cfg.schedule != "direct" or case.name in DIRECT]
            runs += [pytest.param(entry, cfg, case, id=f"{entry.platform}-{label}-{case}", marks=marks) for case in cases]
    return runs


@pytest.mark.parametrize(("entry", "cfg", "case"), _runs())
def test_matches_reference(entry, cfg, case: AttentionCase):
    if entry.backend not in (Backend.ANY, backend_of(device_of(()))):
        pytest.skip(f"needs {entry.backend}")
    if (reason := entry.refusal(case.problem)) is not None:
        pytest.skip(f"refused: {reason}")
    # Weights come from the same code in every schedule of a platform.
    case.check(functools.partial(entry.function, cfg=cfg), weights=cfg.schedule != "blockwise")


def test_every_case_has_its_own_name():
    names = {case.name for case in CASES}
    assert len(names) == len(CASES)
    assert names >= DIRECT
