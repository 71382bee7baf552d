"""Random combinations of options against the reference, in both schedules."""

from __future__ import annotations

import dataclasses
import functools

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ejkernel.kernels._attention import AttentionConfig
from ejkernel.kernels._xla import attention
from ejkernel.testing.attention_cases import AttentionCase


@st.composite
def cases(draw) -> AttentionCase:
    groups, kv_heads = draw(st.sampled_from([(1, 1), (1, 2), (2, 1), (3, 2)]))
    q_len = draw(st.integers(1, 13))
    segments = draw(st.sampled_from([None, None, "packed"])) if q_len > 4 else None
    case = AttentionCase(
        "drawn",
        batch=draw(st.integers(1, 2)),
        q_len=q_len,
        kv_len=q_len if segments else draw(st.integers(1, 13)),
        heads=groups * kv_heads,
        kv_heads=kv_heads,
        channels=draw(st.integers(1, 5)),
        value_channels=draw(st.integers(1, 5)),
        segments=segments,
        mask=draw(st.sampled_from([None, "keys", "pairs", 1, kv_heads, groups * kv_heads])),
        causal=draw(st.booleans()),
        window=draw(st.none() | st.integers(0, 4) | st.tuples(st.integers(0, 6), st.integers(0, 6))),
        scale=draw(st.sampled_from([None, 0.3, -0.7, 2.0])),
        soft_cap=draw(st.sampled_from([None, None, 0.5, 4.0])),
        dropout=draw(st.sampled_from([0.0, 0.0, 0.5])),
        seed=draw(st.integers(0, 2**16)),
    )
    sinks = draw(st.sampled_from([None, (2,), ("H", 1), ("Hkv", 3)]))
    bias = draw(st.none() | st.tuples(*(st.sampled_from(x) for x in ((1, "B"), (1, "Hkv", "H"), ("T",), ("S",)))))
    return dataclasses.replace(case, sinks=sinks, bias=bias)


@settings(max_examples=7, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(cases(), st.integers(1, 8), st.integers(1, 8))
def test_any_combination_of_options(case, block_q, block_k):
    case.check(functools.partial(attention, cfg=AttentionConfig(block_q=block_q, block_k=block_k)), weights=False)
    case.check(functools.partial(attention, cfg=AttentionConfig("direct")))
