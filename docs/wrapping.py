"""Marks what may be broken over lines, which a style sheet cannot see: it does not know how long a text is.

Code in a sentence or a cell stays on one line, so that no break makes two words of `--json`. Code that is marked `long` may be
broken. A cell that is marked `long` gets room for several words in a line. In cells, `T = 8192` stays together.
"""

from __future__ import annotations

import re
from typing import Any

LONGEST_CODE = 32  # characters that fit into a line of a list at 400 pixels
LONGEST_CELL = 24  # characters of a cell that needs no more room than its longest word

_CODE = re.compile(r"(?<!<span></span>)<code>(?P<text>.*?)</code>", re.DOTALL)  # a block's comes after an empty span
_CELL = re.compile(r"<td(?P<attributes>[^>]*)>(?P<inside>.*?)</td>", re.DOTALL)
_EQUATION = re.compile(r"(?<=\b[A-Z]) = (?=\d)")


def on_page_content(html: str, **_: Any) -> str:
    """The page with the marks; mkdocs calls this for every page."""
    return _CELL.sub(_marked_cell, _CODE.sub(_marked_code, html))


def _marked_code(found: re.Match[str]) -> str:
    long = len(_shown(found["text"])) > LONGEST_CODE
    return f'<code class="long">{found["text"]}</code>' if long else found[0]


def _marked_cell(found: re.Match[str]) -> str:
    inside = _EQUATION.sub("&nbsp;=&nbsp;", found["inside"])
    mark = ' class="long"' if len(_shown(inside)) > LONGEST_CELL else ""
    return f"<td{mark}{found['attributes']}>{inside}</td>"


def _shown(html: str) -> str:
    """The text without tags, an entity being one character."""
    return re.sub(r"&[#\w]+;", "x", re.sub(r"<[^>]*>", "", html))
