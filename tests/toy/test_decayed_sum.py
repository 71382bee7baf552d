"""Every implementation of the toy against float64 step by step. A new directory below `kernels/` is picked up by itself."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel import ops
from tests.toy.kernels import registry
from tests.toy.kernels.decayed_sum import SumConfig, SumProblem
from tests.toy.operation import DecayedSum, decayed_sum

CASES = [((2, 37, 3), 0.9), ((1, 1, 4), 0.5), ((2, 16, 2), 0.0), ((1, 50, 1), 1.0), ((1, 5, 200), 0.7), ((2, 0, 3), 0.9)]


def expected(x: np.ndarray, decay: float, flip: int = 1) -> np.ndarray:
    """Float64, one token at a time; its transpose with `flip=-1`."""
    last, out = np.zeros((x.shape[0], x.shape[2])), []
    for t in range(x.shape[1])[::flip]:
        last = decay * last + x[:, t].astype(np.float64)
        out.append(last)
    return np.stack(out[::flip], axis=1) if out else np.zeros(x.shape)


@pytest.mark.parametrize(("shape", "decay"), CASES, ids=str)
@pytest.mark.parametrize("entry", registry.list_implementations("decayed_sum"), ids=str)
def test_matches_reference(entry, shape, decay):
    x, dy = (np.random.default_rng(i).normal(size=shape).astype(np.float32) for i in range(2))
    if (reason := registry.refusal(entry, SumProblem.from_arguments(x, decay))) is not None:
        pytest.skip(f"refused: {reason}")
    for block in entry.function.blocks:
        y, pull = jax.vjp(lambda x, block=block: entry.function(x, decay, cfg=SumConfig(block)), x)
        np.testing.assert_allclose(y, expected(x, decay), atol=2e-5)
        np.testing.assert_allclose(pull(dy)[0], expected(dy, decay, flip=-1), atol=2e-5)


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


def test_tuning_chooses_among_all_platforms():
    x = jax.ShapeDtypeStruct((1, 20, 2), jnp.float32)
    (chosen,) = ops.tune(lambda x: decayed_sum(x, 0.5), x)
    measured = {(c["config"]["platform"], c["config"]["block"]) for c in chosen.record["candidates"]}
    assert measured == {("xla", 16), ("xla", 32), ("xla", 64), ("pallas", 8), ("pallas", 32)}
    assert DecayedSum().op_id == chosen.op_id
