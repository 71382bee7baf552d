"""The site builds without a warning and fetches nothing; drawings and tables are what their programs make."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys

import pytest

from ejkernel.testing.exactness import KINDS, OURS, errors
from tests.documentation.pages import ROOT


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="the extra 'docs' is not installed")
def test_the_site_builds_and_loads_nothing_from_elsewhere(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    pages = list(tmp_path.glob("*.html"))
    assert len(pages) > 15
    for page in pages:
        html = page.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|iframe|source)[^>]*\ssrc=\"?(?:https?:)?//[^\s\">]+", html)
        linked = re.findall(r"<link[^>]*\shref=\"?(?:https?:)?//[^\s\">]+", html)
        assert not loaded + linked, f"{page.name}: {loaded + linked}"
        assert "--8<--" not in html, page.name
        assert "\\|" not in html, f"{page.name}: a table shows the backslash of `\\|`"
    styles = "".join(file.read_text(encoding="utf-8") for file in tmp_path.rglob("*.css"))
    assert not re.findall(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", styles)
    says_what_it_is((tmp_path / "api.html").read_text(encoding="utf-8"))


def says_what_it_is(api: str) -> None:
    """Every entry begins with a sentence, and what it returns is one item, however many lines that takes."""
    entry = r'<h\d id="([\w.]+)" class="doc doc-heading">(?:(?!<h\d ).)*?<div class="doc doc-contents[^>]*>\s*<p>(.{12})'
    entries = dict(re.findall(entry, api, re.DOTALL))
    assert len(entries) > 100
    bare = [name for name, first in entries.items() if first == "<span class=" and not name.endswith("__init__")]
    assert not bare, "sections without a sentence before them"
    returned = re.findall(r"Returns:</span></p>\s*<ul>(.*?)</ul>", api, re.DOTALL)
    assert returned
    assert all(items.count("<li") == 1 for items in returned)


def test_the_drawings_are_what_the_program_draws():
    spec = importlib.util.spec_from_file_location("drawings", ROOT / "docs" / "drawings.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, content in module.drawings().items():
        assert (ROOT / "docs" / "assets" / name).read_text(encoding="utf-8") == content, "run python docs/drawings.py"


def test_what_the_page_on_exactness_says_is_measured():
    table = (ROOT / "docs" / "tables" / "exactness.md").read_text(encoding="utf-8")
    assert [row.split("|")[1].strip() for row in table.splitlines() if OURS in row] == list(KINDS.values())
    found = {(kind, form): error for kind, form, error in errors(time=128, kinds=("resets",))}
    assert max(found["resets", OURS].values()) < 1e-6
    assert 1e-4 < found["resets", "running sums, differences"]["output"] < 1e-1
    assert found["resets", "running sums, factored"]["output"] == float("inf")
