"""A NaN or inf spoils its own sequence and head, from the start of its chunk on, and nothing else: forward and backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton", reason="the triton platform needs Triton")

from ejkernel._device import device_of
from ejkernel.kernels._linear import LinearConfig
from ejkernel.kernels._triton import gated_delta_rule, recurrent
from ejkernel.testing.delta_cases import DeltaCase
from tests.triton.linear_cases import Case

pytestmark = pytest.mark.skipif(device_of(()).backend != "cpu", reason="interpreted on the host")
LENGTHS = (0, 10, 25, 40)  # all of it would fit in one chunk
SPOILED = (("value", np.nan, 1, 0), ("key", np.inf, 2, 1))  # (array, what is in it, sequence, head): nothing in common
KIND = {"shape": (1, 40, 2, 2, 16, 16), "cu_seqlens": LENGTHS, "state": True, "block_q": 64}
CASES = [
    Case(("g",), dtype="bfloat16", **KIND),
    Case(("g_gamma", "gk"), dtype="bfloat16", **KIND),
    Case(("gk", "gv"), dtype="bfloat16", **KIND),
    Case(("gk", "gv"), dtype="float32", **KIND),
    Case((), dtype="bfloat16", schedule="recurrent", **KIND),
]


def value_and_gradients(case, arrays):
    (wo, ws), cu = case.weights(), jnp.array(LENGTHS, jnp.int32)
    cfg = LinearConfig(schedule=case.schedule, block_q=case.block_q)

    def loss(arrays):
        o, S = recurrent(**arrays, cu_seqlens=cu, cfg=cfg)
        terms = [jnp.sum(x.astype(jnp.float32) * w.astype(jnp.float32)) for x, w in ((o, wo), (S, ws))]
        return terms[0] + terms[1], {"output": o, "final": S}

    grads, values = jax.grad(loss, has_aux=True)(arrays)
    return {**values, **{f"d{name}": x for name, x in grads.items()}}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_stays_in_its_sequence_and_head(case):
    clean = case.arrays()
    spoiled = dict(clean)
    for name, value, sequence, head in SPOILED:
        spoiled[name] = spoiled[name].at[0, LENGTHS[sequence + 1] - 3, head].set(value)
    want, got = value_and_gradients(case, clean), value_and_gradients(case, spoiled)
    own = [(slice(*LENGTHS[sequence : sequence + 2]), sequence, head) for _, _, sequence, head in SPOILED]
    assert all(not np.isfinite(np.asarray(got["output"][0, tokens, head], np.float32)).all() for tokens, _, head in own)
    for result in got:
        x, y = (np.array(found[result], np.float32) for found in (got, want))
        for tokens, sequence, head in own:
            at = (0, tokens, head) if x.shape[0] == 1 else (sequence, head)  # [1, T, heads, ...] or [sequences, heads, ...]
            x[at], y[at] = 0, 0
        np.testing.assert_array_equal(x, y, err_msg=result)


def test_tokens_of_earlier_chunks_stay_clean():
    case = Case(("gk",), dtype="bfloat16", shape=(1, 130, 1, 1, 16, 16), block_q=64)
    clean = case.arrays()
    run = lambda arrays: recurrent(**arrays, cfg=LinearConfig(block_q=64))[0]
    got = run({**clean, "value": clean["value"].at[0, 100].set(jnp.nan)})
    np.testing.assert_array_equal(np.float32(got[:, :64]), np.float32(run(clean)[:, :64]))
    assert np.isnan(np.float32(got[:, 100:])).all()


@pytest.mark.parametrize("gate", ["head", "channel"])
def test_the_delta_rule_keeps_it_in_its_sequence_and_head(gate):
    """An infinite beta and a NaN among the values, in two sequences and heads; the third sequence has neither."""
    case = DeltaCase("spoiled", gate=gate, lengths=(10, 15, 7), initial_state=True)
    clean = case.arguments()[0]
    spoiled = clean | {"beta": clean["beta"].at[0, 6, 0].set(np.inf), "value": clean["value"].at[0, 20, 1].set(np.nan)}
    offsets = jnp.array([0, 10, 25, 32], jnp.int32)

    @jax.jit
    def run(arrays):
        found, pull = jax.vjp(lambda arrays: gated_delta_rule(**arrays, cu_seqlens=offsets), arrays)
        return {"output": found[0], "state": found[1], **pull(found)[0]}

    # Query and key have the same two heads here, so their gradients stay apart as well.
    got, want = run(spoiled), run(clean)
    for name in want:
        x, y = np.array(got[name]), np.array(want[name])
        for tokens, sequence, head in ((slice(0, 10), 0, 0), (slice(10, 25), 1, 1)):
            at = (sequence, head) if x.shape[0] == 3 else (0, tokens, head)
            assert name != "output" or not np.isfinite(x[at]).all()
            x[at], y[at] = 0, 0
        np.testing.assert_array_equal(x, y, err_msg=name)
