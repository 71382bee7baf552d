"""Every implementation of the toy against float64 step by step. A new directory below `kernels/` is picked up by itself."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel import ops
from ejkernel.testing.compare import assert_close
from tests.toy.kernels import registry
from tests.toy.kernels.decayed_sum import SumConfig
from tests.toy.operation import DecayedSum, decayed_sum
from tests.toy.record import CASES


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("entry", registry.list_implementations("decayed_sum"), ids=str)
def test_matches_reference(entry, case):
    if (reason := registry.refusal(entry, case.problem)) is not None:
        pytest.skip(f"refused: {reason}")
    for cfg in entry.function.implementation.candidates(case.problem):
        assert_close(case.evaluate(functools.partial(entry.function, cfg=cfg)), case.expected(), case.tolerance)


def test_platforms_take_the_same_arguments_and_are_chosen_by_the_call():
    registry.validate_signatures()
    assert {str(entry.platform) for entry in registry.list_implementations("decayed_sum")} == {"xla", "pallas"}
    narrow, wide = np.ones((1, 4, 3), np.float32), np.ones((1, 4, 200), np.float32)
    np.testing.assert_allclose(decayed_sum(narrow, 0.5, platform="pallas"), decayed_sum(narrow, 0.5), rtol=1e-6)
    with pytest.raises(ValueError, match="holds up to 128 channels; x has 200"):
        decayed_sum(wide, 0.5, platform="pallas")
    assert decayed_sum(wide, 0.5).shape == wide.shape


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match=r"x must be floats \[batch, time, channels\]; got float32\[3\]"):
        decayed_sum(jnp.ones(3))
    with pytest.raises(ValueError, match="decay must be a number from 0 to 1; got 2"):
        decayed_sum(jnp.ones((1, 2, 3)), 2)
    with pytest.raises(ValueError, match="block must be at most 32 on pallas; got 64"):
        decayed_sum(jnp.ones((1, 2, 3)), cfg=SumConfig(64, "pallas"))


def test_tuning_chooses_among_all_platforms():
    x = jax.ShapeDtypeStruct((1, 20, 2), jnp.float32)
    (chosen,) = ops.tune(lambda x: decayed_sum(x, 0.5), x)
    measured = {(c["config"]["platform"], c["config"]["block"]) for c in chosen.record["candidates"]}
    assert measured == {("xla", 16), ("xla", 32), ("xla", 64), ("pallas", 8)}  # of the other platform its own guess
    assert DecayedSum().op_id == chosen.op_id
    assert chosen.route == chosen.record["route"]
