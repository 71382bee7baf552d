"""The README's example runs as printed."""

from __future__ import annotations

import pathlib
import re

README = pathlib.Path(__file__).parents[1] / "README.md"


def test_examples_run():
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    assert blocks
    for block in blocks:
        exec(compile(block, str(README), "exec"), {})
