"""`jax.export` with batch and lengths left open: one program for all of them, values and gradients, on xla."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from ejkernel import kernel_registry
from ejkernel.kernels._attention import AttentionProblem
from ejkernel.kernels._linear import LinearProblem
from ejkernel.kernels._registry import Backend, Platform
from ejkernel.modules import attention, causal_conv1d, gated_delta_rule, lightning_attention, recurrent_attention
from ejkernel.modules.base import default_executor
from ejkernel.modules.operations.recurrent import RecurrentAttention
from ejkernel.testing.compare import relative_rms
from ejkernel.testing.linear_cases import LinearCase
from ejkernel.types.mask import MaskInfo

small = functools.partial(LinearCase, heads=2, kv_heads=1, key_channels=3, value_channels=2, initial_state=True)


def dense(batch, time, gates):
    return small("dense", batch=batch, time=time, gates=gates).arguments()[0]


def packed(lengths):
    arrays, options = small("packed", lengths=lengths, gates=("g", "g_gamma")).arguments()
    return arrays | {"cu_seqlens": options["cu_seqlens"]}


def soft(batch, queries, keys):
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    return {
        "query": normal(batch, queries, 4, 8), "key": normal(batch, keys, 2, 8), "value": normal(batch, keys, 2, 8),
        "bias": normal(1, 4, queries, keys), "mask": jnp.asarray(rng.random((batch, keys)) < 0.8), "sinks": normal(4, 1),
        "q_ids": jnp.asarray(rng.integers(0, 2, (batch, queries))), "kv_ids": jnp.asarray(rng.integers(0, 2, (batch, keys))),
    }  # fmt: skip


def attend(query, key, value, bias=None, mask=None, sinks=None, q_ids=None, kv_ids=None):
    info = None if q_ids is None else MaskInfo.from_segments(q_ids, kv_ids)
    return attention(
        query, key, value, bias, softmax_aux=sinks, attention_mask=mask, mask_info=info, causal=True, sliding_window=20,
        dtype=None, return_weights=False,
    )  # fmt: skip


def values_and_gradients(call, arrays):
    floats = {name: x for name, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)}
    loss = lambda floats: sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(call(**{**arrays, **floats})))
    return call(**arrays), jax.grad(loss)(floats)


def left_open(arrays, words):
    """The shapes of arrays, with the axes of these sizes replaced by words: `{13: "tokens"}`."""
    names = dict(zip(words, export.symbolic_shape(", ".join(words.values())), strict=True))
    return {name: jax.ShapeDtypeStruct([names.get(n, n) for n in x.shape], x.dtype) for name, x in arrays.items()}


def check(call, arrays, words, *others):
    run = functools.partial(values_and_gradients, call)
    program = export.export(jax.jit(run))(left_open(arrays, words))
    for other in others:
        got, want = program.call(other), run(other)
        errors = jax.tree.map(lambda x, y: relative_rms(np.asarray(x), np.asarray(y)), got, want)
        assert max(jax.tree.leaves(errors)) < 1e-5, errors


recurrent = functools.partial(recurrent_attention, return_state=True)
lightning = functools.partial(lightning_attention, layer_idx=1, num_layers=3, return_state=True)


@pytest.mark.parametrize(
    "gates",
    [(), pytest.param(("g",), marks=pytest.mark.long), pytest.param(("g", "g_gamma", "gk", "gv"), marks=pytest.mark.long)],
)
def test_linear_operations_of_open_batch_and_length(gates):
    check(recurrent, dense(11, 13, gates), {11: "batch", 13: "tokens"}, dense(2, 40, gates), dense(1, 1, gates))


def test_a_packed_call_of_open_length():
    check(recurrent, packed((5, 0, 8)), {13: "tokens"}, packed((3, 30, 0)), packed((1, 0, 0)))


@pytest.mark.parametrize("operation", [recurrent_attention, gated_delta_rule, causal_conv1d])
def test_an_open_number_of_packed_sequences_is_refused_with_the_remedy(operation):
    (sequences,) = export.symbolic_shape("sequences")
    row, offsets = jax.ShapeDtypeStruct((6, 2, 4), jnp.float32), jax.ShapeDtypeStruct((sequences + 1,), jnp.int32)
    given = {
        recurrent_attention: [row, row, row],
        gated_delta_rule: [row, row, row, jax.ShapeDtypeStruct((6, 2), jnp.float32)],
        causal_conv1d: [jax.ShapeDtypeStruct((6, 4), jnp.float32), jax.ShapeDtypeStruct((3, 4), jnp.float32)],
    }[operation]
    run = jax.jit(lambda offsets, *given: operation(*given, cu_seqlens=offsets))
    with pytest.raises(
        ValueError, match=r"cu_seqlens must have a known size, .*initial_state.* \[sequences \+ 1\].*repeat the last"
    ):
        export.export(run)(offsets, *given)


@pytest.mark.parametrize("operation", [recurrent_attention, gated_delta_rule])
def test_open_heads_and_channels_are_refused(operation):
    heads, channels = export.symbolic_shape("heads, channels")
    for shape in ((1, 6, heads, 4), (1, 6, 2, channels)):
        row = jax.ShapeDtypeStruct(shape, jnp.float32)
        beta = [jax.ShapeDtypeStruct(shape[:3], jnp.float32)] * (operation is gated_delta_rule)
        with pytest.raises(ValueError, match=r"heads and channels must be known, .* got query \[1, 6, .*(heads|channels)"):
            export.export(jax.jit(operation))(row, row, row, *beta)


def test_lightning_attention():
    check(lightning, dense(11, 13, ()), {11: "batch", 13: "tokens"}, dense(2, 9, ()))


def test_attention_of_open_batch_and_lengths():
    check(attend, soft(11, 13, 17), {11: "batch", 13: "queries", 17: "keys"}, soft(2, 19, 21), soft(1, 3, 2))


def test_the_choice_is_the_heuristics_and_no_other_platform_takes_the_call():
    shapes = left_open(dense(11, 13, ("gk",)), {11: "batch", 13: "tokens"})
    choice = default_executor().choose(RecurrentAttention(), **shapes)
    assert (choice.level, choice.config.platform) == ("heuristics", "xla")
    assert "batch, tokens" in choice.record["not_tuned"]
    problems = {
        "recurrent": jax.eval_shape(lambda arrays: LinearProblem.from_arguments(**arrays), shapes),
        "attention": jax.eval_shape(
            lambda a: AttentionProblem.from_arguments(a["query"], a["key"], a["value"]),
            left_open(soft(11, 13, 17), {11: "batch", 13: "queries", 17: "keys"}),
        ),
    }
    for algorithm, problem in problems.items():
        for entry in kernel_registry.list_implementations(algorithm):
            own = Backend.TPU if entry.backend is Backend.TPU else Backend.GPU
            reason = kernel_registry.refusal(entry, problem, own)
            assert (reason is None) if entry.platform is Platform.XLA else ("know all sizes" in reason), (entry, reason)
