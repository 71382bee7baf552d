"""Promises 4, 5 and 7: what is in a key, what is checked before use, and what is stored."""

from __future__ import annotations

import enum
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel._device import Device, on_device
from ejkernel.ops import (
    AutotunePolicy,
    ConfigCache,
    ConfigSelectorChain,
    ConfigWarning,
    Executor,
    Invocation,
    Kernel,
    Level,
    PersistentCache,
    Tuner,
    overlay,
)
from ejkernel.ops.key import bucket, environment, stable_text, without_environment
from tests.ops.toy import Problem, Toy, ToyConfig, problem


def key_of(kernel=None, given=None, **rest) -> str:
    return Invocation.of(kernel or Toy(), given or problem(), **rest).key


class Color(enum.Enum):
    RED = 1


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Awkward:
    """Static data whose plain repr depends on the process."""

    x: jax.Array
    names: frozenset = field(metadata={"static": True}, default=frozenset({"a", "b", "c", "d", "e"}))
    function: object = field(metadata={"static": True}, default=bucket)
    kind: object = field(metadata={"static": True}, default=Color.RED)


KEY_IN_A_PROCESS = """
import jax.numpy as jnp
from ejkernel.ops import Invocation
from tests.ops.test_promises_keys import Awkward
from tests.ops.toy import Toy
print(Invocation.of(Toy(), Awkward(jnp.ones((2, 3))), platform="xla").key)
"""


def test_promise_4_the_key_is_the_same_in_every_process():
    def key(seed: str) -> str:
        environ = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
        done = subprocess.run(
            [sys.executable, "-c", KEY_IN_A_PROCESS], env=environ, capture_output=True, text=True, check=True, timeout=120
        )
        return done.stdout.strip()

    here = Invocation.of(Toy(), Awkward(jnp.ones((2, 3))), platform="xla").key
    assert key("1") == key("2") == here


def test_promise_4_the_key_is_readable_json_with_device_and_versions():
    parts = json.loads(key_of(platform="xla"))
    assert parts["op"] == "toy"
    assert parts["version"] == 1
    assert parts["arrays"] == {"problem.x": "float32[2,~32,4]"}
    assert parts["static"] == {"platform": "'xla'"}
    assert parts["environment"] == environment(jax.devices()[0])
    assert {"backend", "device", "runtime", "jax", "jaxlib", "ejkernel"} <= parts["environment"].keys()


class NewerToy(Toy):
    version = 2


class TritonToy(Toy):
    def library_versions(self, inv):
        return {"triton": "3.9.0"}


class ScaledToy(Toy):
    def __init__(self, scale: float):
        super().__init__()
        self.scale = scale


MATTERS = {
    "shape": lambda: key_of(given=problem(batch=3)),
    "width": lambda: key_of(given=problem(width=8)),
    "length in another bucket": lambda: key_of(given=problem(time=33)),
    "dtype": lambda: key_of(given=problem(dtype=jnp.bfloat16)),
    "static field": lambda: key_of(given=problem(reverse=True)),
    "static argument": lambda: key_of(platform="xla"),
    "an array more": lambda: key_of(given=problem(w=jnp.ones(4))),
    "op version": lambda: key_of(NewerToy()),
    "library version": lambda: key_of(TritonToy()),
    "kernel attribute": lambda: key_of(ScaledToy(1.0)),
    "other kernel attribute": lambda: key_of(ScaledToy(2.0)),
}


def test_promise_4_a_call_planned_for_another_device_has_that_ones_key():
    devices = [Device("gpu", "NVIDIA H200", 90), Device("gpu", "NVIDIA A100", 80), Device("tpu", "TPU v4")]
    keys = [json.loads(Invocation.of(Toy(), problem()).key)]
    for device in devices:
        with on_device(device):
            keys.append(json.loads(Invocation.of(Toy(), problem()).key))
    assert [key["environment"]["device"] for key in keys[1:]] == [device.kind for device in devices]
    assert [key["environment"]["backend"] for key in keys] == [keys[0]["environment"]["backend"], "gpu", "gpu", "tpu"]
    assert all(key["environment"]["planned on"] == keys[0]["environment"]["device"] for key in keys[1:])
    assert {without_environment(json.dumps(key)) for key in keys} == {without_environment(json.dumps(keys[0]))}


def test_promise_4_everything_that_matters_is_in_the_key():
    keys = [key_of()] + [make() for make in MATTERS.values()]
    with jax.default_matmul_precision("highest"):
        keys.append(key_of())
    with jax.enable_x64(True):
        keys.append(key_of(given=problem(dtype=jnp.float32)))
    assert len(set(keys)) == len(keys)


def test_promise_4_nothing_else_is_in_the_key():
    base = key_of()
    assert key_of(given=problem(time=17)) == key_of(given=problem(time=32)) == base
    assert key_of(given=Problem(problem().x + 1)) == base
    assert key_of(given=Problem(np.asarray(problem().x))) == base
    assert key_of(platform=None) == base
    assert Invocation.of(Toy(), problem=problem()).key == base
    found = []
    jax.jit(lambda p: found.append(key_of(given=p)))(problem())

    def total(x):
        found.append(key_of(given=Problem(x)))
        return x.sum()

    jax.grad(total)(problem().x)
    assert found == [base, base]


def test_promise_4_vmap_axes_are_in_the_key():
    found = []

    def body(x, w):
        found.append(Invocation.of(Toy(), Problem(x, w)))
        return x

    x, w = jnp.ones((5, 2, 3, 7, 4)), jnp.ones((5, 4))
    jax.vmap(jax.vmap(body, in_axes=(2, None)), in_axes=(0, 0))(x, w)
    (inv,) = found
    assert inv.shapes == {"problem.x": "float32[2,~4,4]", "problem.w": "float32[4]"}
    assert inv.placement == {"problem.x": "vmap0 7@2 vmap1 5@0", "problem.w": "vmap1 5@0"}
    assert inv.key != Invocation.of(Toy(), Problem(x[0, :, :, 0], w[0])).key


