"""The blocks of both libraries agree from the same weights; decoding and packing give what whole sequences give."""

from __future__ import annotations

import numpy as np
import pytest

eqx = pytest.importorskip("equinox", reason="the blocks need the extra 'examples'")
nnx = pytest.importorskip("flax.nnx", reason="the blocks in NNX need Flax")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from examples.layers import weights, with_equinox, with_nnx  # noqa: E402

WIDTH, HEADS = 16, 2
X = jax.random.normal(jax.random.key(1), (2, 12, WIDTH))
each_mixer = pytest.mark.parametrize("mixer", with_equinox.MIXERS)


def blocks(mixer: str, dtype=jnp.float32):
    one = with_equinox.Block(mixer, WIDTH, HEADS, dtype, key=jax.random.key(0))
    other = with_nnx.Block(mixer, WIDTH, HEADS, dtype, rngs=nnx.Rngs(3))
    weights.copy(one, other)
    return one, other


def with_gradients(block, x):
    """The output, and a loss's gradients by the input and by every weight."""
    loss = lambda block, x: (block(x)[0].astype(jnp.float32) ** 2).sum()
    if isinstance(block, nnx.Module):
        graph, state = nnx.split(block)
        out, _ = block(x)
        of_weights, of_x = jax.grad(lambda state, x: loss(nnx.merge(graph, state), x), argnums=(0, 1))(state, x)
        return out, of_x, {weights._name(path): v[...] for path, v in nnx.to_flat_state(of_weights)}
    out, _ = block(x)
    of_weights, of_x = eqx.filter_grad(lambda both: loss(*both))((block, x))
    named = jax.tree_util.tree_flatten_with_path(of_weights)[0]
    return out, of_x, {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in named}


@pytest.mark.long
@each_mixer
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_both_libraries_agree_from_the_same_weights(mixer, dtype):
    found, want = (with_gradients(block, X) for block in blocks(mixer, dtype))
    assert found[0].dtype == X.dtype
    assert found[2].keys() == want[2].keys()
    assert all(gradient.dtype == jnp.float32 for gradient in found[2].values())  # the masters' own
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        assert float(jnp.linalg.norm(one)) > 0
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * float(jnp.abs(one).max()))


@pytest.mark.long
@each_mixer
def test_decoding_goes_on_from_the_state_that_a_prompt_left(mixer):
    for block in blocks(mixer):
        whole, _ = block(X)
        parts, state = [], block.start(2, capacity=X.shape[1])
        for begin, end in ((0, 7), (7, 8), (8, 12)):
            y, state = block(X[:, begin:end], state)
            parts.append(y)
        np.testing.assert_allclose(jnp.concatenate(parts, 1), whole, rtol=0, atol=2e-5)


@pytest.mark.long
@each_mixer
def test_packed_documents_do_not_see_each_other(mixer):
    block, _ = blocks(mixer)
    packed, _ = block(X.reshape(1, -1, WIDTH), cu_seqlens=jnp.array([0, 5, 12, 24]))
    apart = [block(X.reshape(1, -1, WIDTH)[:, a:b])[0] for a, b in ((0, 5), (5, 12), (12, 24))]
    np.testing.assert_allclose(packed, jnp.concatenate(apart, 1), rtol=0, atol=2e-5)


def test_a_softmax_block_says_that_its_cache_is_full():
    for block in blocks("softmax"):
        _, state = block(X[:, :4])
        with pytest.raises(ValueError, match=r"holds 4, 4 are there, and 1 came.*start\(batch, capacity\)"):
            block(X[:, 4:5], state)
        with pytest.raises(ValueError, match="cu_seqlens must be None where there is a cache"):
            block(X[:1], state, cu_seqlens=jnp.array([0, 12]))
        with pytest.raises(ValueError, match="capacity must be the most tokens"):
            block.start(2)


def test_under_jit_what_finds_no_room_in_a_cache_is_nan():
    block, _ = blocks("softmax")
    step = eqx.filter_jit(lambda x, state: block(x, state))
    state, finite = block.start(2, capacity=2), []
    for token in range(3):
        y, state = step(X[:, token : token + 1], state)
        finite.append(bool(jnp.isfinite(y).all()))
    assert finite == [True, True, False]


def test_sizes_that_do_not_fit_are_named():
    for make in (
        lambda mixer, width: with_equinox.Block(mixer, width, 4, key=jax.random.key(0)),
        lambda mixer, width: with_nnx.Block(mixer, width, 4, rngs=nnx.Rngs(0)),
    ):
        with pytest.raises(ValueError, match="mixer must be one of 'gla', 'delta', 'softmax'; got 'mamba'"):
            make("mamba", 16)
        with pytest.raises(ValueError, match="width must be a multiple of heads; got 30 and 4"):
            make("gla", 30)


def test_weights_of_another_block_are_refused_by_name():
    one, other = (block for block in (with_equinox, with_nnx))
    gla = one.Block("gla", WIDTH, HEADS, key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"only one has .*mixer.A_log"):
        weights.copy(gla, other.Block("delta", WIDTH, HEADS, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"mlp_norm must be \[32\]; got \[16\]|must be"):
        weights.copy(gla, other.Block("gla", 2 * WIDTH, HEADS, rngs=nnx.Rngs(0)))
