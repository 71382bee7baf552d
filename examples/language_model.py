"""A small language model, trained on a CPU in a few minutes: gated linear attention, gated DeltaNet or softmax attention.

    python -m examples.language_model
    python -m examples.language_model --block delta --checkpoint run.eqx     # stop it, run it again: it goes on

It reads the topics of Python's own `help()` (they ship with the standard library), keeps every tenth one aside, and learns to
predict the next character. Beside its loss on the topics kept aside stands that of a bigram model, which knows how often each
character follows each other one. Then it writes: the prompt is read in one pass, and the text goes on character by character
from the state which that pass left.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from examples.layers.parts import rms_norm
from examples.layers.with_equinox import MIXERS, Block, Linear

Array = jax.Array
TOKENS, SEQUENCES, LONGEST = 2048, 32, 256  # of a packed row: its length, how many pieces it may hold, the longest of them


# --8<-- [start:model]
class LanguageModel(eqx.Module):
    """Characters in, logits of the next character out, and the layers' states to go on from."""

    embedding: Array
    blocks: Block  # every layer's weights, stacked: [layers, ...]
    head: Linear

    def __init__(
        self, block: str, vocabulary: int, width: int = 128, heads: int = 4, layers: int = 3, dtype: Any = None, *, key: Array
    ):
        first, last, *keys = jax.random.split(key, layers + 2)
        dtype = dtype or (jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)
        self.embedding = jax.random.normal(first, (vocabulary, width))
        self.blocks = eqx.filter_vmap(lambda key: Block(block, width, heads, dtype, key=key))(jnp.stack(keys))
        self.head = Linear(width, vocabulary, bias=True, key=last)

    def __call__(self, tokens: Array, states: Any = None, cu_seqlens: Array | None = None) -> tuple[Array, Any]:
        """`tokens [B, T]` -> `(logits [B, T, vocabulary], states)`.

        A scan over the layers compiles one of them, whatever their number. `jax.checkpoint` keeps each layer's input alone
        and computes the rest again for the gradient.
        """
        weights, static = eqx.partition(self.blocks, eqx.is_array)

        def layer(x: Array, own: Any) -> tuple[Array, Any]:
            block, state = eqx.combine(own[0], static), own[1]
            return block(x, state, cu_seqlens)

        x, states = jax.lax.scan(jax.checkpoint(layer), self.embedding[tokens], (weights, states))
        return self.head(rms_norm(x)), states

    def start(self, batch: int, capacity: int) -> Any:
        """The layers' states before the first of at most `capacity` characters."""
        return eqx.filter_vmap(lambda block: block.start(batch, capacity))(self.blocks)


# --8<-- [end:model]


class Text(NamedTuple):
    """Documents as numbers into the alphabet."""

    train: list[np.ndarray]
    kept: list[np.ndarray]
    alphabet: str


def load_text() -> Text:
    names = sorted(topics)
    alphabet = "".join(sorted({c for i, name in enumerate(names) if i % 10 for c in topics[name]}))
    number = {character: i for i, character in enumerate(alphabet)}
    encoded = [np.array([number[c] for c in topics[name] if c in number], np.int32) for name in names]
    return Text([x for i, x in enumerate(encoded) if i % 10], encoded[::10], alphabet)


class Row(NamedTuple):
    """Pieces of documents behind each other. `counts` is 0 where the next character is another piece's."""

    tokens: np.ndarray  # [TOKENS]
    cu_seqlens: np.ndarray  # [SEQUENCES + 1], the last offset repeated: pieces that are not there are empty
    counts: np.ndarray  # [TOKENS]


# --8<-- [start:pack]
def packed_row(documents: list[np.ndarray], rng: np.random.Generator) -> Row:
    """Random pieces of random documents, as many as a row holds: its shape is always the same, so it compiles once."""
    chances = np.array([len(document) for document in documents], float)
    offsets: list[int] = [0]
    pieces: list[np.ndarray] = []
    while offsets[-1] < TOKENS and len(pieces) < SEQUENCES:
        document = documents[rng.choice(len(documents), p=chances / chances.sum())]
        start = rng.integers(0, max(1, len(document) - LONGEST))
        last = len(pieces) == SEQUENCES - 1  # which fills the row
        pieces.append(np.resize(document[start:], TOKENS - offsets[-1]) if last else document[start : start + LONGEST])
        offsets.append(min(offsets[-1] + len(pieces[-1]), TOKENS))
    cu_seqlens = np.pad(np.array(offsets, np.int32), (0, SEQUENCES + 1 - len(offsets)), mode="edge")
    counts = np.ones(TOKENS, np.float32)
    counts[cu_seqlens[1:] - 1] = 0
    return Row(np.concatenate(pieces)[:TOKENS], cu_seqlens, counts)


def loss_of(model: LanguageModel, row: Row) -> Array:
    """Mean -log p(next) in nats per character. Pieces of a row do not see each other."""
    logits, _ = model(jnp.asarray(row.tokens)[None], cu_seqlens=jnp.asarray(row.cu_seqlens))
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[0], jnp.roll(row.tokens, -1))
    return jnp.sum(losses * row.counts) / jnp.sum(row.counts)


# --8<-- [end:pack]


class Training(NamedTuple):
    """All that a run goes on from."""

    model: LanguageModel
    moments: Any
    step: int


