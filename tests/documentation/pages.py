"""The code blocks of a page, and running them."""

from __future__ import annotations

import re
import sys
import textwrap
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "examples").glob("*.md")]
)

_FENCE = re.compile(
    r"(?:^[ ]*<!-- not run: (?P<reason>[^\n]+?) -->\n)?"
    r"^(?P<indent>[ ]*)```(?P<info>[^\n]*)\n(?P<code>.*?)^(?P=indent)```[ ]*$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language line, code, where it begins, and why it is not run."""

    info: str
    code: str
    line: int
    reason: str | None

    @property
    def is_included(self) -> bool:
        """Whether the code comes from a file with tests of its own."""
        return self.code.lstrip().startswith("--8<--")


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(m["info"].strip(), textwrap.dedent(m["code"]), text.count("\n", 0, m.start("code")) + 1, m["reason"])
        for m in _FENCE.finditer(text)
    ]


def table_rows(file: str, heading: str) -> list[list[str]]:
    """The cells of every table row under a heading of the second level, without marks of bold type."""
    section = (ROOT / file).read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    assert section, f"{file} has no section {heading!r}"
    lines = [line for line in section.splitlines() if line.startswith("|") and not line.startswith("|---")]
    return [[cell.strip().replace("*", "") for cell in line.strip("|").split("|")] for line in lines]


def run_page(page: Path, monkeypatch: Any) -> dict[str, Any]:
    """Runs the Python blocks of a page in order, in one module, and gives its names. JAX's settings are then as before."""
    module = types.ModuleType(f"page_{page.stem}")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # classes defined on the page look for it
    before = dict(jax.config.values)
    try:
        for block in blocks(page):
            if block.info == "python" and block.reason is None:
                code = "\n" * (block.line - 1) + block.code  # so that a traceback names the page's own line
                exec(compile(code, str(page), "exec", dont_inherit=True), vars(module))
    finally:
        for name in [name for name, value in before.items() if jax.config.values[name] != value]:
            jax.config.update(name, before[name])
        compilation_cache.reset_cache()  # it keeps the folder of its first use
    return vars(module)
