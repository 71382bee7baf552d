"""`vmap`, forward mode and `shard_map` over the triton platform, interpreted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton", reason="the triton platform needs Triton")

from ejkernel._device import device_of
from ejkernel.callib import _interpreted
from ejkernel.kernels._linear import LinearConfig
from ejkernel.kernels._triton import recurrent
from ejkernel.testing.compare import relative_rms
from tests.triton.linear_cases import Case
from tests.triton.processes import outside

pytestmark = pytest.mark.skipif(device_of(()).backend != "cpu", reason="interpreted on the host")
CFG = LinearConfig(block_q=16)
LENGTHS = [(0, 5, 5, 20), (0, 11, 12, 20)]
M = 2


class Counted:
    """A kernel that notes the grids it runs on."""

    def __init__(self, kernel, seen):
        self.kernel, self.fn, self.seen = kernel, kernel.fn, seen

    def __getitem__(self, grid):
        self.seen.append(grid)
        return self.kernel[grid]


@pytest.fixture
def launches(monkeypatch):
    """The grids of the kernels that ran."""
    seen: list[tuple[int, int, int]] = []
    original = _interpreted.run
    jax.clear_caches()
    monkeypatch.setattr(_interpreted, "run", lambda kernel, *rest: original(Counted(kernel, seen), *rest))
    yield seen
    jax.clear_caches()


def call(arrays, cu_seqlens=None, cfg=CFG):
    return recurrent(**arrays, cu_seqlens=cu_seqlens, cfg=cfg)


def gradient(case):
    wo, ws = case.weights()

    def loss(arrays, cu_seqlens):
        o, S = call(arrays, cu_seqlens, LinearConfig(block_q=case.block_q))
        return jnp.sum(o * wo) + jnp.sum(S * ws), (o, S)

    return jax.grad(loss, has_aux=True)


def many(case):
    return jax.tree.map(lambda *x: jnp.stack(x), *(case.arrays(seed) for seed in range(M)))


def assert_equal(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=2e-5, atol=2e-5), got, want)


@pytest.mark.parametrize(
    "case",
    [
        Case(("gk",), shape=(2, 20, 2, 1, 16, 16), state=True),
        Case(("g", "g_gamma"), shape=(1, 20, 2, 2, 16, 16), state=True, gate_heads="Hkv"),
        Case(("gv",), shape=(1, 17, 2, 1, 8, 16)),
        Case((), shape=(1, 20, 2, 1, 16, 16)),
        Case(("g",), shape=(2, 20, 2, 1, 16, 16), dtype="bfloat16", state=True),  # keeps running sums
        Case(("gk",), shape=(2, 70, 1, 1, 16, 16), dtype="bfloat16", block_q=64),  # and prepared rows
    ],
    ids=str,
)
@pytest.mark.slow
def test_vmap_folds_into_the_batch(case, launches):
    function = lambda arrays: gradient(case)(arrays, None)
    want = jax.block_until_ready([function(case.arrays(seed)) for seed in range(M)])
    alone = len(launches) // M
    del launches[:]
    got = jax.block_until_ready(jax.vmap(function)(many(case)))
    assert_equal(got, jax.tree.map(lambda *x: jnp.stack(x), *want))
    assert len(launches) == alone > 0  # as many kernels as one call has, not M times as many


@pytest.mark.parametrize("mapped_lengths", [True, False])
@pytest.mark.parametrize("gates", [("gk",), ("g_gamma",)])
def test_vmap_of_packed_calls(gates, mapped_lengths):
    case = Case(gates, shape=(1, 20, 2, 1, 16, 16), cu_seqlens=LENGTHS[0], state=True)
    gamma = {n: case.arrays()[n] for n in ("g_gamma",) if n in gates}  # not differentiated: nothing is kept per chunk
    drop = lambda arrays: {n: x for n, x in arrays.items() if n != "g_gamma"}
    function = lambda arrays, cu: gradient_without(case, gamma)(arrays, cu)
    lengths = jnp.array(LENGTHS if mapped_lengths else LENGTHS[0], jnp.int32)
    got = jax.vmap(function, in_axes=(0, 0 if mapped_lengths else None))(drop(many(case)), lengths)
    for m in range(M):
        want = function(drop(case.arrays(m)), lengths[m] if mapped_lengths else lengths)
        assert_equal(jax.tree.map(lambda x, m=m: x[m], got), want)


def gradient_without(case, constants):
    wo, ws = case.weights()

    def loss(arrays, cu_seqlens):
        o, S = call(arrays | constants, cu_seqlens)
        return jnp.sum(o * wo) + jnp.sum(S * ws), (o, S)

    return jax.grad(loss, has_aux=True)


def test_vmap_of_packed_forward_folds(launches):
    case = Case(("gk",), shape=(1, 20, 2, 1, 16, 16), cu_seqlens=LENGTHS[0])
    lengths = jnp.array(LENGTHS, jnp.int32)
    want = jax.block_until_ready([call(case.arrays(m), lengths[m]) for m in range(M)])
    alone = len(launches) // M
    del launches[:]
    got = jax.block_until_ready(jax.vmap(call)(many(case), lengths))
    assert_equal(got, jax.tree.map(lambda *x: jnp.stack(x), *want))
    assert len(launches) == alone > 0


def test_vmap_repeats_what_is_shared_and_nests():
    case = Case(("g",), shape=(1, 20, 2, 1, 16, 16), state=True)
    arrays, others = case.arrays(), case.arrays(1)
    queries = jnp.stack([arrays["query"], others["query"]])
    values = jnp.stack([arrays["value"], others["value"], arrays["value"] * 2])
    function = lambda q, v: call({**arrays, "query": q, "value": v}, cfg=LinearConfig(schedule="recurrent"))
    outer = jax.vmap(jax.vmap(function, in_axes=(0, None)), in_axes=(None, 0))(queries, values)
    assert outer[0].shape == (3, 2, 1, 20, 2, 16)
    for i in range(3):
        for j in range(2):
            assert_equal(jax.tree.map(lambda x, i=i, j=j: x[i, j], outer), function(queries[j], values[i]))


def test_vmap_axis_other_than_the_first():
    case = Case(("gk",), shape=(1, 20, 2, 1, 16, 16))
    last = jax.tree.map(lambda x: jnp.moveaxis(x, 0, -1), many(case))
    got = jax.vmap(call, in_axes=-1, out_axes=1)(last)[0]
    for m in range(M):
        assert relative_rms(got[:, m], call(case.arrays(m))[0]) < 1e-6


@pytest.mark.parametrize("wrapped", ["jvp", "jit of jvp", "jvp of jit"])
def test_forward_mode_names_the_way_out(wrapped):
    case = Case(("g",), shape=(1, 20, 2, 1, 16, 16))
    arrays = case.arrays()
    run = lambda q: call({**arrays, "query": q})[0]
    run = jax.jit(run) if wrapped == "jvp of jit" else run
    derivative = lambda q: jax.jvp(run, (q,), (q,))
    derivative = jax.jit(derivative) if wrapped == "jit of jvp" else derivative
    with pytest.raises(TypeError, match=r"forward-mode differentiation .* needs platform='xla'"):
        derivative(arrays["query"])


SECOND = r"gradient of a gradient .* needs platform='xla'"
TWICE = [
    Case(("g",), shape=(1, 20, 2, 1, 16, 16)),
    Case((), shape=(1, 20, 2, 1, 16, 16)),  # by three scans
    Case(("gk",), shape=(1, 20, 2, 1, 16, 16)),
    Case(("gk", "gv"), shape=(1, 64, 1, 1, 16, 16), dtype="bfloat16", block_q=64),
    Case(("g",), shape=(1, 1, 2, 1, 16, 16), schedule="recurrent", state=True),
    Case(("gk",), shape=(1, 20, 2, 1, 16, 16), cu_seqlens=LENGTHS[0], state=True),
]


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("case", TWICE, ids=str)
def test_second_derivative_names_the_way_out(case, jitted):
    arrays = case.arrays()
    lengths = None if case.cu_seqlens is None else jnp.array(case.cu_seqlens, jnp.int32)
    cfg = LinearConfig(schedule=case.schedule, block_q=case.block_q)
    gradient = jax.grad(lambda arrays: jnp.sum(call(arrays, lengths, cfg)[0].astype(jnp.float32)))
    penalty = lambda arrays: sum(jnp.sum(x.astype(jnp.float32) ** 2) for x in gradient(arrays).values())
    twice = jax.grad(penalty)
    with pytest.raises(TypeError, match=SECOND):
        jax.eval_shape(jax.jit(twice) if jitted else twice, arrays)


def test_derivative_of_the_gradient_by_its_cotangent_names_the_way_out():
    arrays = Case(("gk",), shape=(1, 20, 2, 1, 16, 16)).arrays()

    def pulled(cotangent):
        (o, S), pull = jax.vjp(call, arrays)
        return jnp.sum(pull((cotangent * o, S))[0]["query"])

    with pytest.raises(TypeError, match=SECOND):
        jax.eval_shape(jax.grad(pulled), jnp.float32(1.0))


SHARDED = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, PartitionSpec as P
from tests.interpreter import quicken
from tests.triton.linear_cases import Case
from tests.triton.test_transformations import call

quicken()

def value_and_gradient(arrays):
    (o, S), pull = jax.vjp(call, arrays)
    return (o, S), pull((jnp.sin(o), jnp.cos(S)))[0]

case = Case(("gk", "g_gamma"), shape=(2, 20, 2, 2, 16, 16), state=True)
assert len(jax.devices()) == 2
arrays = case.arrays()
want = value_and_gradient(arrays)
mesh, by_row = Mesh(np.array(jax.devices()), ("rows",)), P("rows")
got = jax.jit(jax.shard_map(value_and_gradient, mesh=mesh, in_specs=by_row, out_specs=by_row))(arrays)
jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), got, want)
print("equal")
"""

