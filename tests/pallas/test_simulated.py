"""Every kernel on a simulated TPU of two cores: reads out of bounds or of memory never written, and races, are errors there."""

from __future__ import annotations

import functools

import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from ejkernel.kernels._linear import LinearConfig
from ejkernel.kernels._pallas import recurrent
from ejkernel.kernels._pallas._chips import interpreted
from ejkernel.testing.compare import assert_close
from ejkernel.testing.linear_cases import LinearCase

TWO_CORES = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2)
small = functools.partial(
    LinearCase, batch=2, time=20, heads=2, kv_heads=2, key_channels=8, value_channels=8, initial_state=True
)
SIMULATED = [
    small("ungated"),
    small("g", gates=("g",), gate_kind="resets"),
    small("g-bfloat16", gates=("g",), dtype="bfloat16"),
    small("g-packed", gates=("g", "g_gamma"), lengths=(5, 0, 18)),
    small("gk", gates=("gk",), gate_kind="infinite"),
    small("gk-bfloat16", gates=("gk",), dtype="bfloat16"),
    small("gv-grouped", gates=("gv",), kv_heads=1, gates_per_kv_head=True),
    small("gk-gv-packed", gates=("gk", "gv"), lengths=(17, 3), reverse=True),
    small("lanes", batch=1, heads=4, kv_heads=2, key_channels=128, value_channels=128, gates=("g",), dtype="bfloat16"),
    small("decode", time=2, gates=("g", "gk", "gv")),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", SIMULATED, ids=str)
def test_two_cores_agree_with_float64_without_a_race(case):
    cfg = LinearConfig("recurrent") if case.time < 16 and case.lengths is None else LinearConfig(block_q=16, block_h=1)
    with interpreted(how=TWO_CORES):
        assert_close(case.evaluate(functools.partial(recurrent, cfg=cfg)), case.expected(), case.tolerance)
    assert interpret_pallas_call.races is None or not interpret_pallas_call.races.races_found
