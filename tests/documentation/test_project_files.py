"""The files beside the code name what is there: one version, and paths that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ejkernel import __version__
from tests.documentation.pages import ROOT

FILES = ("README.md", "CONTRIBUTING.md", "ROADMAP.md", "SECURITY.md", "CHANGELOG.md")
PATH = re.compile(r"`((?:ejkernel|tests|docs|examples|benchmarks)/[\w./]*)`")


def test_the_version_to_cite_is_the_package_s():
    found = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None
    assert found[1] == __version__


def test_the_newest_change_is_of_this_version():
    newest = re.search(r"^## (\S+?),? ", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest is not None
    assert newest[1] == __version__


@pytest.mark.parametrize("name", [*FILES, *(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))])
def test_paths_exist(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    linked = [link for link in re.findall(r"\]\(([^)#:\s]+)[^):]*\)", text) if link.endswith((".md", ".png", ".svg"))]
    paths = [ROOT / path for path in PATH.findall(text)] + [(ROOT / name).parent / link for link in linked]
    assert not [str(path.relative_to(ROOT)) for path in map(Path, paths) if not path.exists()]


def test_no_page_holds_both_sides_of_a_merge():
    pages = [*(ROOT / name for name in FILES), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")]
    marked = re.compile(r"^(<{7}|={7}|>{7})( |$)", re.MULTILINE)
    assert not [str(page.relative_to(ROOT)) for page in pages if marked.search(page.read_text(encoding="utf-8"))]
