"""Carrying results elsewhere: text, shipped defaults, tuning ahead, and what importing costs."""

from __future__ import annotations

import enum
import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ejkernel.ops
from ejkernel.ops import (
    AutotunePolicy,
    ConfigCache,
    ConfigSelectorChain,
    ConfigWarning,
    Executor,
    Invocation,
    Level,
    PersistentCache,
    Tuner,
    dumps,
    loads,
    merge,
    tune,
)
from ejkernel.ops.config import shipped
from ejkernel.ops.config.cache import shared_cache
from ejkernel.ops.config.codec import from_fields, to_fields
from ejkernel.ops.key import device_kind
from tests.ops.toy import Cube, Problem, Toy, ToyConfig, problem

GUESS = AutotunePolicy(cache_miss_fallback="heuristics")


def filled(config: ToyConfig | None = None, time: str = "2026-01-01") -> ConfigCache:
    cache = ConfigCache()
    cache.put(Invocation.of(Toy(), problem()).key, config or ToyConfig(8), {"seconds": 0.5, "time": time})
    return cache


def test_dumps_and_loads_carry_results_and_records(tmp_path):
    text, inv = dumps(filled()), Invocation.of(Toy(), problem())
    chain = ConfigSelectorChain(policy=GUESS)
    assert loads(text, chain.cache) == 1
    choice = chain.choose(inv)
    assert (choice.level, choice.config, choice.record["seconds"]) == (Level.MEMORY, ToyConfig(8), 0.5)
    assert loads(text, PersistentCache("anything", tmp_path)) == 1
    assert PersistentCache("toy", tmp_path, ToyConfig).get(inv.key) == ToyConfig(8)
    assert dumps(PersistentCache("toy", tmp_path)) == dumps(chain.cache) == text
    assert loads(text) == 1
    assert shared_cache().get(inv.key) == {"block": 8, "kind": "plain"}
    assert dumps() == text


def test_the_later_measurement_wins():
    old, new = dumps(filled(ToyConfig(8), "2026-01-01")), dumps(filled(ToyConfig(32), "2026-02-01"))
    assert merge(old, new) == merge(new, old) == new
    cache = filled(ToyConfig(32), "2026-02-01")
    assert loads(old, cache) == 0
    assert [config for _, config in cache.items()] == [ToyConfig(32)]
    assert loads(new, filled(ToyConfig(8), "2026-01-01")) == 1
    assert json.loads(merge())["entries"] == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"format": 9, "entries": []}',
        '{"format": 1}',
        '{"format": 1, "entries": [3]}',
        '{"format": 1, "entries": [{"key": "no JSON", "config": {}, "record": {}}]}',
        '{"format": 1, "entries": [{"key": "[]", "config": {}, "record": {}}]}',
    ],
)
def test_a_text_that_is_none_is_refused_as_a_whole(text):
    with pytest.raises(ValueError):
        loads(text)
    assert not list(shared_cache().items())


class Mode(enum.Enum):
    FAST = "fast"


@dataclass(frozen=True)
class Inner:
    width: int = 3


@dataclass(frozen=True)
class Rich:
    mode: Mode = Mode.FAST
    schedule: Literal["chunked", "recurrent"] = "chunked"
    tiles: tuple[int, ...] = (16, 32)
    pair: tuple[int, str] = (1, "a")
    platform: str | None = None
    scale: float = 1.0
    inner: Inner = Inner()

    def __post_init__(self):
        if self.scale < 0:
            raise ValueError("scale must not be negative")


def test_configs_of_every_field_type_survive_json():
    for config in (Rich(), Rich(platform="xla", tiles=(), scale=2.5, schedule="recurrent", inner=Inner(9))):
        assert from_fields(Rich, json.loads(json.dumps(to_fields(config)))) == config
    assert from_fields(Rich, {**to_fields(Rich()), "scale": 2}).scale == 2.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "slow"}, "mode must be Mode"),
        ({"schedule": "other"}, "schedule must be"),
        ({"tiles": [1, "2"]}, "tiles must be int"),
        ({"pair": [1]}, "pair must be"),
        ({"platform": 3}, "platform must be one of str, NoneType"),
        ({"scale": -1.0}, "refuses its fields: scale must not be negative"),
        ({"inner": {"width": 1.5}}, "Inner.width must be int"),
    ],
)
def test_fields_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        from_fields(Rich, {**to_fields(Rich()), **changes})


