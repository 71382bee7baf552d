"""The page on attention runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path


def test_the_page_runs(capsys):
    page = Path(__file__).parents[2] / "docs" / "attention.md"
    code = "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
    names: dict = {}
    exec(compile(code, str(page), "exec"), names)
    assert names["out"].shape == (2, 4, 8, 64)
    assert len(capsys.readouterr().out.splitlines()) == 16
