"""Errors of chunked gated linear attention against float64: products over a tree (this library) and the usual running sums.

The usual forms are written here as papers give them, per chunk of 64 tokens, with G the
running sum of the log gates: scores q_t exp(G_t) . k_s exp(-G_s) by one matrix product ("factored"), or exp(G_t - G_s) pair by
pair ("differences"), which cannot overflow. Their gradients are JAX's. The gate gradient is also taken by the usual identity,
a reverse running sum of q * dq - k * dk, from this library's own dq and dk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.kernels._linear import LinearConfig
from ejkernel.modules import recurrent_attention
from ejkernel.testing.compare import relative_rms
from ejkernel.testing.hand_written import scan_attention
from ejkernel.testing.linear_cases import LinearCase
from ejkernel.testing.linear_reference import linear_reference

CHUNK = 64
KINDS = {
    "mild": "mild: median -1/16",
    "strong": "strong: median -8",
    "twenty": "all near -20",
    "resets": "mild, one in ten -1e4",
    "infinite": "mild, one in ten -inf",
}
OURS, IDENTITY = "this library, chunks of 64", "... with the usual identity for the gate"
Form = Callable[..., Any]  # of arrays by name, gives the output


def usual_form(query, key, value, gk, *, factored: bool) -> jax.Array:
    """Chunked GLA by running sums of the gates: the output `[B, T, H, V]` of `[B, T, H, K]` inputs; T a multiple of 64."""
    batch, time, heads, channels = query.shape
    chunks = lambda x: jnp.moveaxis(x.reshape(batch, time // CHUNK, CHUNK, heads, -1), (1, 3), (0, 2))  # [N, B, H, C, D]
    causal = jnp.tril(jnp.ones((CHUNK, CHUNK), bool))

    def step(S, row):
        q, k, v, g = row
        G = jnp.cumsum(g, axis=-2)  # [B, H, C, K]
        if factored:
            scores = jnp.einsum("bhtk,bhsk->bhts", q * jnp.exp(G), k * jnp.exp(-G))
            scores = jnp.where(causal, scores, 0)
        else:
            apart = jnp.where(causal[..., None], G[..., :, None, :] - G[..., None, :, :], -jnp.inf)  # [B, H, C, C, K]
            scores = jnp.einsum("bhtk,bhsk,bhtsk->bhts", q, k, jnp.exp(apart))
        o = jnp.einsum("bhts,bhsv->bhtv", scores, v) + jnp.einsum("bhtk,bhkv->bhtv", q * jnp.exp(G), S)
        total = G[..., -1:, :]
        S = jnp.exp(total[..., 0, :, None]) * S + jnp.einsum("bhsk,bhsv->bhkv", k * jnp.exp(total - G), v)
        return S, o

    S = jnp.zeros((batch, heads, channels, value.shape[-1]))
    _, o = lax.scan(step, S, tuple(map(chunks, (query, key, value, gk))))
    return jnp.moveaxis(o, (0, 2), (1, 3)).reshape(batch, time, heads, -1) * channels**-0.5


def forms() -> dict[str, Form]:
    chunked = LinearConfig("chunked", CHUNK)
    return {
        OURS: lambda **a: recurrent_attention(**a, cfg=chunked),
        "step by step (`lax.scan`)": lambda **a: scan_attention(**a)[0],
        "running sums, differences": lambda **a: usual_form(**a, factored=False),
        "running sums, factored": lambda **a: usual_form(**a, factored=True),
    }


def errors(time: int = 512, kinds: tuple[str, ...] = tuple(KINDS)) -> Iterator[tuple[str, str, dict[str, float]]]:
    """(gate kind, form, relative RMS errors of the output and of each gradient); infinite where anything is NaN."""
    for kind in kinds:
        case = LinearCase(
            kind, time=time, heads=1, kv_heads=1, key_channels=32, value_channels=32, gates=("gk",), gate_kind=kind
        )
        arrays, _ = case.arguments()
        weights = case.weights()[0]
        with jax.enable_x64(True):
            wide = {name: jnp.asarray(np.asarray(x, np.float64)) for name, x in arrays.items()}
            found = value_and_gradients(lambda **a: linear_reference(**a)[0], wide, weights)
            want = {name: np.asarray(x) for name, x in found.items()}
        for name, form in forms().items():
            got = value_and_gradients(form, arrays, weights)
            yield kind, name, {n: relative_rms(got[n], want[n]) for n in want}
            if name == OURS:
                difference = arrays["query"] * got["query"] - arrays["key"] * got["key"]
                identity = jnp.cumsum(difference[:, ::-1], axis=1)[:, ::-1]
                yield kind, IDENTITY, {"gk": relative_rms(identity, want["gk"])}


def value_and_gradients(form: Form, arrays: dict[str, jax.Array], weights: np.ndarray) -> dict[str, jax.Array]:
    """The output, and the gradient of sum(weights * output) for every array, by its name."""

    def loss(arrays):
        output = form(**arrays)
        return jnp.sum(output * jnp.asarray(weights, output.dtype)), output

    gradients, output = jax.jit(jax.grad(loss, has_aux=True))(arrays)
    return {"output": output, **gradients}
