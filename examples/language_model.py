"""A small language model of gated linear attention or gated DeltaNet, trained on a CPU in about two minutes.

    python -m examples.language_model
    python -m examples.language_model --layer delta

It reads the topics of Python's own `help()` (they ship with the standard library), keeps every tenth one aside, and learns to
predict the next character. Beside its loss on the topics kept aside stands that of a bigram model, which knows how often each
character follows each other one. Then it writes: the prompt is read in one chunked pass, and the text goes on character by
character from the state which that pass left, in constant time and memory per character.
"""

from __future__ import annotations

import argparse
import time
from pydoc_data.topics import topics
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from examples.layers import Fields, GatedDeltaNet, GatedLinearAttention, each, rms_norm

LAYERS: dict[str, Any] = {"gla": GatedLinearAttention, "delta": GatedDeltaNet}

# Fields of a configuration, of which each layer makes one of its own operation's class.
CHUNKED: Fields = {"schedule": "chunked", "block_q": 64}  # matrix products over 64 tokens at a time: for prompts
STEPWISE: Fields = {"schedule": "recurrent", "block_q": 1}  # one token at a time: for writing


class Block(eqx.Module):
    """Attention, then a gated feed-forward layer, each added to its input."""

    attention: GatedLinearAttention | GatedDeltaNet
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, layer: str, width: int, heads: int, *, key: jax.Array):
        keys = jax.random.split(key, 3)
        self.attention = LAYERS[layer](width, heads, key=keys[0])
        self.up = eqx.nn.Linear(width, 4 * width, use_bias=False, key=keys[1])
        self.down = eqx.nn.Linear(2 * width, width, use_bias=False, key=keys[2])

    def __call__(self, x: jax.Array, state: Any, how: Fields | None) -> tuple[jax.Array, Any]:
        attended, state = self.attention(rms_norm(x), state, how)
        x = x + attended
        gate, up = jnp.split(each(self.up, rms_norm(x)), 2, axis=-1)
        return x + each(self.down, jax.nn.silu(gate) * up), state


class LanguageModel(eqx.Module):
    """Characters in, logits of the next character out, and each layer's state to go on from."""

    embedding: jax.Array
    blocks: list[Block]
    head: eqx.nn.Linear

    def __init__(self, layer: str, vocabulary: int, width: int = 128, heads: int = 4, layers: int = 3, *, key: jax.Array):
        keys = jax.random.split(key, layers + 2)
        self.embedding = jax.random.normal(keys[0], (vocabulary, width))
        self.blocks = [Block(layer, width, heads, key=k) for k in keys[2:]]
        self.head = eqx.nn.Linear(width, vocabulary, key=keys[1])

    def __call__(self, tokens: jax.Array, states: list | None = None, how: Fields | None = None) -> tuple[jax.Array, list]:
        """`tokens [B, T]` -> `(logits [B, T, vocabulary], states)`."""
        x, after = self.embedding[tokens], []
        for block, state in zip(self.blocks, states or [None] * len(self.blocks), strict=True):
            x, state = block(x, state, how)
            after.append(state)
        return each(self.head, rms_norm(x)), after


def load_text() -> tuple[np.ndarray, np.ndarray, str]:
    """(training characters, characters kept aside, alphabet): numbers into the alphabet, split by topic."""
    names = sorted(topics)
    kept = "\n".join(topics[name] for name in names[::10])
    train = "\n".join(topics[name] for i, name in enumerate(names) if i % 10)
    alphabet = "".join(sorted(set(train)))
    number = {character: i for i, character in enumerate(alphabet)}
    encode = lambda text: np.array([number[c] for c in text if c in number], np.int32)
    return encode(train), encode(kept), alphabet


def bigram_loss(train: np.ndarray, kept: np.ndarray, vocabulary: int) -> float:
    """Mean -log p(next | this) in nats of a bigram model with add-one counts."""
    counts = np.ones((vocabulary, vocabulary))
    np.add.at(counts, (train[:-1], train[1:]), 1)
    log_p = np.log(counts / counts.sum(1, keepdims=True))
    return float(-log_p[kept[:-1], kept[1:]].mean())


