"""The language model learns, and reading by chunks plus writing step by step equals one chunked pass."""

from __future__ import annotations

import numpy as np
import pytest

eqx = pytest.importorskip("equinox", reason="the language model needs the extra 'examples'")
pytest.importorskip("optax", reason="the language model needs the extra 'examples'")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from examples import language_model as example  # noqa: E402

each_layer = pytest.mark.parametrize("layer", example.LAYERS)


def small(layer: str, vocabulary: int, layers: int = 2) -> example.LanguageModel:
    return example.LanguageModel(layer, vocabulary, width=32, heads=2, layers=layers, key=jax.random.key(0))


@pytest.mark.long
@each_layer
def test_prefill_by_chunks_and_decoding_by_steps_equal_one_chunked_pass(layer):
    model = small(layer, 11)
    tokens = jax.random.randint(jax.random.key(1), (2, 90), 0, 11)
    chunked = jax.jit(lambda tokens, states: model(tokens, states, how=example.CHUNKED))
    stepwise = jax.jit(lambda token, states: model(token, states, how=example.STEPWISE))
    whole, last = chunked(tokens, None)
    logits, prompt = chunked(tokens[:, :77], None)
    parts, states = [logits], prompt
    for t in range(77, 90):
        logits, states = stepwise(tokens[:, t : t + 1], states)
        parts.append(logits)
    np.testing.assert_allclose(np.concatenate(parts, axis=1), whole, rtol=0, atol=2e-5)
    for state, want in zip(jax.tree.leaves(states), jax.tree.leaves(last), strict=True):
        np.testing.assert_allclose(state, want, rtol=0, atol=2e-5)
    leaves, structure = jax.tree.flatten(prompt)
    for i, leaf in enumerate(leaves):  # without any one of the states the answer is another
        states = jax.tree.unflatten(structure, [*leaves[:i], jnp.zeros_like(leaf), *leaves[i + 1 :]])
        forgotten, _ = stepwise(tokens[:, 77:78], states)
        assert float(abs(forgotten[:, 0] - whole[:, 77]).max()) > 1e-2


@pytest.mark.long
@each_layer
def test_generated_characters_are_those_of_the_likeliest_continuation(layer):
    model = small(layer, 11, layers=1)
    prompt = np.asarray(jax.random.randint(jax.random.key(2), (1, 20), 0, 11))
    written = example.generate(model, prompt, 6, temperature=1e-4)
    assert written.shape == (1, 6)
    logits, _ = model(np.concatenate([prompt, written], axis=1), how=example.CHUNKED)
    assert written[0].tolist() == np.asarray(logits)[0, 19:-1].argmax(-1).tolist()


@pytest.mark.long
@each_layer
def test_a_few_steps_of_training_lower_the_loss(layer):
    text, kept, alphabet = example.load_text()
    assert len(text) > 5 * len(kept) > 50_000
    _, losses = example.train(small(layer, len(alphabet), layers=1), text, 40, batch=4, length=64)
    assert np.isfinite(losses).all()
    assert np.mean(losses[-5:]) < losses[0] - 1.0  # from about log(100) = 4.6


def test_the_bigram_loss_is_that_of_counting():
    text = np.array([0, 1, 0, 1, 0, 2])  # 0 -> 1 twice, 0 -> 2 once, 1 -> 0 twice; and one more of every pair
    want = -np.mean(np.log([3 / 6, 3 / 5, 2 / 6, 1 / 3]))
    assert example.bigram_loss(text, np.array([0, 1, 0, 2, 2]), 3) == pytest.approx(want)
