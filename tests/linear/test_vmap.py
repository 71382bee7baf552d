"""`vmap` over every choice of arguments: values, forward and reverse derivatives of output and final state.

A derivative under `vmap` must know which results are shared by all mapped elements: the final state does not depend on the
query. So each choice is compared with one element after another.
"""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.modules import RecurrentAttentionConfig, recurrent_attention
from ejkernel.testing.linear_cases import LinearCase

SIZE = 3
FOUR = ("query", "key", "value", "initial_state")
CHOICES = [c for n in range(1, 5) for c in itertools.combinations(FOUR, n)]
MORE = ("query", "g", "g_gamma", "gk", "gv", "cu_seqlens")
PAIRS = [*itertools.combinations(MORE, 2)]
small = functools.partial(LinearCase, heads=2, kv_heads=1, key_channels=2, value_channels=3, initial_state=True)
DENSE = small("dense", batch=1, time=5)


class Mapped:
    """A case of which some arrays have a mapped axis, each at another place."""

    def __init__(self, case: LinearCase, choice: tuple[str, ...]):
        rng = np.random.default_rng(1)
        arrays, options = case.arguments()
        if "cu_seqlens" in options:
            arrays["cu_seqlens"] = options["cu_seqlens"]
        offsets = jnp.array([[0, 2, 2, 6], [0, 1, 5, 6], [0, 0, 6, 6]], jnp.int32)
        self.axes = {name: i % 2 if name in choice and name != "cu_seqlens" else None for i, name in enumerate(arrays)}
        self.axes |= {"cu_seqlens": 0} if "cu_seqlens" in choice else {}
        stack = lambda x, axis: jnp.asarray(np.stack([x * rng.uniform(0.5, 1.5) for _ in range(SIZE)], axis), x.dtype)
        self.arrays = {name: x if self.axes[name] is None else stack(x, self.axes[name]) for name, x in arrays.items()}
        if "cu_seqlens" in choice:
            self.arrays["cu_seqlens"] = offsets
        self.floats = {name: x for name, x in self.arrays.items() if name != "cu_seqlens"}
        self.tangents = {name: jnp.cos(3 * x) for name, x in self.floats.items()}
        self.cotangents = tuple(jnp.asarray(rng.normal(size=(SIZE, *w.shape)), jnp.float32) for w in case.weights())

    def element(self, tree: dict[str, jax.Array], n: int) -> dict[str, jax.Array]:
        return {name: x if self.axes[name] is None else jnp.take(x, n, self.axes[name]) for name, x in tree.items()}


def operation(cfg: RecurrentAttentionConfig, arrays: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    return recurrent_attention(**arrays, return_state=True, cfg=cfg)


def derivatives(function, floats, tangents, cotangents):
    """(outputs, gradients, tangents of the outputs unless there are none of the inputs)."""
    outputs, pull = jax.vjp(function, floats)
    return outputs, pull(cotangents)[0], jax.jvp(function, (floats,), (tangents,))[1] if tangents else None


@functools.partial(jax.jit, static_argnums=0)
def one_element(cfg, arrays, tangents, cotangents):
    floats = {name: x for name, x in arrays.items() if name != "cu_seqlens"}
    return derivatives(lambda floats: operation(cfg, {**arrays, **floats}), floats, tangents, cotangents)


def check(cfg: RecurrentAttentionConfig, mapped: Mapped, jit: bool, forward: bool = True) -> None:
    tangents = mapped.tangents if forward else {}
    each = [
        one_element(cfg, mapped.element(mapped.arrays, n), mapped.element(tangents, n), tuple(w[n] for w in mapped.cotangents))
        for n in range(SIZE)
    ]
    outputs, moved = (jax.tree.map(lambda *x: jnp.stack(x), *(one[i] for one in each)) for i in (0, 2))
    gradients = {
        name: sum(one[1][name] for one in each) if axis is None else jnp.stack([one[1][name] for one in each], axis)
        for name, axis in mapped.axes.items()
        if name in mapped.floats
    }
    eager = jax.vmap(functools.partial(operation, cfg), (mapped.axes,))
    vmapped = jax.jit(eager) if jit else eager
    function = lambda floats: vmapped({**mapped.arrays, **floats})
    got = derivatives(function, mapped.floats, tangents, mapped.cotangents)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, got, (outputs, gradients, moved))


@pytest.mark.parametrize("choice", CHOICES, ids="-".join)
def test_every_choice_of_four_arrays(choice):
    check(RecurrentAttentionConfig("chunked", 8), Mapped(DENSE, choice), jit=len(choice) % 2 == 0)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("schedule", ["chunked", "recurrent"])
@pytest.mark.parametrize("choice", [("query",), ("key",), ("query", "initial_state")], ids="-".join)
def test_eager_and_jitted_with_both_schedules(choice, schedule, jit):
    check(RecurrentAttentionConfig(schedule, 4), Mapped(small("short", batch=1, time=2), choice), jit)


@pytest.mark.parametrize("choice", PAIRS, ids="-".join)
def test_gradients_of_pairs_of_gates_and_offsets(choice):
    lengths = (2, 0, 4) if "cu_seqlens" in choice else None
    gates = tuple(name for name in choice if name.startswith("g"))
    case = small("pair", batch=1, time=2, gates=gates, lengths=lengths)
    check(RecurrentAttentionConfig("chunked", 2), Mapped(case, choice), jit="query" in choice, forward=False)


def test_two_maps_around_each_other():
    arrays, _ = DENSE.arguments()
    cfg = RecurrentAttentionConfig("chunked", 4)
    queries, states = (jnp.stack([arrays[name], 0.5 * arrays[name]]) for name in ("query", "initial_state"))

    def total(run, queries, states):
        per_query = lambda q, h: operation(cfg, {**arrays, "query": q, "initial_state": h})[1]
        return jnp.sum(jnp.sin(run(per_query, queries, states)))

    both = lambda f, q, h: jax.vmap(lambda h: jax.vmap(lambda q: f(q, h))(q))(h)
    loops = lambda f, q, h: jnp.stack([jnp.stack([f(x, y) for x in q]) for y in h])
    got, want = (jax.grad(functools.partial(total, run), 1)(queries, states) for run in (both, loops))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("around", ["scan", "checkpoint", "jit"])
def test_the_final_states_gradient_under_vmap_over_queries_alone(around):
    arrays, _ = DENSE.arguments()
    cfg = RecurrentAttentionConfig("chunked", 4)
    queries = jnp.stack([arrays["query"], 0.5 * arrays["query"]])

    def total(h):
        mapped = jax.vmap(lambda q: operation(cfg, {**arrays, "query": q, "initial_state": h})[1])
        if around == "scan":
            return jax.lax.scan(lambda x, _: (x + jnp.sum(mapped(queries)), None), 0.0, None, length=1)[0]
        return jnp.sum({"checkpoint": jax.checkpoint, "jit": jax.jit}[around](mapped)(queries))

    single = jax.grad(lambda h: jnp.sum(operation(cfg, {**arrays, "initial_state": h})[1]))(arrays["initial_state"])
    np.testing.assert_allclose(jax.grad(total)(arrays["initial_state"]), 2 * single, rtol=1e-5)