def loss_of(model: LanguageModel, batch: jax.Array) -> jax.Array:
    """Mean -log p(next) over `batch [B, T + 1]`, in nats per character."""
    logits, _ = model(batch[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


def train(
    model: LanguageModel, text: np.ndarray, steps: int, *, batch: int = 8, length: int = 256, log_every: int = 100
) -> tuple[LanguageModel, list[float]]:
    """The model after `steps` of AdamW on random windows of the text, and the loss before each."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, 4e-3, max(steps // 20, 1), steps, 2e-4)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.01))
    moments = optimizer.init(eqx.filter(model, eqx.is_array))

    @eqx.filter_jit(donate="all")
    def step(model, moments, windows):
        loss, gradients = eqx.filter_value_and_grad(loss_of)(model, windows)
        updates, moments = optimizer.update(gradients, moments, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), moments, loss

    rng, losses, begin = np.random.default_rng(0), [], time.perf_counter()
    for number in range(1, steps + 1):
        starts = rng.integers(0, len(text) - length - 1, batch)
        model, moments, loss = step(model, moments, np.stack([text[s : s + length + 1] for s in starts]))
        losses.append(float(loss))
        if number == 1 or number % log_every == 0:
            print(f"step {number:5}  loss {losses[-1]:.3f}  {time.perf_counter() - begin:5.0f} s", flush=True)
    return model, losses


def evaluate(model: LanguageModel, text: np.ndarray, length: int = 1024) -> float:
    """Mean loss over a text, cut in rows of `length` that each start from an empty state."""
    rows = text[: (len(text) - 1) // length * length + 1]
    windows = np.stack([rows[i : i + length + 1] for i in range(0, len(rows) - 1, length)])
    loss = eqx.filter_jit(loss_of)
    return float(np.mean([loss(model, jnp.asarray(windows[i : i + 1])) for i in range(len(windows))]))


# --8<-- [start:generate]
def generate(model: LanguageModel, prompt: np.ndarray, count: int, *, temperature: float = 0.6, seed: int = 0) -> np.ndarray:
    """`count` characters after `prompt [B, T]`: one chunked pass over it, then step by step from the state it left."""
    logits, states = eqx.filter_jit(lambda model, tokens: model(tokens, how=CHUNKED))(model, prompt)

    def step(carry, key):
        states, logits = carry
        token = jax.random.categorical(key, logits[:, -1] / temperature)  # [B]
        logits, states = model(token[:, None], states, how=STEPWISE)
        return (states, logits), token

    keys = jax.random.split(jax.random.key(seed), count)
    _, tokens = eqx.filter_jit(lambda carry: jax.lax.scan(step, carry, keys))((states, logits[:, -1:]))
    return np.asarray(tokens).T


# --8<-- [end:generate]


def main(layer: str, steps: int) -> None:
    text, kept, alphabet = load_text()
    model = LanguageModel(layer, len(alphabet), key=jax.random.key(0))
    size = sum(x.size for x in jax.tree.leaves(eqx.filter(model, eqx.is_array)))
    print(f"{size:,} parameters; {len(text):,} characters to learn from, {len(kept):,} kept aside")
    model, _ = train(model, text, steps)
    print("\nnats per character on the text kept aside")
    print(f"  bigram model  {bigram_loss(text, kept, len(alphabet)):.3f}")
    print(f"  this model    {evaluate(model, kept):.3f}")
    prompt = kept[:200]
    write = lambda numbers: "".join(alphabet[i] for i in numbers)
    print(f"\n--- {len(prompt)} characters of prompt, read by chunks; written step by step after the bar:\n")
    print(write(prompt) + "|" + write(generate(model, prompt[None], 300)[0]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--layer", choices=LAYERS, default="gla", help="gated linear attention (gla), or gated DeltaNet (delta)"
    )
    parser.add_argument("--steps", type=int, default=600, help="training steps (600)")
    arguments = parser.parse_args()
    main(arguments.layer, arguments.steps)
