"""`ejkernel verify` finds what is wrong, and says what it could not look at."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import pytest

from ejkernel import kernel_registry
from ejkernel._device import backend_of, default_device
from ejkernel.kernels._implementation import Implementation
from ejkernel.kernels._linear import LinearConfig
from ejkernel.kernels._linear.operations import RECURRENT
from ejkernel.kernels._registry import Backend, Platform
from ejkernel.kernels._xla import recurrent

SMALL = ("verify", "--op", "recurrent_attention", "--platform", "pallas")
QUICK = ("--case", "scalar-time-1", "--no-gradients")


@pytest.fixture
def register(monkeypatch):
    """Adds an implementation of "recurrent" on the platform "pallas" for one test."""
    kernel_registry.list_algorithms()
    known = {name: list(entries) for name, entries in kernel_registry._implementations.items()}
    monkeypatch.setattr(kernel_registry, "_implementations", known)
    return kernel_registry.register("recurrent", "pallas", "any", priority=-9)


def right(*args, **kwargs):
    return kernel_registry.get("recurrent", "xla")(*args, **kwargs)


def test_what_is_right_passes(run):
    found = run("verify", "--op", "recurrent_gla", "--case", "packed-rank3", "--json", code=0).json
    (row,) = [row for row in found["summary"] if row["platform"] == "xla"]
    assert (row["passed"], row["refused"], row["failed"], row["worst_case"]) == (1, 0, 0, "packed-rank3")
    assert 0 < row["output_error"] < row["output_limit"]
    assert 0 < row["gradient_error"] < row["gradient_limit"]
    assert found["good"] is True


@pytest.mark.parametrize("name", ["lightning_attention", "attention"])
def test_every_kind_of_operation_has_cases(run, name):
    case = "packed-one" if name == "lightning_attention" else "one-key"
    shown = run("verify", "--op", name, "--platform", "xla", "--case", case, "--no-gradients", code=0)
    assert "1 passed, 0 refused, 0 failed" in shown.words
    assert case in shown.out


@pytest.mark.parametrize("factor", [1.001, float("nan")])
def test_a_wrong_implementation_fails(run, register, factor):
    @register
    def wrong(*args, **kwargs):
        output, state = right(*args, **kwargs)
        return output * factor, state

    shown = run(*SMALL, *QUICK, code=1)
    assert "0 passed, 0 refused, 2 failed" in shown.words  # scalar-time-1 and scalar-time-100
    assert "FAILED recurrent_attention pallas scalar-time-1: output" in shown.words


def test_a_wrong_gradient_fails(run, register):
    @register
    @jax.custom_jvp
    def wrong(query, key, value, g):
        return right(query, key, value, g=g)

    @wrong.defjvp
    def _(primals, tangents):
        output, tangent = jax.jvp(lambda *a: right(*a[:3], g=a[3]), primals, tangents)
        return output, jax.tree.map(lambda x: 2 * x, tangent)

    drop = lambda *a, reverse, softmax_scale, **k: wrong(k["query"], k["key"], k["value"], k["g"])
    kernel_registry._implementations["recurrent"][-1] = _replaced(kernel_registry._implementations["recurrent"][-1], drop)
    found = run(*SMALL, "--case", "scalar-time-5", "--json", code=1).json
    (case,) = found["cases"]
    assert case["status"] == "failed"
    assert "dquery 1.0e+00" in case["reason"]
    assert "output" not in case["reason"]


def _replaced(entry, function):
    import dataclasses

    return dataclasses.replace(entry, function=function)


def test_one_that_raises_fails_and_the_others_still_run(run, register):
    @register
    def broken(*args, **kwargs):
        if kwargs["query"].shape[1] == 1:
            raise RuntimeError("no kernel image\nlong story")
        return right(*args, **kwargs)

    found = run(*SMALL, *QUICK, "--json", code=1).json
    assert [case["status"] for case in found["cases"]] == ["failed", "passed"]
    assert found["cases"][0]["reason"] == "RuntimeError: no kernel image"
    assert run(*SMALL, *QUICK, "--fail-fast", "--json", code=1).json["cases"][-1]["status"] == "failed"


class SecondIsRight(Implementation):
    """Has two candidates, of which the first gives a wrong result."""

    def heuristic(self, problem):
        return LinearConfig(block_q=16)

    def candidates(self, problem):
        return [LinearConfig(block_q=1), LinearConfig(block_q=2)]

    def solve(self, problem, cfg):
        output, state = recurrent.solve(problem, LinearConfig())
        return output * (2 if cfg.block_q == 1 else 1), state


def test_fail_fast_stops_at_a_candidate_that_fails(run, register):
    RECURRENT.register(SecondIsRight(), kernel_registry, Platform.PALLAS, Backend.ANY, -9)
    found = run(*SMALL, *QUICK, "--candidates", "--json", code=1).json
    assert [case["status"] for case in found["cases"]] == ["failed", "passed"] * 2
    found = run(*SMALL, *QUICK, "--candidates", "--fail-fast", "--json", code=1).json
    ((config, status),) = [(case["config"], case["status"]) for case in found["cases"]]
    assert (status, "block_q=1," in config) == ("failed", True)


@dataclasses.dataclass(frozen=True)
class Refusing:
    """A right function that takes only what it supports."""

    supports: Callable[[Any], str | None]

    def __call__(self, *args, **kwargs):
        return right(*args, **kwargs)


def test_a_refused_case_is_not_passed(run, register):
    register(Refusing(lambda problem: "long sequences" if problem.query.shape[1] > 1 else None))
    shown = run(*SMALL, *QUICK, code=0)
    assert "1 passed, 1 refused, 0 failed" in shown.words
    assert "refused recurrent_attention pallas: 1 case: long sequences" in shown.words


def test_nothing_but_refusals_is_no_success(run, register):
    register(Refusing(lambda problem: "anything"))
    assert run(*SMALL, *QUICK, code=1).words.endswith("0 passed, 2 refused, 0 failed")


def test_every_candidate_is_run(run):
    found = run("verify", "--op", "recurrent", "--platform", "xla", *QUICK, "--candidates", "--json", code=0).json
    configs = {case["config"] for case in found["cases"]}
    assert len(configs) > 1
    assert all("schedule=" in config for config in configs)


def test_a_module_of_ones_own_is_loaded(run, monkeypatch, tmp_path, register):
    (tmp_path / "my_kernels.py").write_text("loaded = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    register(right)
    run(*SMALL, *QUICK, "--load", "my_kernels", code=0)
    assert "--load no_such_module" in run(*SMALL, "--load", "no_such_module", code=2).words


@pytest.mark.parametrize(
    ("arguments", "legal"),
    [
        (("--op", "softmax"), "recurrent_attention (recurrent), gla_attention (gla), lightning_attention (lightning_attn)"),
        (("--platform", "opencl"), "triton, pallas, cuda, xla"),
        (("--platform", "auto"), "triton, pallas, cuda, xla; got 'auto'"),
        (("--dtype", "float8"), "float32, bfloat16, float16"),
        (("--case", "no-such-case"), "no shared case"),
        (("--dtype", "fp16"), "got 'fp16'. fp16 is float16 here."),
        (("--op", "chunk_gla"), "chunk_gla: it is ejkernel.gla_attention here."),
        (("--op", "causal_conv1d"), "causal_conv1d: it has one configuration"),
        (
            ("--op", "gla", "--dtype", "float16", "--case", "bfloat16"),
            "no shared case has 'bfloat16' in its name and that dtype",
        ),
        (("--op", "gla", "--case", "packd-g"), "Did you mean packed-g"),
        (("--op", "gla", "--case", "nothing"), "Cases of gla_attention: ungated, g, g_gamma,"),
    ],
)
def test_wrong_names_say_what_is_legal(run, arguments, legal):
    assert legal in run("verify", *arguments, code=2).words


@pytest.mark.skipif(backend_of(default_device()) != "cpu", reason="there the platform is available")
def test_a_platform_that_is_not_here_says_why(run):
    asked = ("verify", "--platform", "cuda", "--op", "attention")
    for case in ((), ("--case", "packed"), ("--case", "causal", "--dtype", "float32")):
        shown = run(*asked, *case, code=1).words
        assert "this call computes on a cpu" in shown
        assert "no shared case" not in shown


def test_an_interrupt_shows_what_was_found(run, register):
    calls = []

    @register
    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return right(*args, **kwargs)

    assert "1 passed" in run(*SMALL, *QUICK, code=130).words
