"""What of a TPU's vector memory a call needs: whatever is chosen or offered fits every chip, and what does not is refused."""

from __future__ import annotations

import dataclasses
import re

import jax
import pytest

from ejkernel.kernels._attention import AttentionConfig
from ejkernel.kernels._delta import GatedDeltaRuleConfig
from ejkernel.kernels._linear import LinearConfig
from ejkernel.kernels._pallas._chips import CHIPS, LANES
from ejkernel.kernels._pallas.attention import _plan as attention_plan
from ejkernel.kernels._pallas.gated_delta_rule import _platform as delta_platform
from ejkernel.kernels._pallas.linear._plan import LEAST_ROWS
from ejkernel.testing.tpu_programs import named

USUAL = AttentionConfig("flash", platform="pallas", backend="tpu")


def seen_on(chip, call, sizes, dtype):
    """(implementation, problem) of a call on a chip."""
    program = named(call, sizes, dtype)
    return program.entry.function.implementation, program.problem(chip)


@pytest.mark.parametrize(
    ("chip", "channels", "block"),
    [("v4", 512, 512), ("v4", 128, 1024), ("v5e", 512, 1024), ("v6e", 512, 1024)],
)
def test_blocks_of_attention_that_vmem_does_not_hold_are_refused(chip, channels, block):
    implementation, problem = seen_on(chip, "attention:none", f"1x2048x4x{channels}", "float32")
    reason = implementation.refuses(problem, AttentionConfig("flash", block_q=block, block_k=block))
    assert re.search(
        rf"blocks of {block} queries and {block} keys need about \d+\.\d MiB of VMEM and a kernel has \d+\.0 MiB on {chip}",
        reason,
    )
    assert "use a smaller block_q or block_k, or None" in reason


def test_a_soft_cap_and_sinks_take_room():
    implementation, problem = seen_on("v4", "attention:none", "1x2048x4x128", "bfloat16")
    large = AttentionConfig("flash", block_q=1024, block_k=1024)
    assert implementation.refuses(problem, large) is None
    for change in ({"soft_cap": 3.0}, {"sinks": jax.ShapeDtypeStruct((4,), "float32")}):
        assert "MiB of VMEM" in implementation.refuses(dataclasses.replace(problem, **change), large)


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("channels", [64, 128, 256, 512])
def test_attention_takes_blocks_that_fit(chip, dtype, channels):
    implementation, problem = seen_on(chip, "attention:none", f"1x2048x4x{channels}", dtype)
    assert implementation.supports(problem) is None
    first, *others = implementation.candidates(problem)
    assert first == implementation.heuristic(problem) == USUAL
    assert all(implementation.refuses(problem, cfg) is None for cfg in (first, *others))
    smaller = (dtype, channels) == ("float32", 512) and attention_plan.GRANTED[chip] == 16 * 2**20
    assert attention_plan.blocks(problem, first) == ((256, 256) if smaller else (512, 512))


def test_a_block_that_is_left_open_makes_room_for_the_other():
    _, problem = seen_on("v4", "attention:none", "1x2048x4x512", "float32")
    assert attention_plan.blocks(problem, AttentionConfig("flash", block_k=384)) == (128, 384)


@pytest.mark.parametrize("chip", CHIPS)
def test_the_least_blocks_of_attention_fit_with_the_most_channels(chip):
    """So no call is refused for VMEM."""
    _, problem = seen_on(chip, "attention:none", f"1x2048x4x{attention_plan.MAX_CHANNELS}", "float32")
    assert attention_plan.vmem(problem, LANES, LANES) < attention_plan.vmem_limit(problem)


@pytest.mark.parametrize(
    ("chip", "call", "sizes", "cfg"),
    [
        ("v4", "gated_delta_rule:gk", "1x512x4x256x256", GatedDeltaRuleConfig(block_q=128)),
        ("v4", "gated_delta_rule:gk", "1x512x4x128x128", GatedDeltaRuleConfig(block_q=64)),
        ("v4", "gated_delta_rule:g", "1x512x4x256x256", GatedDeltaRuleConfig(block_q=128)),
        ("v5e", "recurrent:gk", "1x512x4x512x512", LinearConfig(block_q=256, block_h=4)),
        ("v4", "recurrent:gk", "1x512x4x128x128", LinearConfig(block_q=128, block_h=4)),
    ],
)
def test_chunks_that_vmem_does_not_hold_are_refused(chip, call, sizes, cfg):
    implementation, problem = seen_on(chip, call, sizes, "float32")
    reason = implementation.refuses(problem, cfg)
    found = re.search(
        rf"need about (\d+\.\d) MiB of VMEM and a kernel has (\d+\.0) MiB on {chip}: use a smaller block_q", reason
    )
    assert float(found[1]) > float(found[2])


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("gate", ["none", "g", "gk"])
@pytest.mark.parametrize("channels", [64, 128, 256])
def test_the_delta_rule_takes_chunks_that_fit(chip, dtype, gate, channels):
    implementation, problem = seen_on(chip, f"gated_delta_rule:{gate}", f"1x512x16x{channels}x{channels}", dtype)
    assert implementation.supports(problem) is None
    first, *others = implementation.candidates(problem)
    assert first == implementation.heuristic(problem)
    assert first.block_q == delta_platform.USUAL_ROWS[dtype]
    assert all(implementation.refuses(problem, cfg) is None for cfg in (first, *others))


@pytest.mark.parametrize("chip", CHIPS)
def test_the_least_chunk_of_the_delta_rule_fits_with_the_most_channels(chip):
    """So no call is refused for VMEM."""
    most = delta_platform.PallasDeltaRule.max_channels
    implementation, problem = seen_on(chip, "gated_delta_rule:gk", f"1x512x4x{most}x{most}", "float32")
    assert implementation.refuses(problem, GatedDeltaRuleConfig(block_q=LEAST_ROWS, block_h=1)) is None


def test_fewer_heads_make_room_for_a_longer_chunk():
    implementation, problem = seen_on("v4", "gated_delta_rule:gk", "1x512x4x128x128", "float32")
    heads = {cfg.block_q: cfg.block_h for cfg in implementation.candidates(problem)}
    assert heads == {32: None, 64: 2, 128: 1}


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("gates", ["gk", "gv", "gk+gv"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_channel_gates_take_the_usual_chunk_and_fewer_heads_only_where_they_spill(chip, gates, dtype):
    implementation, problem = seen_on(chip, f"recurrent:{gates}", "1x512x8x128x128", dtype)
    first = implementation.heuristic(problem)
    assert (first.block_q, first.block_h) == (CHIPS[chip].mxu, 2 if (chip, dtype) == ("v4", "float32") else 4)


@pytest.mark.parametrize("gates", ["g", "gk", "gk+gv"])
def test_a_state_that_vmem_does_not_hold_is_refused(gates):
    implementation, problem = seen_on("v4", f"recurrent:{gates}", "1x512x4x512x512", "float32")
    found = re.search(r"a state of 512 x 512 needs about (\d+\.\d) MiB .* has 12.0 MiB on v4: use platform='xla'",
                      implementation.supports(problem))  # fmt: skip
    assert float(found[1]) > 12
