"""Promises 9, 10 and 12: overlays reach jitted callers, processes agree, and one call lists what was picked."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import ejkernel.ops
from ejkernel.ops import AutotunePolicy, ConfigSelectorChain, Executor, Invocation, Kernel, Tuner, overlay, report
from tests.ops.racers import Race, Racer, time_by_work
from tests.ops.toy import Problem, Toy, ToyConfig, problem


class Shown(Kernel[ToyConfig, jax.Array]):
    """y = the block it ran with, so that tests see the configuration in the result."""

    op_id = "shown"

    def run(self, x: jax.Array, *, cfg: ToyConfig) -> jax.Array:
        return x * 0 + cfg.block

    def heuristic_cfg(self, inv: Invocation) -> ToyConfig:
        return ToyConfig(16)


EXECUTOR = Executor(ConfigSelectorChain())


def block(x: jax.Array) -> jax.Array:
    return EXECUTOR(Shown(), x)


def in_scan(x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda carry, _: (carry, block(x)), 0, None, length=1)[1][0]


CALLERS = {
    "eager": block,
    "jit": jax.jit(block),
    "jit in jit": jax.jit(lambda x: jax.jit(block)(x)),
    "scan": jax.jit(in_scan),
    "grad": lambda x: jax.value_and_grad(block)(x)[0],
    "vmap": lambda x: jax.vmap(block)(x[None])[0],
}


@pytest.mark.parametrize("caller", CALLERS)
def test_promise_9_an_overlay_makes_jitted_callers_retrace_and_is_undone_on_exit(caller):
    run, x = CALLERS[caller], jnp.float32(0)
    assert run(x) == 16
    with overlay(shown=ToyConfig(8)):
        assert run(x) == 8
        with overlay({"shown": ToyConfig(4)}):
            assert run(x) == 4
        assert run(x) == 8
    assert run(x) == 16


def test_promise_9_an_overlay_ends_with_an_exception():
    with pytest.raises(RuntimeError, match="stop"), overlay(shown=ToyConfig(8)):
        raise RuntimeError("stop")
    assert CALLERS["jit"](jnp.float32(0)) == 16


def test_promise_9_an_overlay_is_local_to_its_thread():
    seen = []
    with overlay(shown=ToyConfig(8)):
        thread = threading.Thread(target=lambda: seen.append(float(CALLERS["jit"](jnp.float32(0)))))
        thread.start()
        thread.join()
    assert seen == [16.0]


def test_promise_9_an_overlay_that_cannot_run_the_call_says_so():
    with overlay(toy=ToyConfig(128)), pytest.raises(ValueError, match="block 128 is larger than 64"):
        EXECUTOR(Toy(), problem())
    with overlay(toy=Racer()), pytest.raises(ValueError, match="it is a Racer, not a ToyConfig"):
        EXECUTOR(Toy(), problem())
    with pytest.raises(TypeError, match="it cannot be hashed"), overlay(toy={"block": 3}):
        pass


class Renamed(Shown):
    """An operation that had another name."""

    op_id = "renamed"
    aliases = ("old_name", "older_name")


def test_promise_9_an_overlay_may_name_an_operation_by_its_aliases():
    call = lambda: float(EXECUTOR(Renamed(), jnp.float32(0)))
    with overlay(old_name=ToyConfig(8)):
        assert call() == 8
        with overlay(renamed=ToyConfig(4)):
            assert call() == 4
            with overlay(older_name=ToyConfig(2)):
                assert call() == 2
    twice = {"old_name": ToyConfig(8), "renamed": ToyConfig(4)}
    with pytest.raises(ValueError, match="name each operation once; got old_name, renamed"), overlay(twice):
        pass


def run_as_late() -> float:
    class Late(Shown):
        op_id = "late"
        aliases = ("name_of_yore",)

    return float(EXECUTOR(Late(), jnp.float32(0)))


@pytest.mark.filterwarnings("ignore:an overlay for 'name_of_yore'")
def test_promise_9_an_overlay_by_an_alias_reaches_a_kernel_that_is_defined_later():
    with overlay(name_of_yore=ToyConfig(8)):
        assert run_as_late() == 8


@pytest.mark.parametrize(("name", "hint"), [("shwon", "did you mean 'shown'"), ("zzzzzz", "known are .*'toy'")])
def test_promise_9_an_overlay_for_a_name_that_nobody_has_is_a_warning(name, hint):
    says = f"an overlay for '{name}'.* changes nothing; {hint}"
    with pytest.warns(ejkernel.ops.ConfigWarning, match=says) as given, overlay({name: ToyConfig(8)}):
        pass
    assert given[0].filename == __file__


def test_promise_9_an_overlay_for_a_key_or_a_kernel_named_by_its_instance_is_no_warning(recwarn):
    Kernel("named_by_instance")
    with overlay({Invocation.of(Shown(), jnp.float32(0)).key: ToyConfig(8), "named_by_instance": ToyConfig(3)}):
        assert block(jnp.float32(0)) == 8
    assert not [w for w in recwarn if issubclass(w.category, ejkernel.ops.ConfigWarning)]


def in_two_processes(scenario: str, tmp_path) -> list[dict]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path]), "JAX_PLATFORMS": "cpu"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.ops.processes", scenario, str(port), str(number), str(tmp_path / str(number))],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    try:
        ended = [process.communicate(timeout=90) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, ended, strict=True):
        assert process.returncode == 0, errors
    return [json.loads(output.strip().splitlines()[-1]) for output, _ in ended]


def test_promise_10_process_0_decides_and_the_others_follow(tmp_path):
    first, second = in_two_processes("agree", tmp_path)
    assert first["preferred"] != second["preferred"]  # each alone would choose what is fastest for itself
    assert first["chosen"] == second["chosen"] == first["preferred"]
    assert (first["level"], second["level"]) == ("autotune", "autotune")
    assert second["tunings"] == 0
    assert first["jitted"] == second["jitted"] == first["preferred"]
    assert first["stored"] == 1  # process 0 writes, and only process 0
    assert second["stored"] == 0
    assert first["ahead"] == second["ahead"]
    assert first["heuristics"] == second["heuristics"] == "heuristics"


@pytest.mark.slow
def test_promise_10_a_failure_on_one_process_does_not_hang_the_rest(tmp_path):
    first, second = in_two_processes("fail", tmp_path)
    assert first["failed tuning"] == second["failed tuning"] == ["heuristics", 300]
    assert "process 0 did not say within" in second["absent"]["warning"]
    assert second["absent"]["level"] == "heuristics"
    assert second["absent"]["seconds"] < 10
    assert first["late"] == ["heuristics", -1]  # process 0 finds that the other did not wait, and does the same
    assert first["error"].startswith("NoConfigError: no tuned configuration")
    assert second["error"].startswith("NoConfigError: process 0 could not choose")


def test_promise_12_one_call_lists_what_was_picked_by_which_level_with_times_losers_and_reasons(monkeypatch):
    time_by_work(monkeypatch)
    chain = ConfigSelectorChain(policy=AutotunePolicy(cache_miss_fallback="autotune"), tuner=Tuner(1, 5))
    executor = Executor(chain)
    kernel = Race(Racer(10), Racer(1, "wrong"), Racer(1, "raises"))
    for _ in range(3):
        executor(kernel, jnp.ones(64))
    executor(Toy(), problem(), platform="xla", _cfg=ToyConfig(8))
    tuned, explicit = report()
    assert (tuned.op_id, tuned.level, tuned.config) == ("race", "autotune", Racer(10))
    assert tuned.arguments == {"x": "float32[64]"}
    assert 0 < tuned.record["seconds"] < tuned.record["heuristic_seconds"]
    assert [candidate.get("reason", "")[:6] for candidate in tuned.record["candidates"]] == ["", "", "its re", "failed"]
    assert (explicit.op_id, explicit.level, explicit.config) == ("toy", "explicit", ToyConfig(8))
    assert explicit.arguments["platform"] == "'xla'"
    text = str(report())
    assert max(map(len, text.splitlines())) <= 80
    for part in ("race  autotune  Racer(work=10, fault='none')", "x: float32[64]", "its result is wrong", "cannot be built"):
        assert part in text
    assert ejkernel.ops.report is report


@pytest.fixture
def accelerator(monkeypatch):
    """Lets the chain take this device for an accelerator."""
    monkeypatch.setattr("ejkernel.ops.config.selection.backend_of", lambda device: "gpu")


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize("traced", [False, True])
def test_promise_12_on_an_accelerator_an_unknown_call_is_tuned_and_the_report_says_how_long_it_took(traced):
    executor = Executor(ConfigSelectorChain(tuner=Tuner(0, 1)))  # the policy of the kernel itself
    run = lambda x: executor(Toy(), Problem(x))
    (jax.jit(run) if traced else run)(problem().x)
    (chosen,) = report()
    assert chosen.level == "autotune"
    assert chosen.record["tuning_seconds"] > 0
    assert chosen.why == f"tuned in this process in {chosen.record['tuning_seconds']:.1f} s, 3 of 3 candidates timed"
    assert f"    {chosen.why}" in str(report()).splitlines()


NOT_TUNED: dict[str, tuple[dict[str, Any], str]] = {
    "EJKERNEL_AUTOTUNE_POLICY=heuristics": ({}, "heuristics"),
    "cache_miss_fallback='heuristics'": ({"policy": AutotunePolicy(cache_miss_fallback="heuristics")}, "autotune"),
    "allow_autotune=False": ({"policy": AutotunePolicy(allow_autotune=False)}, "autotune"),
    "the chain has no tuner": ({"tuner": None}, "autotune"),
}


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize("why", NOT_TUNED)
def test_promise_12_the_report_says_why_an_unknown_call_was_not_tuned(why, monkeypatch):
    options, variable = NOT_TUNED[why]
    monkeypatch.setenv("EJKERNEL_AUTOTUNE_POLICY", variable)
    Executor(ConfigSelectorChain(**({"tuner": Tuner(0, 1)} | options)))(Toy(), problem())
    (chosen,) = report()
    assert (chosen.level, chosen.why) == ("heuristics", f"not tuned: {why}")


def test_promise_12_the_report_says_whose_policy_it_was_and_what_failed():
    EXECUTOR(Toy(), problem())
    tuning = ConfigSelectorChain(policy=AutotunePolicy(cache_miss_fallback="autotune"), tuner=Tuner(0, 1))
    with pytest.warns(ejkernel.ops.ConfigWarning, match="nothing is stored"):
        tuning.choose(Invocation.of(Race(heuristic=Racer(1, "nan")), jnp.ones(4)))
    guessed, failed = (chosen.why for chosen in report())
    assert guessed == "not tuned: toy says 'heuristics' on cpu, and EJKERNEL_AUTOTUNE_POLICY is not set"
    assert re.match(r"tuning failed in \d+\.\d s, so this is the heuristic: .*NaN", failed)


def test_promise_12_the_operations_tune_on_accelerators_when_nobody_says_otherwise():
    from ejkernel.modules import Attention, GLAttention, RecurrentAttention, create_default_executor

    policy = create_default_executor().chooser.policy
    assert {policy.fallback(kernel(), "gpu") for kernel in (GLAttention, RecurrentAttention)} == {"autotune"}
    assert policy.fallback(Attention(), "gpu") == policy.fallback(GLAttention(), "cpu") == "heuristics"


@pytest.mark.parametrize("record", [{"seconds": "fast"}, {"candidates": [3]}, {"candidates": [{"config": {}}]}])
def test_promise_12_a_record_of_another_kind_does_not_end_the_report(record):
    chain = ConfigSelectorChain()
    chain.cache.put(Invocation.of(Toy(), problem()).key, ToyConfig(8), record)
    Executor(chain)(Toy(), problem())
    assert "its record is unreadable" in str(report())


def test_promise_12_the_report_does_not_grow_for_ever(monkeypatch):
    monkeypatch.setattr("ejkernel.ops.reporting._LIMIT", 5)
    for width in range(1, 20):
        EXECUTOR.choose(Toy(), Problem(jax.ShapeDtypeStruct((1, 1, width), jnp.float32)))
    assert len(report()) == 5
    assert report()[-1].arguments["problem.x"] == "float32[1,~1,19]"
