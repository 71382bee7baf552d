"""The example of a user's own kernel runs as it is written."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "own_kernel.md"


@pytest.mark.skipif(not PAGE.is_file(), reason="the documentation is not beside the tests")
def test_the_example_runs_and_is_right(capsys, monkeypatch):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.S)
    assert len(blocks) == 3
    module = types.ModuleType("own_kernel")
    monkeypatch.setitem(sys.modules, "own_kernel", module)
    names = vars(module)
    for block in blocks:
        exec(compile(block, str(PAGE), "exec", dont_inherit=True), names)
    assert jnp.allclose(names["y"], jax.nn.logsumexp(names["x"], axis=-1), rtol=1e-6)
    shown = capsys.readouterr().out
    assert "logsumexp  autotune" in shown
    assert "x: float32[3,~1024]" in shown
    kernel = blocks[0][blocks[0].index("@dataclass") : blocks[0].index("executor =")]
    assert len(kernel.strip().splitlines()) <= 30