def test_promise_4_sharding_is_in_the_key():
    def sharded(axis: str | None, devices: int = 2) -> Problem:
        mesh = jax.sharding.AbstractMesh((devices, 1), ("data", "trivial"))
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(axis))
        return Problem(jax.ShapeDtypeStruct((2, 24, 4), jnp.float32, sharding=sharding))

    split = Invocation.of(Toy(), sharded("data"))
    assert split.placement == {"problem.x": "split 2x1x1"}
    assert split.key != key_of()
    assert key_of(given=sharded("trivial")) == key_of(given=sharded(None)) == key_of(given=sharded("data", 1)) == key_of()


@pytest.mark.slow
def test_promise_4_varying_lengths_cause_a_bounded_number_of_tunings():
    chain = ConfigSelectorChain(policy=AutotunePolicy(cache_miss_fallback="autotune"), tuner=Tuner(0, 1))
    for time in range(1, 600, 13):
        chain.choose(Invocation.of(Toy(), Problem(jax.ShapeDtypeStruct((1, time, 2), jnp.float32))))
    assert len(list(chain.cache.items())) == 8  # 47 lengths: 1, 16, 32, 64, 128, 256, 512, 1024


def test_promise_4_a_value_that_shows_only_its_address_is_refused():
    with pytest.raises(TypeError, match="shows an address"):
        stable_text(object(), "problem.mask")


@pytest.mark.parametrize("level", [Level.MEMORY, Level.DISK])
def test_promise_5_a_stored_config_is_checked_against_its_class_and_support(level, tmp_path):
    inv = Invocation.of(Toy(), problem())
    for bad, reason in ((ToyConfig(128), "larger than 64"), ({"block": "x", "kind": ""}, "must be int")):
        chain = ConfigSelectorChain(
            ConfigCache(), AutotunePolicy(cache_miss_fallback="heuristics"), persistent=PersistentCache("toy", tmp_path)
        )
        (chain.cache if level is Level.MEMORY else PersistentCache("toy", tmp_path)).put(inv.key, bad)
        with pytest.warns(ConfigWarning, match=reason):
            choice = chain.choose(inv)
        assert (choice.level, choice.config) == (Level.HEURISTICS, ToyConfig())
        (chain.cache if level is Level.MEMORY else PersistentCache("toy", tmp_path)).put(inv.key, ToyConfig(64))
        assert chain.choose(inv).level is level


def test_promise_5_a_check_that_raises_is_a_miss():
    class Broken(Toy):
        def check_cfg(self, inv, cfg):
            raise RuntimeError("no such device")

    inv = Invocation.of(Broken(), problem())
    chain = ConfigSelectorChain(policy=AutotunePolicy(cache_miss_fallback="heuristics"))
    chain.cache.put(inv.key, ToyConfig(8))
    with pytest.warns(ConfigWarning, match="no such device"):
        assert chain.choose(inv).level is Level.HEURISTICS


def test_promise_7_only_measured_results_are_stored(tmp_path):
    chain = ConfigSelectorChain(
        policy=AutotunePolicy(cache_miss_fallback="heuristics"), tuner=Tuner(0, 1), persistent=PersistentCache("toy", tmp_path)
    )
    executor = Executor(chain)
    executor(Toy(), problem())
    executor(Toy(), problem(), _cfg=ToyConfig(8))
    with overlay(toy=ToyConfig(32)):
        executor(Toy(), problem())
    assert not list(chain.cache.items())
    assert not list(PersistentCache("toy", tmp_path).items())
    chain.policy = replace(chain.policy, cache_miss_fallback="autotune")
    executor(Toy(), problem(time=99))
    assert len(list(chain.cache.items())) == len(list(PersistentCache("toy", tmp_path).items())) == 1


def test_levels_answer_in_order(tmp_path, monkeypatch):
    inv = Invocation.of(Toy(), problem())
    disk = PersistentCache("toy", tmp_path, ToyConfig)
    chain = ConfigSelectorChain(policy=AutotunePolicy(cache_miss_fallback="heuristics"), persistent=disk)
    assert chain.choose(inv).level is Level.HEURISTICS
    disk.put(inv.key, ToyConfig(1), {"seconds": 1.0})
    assert chain.choose(inv).level is Level.DISK
    found = chain.choose(inv)
    assert (found.level, found.config, found.record["seconds"]) == (Level.MEMORY, ToyConfig(1), 1.0)
    with overlay(toy=ToyConfig(2)):
        assert chain.choose(inv).level is Level.OVERLAY
        with overlay({inv.key: ToyConfig(3)}):
            assert chain.choose(inv).config == ToyConfig(3)
        assert chain.choose(inv, ToyConfig(4)).level is Level.EXPLICIT


def test_a_kernel_without_a_named_config_class_works_too(tmp_path):
    class Plain(Kernel):
        op_id = "plain"

        def run(self, x, *, cfg):
            return x * cfg.block

        def heuristic_cfg(self, inv):
            return ToyConfig(2)

        def candidate_cfgs(self, inv):
            return [ToyConfig(2, "other")]

    chain = ConfigSelectorChain(
        policy=AutotunePolicy(cache_miss_fallback="autotune"), tuner=Tuner(0, 1), persistent=PersistentCache("x", tmp_path)
    )
    assert Executor(chain)(Plain(), jnp.float32(3)) == 6
    again = ConfigSelectorChain(persistent=PersistentCache("x", tmp_path))
    assert again.choose(Invocation.of(Plain(), jnp.float32(3))).level is Level.DISK
