"""`EJKERNEL_CHECK=1` and `check_values`: mistakes that shapes do not show are named, eagerly and under `jit`."""

from __future__ import annotations

import functools
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel import attention, causal_conv1d, check_values, gated_delta_rule, gla_attention, recurrent_attention
from ejkernel._checking import VARIABLE, checking, extreme
from ejkernel.ops import ValueWarning
from ejkernel.ops.notices import forget_warnings
from ejkernel.types.mask import MaskInfo
from tests.documentation.pages import ROOT

T = 6
X = jnp.ones((1, T, 2, 4))
GATES = -jnp.ones_like(X)
WRONG = GATES.at[0, 3, 1, 2].set(0.75)
FOUND = r"g is 0.75 at \[0, 3, 1, 2\]"


@pytest.fixture(autouse=True)
def _unset(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    forget_warnings()


def gated(g):
    return gla_attention(X, X, X, g)


AROUND = {
    "eager": gated,
    "jit": jax.jit(gated),
    "grad": jax.grad(lambda g: gated(g).sum()),
    "jit of grad of checkpoint": jax.jit(jax.grad(lambda g: jax.checkpoint(gated)(g).sum())),
    "scan": jax.jit(lambda g: jax.lax.scan(lambda x, g: (x, gated(g)), 0.0, g[None])),
    "vmap": jax.jit(jax.vmap(gated)),
}


@pytest.mark.parametrize("around", AROUND)
def test_a_gate_above_0_is_named_whatever_is_around_the_call(around):
    with check_values():
        jax.block_until_ready(AROUND[around](GATES[None] if around == "vmap" else GATES))
        with pytest.raises(Exception, match=FOUND):
            jax.block_until_ready(AROUND[around](WRONG[None] if around == "vmap" else WRONG))


def test_functions_that_were_jitted_before_are_traced_again_and_run_as_before_afterwards():
    f = jax.jit(gated)
    before = f(WRONG)
    with check_values(), pytest.raises(Exception, match=FOUND):
        f(WRONG).block_until_ready()
    np.testing.assert_array_equal(f(WRONG), before)


def test_off_a_program_has_no_callback_and_on_it_has():
    program = lambda: str(jax.make_jaxpr(gated)(GATES))
    assert "debug_callback" not in program()
    with check_values():
        assert "debug_callback" in program()


def test_the_variable_turns_it_on_and_the_block_off(monkeypatch):
    monkeypatch.setenv(VARIABLE, "1")
    with pytest.raises(ValueError, match=FOUND):
        gated(WRONG)
    with check_values(False), warnings.catch_warnings():
        warnings.simplefilter("ignore", ValueWarning)
        gated(WRONG)
    monkeypatch.setenv(VARIABLE, "yes")
    with pytest.raises(ValueError, match="EJKERNEL_CHECK must be 0 or 1; got 'yes'"):
        checking()


ARGUMENTS = [
    (lambda: gla_attention(X, X, X, jax.nn.sigmoid(GATES)), "log_sigmoid"),
    (lambda: gla_attention(X, X, X, g_gamma=jnp.array([-1.0, 0.5])), r"g_gamma is 0.5 at \[1\]"),
    (lambda: recurrent_attention(X, X, X, gv=WRONG), r"gv is 0.75 at \[0, 3, 1, 2\]"),
    (lambda: gla_attention(X, X, X, GATES.at[0, 2].set(jnp.nan)), r"g is nan at \[0, 2, 0, 0\]"),
    (lambda: gla_attention(X, X, X, -8 * GATES), r"with a minus: -jnp.exp\(A_log\) \* jax.nn.softplus\(x\)\.$"),
    (lambda: gated_delta_rule(X, X, X, X[..., 0].at[0, 4, 1].set(-0.5)), r"beta is -0.5 at \[0, 4, 1\]"),
    (lambda: gated_delta_rule(X, X, X, X[..., 0], WRONG), FOUND),
    (lambda: gated_delta_rule(X, X, X, GATES[..., 0], X[..., 0]), "The order here is query, key, value, beta, g"),
]


@pytest.mark.parametrize(("call", "message"), ARGUMENTS)
def test_arguments_index_and_value_are_named(call, message):
    with check_values(), pytest.raises(ValueError, match=message):
        call()


def test_what_is_legal_passes():
    with check_values():
        gated(GATES.at[0, 1].set(-jnp.inf).at[0, 2].set(0.0))
        gla_attention(X[:, :0], X[:, :0], X[:, :0], GATES[:, :0])
        gated_delta_rule(X, X, X, 2 * X[..., 0])


OFFSETS = {
    "recurrence": jax.jit(lambda offsets: gla_attention(X, X, X, cu_seqlens=offsets)),
    "convolution": jax.jit(lambda offsets: causal_conv1d(X[0, :, 0], jnp.ones((2, 4)), cu_seqlens=offsets)),
    "mask": jax.jit(functools.partial(MaskInfo.from_cu_seqlens, total=T)),
}


@pytest.mark.parametrize("operation", OFFSETS)
@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([0, 4, T], None),
        ([0, 4, T + 2], f"{T}; got {T + 2} last"),
        ([3, 3], r"lengths, .* np.cumsum"),
        ([0, 4, 3, T], "at index 2"),
    ],
)
def test_traced_offsets(operation, offsets, message):
    run = lambda: jax.block_until_ready(OFFSETS[operation](jnp.array(offsets)))
    with check_values():
        if message is None:
            run()
        else:
            with pytest.raises(Exception, match=message):
                run()


