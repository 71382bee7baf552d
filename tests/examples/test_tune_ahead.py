"""What one process tuned runs in another that may measure nothing."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from ejkernel import ops
from ejkernel.ops.config.cache import shared_cache
from examples import tune_ahead


@pytest.mark.long
def test_a_tuned_file_is_all_that_a_run_needs(tmp_path, monkeypatch):
    monkeypatch.setattr(tune_ahead, "SHAPE", (1, 16, 1, 8))
    shared_cache().clear()
    file = tmp_path / "tuned.json"
    (chosen,) = tune_ahead.tune(file)
    assert (chosen.op_id, chosen.level) == ("gla", "autotune")
    assert len(json.loads(file.read_text())["entries"]) == 1

    shared_cache().clear()
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "another machine's"))
    monkeypatch.setenv("EJKERNEL_AUTOTUNE_POLICY", "error")
    tune_ahead.training_step.clear_cache()  # type: ignore[attr-defined]
    with pytest.raises(ops.NoConfigError):
        tune_ahead.training_step(*(np.zeros(s.shape, s.dtype) for s in tune_ahead.shapes()))
    assert np.isfinite(tune_ahead.run(file)).all()
    assert any(choice.key == chosen.key and choice.config == chosen.config for choice in ops.report())


def test_a_file_that_is_not_there_is_named(tmp_path):
    command = [sys.executable, "-m", "examples.tune_ahead", "run", str(tmp_path / "none.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "none.json: write it first with `tune`" in done.stderr
