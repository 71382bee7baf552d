"""The language model learns, goes on from a checkpoint, and writes from the state that reading left."""

from __future__ import annotations

import numpy as np
import pytest

eqx = pytest.importorskip("equinox", reason="the language model needs the extra 'examples'")
pytest.importorskip("optax", reason="the language model needs the extra 'examples'")

import jax  # noqa: E402

from examples import language_model as example  # noqa: E402

each_block = pytest.mark.parametrize("block", example.MIXERS)


def small(block: str, vocabulary: int, layers: int = 2) -> example.LanguageModel:
    return example.LanguageModel(block, vocabulary, width=32, heads=2, layers=layers, key=jax.random.key(0))


@pytest.fixture
def _short(monkeypatch):
    """Rows of 256 characters, which a small model computes in no time."""
    for name, value in (("TOKENS", 256), ("SEQUENCES", 8), ("LONGEST", 64)):
        monkeypatch.setattr(example, name, value)


@pytest.mark.long
@each_block
def test_written_characters_are_those_of_the_likeliest_continuation(block):
    model = small(block, 11)
    prompt = np.asarray(jax.random.randint(jax.random.key(2), (2, 20), 0, 11))
    written = example.generate(model, prompt, 6, temperature=1e-4)
    assert written.shape == (2, 6)
    logits, _ = model(np.concatenate([prompt, written], axis=1))
    assert written.tolist() == np.asarray(logits)[:, 19:-1].argmax(-1).tolist()


@pytest.mark.long
@each_block
@pytest.mark.usefixtures("_short")
def test_a_few_steps_of_training_lower_the_loss(block):
    text = example.load_text()
    _, losses = example.train(small(block, len(text.alphabet), layers=1), text.train, 40)
    assert np.isfinite(losses).all()
    assert np.mean(losses[-5:]) < losses[0] - 1.0  # from about log(100) = 4.6


@pytest.mark.long
@pytest.mark.usefixtures("_short")
def test_a_run_that_was_interrupted_goes_on_as_if_it_had_not_been(tmp_path):
    text, model = example.load_text(), lambda: small("gla", 120, layers=1)
    whole, losses = example.train(model(), text.train, 6)
    file = tmp_path / "run.eqx"
    _, first = example.train(model(), text.train, 6, stop=3, checkpoint=file)
    resumed, rest = example.train(model(), text.train, 6, checkpoint=file)
    assert len(first) == len(rest) == 3
    assert first + rest == losses
    for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(resumed), strict=True):
        np.testing.assert_array_equal(one, other)
    assert example.train(model(), text.train, 6, checkpoint=file)[1] == []  # nothing is left to do


def test_a_checkpoint_of_another_block_is_named(tmp_path):
    file = tmp_path / "run.eqx"
    training = lambda block: example.Training(small(block, 11, layers=1), 0.0, 0)
    example.save(file, training("gla"))
    assert jax.tree.all(jax.tree.map(np.array_equal, example.restored(file, training("gla")), training("gla")))
    with pytest.raises(ValueError, match=r"run\.eqx must hold a run of this model"):
        example.restored(file, training("delta"))


def test_no_steps_are_refused(capsys):
    with pytest.raises(SystemExit):
        example.main(["--steps", "0"])
    assert "--steps must be at least 1; got 0" in capsys.readouterr().err


def test_packed_rows_have_one_shape_and_count_what_has_a_successor():
    text = example.load_text()
    assert sum(map(len, text.train)) > 5 * sum(map(len, text.kept)) > 50_000
    for seed in range(5):
        row = example.packed_row(text.train, np.random.default_rng(seed))
        assert row.tokens.shape == row.counts.shape == (example.TOKENS,)
        assert row.cu_seqlens.shape == (example.SEQUENCES + 1,)
        assert row.cu_seqlens[0] == 0
        assert row.cu_seqlens[-1] == example.TOKENS
        assert (np.diff(row.cu_seqlens) >= 0).all()
        ends = np.unique(row.cu_seqlens[1:]) - 1
        assert np.flatnonzero(row.counts == 0).tolist() == ends.tolist()


def test_the_bigram_loss_is_that_of_counting():
    text = [np.array([0, 1, 0, 1, 0, 2])]  # 0 -> 1 twice, 0 -> 2 once, 1 -> 0 twice; and one more of every pair
    want = -np.mean(np.log([3 / 6, 3 / 5, 2 / 6, 1 / 3]))
    assert example.bigram_loss(text, [np.array([0, 1, 0, 2, 2])], 3) == pytest.approx(want)