def test_known_offsets_that_are_lengths_are_called_so_without_being_asked():
    with pytest.raises(ValueError, match=r"must start at 0; got 4 first\. These are lengths, which add up to 6"):
        gla_attention(X, X, X, cu_seqlens=[4, 2])


@pytest.mark.parametrize("operation", [gla_attention, attention])
def test_heads_that_outnumber_tokens_by_far(operation):
    few, many = jnp.ones((1, 2, 16, 4)), jnp.ones((1, 16, 2, 4))
    with check_values():
        with pytest.warns(ValueWarning, match=r"16 heads and only 2 tokens.*swapaxes"):
            operation(few, few, few)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            operation(many, many, many)
            operation(few[:, :1], few[:, :1], few[:, :1])  # decoding


LONG = jnp.ones((64, 2, 2, 4))  # 64 tokens of 2 rows, as a scan has them


@pytest.mark.parametrize("query", [LONG, jnp.ones((64, 1, 2, 4))], ids=["two rows", "one row"])
def test_time_before_the_batch(query):
    beta = query[..., 0]
    with check_values():
        with pytest.warns(ValueWarning, match=r"query .* a batch of 64 and only [12] tokens?, .*\[time, batch, .* 0, 1\)"):
            gla_attention(query, query, query)
        with pytest.warns(ValueWarning, match="gated_delta_rule: .* a batch of 64"):
            gated_delta_rule(query, query, query, beta)


def test_many_rows_of_a_decoder_and_long_enough_sequences_pass():
    step, state, short = LONG[:, :1], jnp.zeros((64, 2, 4, 4)), jnp.ones((32, 2, 2, 4))
    with check_values(), warnings.catch_warnings():
        warnings.simplefilter("error")
        gla_attention(step, step, step, initial_state=state)
        gla_attention(short, short, short)
        gla_attention(*[LONG.swapaxes(0, 1)] * 3)


def test_one_sink_for_each_head_is_a_column():
    x, sinks = jnp.ones((1, 3, 4, 8)), jnp.zeros(4)
    with check_values():
        with pytest.warns(ValueWarning, match=r"softmax_aux \[4\] is 4 sinks that every head has.*\[4, 1\]"):
            attention(x, x, x, softmax_aux=sinks)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            attention(x, x, x, softmax_aux=sinks[:, None])
            attention(x, x, x, softmax_aux=sinks[:2])


def test_what_is_exported_with_open_sizes_has_no_callback_and_errors_are_those_without_the_check():
    batch, tokens, heads, n = jax.export.symbolic_shape("batch, tokens, heads, n")
    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    row, beta, offsets = of(batch, tokens, 2, 4), of(batch, tokens, 2), jax.ShapeDtypeStruct((3,), jnp.int32)
    packed = lambda x, offsets: gla_attention(x, x, x, g_gamma=jnp.zeros(2), cu_seqlens=offsets)
    with check_values():
        program = jax.export.export(jax.jit(lambda x, beta: gated_delta_rule(x, x, x, beta, -x)))(row, beta)
        assert program.call(jnp.ones((3, 5, 2, 4)), jnp.ones((3, 5, 2))).shape == (3, 5, 2, 4)
        program = jax.export.export(jax.jit(packed))(of(1, tokens, 2, 4), offsets)
        assert program.call(jnp.ones((1, 5, 2, 4)), jnp.array([0, 2, 5], jnp.int32)).shape == (1, 5, 2, 4)
        convolution = lambda x, offsets: causal_conv1d(x, jnp.ones((2, 4)), cu_seqlens=offsets)
        program = jax.export.export(jax.jit(convolution))(of(1, tokens, 4), offsets)
        assert program.call(jnp.ones((1, 5, 4)), jnp.array([0, 2, 5], jnp.int32)).shape == (1, 5, 4)
        with pytest.raises(ValueError, match="heads and channels must be known"):
            jax.export.export(jax.jit(lambda x: gla_attention(x, x, x, x)))(of(1, 6, heads, 4))
        with pytest.raises(ValueError, match="cu_seqlens must have a known size"):
            jax.export.export(jax.jit(packed))(of(1, tokens, 2, 4), jax.ShapeDtypeStruct((n,), jnp.int32))


