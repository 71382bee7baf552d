"""`ejkernel bench`: times with errors and floors, tables, JSON and pictures."""

from __future__ import annotations

import dataclasses
import importlib.util
import json

import jax
import numpy as np
import pytest

from ejkernel._device import backend_of, default_device
from ejkernel.cli import _measure
from ejkernel.kernels._linear import record as linear_record
from ejkernel.testing import flash_linear, floors
from ejkernel.testing.hand_written import scan_attention
from ejkernel.testing.judge import TOKENS
from ejkernel.testing.linear_reference import linear_reference
from ejkernel.testing.record import find
from ejkernel.testing.shapes import Shape
from ejkernel.testing.timing import best_time, directed

FAST = ("--seconds", "0.01")


@pytest.fixture(autouse=True)
def _known_rates(monkeypatch):
    """Measuring the device takes a second, which only one test needs."""
    monkeypatch.setattr(floors, "_copy_rate", lambda size: 1e10)
    monkeypatch.setattr(floors, "_product_rate", lambda dtype: 1e11)
    monkeypatch.setattr(floors, "_rates", {})


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A small run's file: two lengths of one operation, forward."""
    one = lambda tokens, who, seconds: _measure.Measured(
        "gla_attention", f"1x{tokens}x1x8x8:gk:float32", tokens, "forward", who, seconds, 2e-7, None, 1e-5, "bytes"
    )
    measured = [one(64, "ejkernel", 1e-4), one(64, "scan", 3e-4), one(128, "ejkernel", 2e-4), one(128, "scan", 6e-4)]
    about = {"environment": {"device": "a device", "jax": "1", "ejkernel": "1"}, "time": "2026-01-01T00:00"}
    file = tmp_path_factory.mktemp("bench") / "run.json"
    content = {"format": 1, "about": {**about, "operations_per_second": {"float32": 1e11}}}
    file.write_text(json.dumps({**content, "measurements": [dataclasses.asdict(m) for m in measured]}))
    return file


def test_time_error_and_floor_beside_each_other(run):
    found = run("bench", "--op", "lightning_attention", "--shapes", "1x12x1x8", *FAST, "--json", code=0).json
    rows = {(one["contender"], one["direction"]): one for one in found["measurements"]}
    assert set(rows) == {(who, way) for who in ("ejkernel", "scan") for way in ("forward", "forward+backward")}
    for (_, direction), row in rows.items():
        assert 0 < row["seconds"] < 1
        assert row["floor_seconds"] > 0
        assert 0 < row["output_error"] < 2e-6
        assert (row["gradient_error"] is None) == (direction == "forward")
    assert "schedule=" in rows["ejkernel", "forward"]["config"]
    assert "chunks of 16" in rows["ejkernel", "forward"]["route"]
    assert rows["scan", "forward"]["route"] == ""
    assert found["about"]["environment"]["jax"] == jax.__version__


def test_attention_against_jax_nn_as_a_table(run):
    shown = run("bench", "--op", "attention", "--shapes", "1x16x2/1x8", "--direction", "forward", *FAST, code=0)
    for word in ("ejkernel", "jax.nn", "x floor", "x ours", "1xTx2/1x8x8:float32", "times faster"):
        assert word in shown.out


def test_calls_without_gates_have_the_floor_of_such_calls(run):
    """Also an operation that has gates when none are named."""
    asked = ("bench", "--op", "gla", "--direction", "forward", "--no-error", "--compare", "none", *FAST, "--json")
    (bare,) = run(*asked, "--shapes", "1x4x1x4:none", code=0).json["measurements"]
    (gated,) = run(*asked, "--shapes", "1x4x1x4", code=0).json["measurements"]
    assert (bare["floor_seconds"], gated["floor_seconds"]) == (256 / 1e10, 320 / 1e10)


def test_strong_gates_are_among_the_weak_ones(run):
    shape = Shape(1, 64 * 64, 1, 1, 1, ("g", "gk", "g_gamma"))
    weak, strong = shape.arrays(), shape.arrays(strong_gates=True)
    assert min(float(weak[name].min()) for name in ("g", "gk", "g_gamma")) > -1
    for name in ("g", "gk"):
        assert float(strong[name].min()) == -1e4
        assert 0.5 < float((strong[name] > -1).mean()) < 1
        assert bool(((strong[name] < -1) & (strong[name] > -1e3)).any())
    assert float(strong["g_gamma"].min()) > -1
    asked = ("bench", "--op", "gla", "--shapes", "1x70x1x4", "--direction", "forward", "--strong-gates", *FAST, "--json")
    found = run(*asked, code=0).json
    assert "reset" in found["about"]["gates"]
    assert all(0 < one["output_error"] < 2e-6 for one in found["measurements"])


