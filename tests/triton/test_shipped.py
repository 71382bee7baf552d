"""What tuning writes is what a GPU of that kind finds, and what is shipped can be read."""

import json
from typing import Any

import jax
import pytest

pytest.importorskip("triton", reason="the triton platform needs Triton")

from ejkernel._device import Device, on_device
from ejkernel.kernels._linear import LinearConfig
from ejkernel.modules import (
    GLAttention,
    GLAttentionConfig,
    LightningAttention,
    RecurrentAttention,
    RecurrentAttentionConfig,
    gla_attention,
    recurrent_attention,
)
from ejkernel.ops import ConfigCache, Tuner
from ejkernel.ops.collecting import collecting
from ejkernel.ops.config import shipped
from ejkernel.ops.config.codec import from_fields
from ejkernel.ops.config.shipped import HEURISTIC, read
from ejkernel.ops.tuner import OUT_OF_TIME, Tuned
from ejkernel.testing import delta_gpu, linear_gpu, shipping

CLASSES = {kernel.op_id: kernel._config_cls for kernel in (RecurrentAttention, GLAttention, LightningAttention)}
H200 = Device("gpu", "NVIDIA H200", 90)
WINNER: dict[str, Any] = {"block_d": 32, "platform": "triton", "backend": "gpu"}


@pytest.fixture
def on_h200(monkeypatch):
    monkeypatch.setattr(shipped, "device_kind", lambda device: "NVIDIA H200")


@pytest.fixture
def written(tmp_path, monkeypatch, on_h200):
    """The file for an H200 with a winner for two calls, and the folder that it is shipped in."""
    config = RecurrentAttentionConfig(**WINNER)
    monkeypatch.setattr(Tuner, "tune", lambda self, inv, validate_backward: Tuned(config, {"time": "2026"}))
    cache = ConfigCache()
    for name in ("8x2048x16x128x128 gk", "packed 32768x16x128x128 g_gamma"):
        shipping.tune_call(shipping.invocations(linear_gpu.calls()[name]), Tuner(), False, cache)
    shipping.write(tmp_path / "h200.json", "NVIDIA H200", cache)
    shipping.write(tmp_path / "h200.json", "NVIDIA H200", cache)  # a second run replaces, it does not repeat
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    shipped._defaults.cache_clear()
    yield tmp_path / "h200.json"
    shipped._defaults.cache_clear()


def found(function, arrays):
    """The shipped fields for the one call that `function` makes."""
    with collecting() as calls:
        jax.eval_shape(lambda arrays: function(**arrays), arrays)
    ((_, inv),) = calls.found.values()
    answer = shipped.shipped_default(inv)
    return None if answer is None else from_fields(inv.kernel._config_cls, answer[0])


def test_an_h200_finds_what_was_written(written):
    assert len(read(written)) == 5  # recurrent twice, gla twice, lightning once
    arrays = linear_gpu.calls()["8x2048x16x128x128 gk"]
    assert found(recurrent_attention, arrays) == RecurrentAttentionConfig(**WINNER)
    arrays["g"] = arrays.pop("gk")
    assert found(gla_attention, arrays) == GLAttentionConfig(**WINNER)
    assert found(recurrent_attention, linear_gpu.calls()["8x2048x16x128x128 g"]) is None


def test_what_is_shipped_has_timed_every_candidate(monkeypatch, on_h200):
    """A packed call's race that ends early is run again, with more time."""
    given: list[float] = []

    def tune(self, inv, validate_backward):
        given.append(self.max_seconds)
        late = {"reason": f"not timed: the time {OUT_OF_TIME}"} if self.max_seconds < 3 else {"seconds": 1e-3}
        return Tuned(RecurrentAttentionConfig(**WINNER), {"candidates": [{"seconds": 1e-3}, late]})

    monkeypatch.setattr(Tuner, "tune", tune)
    usual = Tuner(max_seconds=1.0)
    call = shipping.invocations(linear_gpu.calls()["packed 32768x16x128x128 g"])
    record = shipping.tune_call(call, usual, False, ConfigCache())
    assert given == [1.0, 2.0, 4.0]
    assert usual.max_seconds == 1.0
    assert all("seconds" in candidate for candidate in record["candidates"])


def test_calls_are_the_benchmarks_and_a_decode_step():
    names = linear_gpu.calls()
    assert len(names) == len(linear_gpu.rows()) + 1
    assert shipping.problem_of(names["decode gk"]).shape == (128, 1, 16, 128, 128)
    mild = [row for row in delta_gpu.ROWS if "strong" not in row[1]]
    assert len(delta_gpu.calls()) == len(mild) + 2  # and a decode step with each gate


@pytest.mark.parametrize(
    "file", [None, *sorted(shipped.FOLDER.glob("*.json"))], ids=lambda f: "written" if f is None else f.name
)
def test_every_entry_is_a_configuration(file, written):
    entries = read(file or written)
    assert entries
    for call, won in entries.items():
        operation = json.loads(call)["op"]
        if operation in CLASSES and won != HEURISTIC:
            assert isinstance(from_fields(CLASSES[operation], won["config"]), LinearConfig)


@pytest.mark.parametrize("name", linear_gpu.calls())
def test_the_benchmarks_calls_are_tuned_for_an_h200(name, on_h200):
    for inv in shipping.invocations(linear_gpu.calls()[name]):  # recurrent, and gla and lightning where they make the call
        with on_device(H200):
            found = shipped.shipped_default(inv)
        assert found is not None
        config, record = found
        assert config.platform == "triton"
        assert config.schedule == ("recurrent" if name.startswith("decode") else "chunked")
        assert record["shipped_for"] == "h200"
