"""Every implementation of attention against the float64 reference, with every schedule it has."""

from __future__ import annotations

import functools

import pytest

from ejkernel import kernel_registry
from ejkernel.kernels._attention import AttentionConfig
from ejkernel.kernels._registry import Backend, current_backend
from ejkernel.testing.attention_cases import CASES, AttentionCase

SCHEDULES = {
    "xla": [AttentionConfig("direct"), AttentionConfig(block_q=16, block_k=24)],
    "cuda": [AttentionConfig("fused")],
}


def _runs() -> list:
    runs = []
    for entry in kernel_registry.list_implementations("attention"):
        for cfg in SCHEDULES[str(entry.platform)]:
            label = cfg.schedule if cfg.block_q is None else f"{cfg.block_q}x{cfg.block_k}"
            marks = [pytest.mark.gpu] if entry.backend is Backend.GPU else []
            runs.append(pytest.param(entry, cfg, id=f"{entry.platform}-{label}", marks=marks))
    return runs


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("entry", "cfg"), _runs())
def test_matches_reference(entry, cfg, case: AttentionCase):
    if entry.backend not in (Backend.ANY, current_backend()):
        pytest.skip(f"needs {entry.backend}")
    if (reason := entry.refusal(case.problem)) is not None:
        pytest.skip(f"refused: {reason}")
    # Weights come from the same code in every schedule of a platform.
    case.check(functools.partial(entry.function, cfg=cfg), weights=cfg.schedule != "blockwise")


def test_every_case_has_its_own_name():
    assert len({case.name for case in CASES}) == len(CASES)
