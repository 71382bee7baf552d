"""The tests of the GPU can be compiled where there is none."""

import collections

import pytest

pytest.importorskip("triton", reason="the triton platform needs Triton")

from tests.triton.processes import outside


@pytest.mark.long
def test_what_a_gpu_test_launches_is_compiled_without_one(tmp_path):
    printed = outside(
        "-m", "pytest", "-p", "tests.ahead", "-p", "no:cacheprovider", "-rs", "-m", "gpu", "tests/triton/test_gpu.py",
        "-k", "test_matches_float64 and g-mild-1x300x2x2x128", environment={"TRITON_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert "compiled 4 launches" in printed
    compiled = {path.stem for path in tmp_path.glob("*/*.ptx")}
    assert compiled == {"running_log_decays", "head_gate_scan_by_warpgroups", "head_gate_backward_by_warpgroups"}


@pytest.mark.long
def test_what_comes_after_a_comparison_is_compiled_too(tmp_path):
    """Chunked first, then step by step."""
    outside(
        "-m", "pytest", "-p", "tests.ahead", "-p", "no:cacheprovider", "-m", "gpu", "tests/linear/test_reference_cases.py",
        "-k", "test_matches_reference and triton and bfloat16-gk-mild", environment={"TRITON_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    compiled = {path.stem for path in tmp_path.glob("*/*.ptx")}
    assert {"state_scan", "decode_steps"} <= compiled


@pytest.mark.long
def test_what_a_benchmark_launches_is_compiled_without_a_gpu(tmp_path):
    rows = ("--rows", "4x4096x32x64x64 channel", "channel mild unit usual;", "decode channel")
    outside("-m", "benchmarks.ahead", "delta_rule_gpu", *rows, environment={"TRITON_CACHE_DIR": str(tmp_path)})
    compiled = collections.Counter(path.stem for path in tmp_path.glob("*/*.ptx"))
    assert {"delta_correction_in_registers", "delta_scan_by_warpgroups"} <= compiled.keys()
    assert compiled["delta_steps"] >= 8  # tiles that are raced


@pytest.mark.slow
def test_what_does_not_compile_is_named_and_fails():
    nowhere = {"TRITON_CACHE_DIR": "/dev/null/nowhere"}
    with pytest.raises(AssertionError, match="not compiled, the reason is above: triton, 8x2048x2048, forward"):
        outside("-m", "benchmarks.ahead", "causal_conv_gpu", "--rows", "8x2048x2048", environment=nowhere)
