"""`vmap` of softmax attention on Triton: the calls one by one, as one larger call wherever that is possible."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton", reason="the triton platform needs Triton")

from ejkernel._device import device_of
from ejkernel.kernels._triton import attention
from ejkernel.kernels._triton.attention._batching import mapped_calls
from ejkernel.types.mask import MaskInfo

pytestmark = [pytest.mark.gpu] if device_of(()).backend == "gpu" else []
B, T, S, H, HK, D, DV, SIZE = 2, 18, 20, 2, 1, 8, 12, 3
FLOATS = ("query", "key", "value", "bias", "softmax_aux", "softmax_scale")


def of(name: str, rng: np.random.Generator, batch: int = B, bias: tuple[int, ...] = (B, H, T, S)) -> Any:
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    if name == "mask_info":
        ids = lambda n: jnp.asarray(np.sort(rng.integers(0, 2, (batch, n))), jnp.int32)
        return MaskInfo.from_segments(ids(T), ids(S))
    return {
        "query": lambda: normal(batch, T, H, D),
        "key": lambda: normal(batch, S, HK, D),
        "value": lambda: normal(batch, S, HK, DV),
        "bias": lambda: normal(*bias),
        "softmax_aux": lambda: normal(H, 1),
        "softmax_scale": lambda: normal() * 0.3,
        "attention_mask": lambda: jnp.asarray(rng.random((batch, 1, T, S)) < 0.7),
        "dropout_rng": lambda: jax.random.key(rng.integers(1 << 30)),
    }[name]()


def loss(given: dict[str, Any]) -> Any:
    dropout = {"deterministic": False, "dropout_prob": 0.3} if "dropout_rng" in given else {}
    output = attention(**given, **dropout, causal=True, dtype=None, return_weights=False)[0]
    return (output**2).sum(), output


def check(names: tuple[str, ...], mapped: tuple[str, ...], *, loops: bool = False, **shapes: Any) -> None:
    rng = np.random.default_rng(0)
    stack = lambda name: jax.tree.map(lambda *x: jnp.stack(x), *[of(name, rng, **shapes) for _ in range(SIZE)])
    given = {name: stack(name) if name in mapped else of(name, rng, **shapes) for name in names}
    floats = {name: x for name, x in given.items() if name in FLOATS}
    rest = {name: x for name, x in given.items() if name not in FLOATS}
    one = lambda floats, rest: jax.grad(lambda floats: loss({**floats, **rest}), has_aux=True)(floats)
    axes = tuple({name: 0 if name in mapped else None for name in group} for group in (floats, rest))
    many = jax.vmap(one, axes)
    got = many(floats, rest)
    at = lambda group, n: {name: jax.tree.map(lambda x: x[n], x) if name in mapped else x for name, x in group.items()}
    each = [one(at(floats, n), at(rest, n)) for n in range(SIZE)]
    want = jax.tree.map(lambda *x: np.stack(x), *each)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5), got, want)
    assert (" scan[" in str(jax.make_jaxpr(many)(floats, rest))) == loops


EVERY = ("query", "key", "value", "bias", "softmax_aux", "softmax_scale", "attention_mask", "mask_info", "dropout_rng")


@pytest.mark.parametrize("mapped", [("query", "softmax_aux", "mask_info"), EVERY], ids="+".join)
def test_calls_are_folded_into_the_batch(mapped):
    check(EVERY, mapped)


@pytest.mark.long
@pytest.mark.parametrize("mapped", [(name,) for name in EVERY] + [EVERY[n:] for n in range(1, 9)], ids="+".join)
def test_every_argument_is_folded(mapped):
    check(EVERY, mapped)


@pytest.mark.long
def test_every_subset_of_queries_keys_and_values():
    names = ("query", "key", "value", "bias")
    for mapped in itertools.chain.from_iterable(itertools.combinations(names, n) for n in range(1, 5)):
        check(names, mapped, batch=1, bias=(1, H, T, S))


@pytest.mark.parametrize(
    ("bias", "mapped", "loops"),
    [
        ((1, H, 1, S), ("query",), True),  # its gradient is a sum over rows
        ((1, H, T, S), ("bias", "value"), True),  # each call's would be repeated for its rows
    ],
    ids=["shared", "own"],
)
def test_what_runs_one_by_one(bias, mapped, loops):
    check(("query", "key", "value", "bias"), mapped, loops=loops, bias=bias)


@pytest.mark.parametrize("bias", [(1, 1, 1, S), (1, H, T, 1), (1, 1, 1, 1)], ids=str)
def test_a_bias_of_one_row_whose_gradient_is_not_wanted(bias):
    """Folding repeats it for the rows of each call's batch; its gradient, which is 0, has one row all the same."""
    rng = np.random.default_rng(0)
    given = {name: jnp.stack([of(name, rng, bias=bias) for _ in range(SIZE)]) for name in ("query", "key", "value", "bias")}
    one = lambda q, rest: jax.grad(lambda q: loss({"query": q, **rest}), has_aux=True)(q)
    queries = given.pop("query")
    got = jax.vmap(one)(queries, given)
    each = [one(queries[n], {name: x[n] for name, x in given.items()}) for n in range(SIZE)]
    want = jax.tree.map(lambda *x: np.stack(x), *each)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5), got, want)


def test_of_no_calls():
    q = jnp.zeros((0, B, T, H, D))
    output = jax.vmap(lambda q: loss({"query": q, "key": q, "value": q})[1])(q)
    assert output.shape == q.shape


def test_nested():
    rng = np.random.default_rng(3)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 2, 1, T, 1, D)), jnp.float32) for _ in range(3))
    run = lambda q, k, v: loss({"query": q, "key": k, "value": v})[1]
    got = jax.vmap(jax.vmap(run), (0, None, 0))(q, k[0], v)
    want = np.stack([np.stack([run(q[i, j], k[0, j], v[i, j]) for j in range(2)]) for i in range(2)])
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


def test_a_shared_bias_stays_one():
    """Without its gradient: no copy for each of the calls."""
    seen = []

    def function(args):
        seen.append(jax.tree.map(jnp.shape, args))
        return {"output": args["arrays"]["query"]}

    arrays = {"query": jnp.zeros((SIZE, 1, T, H, D)), "bias": jnp.zeros((1, H, T, S))}
    args = {"arrays": arrays, "others": {}}
    mapped = {"arrays": {"query": True, "bias": False}, "others": {}}
    mapped_calls(function, SIZE, mapped, args, bias_gradient=False)
    mapped_calls(function, SIZE, mapped, args, bias_gradient=True)
    assert [x["arrays"]["bias"] for x in seen] == [(1, H, T, S), (SIZE, H, T, S)]
