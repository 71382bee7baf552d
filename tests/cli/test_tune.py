"""`ejkernel tune`: what it measures, what it skips, and that an interrupt loses nothing."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from ejkernel import ops
from ejkernel.modules import GLAttention, GLAttentionConfig, attention, gla_attention, recurrent_attention
from ejkernel.modules.base import default_executor
from ejkernel.ops.config.cache import shared_cache
from ejkernel.ops.tuner import Tuned, Tuner, TuningFailed

GLA = ("tune", "--op", "gla_attention")


@pytest.fixture
def tuned(monkeypatch):
    """A tuner that measures nothing: it takes the heuristic, and keeps a list of the calls it was asked for."""
    asked = []

    def tune(self, inv, validate_backward=False):
        asked.append(inv)
        self.progress(0.5, "compiling")
        config = inv.kernel.heuristic_cfg(inv)
        return Tuned(config, {"seconds": 1e-3, "heuristic_seconds": 2e-3, "candidates": [], "backward": validate_backward})

    monkeypatch.setattr(Tuner, "tune", tune)
    shared_cache().clear()
    yield asked
    shared_cache().clear()


def test_shapes_on_the_line_are_stored_and_then_known(run, tuned, tmp_path):
    asked = (*GLA, "--shapes", "1x8x1x4:g,1x8x1x4:gk", "--shapes", "1x8x1x4:none")
    first = run(*asked, "--json", code=0).json
    assert [call["status"] for call in first["calls"]] == ["tuned"] * 3
    assert first["folder"] == str(tmp_path / "cache")
    assert len(list((tmp_path / "cache" / "gla").glob("*.json"))) == 3
    assert [call["status"] for call in run(*asked, "--json", code=0).json["calls"]] == ["known"] * 3
    assert len(tuned) == 3
    shown = run(*asked, "--force", code=0)
    assert len(tuned) == 6
    assert "2.00x" in shown.out
    assert shown.words.count("tuned") >= 3


def test_without_shapes_it_takes_those_that_bench_measures(run, tuned):
    shown = run("tune", "--op", "gla_attention,attention", "--max-seconds", "30", code=0)
    assert {inv.kernel.op_id for inv in tuned} == {"gla", "attention"}
    assert len(tuned) == 8
    assert "8 calls, each at most 30 s: 4 minutes at most" in shown.err
    assert "8 calls stored in" in shown.out


def test_nothing_is_said_to_be_stored_that_is_not(run, tuned, monkeypatch):
    def late(self, inv, validate_backward=False):
        heuristic = {"config": {}, "seconds": 1e-3}
        rest = {"config": {}, "reason": "not tried: the time of 1 s was used up"}
        return Tuned(inv.kernel.heuristic_cfg(inv), {"seconds": 1e-3, "candidates": [heuristic, rest]})

    monkeypatch.setattr(Tuner, "tune", late)
    shown = run(*GLA, "--shapes", "1x8x1x4:g", code=1)
    assert "stored in" not in shown.out
    assert " unfinished " in shown.out
    assert " tuned " not in shown.out
    assert "1 of 1 call not stored: time ran out before anything beside the heuristic was timed" in shown.words


def test_what_was_tuned_is_what_a_call_uses(run, tuned):
    run(*GLA, "--shapes", "1x8x1x4:gk", code=0)
    q = jnp.ones((1, 7, 1, 4))  # of the same bucket
    choice = default_executor().choose(GLAttention(), q, q, q, -q)
    assert str(choice.level) == "disk"


def test_an_interrupt_keeps_what_was_measured_and_the_next_run_goes_on(run, tuned, monkeypatch):
    whole = Tuner.tune

    def interrupted(self, inv, validate_backward=False):
        if len(tuned) == 1:
            raise KeyboardInterrupt
        return whole(self, inv, validate_backward)

    asked = (*GLA, "--shapes", "1x8x1x4:g,1x8x1x4:gk,1x8x1x4:none")
    monkeypatch.setattr(Tuner, "tune", interrupted)
    first = run(*asked, code=130)
    assert "interrupted: 2 of 3 calls left" in first.words
    monkeypatch.setattr(Tuner, "tune", whole)
    found = run(*asked, "--json", code=0).json
    assert [call["status"] for call in found["calls"]] == ["known", "tuned", "tuned"]
    assert found["interrupted"] is False


def test_a_file_of_shapes(run, tuned, tmp_path):
    file = tmp_path / "shapes.txt"
    file.write_text(
        "# layers\ngla_attention 1x8x1x4:g\n\nattention 1x16x2/1x8:bfloat16  # the third\nrecurrent_gla 1x8x1x4:none\n"
    )
    calls = run("tune", "--file", file, "--json", code=0).json["calls"]
    assert [call["operation"] for call in calls] == ["gla_attention", "attention", "gla_attention"]
    file.write_text("gla_attention 1x8x1x4\nsoftmax 1x8x1x4\n")
    assert "line 2: expected 'OPERATION SHAPE'" in run("tune", "--file", file, code=2).words


def test_a_recorded_run(run, tuned, tmp_path):
    q, k, v = (jax.random.normal(jax.random.key(i), (1, 12, 2, 4)) for i in range(3))
    gla_attention(q, k, v, -abs(k))
    gla_attention(q, k, v, cfg=GLAttentionConfig("chunked", 4))
    attention(q, k, v, causal=True, sliding_window=3, dtype=None)
    jax.vmap(lambda q: recurrent_attention(q, k, v))(q[None])
    recurrent_attention(q, k, v, cu_seqlens=jnp.array([0, 5, 12]))
    file = ops.report().save(tmp_path / "run.json")
    tuned.clear()
    found = run("tune", "--recorded", file, "--json", code=0).json
    assert [call["status"] for call in found["calls"]] == ["tuned"] * 4  # the explicit one is left alone
    assert {call["operation"] for call in found["calls"]} == {"gla_attention", "attention", "recurrent_attention"}
    recorded = {chosen.key for chosen in ops.report() if chosen.level == "heuristics"}
    assert {inv.key for inv in tuned} == recorded
    only = run("tune", "--recorded", file, "--op", "attention", "--json", code=0).json
    assert [call["status"] for call in only["calls"]] == ["known"]


def test_a_recorded_call_that_cannot_be_made_again_says_why(run, tuned, tmp_path):
    q = jnp.ones((1, 6, 1, 4))
    with jax.default_matmul_precision("highest"):
        gla_attention(q, q, q)
    file = ops.report().save(tmp_path / "run.json")
    found = run("tune", "--recorded", file, "--json", code=1).json
    assert found["calls"][0]["status"] == "skipped"
    assert "another key" in found["calls"][0]["reason"]


RECORDED = '{"format":1,"kind":"ejkernel choices","choices":['
NO_ROUTE = '{"key":"{}","level":"disk","config":{},"record":{},"route":3}'


@pytest.mark.parametrize("content", ["", "{}", RECORDED + "{}]}", RECORDED + NO_ROUTE + "]}"])
def test_a_damaged_record_is_refused(run, tmp_path, content):
    (tmp_path / "run.json").write_text(content)
    assert "is not a recorded run" in run("tune", "--recorded", tmp_path / "run.json", code=1).words


def test_a_call_that_cannot_be_measured_is_a_failure(run, monkeypatch):
    def failing(self, inv, validate_backward=False):
        raise TuningFailed("everything was too large", {"failed": "everything was too large"})

    monkeypatch.setattr(Tuner, "tune", failing)
    with pytest.warns(ops.ConfigWarning, match="everything was too large"):
        shown = run(*GLA, "--shapes", "1x8x1x4", code=1)
    assert "failed" in shown.words


def test_forward_only_is_passed_on(run, tuned):
    run(*GLA, "--shapes", "1x8x1x4", code=0)
    backward = lambda: run("cache", "show", "--json").json["entries"][0]["record"]["backward"]
    assert backward() is True
    run(*GLA, "--shapes", "1x8x1x4", "--forward-only", "--force", code=0)
    assert backward() is False


def test_tuning_for_real(run):
    shown = run("tune", "--op", "attention", "--shapes", "1x4x1x2", "--forward-only", "--iters", "1", "--json", code=0)
    (call,) = shown.json["calls"]
    assert call["status"] == "tuned"
    assert call["record"]["measured"] == "forward"
    assert len(call["record"]["candidates"]) >= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--shapes", "1x8x1x4"), "--shapes needs --op"),
        (("--op", "softmax", "--shapes", "1x8x1x4"), "--op must be one of"),
        (("--op", "gla_attention", "--shapes", "8x1x4"), "a shape must be"),
        (("--op", "gla_attention", "--shapes", "1x8x1x4:bf16"), "bf16 is bfloat16 here."),
        (("--op", "gla_attention", "--shapes", "1x8x1x4:g4"), "g4, a g per key channel, is gk here."),
        (("--op", "gla_attention", "--shapes", "1x8x1x4", "--iters", "0"), "iters must be an integer of at least 1"),
        (("--op", "gla_attention", "--shapes", "1x8x1x4", "--max-seconds", "0"), "--max-seconds must be positive"),
        (("--op", "gla_attention", "--shapes", "1x8x1x4", "--platform", "metal"), "--platform must be one of"),
        (("--op", "attention", "--gates", "gk", "--shapes", "1x8x1x4"), "--gates does not go together with attention"),
        (("--op", "attention", "--file", "no_such_file"), "--op does not go together with --file"),
        (("--dtype", "float16", "--platform", "xla", "--recorded", "x"), "does not go together with --dtype, --platform."),
        (("--file", "no_such_file"), "cannot be read"),
        (("--recorded", "no_such_file"), "cannot be read"),
    ],
)
def test_wrong_usage_says_what_is_legal(run, arguments, message):
    assert message in run("tune", *arguments, code=2).words


def test_a_folder_that_cannot_be_written_is_found_before_measuring(run, tuned, tmp_path):
    (tmp_path / "file").write_text("")
    shown = run(*GLA, "--shapes", "1x8x1x4", "--cache-dir", tmp_path / "file", code=1)
    assert "cannot be written to" in shown.words
    assert tuned == []