def test_a_class_whose_annotations_cannot_be_looked_up_is_read_without_checking_types():
    @dataclass(frozen=True)
    class Local:
        block: NowhereDefined  # type: ignore[name-defined]  # noqa: F821
        tiles: tuple[int, ...] = ()

    assert from_fields(Local, {"block": 3, "tiles": [1, 2]}) == Local(3, (1, 2))
    with pytest.raises(ValueError, match="unknown field 'warps'"):
        from_fields(Local, {"block": 3, "tiles": [], "warps": 1})


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(), inside, max_size=3),
    max_leaves=5,
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(list(to_fields(Rich()))), anything))
def test_whatever_a_stored_entry_holds_it_is_read_or_refused_with_a_reason(fields):
    try:
        config = from_fields(Rich, {**to_fields(Rich()), **fields})
    except ValueError:
        return
    assert isinstance(config, Rich)
    hash(config)


def test_only_plain_values_can_be_stored():
    cache = ConfigCache()
    cache.put("{}", 3)
    with pytest.raises(TypeError, match="must be a dataclass instance"):
        dumps(cache)
    with pytest.raises(TypeError, match="field 'kind'"):
        to_fields(ToyConfig(1, object()))
    assert json.dumps(to_fields(ToyConfig(np.int64(8)))) == json.dumps(to_fields(ToyConfig(8)))


def test_shipped_defaults_answer_by_device_kind_with_a_relative_as_fallback(tmp_path, monkeypatch):
    inv, chain = Invocation.of(Toy(), problem()), ConfigSelectorChain(policy=GUESS)
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    monkeypatch.setattr(shipped, "device_kind", lambda device: "NVIDIA H200")
    assert chain.choose(inv).level is Level.HEURISTICS
    elsewhere = ConfigCache()  # measured on another device with other versions
    parts = json.loads(inv.key)
    parts["environment"] = {"device": "NVIDIA H100 80GB HBM3", "jax": "0.9"}
    elsewhere.put(json.dumps(parts), ToyConfig(32), {"seconds": 1.0})
    shipped.write(tmp_path / "h100.json", "h100", elsewhere.entries())
    shipped._defaults.cache_clear()
    choice = chain.choose(inv)
    assert (choice.level, choice.config, choice.record["shipped_for"]) == (Level.SHIPPED, ToyConfig(32), "h100")
    assert not list(chain.cache.items())  # it was not measured here
    shipped.write(tmp_path / "h200.json", "h200", filled(ToyConfig(64)).entries())
    shipped._defaults.cache_clear()
    assert chain.choose(inv).config == ToyConfig(64)
    shipped.write(tmp_path / "h200.json", "h200", filled(ToyConfig(128)).entries())  # refused by check_cfg
    shipped._defaults.cache_clear()
    with pytest.warns(ConfigWarning, match="larger than 64"):
        assert chain.choose(inv).level is Level.HEURISTICS
    (tmp_path / "h200.json").write_text("{")
    shipped._defaults.cache_clear()
    with pytest.warns(ConfigWarning, match="ignored the shipped configurations"):
        assert chain.choose(inv).config == ToyConfig(32)
    shipped._defaults.cache_clear()


@pytest.mark.parametrize(
    ("kind", "name", "first_relative"),
    [
        ("NVIDIA H100 80GB HBM3", "h100", "h200"),
        ("NVIDIA H200", "h200", "h100"),
        ("NVIDIA GH200 480GB", "gh200", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100", "a800"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090", "l40s"),
        ("NVIDIA L40S", "l40s", "rtx-4090"),
        ("NVIDIA B200", "b200", "gb200"),
        ("TPU v5 lite", "tpu-v5-lite", "tpu-v6e"),
        ("TPU v4", "tpu-v4", "tpu-v5p"),
        ("Some New Device 9", "some-new-device-9", None),
    ],
)
def test_device_names_and_relatives(kind, name, first_relative):
    assert shipped.device_name(kind) == name
    found = shipped.relatives(name)
    assert found[0] == name
    assert (found[1] if len(found) > 1 else None) == first_relative


