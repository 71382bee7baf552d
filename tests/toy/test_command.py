"""The command knows the toy by its record alone: nothing below `ejkernel/` names it."""

from __future__ import annotations

import importlib
import json
import textwrap

import pytest

from ejkernel.testing.record import register
from tests.toy import kernels
from tests.toy.record import DECAYED_SUM

pytest.importorskip("typer", reason="the command needs the extra 'cli'")

LOADED = ("--load", "tests.toy", "--op", "decayed_sum")


@pytest.mark.slow
def test_verify_runs_every_implementation_with_every_candidate(run):
    found = run("verify", *LOADED, "--candidates", "--no-gradients", "--json", code=0).json
    rows = {row["platform"]: (row["passed"], row["refused"], row["failed"]) for row in found["summary"]}
    assert rows == {"xla": (18, 0, 0), "pallas": (10, 1, 0)}
    (refused,) = [case for case in found["cases"] if case["status"] == "refused"]
    assert (refused["case"], refused["reason"]) == ("wide", "it holds up to 128 channels; x has 200")
    (row,) = run("verify", *LOADED, "--case", "plain", "--platform", "pallas", "--json", code=0).json["summary"]
    assert 0 < row["gradient_error"] < row["gradient_limit"]


@pytest.mark.slow
def test_bench_measures_it_against_its_rival(run, tmp_path):
    file = tmp_path / "run.json"
    shown = run("bench", *LOADED, "--lengths", "8", "--seconds", "0.01", "--save", file, code=0)
    for text in ("decayed_sum 1xTx4:float32, forward+backward", "route of ejkernel: products of 16 tokens", "scan"):
        assert text in shown.words
    rows = json.loads(file.read_text())["measurements"]
    assert len(rows) == 4  # two contenders in two directions; the usual shapes are one at this length
    assert all(0 <= row["output_error"] < 2e-6 and row["floor_seconds"] > 0 for row in rows)
    assert {row["route"] for row in rows} == {"products of 16 tokens", ""}
    refused = run("bench", *LOADED, "--shapes", "1x2", code=2)
    assert "a shape of decayed_sum must be BxTxD" in refused.words
    assert "--gates does not go together with decayed_sum" in run("bench", *LOADED, "--gates", "g", code=2).words


def test_tune_stores_it_and_the_cache_shows_its_route(run):
    (call,) = run("tune", *LOADED, "--shapes", "1x8x2", "--iters", "1", "--json", code=0).json["calls"]
    assert (call["operation"], call["status"]) == ("decayed_sum", "tuned")
    assert call["route"] in (
        "products of 16 tokens",
        "products of 32 tokens",
        "products of 64 tokens",
        "one token after another",
    )
    assert f"route {call['route']}" in run("cache", "show", "--op", "decayed_sum", code=0).words


def test_a_platform_is_one_directory(run, tmp_path, monkeypatch):
    """A folder that the toy's package did not have is verified by the command, with every shared case."""
    folder = tmp_path / "_triton" / "decayed_sum"
    folder.mkdir(parents=True)
    for package in (folder, folder.parent):
        (package / "__init__.py").touch()
    (folder / "_interface.py").write_text(
        textwrap.dedent("""
        from ejkernel.kernels._registry import Backend, Platform
        from tests.toy.kernels import registry
        from tests.toy.kernels._xla.decayed_sum._interface import XlaSum
        from tests.toy.kernels.decayed_sum import DECAYED_SUM

        decayed_sum = DECAYED_SUM.register(XlaSum(), registry, Platform.TRITON, Backend.ANY, priority=1)
        """)
    )
    before = ("verify", *LOADED, "--platform", "triton", "--no-gradients")
    monkeypatch.setattr(kernels, "__path__", [*kernels.__path__, str(tmp_path)])
    monkeypatch.setattr(kernels.registry, "_visited", set(kernels.registry._visited))
    monkeypatch.setattr(
        kernels.registry, "_implementations", {"decayed_sum": kernels.registry.list_implementations("decayed_sum")}
    )
    kernels.registry._visited.discard(("decayed_sum", "triton"))
    importlib.invalidate_caches()
    assert "6 passed, 0 refused, 0 failed" in run(*before, code=0).words


def test_a_name_is_taken_once():
    with pytest.raises(ValueError, match=r"'decayed_sum' is taken: there is a record of decayed_sum"):
        register(DECAYED_SUM)