def test_a_rival_that_is_not_here_says_why(run):
    if flash_linear.missing() is None:
        pytest.skip("flash-linear-attention runs here")
    asked = ("bench", "--op", "recurrent", "--shapes", "1x4x1x4", "--direction", "forward", "--no-error", *FAST)
    assert "fla did not run (recurrent_attention):" in run(*asked, "--compare", "fla", code=0).words
    assert "fla" not in run(*asked, code=0).words


def test_a_platform_that_is_not_here_is_a_failure(run):
    if backend_of(default_device()) != "cpu":
        pytest.skip("there it is available")
    asked = ("bench", "--op", "attention", "--shapes", "1x4x1x4", "--direction", "forward", "--compare", "none", *FAST)
    assert "this call computes on a cpu" in run(*asked, "--platform", "cuda", code=1).words


def test_ours_on_several_platforms(run):
    asked = ("bench", "--op", "gla_attention", "--shapes", "1x4x1x4", "--direction", "forward", "--no-error", *FAST)
    shown = run(*asked, "--platform", "xla,auto", code=0)
    for word in ("ejkernel xla", "ejkernel auto", "times faster"):
        assert word in shown.words


def test_one_that_raises_does_not_take_the_others_with_it(run, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(linear_record, "scan_attention", broken)
    found = run("bench", "--op", "gla_attention", "--shapes", "1x4x1x4", "--direction", "forward", *FAST, "--json", code=0).json
    ours, scan = found["measurements"]
    assert ours["seconds"] is not None
    assert (scan["seconds"], scan["reason"]) == (None, "RuntimeError: out of memory")


@pytest.mark.parametrize("name", ["recurrent_attention", "gla_attention", "lightning_attention", "attention"])
def test_errors_of_a_part_are_those_of_the_call(name):
    """Longer than the part that is compared, so that the state (or the keys) before it counts, with grouped heads."""
    op = find(name)
    shape = Shape(2, TOKENS + 40, 4, 8, 6, op.gates, kv_heads=2)
    arrays, cotangent = op.arrays(shape), op.cotangent(shape)
    judge = op.judge(shape, arrays, cotangent, gradients=True)
    output, gradients = jax.jit(directed(op.function, "forward+backward"))(arrays, judge.cotangent)
    named = {name: np.asarray(x) for name, x in gradients.items()}
    error, worst = judge.errors(np.asarray(output), named)
    assert 0 < error < 2e-6
    assert worst is not None
    assert 0 < worst < 1e-5
    wrong = np.array(output)
    wrong[0, -1, 0] *= 1.1
    assert judge.errors(wrong, named)[0] > 1e-4
    for array in named:
        spoilt = named | {array: named[array] * 1.01}
        assert judge.errors(np.asarray(output), spoilt)[1] == pytest.approx(0.01, rel=0.01)


def test_the_hand_written_scan_is_the_recurrence():
    shape = Shape(2, 9, 4, 5, 6, ("g_gamma", "gk", "gv"), kv_heads=2)
    arrays = {name: np.asarray(x) for name, x in shape.arrays().items()}
    arrays["g"] = arrays["gk"][..., ::-1]  # per key channel, as gla_attention takes it
    output, state = jax.jit(scan_attention)(**arrays)
    with jax.enable_x64(True):
        want, final = jax.jit(linear_reference)(**{name: x.astype(np.float64) for name, x in arrays.items()})
    np.testing.assert_allclose(output, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(state, final, rtol=1e-5, atol=1e-5)


def test_rates_are_measured_and_only_grow(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(floors, "_rates", {})
    rate = floors.bandwidth(1)
    assert 1e7 < rate < 1e14
    assert floors.bandwidth(2) == rate
    floors.refresh()
    assert floors.bandwidth(1) >= rate


def test_the_floor_is_the_larger_of_bytes_and_operations():
    op, narrow, wide = find("recurrent"), Shape(1, 64, 1, 8, 8), Shape(1, 64, 1, 512, 512)
    assert op.floor(narrow, "forward").bound == "bytes"
    assert op.floor(wide, "forward").bound == "operations"
    assert op.floor(wide, "forward+backward").seconds == pytest.approx(14 / 4 * op.floor(wide, "forward").seconds)


def test_bytes_and_operations_of_a_call():
    small = Shape(1, 8, 1, 4, 4)  # q, k, v and the output have 8 x 4 numbers of four bytes each
    for name, forward, backward in (("recurrent", 8 * 4 * 4 * 4, 8 * 4 * 4 * 14), ("attention", 8 * 8 * 8, 8 * 8 * 8 * 7 // 2)):
        op = find(name)
        assert (op.compulsory_bytes(small, "forward"), op.compulsory_bytes(small, "forward+backward")) == (512, 1024 + 384)
        assert (op.operations(small, "forward"), op.operations(small, "forward+backward")) == (forward, backward)


def test_long_calls_are_timed_twice_and_short_ones_often():
    import time

    made = []

    def nap():
        time.sleep(0.02)
        made.append("nap")

    assert best_time(nap, lambda _: None, seconds=0.001) >= 0.02
    assert len(made) == 2
    made.clear()
    best_time(lambda: made.append(1), lambda _: None, seconds=1, rounds=4)
    assert len(made) > 100


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_picture_of_what_was_saved(run, saved, tmp_path, suffix):
    pytest.importorskip("matplotlib")
    file = tmp_path / "new" / f"run.{suffix}"
    shown = run("bench", "--from", saved, "--plot", file, code=0)
    assert shown.out.splitlines()[-1] == f"picture: {file}"
    assert file.stat().st_size > 10_000
    assert "3.00x" in shown.out


def test_the_summary_is_one_line_an_operation(run, saved):
    shown = run("bench", "--from", saved, "--summary", code=0)
    (line,) = [line for line in shown.out.splitlines() if line.strip().startswith("gla_attention")]
    assert line.split() == ["gla_attention,", "gk", "128", "2.0e-07", "-", "scan", "3.00x", "-"]


def test_without_matplotlib_it_says_what_to_install(run, saved, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None)
    assert "pip install matplotlib" in run("bench", "--from", saved, "--plot", "a.png", code=2).words


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"format": 1}',
        '{"format": 1, "about": {}, "measurements": []}',
        '{"format": 1, "about": {}, "measurements": [{"a": 1}]}',
    ],
)
def test_a_damaged_file_is_refused(run, tmp_path, content):
    (tmp_path / "run.json").write_text(content)
    assert "is not what bench --save writes" in run("bench", "--from", tmp_path / "run.json", code=1).words


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--shapes", "2x4"), "a shape must be BxTxHxKxV or BxTxHxD"),
        (("--shapes", "1x4x3/2x4"), "kv_heads must divide heads"),
        (("--shapes", "1x4x1x4:gz"), "gate must be one of g, g_gamma, gk, gv"),
        (("--shapes", "1x4x1x4:gk:int8"), "a dtype one of float32, bfloat16, float16, float64; got 'int8'"),
        (("--shapes", "1x4x1x4:gk:gv"), "a shape must be BxTxHxKxV or BxTxHxD"),
        (("--shapes", "1x4x1x4:float16:float32"), "a shape must be BxTxHxKxV or BxTxHxD"),
        (("--shapes", "1x4x1x4:gv", "--op", "gla_attention"), "gla_attention takes g, gk, g_gamma; got gv"),
        (("--shapes", "1x4x1x4:float64", "--op", "attention"), "float64 needs 64-bit numbers"),
        (("--lengths", "1,x"), "--lengths must be positive whole numbers"),
        (("--direction", "sideways"), "--direction must be forward, forward+backward or both"),
        (
            ("--compare", "numpy", "--op", "gla"),
            "must be of scan, fla, jla for gla_attention, or none alone; got 'numpy'",
        ),
        (("--gates", "gq"), "--gates must be of"),
        (("--plot", "picture.txt"), "--plot must name a .png, .svg or .pdf file"),
        (("--compare", "scan,none"), "or none alone; got 'none'"),
        (
            ("--compare", "scan", "--op", "attention"),
            "--compare must be of jax.nn, cudnn for attention, or none alone; got 'scan'",
        ),
        (("--gates", "gk", "--op", "attention"), "--gates does not go together with attention, which takes no gates"),
        (("--strong-gates", "--op", "attention"), "--strong-gates does not go together with attention, which takes no gates"),
        (("--gates", "gv", "--op", "gla"), "--gates must be of g, gk, g_gamma, or none; got 'gv'"),
        (("--from", "x.json", "--op", "attention"), "does not go together with --op."),
        (("--from", "x.json", "--no-error", "--seconds", "2", "--gates", "g"), "together with --gates, --seconds, --no-error."),
        (("--from", "no_such_file.json"), "cannot be read"),
        (("--seconds", "0"), "--seconds must be positive"),
    ],
)
def test_wrong_usage_says_what_is_legal(run, arguments, message):
    assert message in run("bench", *arguments, code=2).words
