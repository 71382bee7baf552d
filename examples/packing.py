"""Documents of uneven length in one row: the same loss and gradients as one by one, faster.

    python -m examples.packing

A layer of gated linear attention reads documents of very different lengths (paragraphs of Python's `help()`). One by one, each
length is a call of its own, and a program of its own to compile. Padded to the longest, most of the work is on padding. Packed,
all documents lie in one row, and `cu_seqlens` says where each begins: the state starts afresh there.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.modules import gla_attention

WIDTH, HEADS = 64, 2
Params = dict[str, jax.Array]


def documents(count: int = 12) -> list[np.ndarray]:
    """The bytes of the first paragraphs on assignments."""
    paragraphs = topics["assignment"].split("\n\n")[:count]
    return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in paragraphs]


def init(key: jax.Array) -> Params:
    keys = jax.random.split(key, 3)
    return {
        "embedding": jax.random.normal(keys[0], (256, WIDTH)),
        "inner": jax.random.normal(keys[1], (WIDTH, 4 * WIDTH)) * WIDTH**-0.5,
        "head": jax.random.normal(keys[2], (WIDTH, 256)) * WIDTH**-0.5,
    }


def layer(params: Params, tokens: jax.Array, cu_seqlens: jax.Array | None = None) -> jax.Array:
    """Logits `[..., 256]` of the next byte for `tokens [B, T]`, or `[tokens]` packed by `cu_seqlens`."""
    x = params["embedding"][tokens]
    q, k, v, g = (y.reshape(*y.shape[:-1], HEADS, -1) for y in jnp.split(x @ params["inner"], 4, axis=-1))
    o = gla_attention(q, k, v, jax.nn.log_sigmoid(g), cu_seqlens=cu_seqlens)
    return o.reshape(x.shape) @ params["head"]


def total_loss(logits: jax.Array, tokens: jax.Array, counts: jax.Array) -> jax.Array:
    """Sum of -log p(next byte); `counts` is 0 where the next byte is padding or another document's."""
    following = jnp.roll(tokens, -1, axis=-1)
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), following[..., None], axis=-1)[..., 0]
    return -jnp.sum(picked * counts)


@jax.jit
@jax.value_and_grad
def one_document(params: Params, tokens: jax.Array) -> jax.Array:
    return total_loss(layer(params, tokens[None]), tokens[None], jnp.arange(len(tokens)) < len(tokens) - 1)


@jax.jit
@jax.value_and_grad
def padded_documents(params: Params, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
    return total_loss(layer(params, tokens), tokens, jnp.arange(tokens.shape[1]) < lengths[:, None] - 1)


@jax.jit
@jax.value_and_grad
def packed_documents(params: Params, tokens: jax.Array, cu_seqlens: jax.Array) -> jax.Array:
    is_last = jnp.zeros(len(tokens), bool).at[cu_seqlens[1:] - 1].set(True)
    return total_loss(layer(params, tokens, cu_seqlens), tokens, ~is_last)


# --8<-- [start:ways]
def one_by_one(params: Params, texts: list[np.ndarray]) -> tuple[jax.Array, Params]:
    results = [one_document(params, text) for text in texts]
    return jax.tree.map(lambda *parts: sum(parts), *results)


def padded(params: Params, texts: list[np.ndarray]) -> tuple[jax.Array, Params]:
    lengths = np.array([len(text) for text in texts])
    return padded_documents(params, np.stack([np.pad(text, (0, lengths.max() - len(text))) for text in texts]), lengths)


def packed(params: Params, texts: list[np.ndarray]) -> tuple[jax.Array, Params]:
    cu_seqlens = np.cumsum([0, *(len(text) for text in texts)], dtype=np.int32)
    return packed_documents(params, np.concatenate(texts), cu_seqlens)


# --8<-- [end:ways]


def timed(function: Callable, *args) -> tuple[float, float, tuple[jax.Array, Params]]:
    """(seconds of the first call, which compiles; best of the later ones; the result)."""
    seconds = []
    for _ in range(12):
        begin = time.perf_counter()
        result = jax.block_until_ready(function(*args))
        seconds.append(time.perf_counter() - begin)
    return seconds[0], min(seconds[1:]), result


def main() -> None:
    params, texts = init(jax.random.key(0)), documents()
    lengths = [len(text) for text in texts]
    print(f"{len(texts)} documents of {min(lengths)} to {max(lengths)} bytes, {sum(lengths)} together")
    print(f"{'':12}{'first call':>12}{'each later':>12}{'loss':>14}{'gradients differ by':>22}")
    expected = None
    for way in (one_by_one, padded, packed):
        first, later, (loss, gradients) = timed(way, params, texts)
        expected = gradients if expected is None else expected
        far = max(float(jnp.linalg.norm(gradients[n] - expected[n]) / jnp.linalg.norm(expected[n])) for n in expected)
        print(f"{way.__name__:12}{first:10.2f} s{later * 1e3:9.0f} ms{float(loss):14.2f}{far:22.1e}")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()  # it has no options, and says so when asked
    main()
