"""Every code block of the documentation and the README runs as printed; blocks of one page share their names."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

from ejkernel._device import backend_of, default_device
from tests.documentation.pages import PAGES, ROOT, blocks, run_page

LONG = ("layers.md",)  # pages that train something
WITH_CODE = [
    pytest.param(page, marks=[pytest.mark.long] if page.name in LONG else [])
    for page in PAGES
    if any(block.info == "python" for block in blocks(page))
]
NOT_RUN = [(page, block) for page in PAGES for block in blocks(page) if block.reason is not None]
LANGUAGES = {"python", "sh", "text", "{.python .no-run}"}


def _name(page) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", WITH_CODE, ids=_name)
def test_the_blocks_run(page, monkeypatch, capsys):
    names = run_page(page, monkeypatch)
    shown = capsys.readouterr().out
    CHECKS.get(page.name, lambda names, shown: None)(names, shown)


@pytest.mark.parametrize(("page", "block"), NOT_RUN, ids=lambda value: getattr(value, "name", ""))
def test_blocks_that_cannot_run_here_at_least_compile(page, block):
    compile(block.code, str(page), "exec")
    pytest.skip(f"{_name(page)}, line {block.line}: {block.reason}")


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_no_code_escapes_by_another_language_name(page):
    found = blocks(page)
    assert {block.info for block in found} <= LANGUAGES
    assert all(block.is_included for block in found if block.info == "{.python .no-run}")
    assert len(found) * 2 == len(re.findall(r"^ *```", page.read_text(encoding="utf-8"), re.MULTILINE))


def own_kernel(names, shown):
    assert jnp.allclose(names["y"], jax.nn.logsumexp(names["x"], axis=-1), rtol=1e-6)
    assert "logsumexp  autotune" in shown
    assert "x: float32[3,~1024]" in shown


def attention(names, shown):
    assert names["out"].shape == (2, 4, 8, 64)
    assert len(shown.splitlines()) == 16  # the mask, drawn


def adding_platform(names, shown):
    assert [case.name for case in names["chosen"]] == [line.split(":")[0] for line in shown.splitlines()[1:]]
    assert shown.count("right") == 3
    assert shown.count("packed sequences are not implemented") == 2


def printed(page: str) -> str:
    """The page's first block of output, in one line."""
    return " ".join(next(block.code for block in blocks(ROOT / "docs" / page) if block.info == "text").split())


def platforms(names, shown):
    if backend_of(default_device()) == "cpu" and "import failed" not in shown:
        assert printed("platforms.md") in shown


def configuration(names, shown):
    assert names["chosen"][0].level == "autotune"
    assert "gla" in shown


def layers(names, shown):
    first, last = map(float, shown.split()[-3::2])
    assert last < first - 1


def limits(names, shown):
    assert "g is 0.7311 at [0, 0, 0, 0]" in shown


def index(names, shown):
    assert printed("index.md") in shown


CHECKED = (own_kernel, attention, adding_platform, platforms, configuration, layers, limits, index)
CHECKS = {f"{check.__name__}.md": check for check in CHECKED}
