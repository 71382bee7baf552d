"""Promises 1 to 3: what is on disk never breaks a call, is never half written, and is never lost."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import jax.numpy as jnp
import pytest

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
)
from ejkernel.ops.reporting import describe
from tests.ops import racers
from tests.ops.racers import Race, Racer
from tests.ops.toy import Problem, Toy, ToyConfig

HEURISTICS = AutotunePolicy(cache_miss_fallback="heuristics")


def chain(path) -> ConfigSelectorChain:
    return ConfigSelectorChain(policy=HEURISTICS, tuner=Tuner(0, 3), persistent=PersistentCache("toy", path, ToyConfig))


def call() -> Invocation:
    return Invocation.of(Toy(), Problem(jnp.ones((2, 3, 4))))


def entry(**changes) -> str:
    content = {"format": 1, "key": call().key, "config": {"block": 8, "kind": "plain"}, "record": {}, **changes}
    return json.dumps(content)


DAMAGE: dict[str, str | bytes] = {
    "empty": "",
    "truncated": entry()[:-20],
    "not JSON": "block = 8",
    "not text": b"\xff\xfe\x00\x80",
    "a list": "[1, 2]",
    "a number": "3",
    "nested for ever": "[" * 100_000,
    "huge": " " * (1 << 21),
    "another format": entry(format=99),
    "another key": entry(key="other"),
    "no key": entry(key=None),
    "no config": entry(config=None),
    "no record": entry(record=[]),
    "unknown field": entry(config={"block": 8, "kind": "plain", "warps": 4}),
    "missing field": entry(config={"block": 8}),
    "wrong type": entry(config={"block": "8", "kind": "plain"}),
    "a bool for an int": entry(config={"block": True, "kind": "plain"}),
    "NaN": entry(config={"block": float("nan"), "kind": "plain"}),
    "NaN in its record": entry(record={"of nobody": float("nan")}),
    "a number beyond all": entry(record={"of nobody": 1}).replace('"of nobody": 1', '"of nobody": 1e999'),
}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda name: name.replace(" ", "_"))
def test_promise_1_damaged_file_is_a_miss_with_one_warning_and_the_next_write_heals(damage, tmp_path):
    inv, stored = call(), PersistentCache("toy", tmp_path, ToyConfig)
    stored.folder.mkdir()
    content = DAMAGE[damage]
    stored.file(inv.key).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.warns(ConfigWarning, match="ignored the stored configuration") as given:
        found = [(stored.get(inv.key), chain(tmp_path).choose(inv).level, dict(stored.items())) for _ in range(3)]
    assert len(given) == 1
    assert [(config, level) for config, level, _ in found] == [(None, Level.HEURISTICS)] * 3
    assert all(inv.key not in items for _, _, items in found)
    stored.put(inv.key, ToyConfig(8))
    assert chain(tmp_path).choose(inv).config == ToyConfig(8)


@pytest.mark.parametrize("kind", ["folder", "pipe", "dangling link"])
def test_promise_1_a_thing_that_is_no_file_is_a_miss(kind, tmp_path):
    inv, stored = call(), PersistentCache("toy", tmp_path, ToyConfig)
    stored.folder.mkdir()
    file = stored.file(inv.key)
    {"folder": file.mkdir, "pipe": lambda: os.mkfifo(file), "dangling link": lambda: file.symlink_to("nowhere")}[kind]()
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        assert stored.get(inv.key) is None
        assert stored.get(inv.key) is None
    assert len(given) == (0 if kind == "dangling link" else 1)


def test_what_another_user_left_behind_does_not_keep_from_storing(tmp_path):
    inv, stored = call(), PersistentCache("toy", tmp_path, ToyConfig)
    left = stored.folder / f"{'0' * 12}.{'1' * 16}.tmp"
    left.mkdir(parents=True)  # as little to be unlinked as another user's file in a folder like /tmp
    os.utime(left, (0, 0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stored.put(inv.key, ToyConfig(8))
    assert stored.get(inv.key) == ToyConfig(8)


def unwritable(kind: str, tmp_path: Path) -> Path:
    if kind == "a file in its place":
        (tmp_path / "file").write_text("")
        return tmp_path / "file"
    if kind == "a file system that takes nothing":
        return Path("/proc/ejkernel")
    folder = tmp_path / "read-only"
    folder.mkdir(mode=0o500)
    return folder


@pytest.mark.parametrize("kind", ["a file in its place", "a file system that takes nothing", "permissions"])
def test_promise_1_unwritable_folder_is_one_warning(kind, tmp_path):
    if kind == "permissions" and os.geteuid() == 0:
        pytest.skip("the super-user writes anywhere")
    executor = Executor(
        ConfigSelectorChain(
            policy=AutotunePolicy(cache_miss_fallback="autotune"),
            tuner=Tuner(0, 1),
            persistent=PersistentCache("toy", unwritable(kind, tmp_path)),
        )
    )
    inputs = [jnp.ones((2, time, 4)) for time in (3, 30, 300)]  # three buckets, three tunings, three writes
    with pytest.warns(ConfigWarning, match="cannot be written to") as given:
        results = [executor(Toy(), Problem(x)) for x in inputs]
    assert len(given) == 1
    assert all(jnp.array_equal(result, 2 * x) for result, x in zip(results, inputs, strict=True))


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_promise_1_full_disk_is_one_warning_and_leaves_nothing(step, tmp_path, monkeypatch):
    inv, stored = call(), PersistentCache("toy", tmp_path, ToyConfig)
    stored.put(inv.key, ToyConfig(8))

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    def put_two():
        for key in (inv.key, "another key"):
            stored.put(key, ToyConfig(32))

    with monkeypatch.context() as patched:
        patched.setattr(os, step, full)
        with pytest.warns(ConfigWarning, match="No space left") as given:
            put_two()
    assert len(given) == 1
    assert [file.suffix for file in stored.folder.iterdir()] == [".json"]
    assert stored.get(inv.key) == ToyConfig(8)
    stored.put(inv.key, ToyConfig(32))
    assert stored.get(inv.key) == ToyConfig(32)


def nobodys_home(monkeypatch):
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", "~nosuchuser/x")


def no_home(monkeypatch):
    def nobody(*_):
        raise KeyError("uid not found")

    for variable in ("EJKERNEL_CACHE_DIR", "HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("pwd.getpwuid", nobody)


@pytest.mark.skipif(sys.platform == "win32", reason="homes are found in another way there")
@pytest.mark.parametrize("home", [nobodys_home, no_home])
def test_promise_1_a_home_that_does_not_exist_is_a_miss_and_one_warning(home, monkeypatch):
    home(monkeypatch)
    chain = ConfigSelectorChain(
        policy=AutotunePolicy(cache_miss_fallback="autotune"), tuner=Tuner(0, 1), persistent=PersistentCache
    )
    inputs = [jnp.ones((2, time, 4)) for time in (3, 30)]
    with pytest.warns(ConfigWarning, match="neither read nor stored: .* home") as given:
        results = [Executor(chain)(Toy(), Problem(x)) for x in inputs]
    assert len(given) == 1
    assert all(jnp.array_equal(result, 2 * x) for result, x in zip(results, inputs, strict=True))
    assert list(PersistentCache("toy").items()) == []


def test_promise_1_a_path_is_taken_from_the_users_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert PersistentCache("toy", "~/cache").folder == tmp_path / "cache" / "toy"


def test_promise_1_nothing_is_created_before_the_first_result(tmp_path):
    executor = Executor(chain(tmp_path / "cache"))
    executor(Toy(), Problem(jnp.ones((2, 3, 4))))
    assert not (tmp_path / "cache").exists()


def script(mode: str, folder: Path, **limits) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
    command = [sys.executable, "-W", "ignore::RuntimeWarning", "-m", "tests.ops.writers", mode, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_promise_1_a_write_that_the_system_cuts_short_is_one_warning(tmp_path):
    assert script("limited", tmp_path) == "1 warning, 1 entry, 0 temporary files"


@pytest.mark.slow
def test_promise_2_killed_writers_never_leave_a_half_written_entry(tmp_path):
    killed, seen = script("killed", tmp_path).split()
    assert int(killed) >= 190
    assert int(seen) > 0
    stored = PersistentCache("toy", tmp_path, ToyConfig)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(list(stored.items())) == len(list(stored.folder.glob("*.json"))) > 0


def test_promise_2_what_killed_writers_left_is_removed_when_it_is_old(tmp_path):
    stored = PersistentCache("toy", tmp_path, ToyConfig)
    stored.folder.mkdir()
    old, new = (stored.folder / f"{'0' * 12}.{digit * 16}.tmp" for digit in "12")
    foreign = stored.folder / "draft.tmp"
    for file in (old, new, foreign):
        file.write_text("{")
    for file in (old, foreign):
        os.utime(file, (0, 0))
    stored.put("key", ToyConfig())
    assert not old.exists()
    assert new.exists()
    assert foreign.exists()


def test_files_of_others_in_the_folder_are_neither_read_nor_removed(tmp_path):
    stored = PersistentCache("toy", tmp_path, ToyConfig)
    stored.put("key", ToyConfig())
    foreign = [stored.folder / name for name in ("package.json", "notes.tmp", f"{'0' * 39}.json", f"{'0' * 40}.json.bak")]
    for file in foreign:
        file.write_text("{}")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [key for key, _ in stored.items()] == ["key"]
    stored.clear()
    assert sorted(stored.folder.iterdir()) == sorted(foreign)


@pytest.mark.slow
def test_promise_3_sixteen_processes_lose_none_of_their_entries(tmp_path):
    script("many", tmp_path)
    stored = PersistentCache("toy", tmp_path, ToyConfig)
    found = dict(stored.items())
    assert len(found) == 16 * 200 + 1
    assert found["process 7 key 42"] == ToyConfig(42, "7")
    assert found["shared"].block == 199
    assert not list(stored.folder.glob("*.tmp"))


@pytest.mark.skipif(sys.platform == "win32", reason="permissions are others there")
def test_promise_3_everyone_whom_the_umask_allows_can_read_an_entry(tmp_path):
    stored, umask = PersistentCache("toy", tmp_path), os.umask(0o022)
    try:
        stored.put("a key", {"block": 8})
    finally:
        os.umask(umask)
    assert stored.file("a key").stat().st_mode & 0o777 == 0o644


def test_promise_7_a_race_that_only_the_heuristic_ran_is_not_stored(tmp_path):
    hanging = [Racer(n, "hangs compiling") for n in range(2, 5)]
    tuner = Tuner(1, 1, max_seconds=4.0)
    chain = ConfigSelectorChain(ConfigCache(), "autotune", tuner, PersistentCache("race", tmp_path))
    inv = Invocation.of(Race(*hanging), jnp.ones(4))
    try:
        choice = chain.choose(inv)
    finally:
        racers.release.set()
    assert choice.level is Level.AUTOTUNE
    assert chain.choose(inv).level is Level.MEMORY  # this process does not try again
    assert not tmp_path.joinpath("race").exists()
    assert "not stored" in describe(inv, "autotune", choice.config, choice.record).why