def test_shipped_files_are_readable_and_named_after_devices():
    for file in shipped.FOLDER.glob("*.json"):
        assert shipped.read(file)
        assert shipped.device_name(file.stem) == file.stem
    assert shipped.device_name(device_kind(jax.devices("cpu")[0])) == "cpu"


def test_tune_finds_every_call_whatever_it_is_inside_of():
    executor = Executor(ConfigSelectorChain(policy=GUESS, tuner=Tuner(0, 1)))

    @jax.jit
    def layer(x):
        return executor(Toy(), Problem(x))

    def step(x, y, name):
        assert name == "static"
        first = layer(x)
        _, rows = jax.lax.scan(lambda carry, row: (carry, executor(Toy(), Problem(row))), 0, y)
        gradient = jax.grad(lambda z: executor(Cube(), z, jnp.asarray(2)).sum())(first)
        mapped = jax.vmap(lambda row: executor(Toy(), Problem(row)))(y)
        executor(Toy(), problem(batch=11), _cfg=ToyConfig(8))
        return gradient.sum() + rows.sum() + mapped.sum() + layer(x).sum()

    x, y = jnp.ones((2, 3, 4)), jnp.ones((5, 2, 3, 7))
    step(x, y, "static")  # everything that is jitted is traced already
    assert not list(executor.chooser.cache.items())
    found = tune(step, x, jax.ShapeDtypeStruct(y.shape, y.dtype), name="static")
    assert [(choice.op_id, *choice.arguments.values()) for choice in found] == [
        ("toy", "float32[2,~4,4]"),
        ("toy", "float32[2,~4,7]"),
        ("cube", "int32[]", "float32[2,3,4]"),
        ("toy", "float32[2,~4,7]", "vmap0 5@0"),
    ]
    assert {choice.level for choice in found} == {"autotune"}
    assert len(found) == len(list(executor.chooser.cache.items())) == 4
    assert {choice.level for choice in tune(step, x, y, "static")} == {"memory"}
    for choice in found:
        assert choice.record["candidates"]
    assert executor.choose(Toy(), Problem(x)).level is Level.MEMORY


def test_tune_adds_nothing_to_programs_traced_later():
    executor = Executor(ConfigSelectorChain(policy=GUESS, tuner=Tuner(0, 1)))
    f = jax.jit(lambda x: executor(Toy(), Problem(x)))
    x = problem().x
    with jax.checking_leaks():
        tune(f, x)
    assert jnp.array_equal(f(x), 2 * x)


def test_tune_says_when_there_is_nothing_to_tune():
    with pytest.warns(ConfigWarning, match="calls no operation"):
        assert tune(lambda x: x + 1, jnp.ones(3)) == ()


def in_new_process(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_creates_nothing_and_loads_nothing_that_only_tuning_needs(tmp_path, monkeypatch):
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "cache"))
    loaded = in_new_process(
        "import sys, ejkernel.ops, ejkernel.modules.base; ejkernel.modules.base.create_default_executor()\n"
        "print(*[name for name in sys.modules if name.startswith('ejkernel.ops') or name == 'platformdirs'])"
    ).split()
    assert "ejkernel.ops.executor" in loaded
    needed_later = {"race", "trial", "compare", "inputs", "distributed", "ahead", "config.exchange"}
    assert not {f"ejkernel.ops.{name}" for name in needed_later} & set(loaded)
    assert "platformdirs" not in loaded
    assert not (tmp_path / "cache").exists()


def test_every_public_name_is_there():
    for name in ejkernel.ops.__all__:
        assert getattr(ejkernel.ops, name) is not None
        assert name in dir(ejkernel.ops)
    with pytest.raises(AttributeError, match="no attribute 'Tunner'"):
        _ = ejkernel.ops.Tunner