# --8<-- [start:checkpoint]
def save(file: Path, training: Training) -> None:
    """Writes a checkpoint: beside the old one, then in its place, so that there is always a whole one."""
    beside = file.with_name(file.name + ".new")
    eqx.tree_serialise_leaves(beside, training)
    os.replace(beside, file)


def restored(file: Path | None, fresh: Training) -> Training:
    """The training that a file holds, or a fresh one where there is none yet."""
    if file is None or not file.exists():
        return fresh
    try:
        return eqx.tree_deserialise_leaves(file, fresh)
    except RuntimeError as problem:  # whatever it was, Equinox raises it as one
        raise ValueError(f"{file} must hold a run of this model, of the same --block; it does not, or is broken.") from problem


# --8<-- [end:checkpoint]


def train(
    model: LanguageModel,
    documents: list[np.ndarray],
    steps: int,
    *,
    stop: int | None = None,
    checkpoint: Path | None = None,
    log_every: int = 100,
) -> tuple[LanguageModel, list[float]]:
    """The model after `steps` of AdamW on packed rows, and the losses of the steps made here.

    Args:
        stop: make no step after this one, as if the run were interrupted.
        checkpoint: where the run is stored every `log_every` steps and at its end, and taken up again if it is there.
    """
    schedule = optax.warmup_cosine_decay_schedule(0.0, 4e-3, max(steps // 20, 1), steps, 2e-4)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.01))
    model, moments, done = restored(checkpoint, Training(model, optimizer.init(eqx.filter(model, eqx.is_array)), 0))

    @eqx.filter_jit(donate="all")
    def update(model, moments, row):
        loss, gradients = eqx.filter_value_and_grad(loss_of)(model, row)
        updates, moments = optimizer.update(gradients, moments, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), moments, loss

    losses, begin, end = [], time.perf_counter(), min(steps, stop or steps)
    for number in range(done + 1, end + 1):
        row = packed_row(documents, np.random.default_rng(number))  # by the step's number: a run that goes on draws the same
        model, moments, loss = update(model, moments, row)
        losses.append(float(loss))
        if number == 1 or number % log_every == 0:
            print(f"step {number:5}  loss {losses[-1]:.3f}  {time.perf_counter() - begin:5.0f} s", flush=True)
        if checkpoint is not None and (number == end or number % log_every == 0):
            save(checkpoint, Training(model, moments, number))
    return model, losses


def evaluate(model: LanguageModel, documents: list[np.ndarray], rows: int = 16) -> float:
    """Mean loss over pieces of documents, always the same ones."""
    loss, rng = eqx.filter_jit(loss_of), np.random.default_rng(0)
    return float(np.mean([loss(model, packed_row(documents, rng)) for _ in range(rows)]))


def bigram_loss(train: list[np.ndarray], kept: list[np.ndarray], vocabulary: int) -> float:
    """Mean -log p(next | this) in nats of a bigram model with add-one counts."""
    counts = np.ones((vocabulary, vocabulary))
    for document in train:
        np.add.at(counts, (document[:-1], document[1:]), 1)
    log_p = np.log(counts / counts.sum(1, keepdims=True))
    return float(-np.concatenate([log_p[document[:-1], document[1:]] for document in kept]).mean())


# --8<-- [start:generate]
def generate(model: LanguageModel, prompt: np.ndarray, count: int, *, temperature: float = 0.6, seed: int = 0) -> np.ndarray:
    """`count` characters after `prompt [B, T]`: one pass over it, then one character at a time from the state it left."""
    start = model.start(len(prompt), prompt.shape[1] + count)
    logits, states = eqx.filter_jit(model)(jnp.asarray(prompt), start)

    def write(carry, key):
        states, logits = carry
        token = jax.random.categorical(key, logits[:, -1] / temperature)  # [B]
        logits, states = model(token[:, None], states)
        return (states, logits), token

    keys = jax.random.split(jax.random.key(seed), count)
    _, tokens = eqx.filter_jit(lambda carry: jax.lax.scan(write, carry, keys))((states, logits[:, -1:]))
    return np.asarray(tokens).T


# --8<-- [end:generate]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--block", choices=MIXERS, default="gla", help="what mixes the characters (gla)")
    parser.add_argument("--steps", type=int, default=500, help="training steps (500)")
    parser.add_argument("--checkpoint", type=Path, help="a file to store the run in, and to go on from")
    given = parser.parse_args(arguments)
    if given.steps < 1:
        parser.error(f"--steps must be at least 1; got {given.steps}")
    text = load_text()
    model = LanguageModel(given.block, len(text.alphabet), key=jax.random.key(0))
    size = sum(x.size for x in jax.tree.leaves(eqx.filter(model, eqx.is_array)))
    characters = [sum(map(len, documents)) for documents in (text.train, text.kept)]
    print(f"{size:,} parameters; {characters[0]:,} characters to learn from, {characters[1]:,} kept aside")
    model, _ = train(model, text.train, given.steps, checkpoint=given.checkpoint)
    print("\nnats per character on the text kept aside")
    print(f"  bigram model  {bigram_loss(text.train, text.kept, len(text.alphabet)):.3f}")
    print(f"  this model    {evaluate(model, text.kept):.3f}")
    prompt = text.kept[0][:200]
    write = lambda numbers: "".join(text.alphabet[i] for i in numbers)
    print(f"\n--- {len(prompt)} characters of prompt, read in one pass; written one by one after the bar:\n")
    print(write(prompt) + "|" + write(generate(model, prompt[None], 300)[0]))


if __name__ == "__main__":
    main()