# Each array is the same on both devices at least once, beside others that are not and are in another round: its gradient is the
# sum of theirs, and typed as the same on both.
REPLICATED = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, PartitionSpec as P
from tests.interpreter import quicken
from tests.triton.linear_cases import Case
from tests.triton.test_transformations import call

quicken()
case = Case(("g", "gk", "gv"), shape=(2, 20, 1, 1, 16, 16), state=True)
arrays = {**case.arrays(), "g_gamma": jnp.array([-0.1])}
mesh = Mesh(np.array(jax.devices()), ("rows",))
names = [*arrays]

def loss(arrays):
    o, S = call(arrays)
    return jnp.sum(jnp.sin(o)) + jnp.sum(jnp.cos(S))

def both_rows(name, x):
    return jnp.concatenate([x, x]) if x.shape[0] == 1 and name != "g_gamma" else x

for also in [(), ("query", "gv"), ("key", "gk"), ("value", "g", "initial_state"), ("query", "key", "value")]:
    shared = ("g_gamma", *also)  # which has no rows
    given = {n: x if n not in shared or n == "g_gamma" else x[:1] for n, x in arrays.items()}
    specs = {n: P() if n in shared else P("rows") for n in names}
    split = jax.shard_map(lambda a: jax.lax.psum(loss(a), "rows"), mesh=mesh, in_specs=(specs,), out_specs=P())
    got = jax.jit(jax.grad(split))(given)
    want = jax.grad(lambda a: loss({n: both_rows(n, x) for n, x in a.items()}))(given)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), got, want)
print("equal")
"""


def test_shard_map_over_two_devices():
    options = {"TRITON_INTERPRET": "1", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    assert outside("-c", SHARDED, environment=options) == "equal\n"


@pytest.mark.long
def test_gradients_of_arrays_that_shards_have_in_common():
    options = {"TRITON_INTERPRET": "1", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    assert outside("-c", REPLICATED, environment=options) == "equal\n"