def test_without_it_the_first_call_warns_once_at_the_users_line():
    x = jnp.ones((1, 11, 1, 3))  # a shape of its own: the look is taken when a call's plan is first made
    call = lambda: gla_attention(x, x, x, x)
    with pytest.warns(ValueWarning, match=r"gla_attention: g is 1 at \[0, 0, 0, 0\]") as given:
        assert call().shape == call().shape
    assert [warning.filename for warning in given] == [__file__]


@pytest.mark.parametrize("by", ["gate", "query"])
def test_without_it_an_eager_gradient_warns_likewise(by):
    x = jnp.ones((1, 13 if by == "gate" else 14, 1, 3))  # likewise
    loss = lambda x, g: gla_attention(x, x, x, g).sum()
    with pytest.warns(ValueWarning, match=r"g is 1 at \[0, 0, 0, 0\]"):
        jax.grad(loss, argnums=int(by == "gate"))(x, x)


def test_without_it_good_gates_and_traced_ones_are_silent():
    x = jnp.ones((1, 12, 1, 3))  # likewise
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gla_attention(x, x, x, -x)
        jax.jit(gla_attention)(x, x, x, x)
        jax.vmap(lambda g: gla_attention(x, x, x, g))(x[None])
        jax.jit(lambda q: gla_attention(q, x, x, x, softmax_scale=2.0))(x)


def test_what_jax_watches_in_a_program_is_not_watched_in_the_look_at_its_values():
    """A first call that is not jitted, with transfers forbidden: numbers of the look are the library's own."""
    x = jnp.ones((1, 15, 1, 3))  # likewise
    gates = -x
    with jax.transfer_guard("disallow"):
        first = gla_attention(x, x, x, gates)
    np.testing.assert_array_equal(first, gla_attention(x, x, x, gates))
    resets, wrong = jnp.full_like(x, -jnp.inf), jnp.full_like(x, jnp.inf)
    with jax.debug_infs(True), check_values():
        gla_attention(x, x, x, resets)
        with pytest.raises(ValueError, match=r"g is inf at \[0, 0, 0, 0\]"):
            gla_attention(x, x, x, wrong)


@pytest.mark.parametrize("shape", [(5,), (3, 4), (2, 3, 4)])
def test_the_extreme_value_and_where_it_is(shape):
    x = np.random.default_rng(0).permutation(np.prod(shape)).reshape(shape).astype(np.float32)
    value, *place = extreme(jnp.asarray(x), lambda x: x)
    assert float(value) == x.max()
    assert tuple(map(int, place)) == np.unravel_index(x.argmax(), shape)


def test_the_first_of_equals_and_a_nan_before_all():
    x = np.zeros((2, 3), np.float32)
    assert [int(i) for i in extreme(jnp.asarray(x), lambda x: x)] == [0, 0, 0]
    x[1, 2], x[0, 1] = np.inf, np.nan
    value, *place = extreme(jnp.asarray(x), lambda x: x)
    assert np.isnan(value)
    assert list(map(int, place)) == [0, 1]


def test_a_nan_among_many_numbers():
    x = np.full((2, 64, 4, 16), -1, np.float32)  # of so many, XLA's max on a CPU passes a NaN over
    x[1, 60, 3, 15] = np.nan
    value, *place = extreme(jnp.asarray(x), lambda x: x)
    assert np.isnan(value)
    assert list(map(int, place)) == [1, 60, 3, 15]


def test_strict_settings():
    with check_values(), jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        x = X.astype(jnp.bfloat16)
        gated_delta_rule(x, x, x, x[..., 0], -x)


@pytest.mark.long
def test_arrays_that_are_split_between_devices():
    command = [sys.executable, "-m", "tests.operations.checked_meshes"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
