"""Running: eager, traced, differentiated, with a kernel's own gradient, with arguments of every kind."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.modules.base import create_default_executor
from ejkernel.ops import (
    AutotunePolicy,
    ConfigSelectorChain,
    Executor,
    Invocation,
    Kernel,
    Level,
    PersistentCache,
    Tuner,
    overlay,
)
from ejkernel.ops.config.cache import shared_cache
from tests.ops.toy import Cube, Problem, Toy, ToyConfig, problem


@pytest.fixture
def executor() -> Executor:
    return Executor(ConfigSelectorChain())


def test_eager_traced_and_differentiated_calls_give_the_same(executor):
    x = jnp.round(7 * problem().x)  # whole numbers, whose sums are exact in any order

    def f(x):
        return executor(Toy(), Problem(x, reverse=True))

    expected = 2 * x[:, ::-1]
    for found in (f(x), jax.jit(f)(x), jax.vmap(f)(x[None])[0], f(np.asarray(x))):
        assert jnp.array_equal(found, expected)
    weights = jnp.arange(x.size, dtype=x.dtype).reshape(x.shape)
    for gradient in (jax.grad(lambda x: (f(x) * weights).sum()), jax.jit(jax.grad(lambda x: (f(x) * weights).sum()))):
        assert jnp.array_equal(gradient(x), 2 * weights[:, ::-1])
    assert jnp.array_equal(jax.jvp(f, (x,), (weights,))[1], 2 * weights[:, ::-1])
    assert jnp.array_equal(jax.jacfwd(lambda s: f(s * x))(1.0), expected)
    assert jnp.array_equal(jax.hessian(lambda s: (f(s * x) ** 2).sum())(1.0), 2 * (expected**2).sum())


def test_an_eager_call_is_compiled_once_and_so_is_its_gradient(executor):
    traces = []

    class Counted(Toy):
        def run(self, problem, *, platform=None, cfg):
            traces.append(cfg)
            return super().run(problem, platform=platform, cfg=cfg)

    for _ in range(5):
        executor(Counted(), problem())
    assert len(traces) == 1
    for _ in range(5):
        jax.grad(lambda x: executor(Counted(), Problem(x)).sum())(problem().x)
    assert len(traces) <= 2
    executor(Counted(), problem(batch=3))
    executor(Counted(), problem(), platform="xla")
    executor(Counted(), problem(), _cfg=ToyConfig(8))
    assert len(traces) <= 5


class OfAnotherLibrary:
    """An array that can be written to, and is known by its address."""

    def __init__(self, values):
        self.values = np.array(values, np.float32)

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.values, dtype)


class OfOneForJax:
    def __init__(self, values):
        self.values = values

    def __jax_array__(self):
        return jnp.asarray(self.values, jnp.float32)


@pytest.mark.parametrize("kind", [OfAnotherLibrary, OfOneForJax])
def test_arrays_of_other_libraries_are_data(executor, kind):
    """What is written to one between two calls is seen, by the operations too."""
    array = kind([1.0, 2.0])
    run = lambda: executor(Cube(), array, n=1)
    assert run().tolist() == [1.0, 8.0]
    array.values = np.array([3.0, 1.0])
    assert run().tolist() == [27.0, 1.0]
    assert executor.choose(Cube(), array, n=1).config == executor.choose(Cube(), np.zeros(2, np.float32), n=1).config


def test_a_shape_is_no_argument_of_a_call(executor):
    with pytest.raises(TypeError, match=r"cube: x must hold arrays; got ShapeDtypeStruct\(shape=\(2,\)"):
        executor(Cube(), jax.ShapeDtypeStruct((2,), jnp.float32), n=1)


def test_static_values_of_different_types_are_not_confused(executor):
    class Typed(Kernel[ToyConfig, jax.Array]):
        op_id = "typed"

        def run(self, x, flag, *, cfg):
            return x + {bool: 1, int: 2, float: 3}[type(flag)]

        def heuristic_cfg(self, inv):
            return ToyConfig()

    x = jnp.float32(0)
    assert [int(executor(Typed(), x, flag)) for flag in (True, 1, 1.0, True)] == [1, 2, 3, 1]


def test_own_gradient_is_used_everywhere(executor):
    n = jnp.asarray(2, jnp.int32)

    def f(x):
        return executor(Cube(), x, n)

    assert f(3.0) == f(jnp.float32(3)) == 54
    for grad in (jax.grad(f), jax.jit(jax.grad(f)), jax.grad(jax.jit(f)), jax.grad(jax.checkpoint(f))):
        assert grad(3.0) == 540  # ten times the truth: it is the kernel's own
    assert jnp.array_equal(jax.vmap(jax.grad(f))(jnp.arange(3.0)), 60 * jnp.arange(3.0) ** 2)
    with jax.checking_leaks():
        assert jax.grad(f)(3.0) == 540


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pair:
    a: jax.Array
    b: jax.Array | None


class OfPair(Kernel[ToyConfig, jax.Array]):
    op_id = "of_pair"
    gradient = staticmethod(lambda pair, dy: (Pair(7 * dy, None),))

    def heuristic_cfg(self, inv):
        return ToyConfig()

    def run(self, pair, *, cfg):
        return pair.a * 2

    def fwd_with_residuals(self, pair, *, cfg):
        return pair.a * 2, None

    def vjp(self, residuals, y, dy, pair, *, cfg):
        return type(self).gradient(pair, dy)


def test_own_gradient_of_a_pytree(executor):
    a, b = jnp.float32(1), jnp.float32(2)
    gradient = jax.grad(lambda pair: executor(OfPair(), pair))
    assert gradient(Pair(a, None)) == Pair(7.0, None)
    assert gradient(Pair(a, b)) == Pair(7.0, 0.0)


@pytest.mark.parametrize(
    ("gradient", "error", "message"),
    [
        (lambda pair, dy: 7 * dy, TypeError, "must return a tuple of 1"),
        (lambda pair, dy: (dy, dy), TypeError, "got a tuple of 2"),
        (lambda pair, dy: (Pair(jnp.ones(3), None),), ValueError, r"gradient of shape \[3\]"),
    ],
)
def test_own_gradient_of_the_wrong_form_is_refused(executor, gradient, error, message):
    kernel = type("Wrong", (OfPair,), {"gradient": staticmethod(gradient)})()
    with pytest.raises(error, match=message):
        jax.grad(lambda a: executor(kernel, Pair(a, None)))(1.0)


def test_own_gradient_needs_both_halves_and_positional_arrays(executor):
    class Half(Toy):
        def vjp(self, residuals, y, dy, *args, cfg):
            return (dy,)

    with pytest.raises(TypeError, match="defines vjp but not fwd_with_residuals"):
        executor(Half(), problem())
    with pytest.raises(TypeError, match="pass 'x' by position"):
        jax.grad(lambda x: executor(Cube(), x=x, n=2))(1.0)


@pytest.mark.parametrize("other", ["attention", len], ids=["name", "function"])
def test_what_is_no_kernel_is_refused_by_name(executor, other):
    with pytest.raises(TypeError, match=r"kernel must be an instance of ejkernel\.ops\.Kernel, such as Attention\(\); got"):
        executor(other, jnp.ones(3))


def test_errors_name_the_argument(executor):
    with pytest.raises(TypeError, match="toy: missing a required argument: 'problem'"):
        executor(Toy())
    with pytest.raises(TypeError, match="toy: got an unexpected keyword argument 'plattform'"):
        executor(Toy(), problem(), plattform="xla")
    with pytest.raises(TypeError, match="must be hashable"):
        executor(Toy(), problem(), platform={1, 2})
    with pytest.raises(ValueError, match="op_id must be letters"):
        executor(Kernel("../up"), problem())
    with pytest.raises(NotImplementedError, match="must define heuristic_cfg"):
        executor(Kernel("bare"), problem())
    with pytest.raises(NotImplementedError, match=r"must define get_impl\(cfg\) or run"):
        executor(Kernel("bare"), problem(), _cfg=ToyConfig())


@dataclass
class Loose:
    """A configuration that can be changed."""

    block: int = 3


@dataclass(eq=False)
class Alone(Loose):
    """The same, but with a hash."""


def guessing(heuristic, *candidates) -> Kernel:
    class Guess(Kernel):
        op_id = "guess"

        def run(self, x, *, cfg):
            return x

        def heuristic_cfg(self, inv):
            return heuristic

        def candidate_cfgs(self, inv):
            return candidates

    return Guess()


@pytest.mark.parametrize(
    ("cfg", "reason"),
    [
        (Loose(), r"Loose can be changed; declare it with @dataclass\(frozen=True\)"),
        (Alone(), "Alone can be changed"),
        ({"block": 3}, "it cannot be hashed"),
        (ToyConfig(8, []), "it cannot be hashed"),
        (ToyConfig, "it is the class ToyConfig itself"),
    ],
)
def test_a_configuration_that_is_no_frozen_dataclass_is_refused(executor, cfg, reason):
    x = jnp.ones(3)
    message = f"must be a frozen dataclass, hashable in all its fields; got .*: {reason}"
    with pytest.raises(TypeError, match=f"the heuristics configuration of 'guess' {message}"):
        executor(guessing(cfg), x)
    with pytest.raises(TypeError, match=f"(guess: cfg|the explicit configuration of 'guess') {message}"):
        executor(guessing(ToyConfig()), x, _cfg=cfg)
    with pytest.raises(TypeError, match=f"the configuration for 'guess' {message}"), overlay(guess=cfg):
        pass
    tuned = Tuner(0, 1).tune(Invocation.of(guessing(ToyConfig(), cfg, ToyConfig(8)), x))
    assert [c.get("reason", "")[:17] for c in tuned.record["candidates"]] == ["", "", "failed: TypeError"]


def test_a_candidate_that_cannot_be_stored_loses():
    tuned = Tuner(0, 1).tune(Invocation.of(guessing(ToyConfig(), 4, ToyConfig(8, object())), jnp.ones(3)))
    assert [candidate.get("reason", "")[:17] for candidate in tuned.record["candidates"]] == ["", *["failed: TypeError"] * 2]
    assert tuned.record["candidates"][1]["config"] == {"value": "4"}


@pytest.mark.parametrize("word", ["autotune", "heuristics", "error"])
def test_a_policy_may_be_given_by_its_word(word):
    assert ConfigSelectorChain(policy=word).policy == AutotunePolicy(cache_miss_fallback=word)
    expected = AutotunePolicy(cache_miss_fallback=word, validate_backward=True)
    assert create_default_executor(word).chooser.policy == expected
    with pytest.raises(TypeError, match=f"allow_autotune must be True or False; got '{word}'; .*cache_miss_fallback='{word}'"):
        AutotunePolicy(word)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"policy": "sometimes"}, ValueError, "policy must be one of 'autotune', 'heuristics', 'error'; got 'sometimes'"),
        ({"policy": True}, TypeError, "policy must be an AutotunePolicy, one of .* got True"),
        ({"policy": AutotunePolicy}, TypeError, "policy must be an AutotunePolicy, one of"),
        ({"tuner": Tuner}, TypeError, "tuner must be a Tuner or None; got <class"),
        ({"cache": "folder"}, TypeError, "cache must be a ConfigCache or None; got 'folder'"),
        ({"persistent": "folder"}, TypeError, "persistent must be a PersistentCache, .* got 'folder'"),
    ],
)
def test_a_chain_of_other_parts_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        ConfigSelectorChain(**options)


def test_get_impl_alone_is_enough(executor):
    class Times(Kernel[ToyConfig, jax.Array]):
        def get_impl(self, cfg):
            return lambda x, factor=1: x * cfg.block * factor

        def heuristic_cfg(self, inv):
            return ToyConfig(2 if inv.args[0].shape == (3,) else 5)

    assert executor(Times("times"), jnp.ones(3), factor=3)[0] == 6
    assert executor(Times("times"), jnp.ones(4))[0] == 5
    assert Times("times") == Times("times") != Times("other")


def test_a_change_of_memory_reaches_eager_calls_at_once(executor):
    class Shown(Toy):
        def run(self, problem, *, platform=None, cfg):
            return problem.x * 0 + cfg.block

    inv = Invocation.of(Shown(), problem())
    assert executor(Shown(), problem())[0, 0, 0] == 16
    executor.chooser.cache.put(inv.key, ToyConfig(32))
    assert executor(Shown(), problem())[0, 0, 0] == 32
    executor.chooser.cache.clear()
    assert executor(Shown(), problem())[0, 0, 0] == 16


def test_stores_of_plans_are_bounded(executor, monkeypatch):
    monkeypatch.setattr("ejkernel.ops.executor._LIMIT", 4)
    for number in range(20):
        assert executor(Toy(), problem(batch=1, time=1, width=1, scale=float(number))).shape == (1, 1, 1)
    assert len(executor._known) <= 4
    assert len(executor._plans) <= 4


def test_typed_keys_ints_bools_and_8_bit_floats_are_drawn_and_tuned():
    class Mixed(Kernel[ToyConfig, jax.Array]):
        op_id = "mixed"

        def run(self, key, flags, count, small, c, *, cfg):
            noise = jax.random.normal(jax.random.wrap_key_data(key) if key.dtype == jnp.uint32 else key, flags.shape)
            return jnp.where(flags, noise, count.astype(jnp.float32) + small.astype(jnp.float32)) + c.real

        def heuristic_cfg(self, inv):
            return ToyConfig()

        def candidate_cfgs(self, inv):
            return [ToyConfig(8)]

    chain = ConfigSelectorChain(policy=AutotunePolicy(cache_miss_fallback="autotune"), tuner=Tuner(0, 1))
    small = jnp.ones(3, jnp.float8_e4m3fn)
    args = (jax.random.key(0), jnp.ones(3, bool), jnp.ones(3, jnp.int32), small, jnp.ones(3, jnp.complex64))
    assert chain.choose(Invocation.of(Mixed(), *args)).level is Level.AUTOTUNE


def test_tuning_under_vmap_runs_the_mapped_call():
    shapes = []

    class Seen(Toy):
        def run(self, problem, *, platform=None, cfg):
            shapes.append((problem.x.shape, [axis for axis in (getattr(problem.x, "batch_dim", None),) if axis is not None]))
            return super().run(problem, platform=platform, cfg=cfg)

    chain = ConfigSelectorChain(policy=AutotunePolicy(cache_miss_fallback="autotune"), tuner=Tuner(0, 1))
    x = jnp.ones((2, 3, 4, 6))
    found = jax.vmap(lambda x: Executor(chain)(Seen(), Problem(x)), in_axes=3)(x)
    assert found.shape == (6, 2, 3, 4)
    assert {shape for shape, _ in shapes} == {(2, 3, 4)}
    assert len([axes for _, axes in shapes if axes]) >= 3  # the heuristic and two candidates, each mapped


def test_a_sharded_call_is_measured_on_one_shard():
    seen = []

    class Seen(Toy):
        def random_inputs(self, inv, key):
            args, kwargs = super().random_inputs(inv, key)
            seen.append(args[0].x.shape)
            return args, kwargs

    mesh = jax.sharding.AbstractMesh((4,), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    chain = ConfigSelectorChain(policy=AutotunePolicy(cache_miss_fallback="autotune"), tuner=Tuner(0, 1))
    chain.choose(Invocation.of(Seen(), Problem(jax.ShapeDtypeStruct((8, 3, 2), jnp.float32, sharding=sharding))))
    assert seen == [(2, 3, 2)]


def test_the_default_executor_keeps_results_in_the_folder_of_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("EJKERNEL_AUTOTUNE_POLICY", "autotune")
    executor = create_default_executor()
    executor(Toy(), problem())
    assert list(tmp_path.joinpath("cache", "toy").glob("*.json"))
    assert create_default_executor().choose(Toy(), problem()).level is Level.MEMORY
    shared_cache().clear()
    choice = create_default_executor().choose(Toy(), problem())
    assert choice.level is Level.DISK
    assert choice.record["measured"] == "forward+backward"
    assert PersistentCache("toy").folder == tmp_path / "cache" / "toy"


def test_the_usual_folder_is_the_users_cache_folder(monkeypatch):
    import platformdirs

    monkeypatch.delenv("EJKERNEL_CACHE_DIR")
    assert str(PersistentCache("toy").folder).startswith(platformdirs.user_cache_dir("ejkernel", appauthor=False))


ON_FOUR_DEVICES = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from ejkernel.ops import *
from tests.ops.toy import *

mesh = Mesh(np.array(jax.devices()), ("data",))
x = problem(batch=8).x
split = jax.device_put(x, NamedSharding(mesh, P("data")))
executor = Executor(ConfigSelectorChain(policy=AutotunePolicy(cache_miss_fallback="autotune"), tuner=Tuner(0, 1)))
op = lambda x: executor(Toy(), Problem(x))
for run in (op, jax.jit(op), jax.shard_map(op, mesh=mesh, in_specs=P("data"), out_specs=P("data")),
            jax.jit(jax.shard_map(op, mesh=mesh, in_specs=P("data"), out_specs=P("data")))):
    y = run(split)
    assert jnp.array_equal(y, 2 * x) and y.sharding.is_equivalent_to(split.sharding, 3), run
    assert jnp.array_equal(jax.grad(lambda x: (run(x) * x).sum())(split), 4 * x)
print(*sorted({" ".join(chosen.arguments.values()) for chosen in report()}), sep="\\n")
"""


@pytest.mark.slow
def test_sharded_arrays_and_shard_map():
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    environment["PYTHONPATH"] = os.pathsep.join([os.getcwd(), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", ON_FOUR_DEVICES], env=environment, capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "float32[2,~32,4]",  # inside shard_map
        "float32[8,~32,4]",  # under jit, where the sharding is not visible
        "float32[8,~32,4] split 4x1x1",
    ]
