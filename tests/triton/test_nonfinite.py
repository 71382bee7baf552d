"""A NaN or inf spoils its own sequence and head, from the start of its chunk on, and nothing else: forward and backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton", reason="the triton platform needs Triton")

from ejkernel._device import device_of
from ejkernel.kernels._linear import LinearConfig
from ejkernel.kernels._triton import recurrent
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
