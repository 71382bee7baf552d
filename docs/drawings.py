"""The documentation's drawings, as SVG that takes its colours from the page, so that they fit its light and dark scheme.

    python docs/drawings.py

writes docs/assets/*.svg; the pages include them in place.
"""

from __future__ import annotations

from pathlib import Path

ASSETS = Path(__file__).parent / "assets"
CELL = 22
LEVELS = {1: "c1", 2: "c2", 4: "c3"}


class Drawing:
    """Shapes collected into one SVG."""

    def __init__(self, width: int, height: int, title: str):
        self.width, self.height, self.title = width, height, title
        self.parts: list[str] = []

    def rect(self, x: float, y: float, w: float, h: float, style: str = "cell", opacity: float = 1) -> None:
        shade = "" if opacity == 1 else f' fill-opacity="{opacity:.2f}"'
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="2.5" class="{style}"{shade}/>')

    def text(self, x: float, y: float, words: str, style: str = "") -> None:
        self.parts.append(f'<text x="{x:g}" y="{y:g}" class="{style}">{words}</text>')

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        self.parts.append(f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" class="line" marker-end="url(#tip)"/>')

    def grid(self, x: float, y: float, shades: list[list[float]], style: str = "c1") -> None:
        """A matrix of cells; 0 is an empty one."""
        for i, row in enumerate(shades):
            for j, shade in enumerate(row):
                self.rect(x + j * CELL, y + i * CELL, CELL - 2, CELL - 2, style if shade else "cell", shade or 1)

    def svg(self) -> str:
        tip = (
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            '<path d="M0 0 8 4 0 8z" class="tip"/></marker></defs>'
        )
        body = "\n".join(self.parts)
        return (
            f'<svg class="drawing" viewBox="0 0 {self.width} {self.height}" style="max-width:{self.width}px" role="img" '
            f'aria-label="{self.title}" xmlns="http://www.w3.org/2000/svg">\n{tip}\n{body}\n</svg>\n'
        )


STATE = [[0.9, 0.35, 0.6, 0.2], [0.3, 0.75, 0.15, 0.5], [0.5, 0.2, 0.85, 0.4]]


def _sub(letter: str, index: str = "t") -> str:
    """A letter with an index; what follows stands on the line again."""
    return f"{letter}<tspan class='sub' dy='4'>{index}</tspan><tspan dy='-4'>&#8203;</tspan>"


def _times(state: list[list[float]], rows: list[float]) -> list[list[float]]:
    return [[cell * factor for cell in row] for row, factor in zip(state, rows, strict=True)]


def step() -> Drawing:
    """One step: decay, add, read."""
    d = Drawing(760, 210, "one step: the state is multiplied by the decay, the outer product of key and value is added, "
                "and the query reads the sum")  # fmt: skip
    top, decayed = 70, _times(STATE, [0.9, 0.25, 0.6])
    d.grid(20, top, STATE)
    d.text(64, top + 92, _sub("h", "t-1"), "name")
    d.text(64, top - 40, "1  state [K, V]", "note")
    d.text(128, top + 38, "&#215;", "sign")
    for i, factor in enumerate((0.9, 0.25, 0.6)):
        d.rect(150, top + i * CELL, CELL - 2, CELL - 2, "c2", factor)
    d.text(160, top + 92, f"exp({_sub('g')})", "name")
    d.text(164, top - 40, "2  decay", "note")
    d.text(200, top + 38, "+", "sign")
    key, value = (0.5, 0.9, 0.3), (0.8, 0.3, 0.6, 0.9)
    for i, shade in enumerate(key):
        d.rect(222, top + i * CELL, CELL - 2, CELL - 2, "c3", shade)
    for j, shade in enumerate(value):
        d.rect(250 + j * CELL, top - 26, CELL - 2, CELL - 2, "c3", shade)
    outer = [[k * v for v in value] for k in key]
    d.grid(250, top, outer, "c3")
    transposed = (
        "k<tspan class='sub' dy='-6'>T</tspan><tspan class='sub' dx='-6' dy='11'>t</tspan><tspan dy='-5'>&#8203;</tspan>"
    )
    d.text(290, top + 92, f"{transposed} {_sub('v')}", "name")
    d.text(290, top - 40, "3  add", "note")
    d.text(360, top + 38, "=", "sign")
    new = [[min(a + b, 1) for a, b in zip(x, y, strict=True)] for x, y in zip(decayed, outer, strict=True)]
    d.grid(384, top, new)
    d.text(428, top + 92, _sub("h"), "name")
    d.arrow(478, top + 32, 520, top + 32)
    for i, shade in enumerate((0.8, 0.2, 0.5)):
        d.rect(532, top + i * CELL, CELL - 2, CELL - 2, "c4", shade)
    d.text(542, top + 92, _sub("q"), "name")
    d.text(580, top - 40, "4  read", "note")
    d.arrow(564, top + 32, 606, top + 32)
    for j, shade in enumerate((0.9, 0.5, 0.7, 0.4)):
        d.rect(618 + j * CELL, top + CELL, CELL - 2, CELL - 2, "c4", shade)
    d.text(662, top + 92, f"{_sub('o')} = scale {_sub('q')} {_sub('h')}", "name")
    d.arrow(428, top + 104, 428, top + 124)
    d.text(428, top + 138, "to the next step, or out as the final state", "note")
    return d


def gates() -> Drawing:
    """What each gate multiplies."""
    d = Drawing(800, 190, "g multiplies the whole state, gk its rows, gv its columns, g_gamma the whole state by the same "
                "number at every step")  # fmt: skip
    top, full = 62, [[1.0] * 4] * 3
    columns = (44, 248, 440, 628)
    rows, shades = (0.9, 0.2, 0.55), (0.85, 0.3, 0.6, 0.15)
    d.rect(columns[0] + 36, top - 34, CELL - 2, CELL - 2, "c2", 0.55)
    d.grid(columns[0], top, [[0.55 * x for x in row] for row in full], "c2")
    for i, shade in enumerate(rows):
        d.rect(columns[1] - 32, top + i * CELL, CELL - 2, CELL - 2, "c2", shade)
    d.grid(columns[1], top, _times(full, list(rows)), "c2")
    for j, shade in enumerate(shades):
        d.rect(columns[2] + j * CELL, top - 34, CELL - 2, CELL - 2, "c2", shade)
    d.grid(columns[2], top, [list(shades)] * 3, "c2")
    for n in range(3):
        x = columns[3] + n * 48
        d.rect(x + 9, top - 34, CELL - 2, CELL - 2, "c2", 0.7)
        for i in range(3):
            for j in range(3):
                d.rect(x + j * 13, top + 8 + i * 13, 11, 11, "c2", 0.7)
        d.text(x + 19, top + 64, f"t<tspan class='sub'>{'' if n == 0 else f'+{n}'}</tspan>", "note")
    names = ("g  [B, T, H]", "gk  [B, T, H, K]", "gv  [B, T, H, V]", "g_gamma  [H]")
    notes = ("one number a head and step", "one a row; so is g of rank 4", "one a column", "one a head, the same at every step")
    for x, name, note in zip((88, 280, 484, 690), names, notes, strict=True):
        d.text(x, top + 96, name, "code")
        d.text(x, top + 116, note, "note")
    return d


def tree() -> Drawing:
    """Which level of the tree covers which pair of tokens in a chunk of eight."""
    d = Drawing(700, 250, "a chunk of eight tokens: pairs of tokens by the level of the tree that covers them")
    x0, y0, size = 60, 34, CELL
    for t in range(8):
        for s in range(8):
            level = 1 << ((t ^ s).bit_length() - 1) if s < t else 0
            style, shade = (LEVELS[level], 0.75) if level else ("c4", 0.75) if s == t else ("cell", 1)
            d.rect(x0 + s * size, y0 + t * size, size - 2, size - 2, style, shade)
        d.text(x0 - 14, y0 + t * size + 15, str(t), "note")
        d.text(x0 + t * size + 10, y0 - 10, str(t), "note")
    d.text(x0 + 88, y0 + 196, "s: the token that was written", "note")
    d.text(26, y0 + 92, "t", "name")
    rows = [
        ("c4", "t = s: no decay", "the diagonal, q . k"),
        ("c1", "blocks of 1", "between the two tokens of a pair"),
        ("c2", "blocks of 2", "from a pair to the next"),
        ("c3", "blocks of 4", "from one half of the chunk to the other"),
    ]
    for i, (style, name, note) in enumerate(rows):
        y = y0 + 4 + i * 46
        d.rect(290, y, 20, 20, style, 0.75)
        d.text(322, y + 9, name, "left code")
        d.text(322, y + 26, note, "left note")
    return d


def packing() -> Drawing:
    """Three sequences in one row."""
    d = Drawing(720, 150, "three sequences of 5, 3 and 8 tokens in one row, cut at cu_seqlens 0, 5, 8, 16")
    x, y, at = 20, 48, 0
    for style, length in (("c1", 5), ("c2", 3), ("c3", 8)):
        d.text(x + at * 42, y - 14, str(at), "code")
        d.text(x + at * 42 + 6, y + 62, "start afresh", "left note")
        d.text(x + at * 42 + 6, y + 76, "or from its state", "left note")
        for i in range(length):
            d.rect(x + (at + i) * 42 + 3, y, 37, 30, style, 0.35 + 0.5 * i / length)
            if i:
                d.arrow(x + (at + i) * 42 - 12, y + 40, x + (at + i) * 42 + 14, y + 40)
        at += length
    d.text(x + at * 42, y - 14, str(at), "code")
    d.text(x, y - 34, "cu_seqlens", "left code")
    return d


def icon() -> str:
    """The tree's pattern, small, with colours of its own."""
    colours = {0: "#e8b04a", 1: "#14a89c", 2: "#4f8fe0"}
    cells = [
        f'<rect x="{1 + s * 8}" y="{1 + t * 8}" width="7" height="7" rx="1" fill="{colours[(t ^ s).bit_length()]}"/>'
        for t in range(4)
        for s in range(t + 1)
    ]
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 33 33">{"".join(cells)}</svg>\n'


def drawings() -> dict[str, str]:
    """Every file by name."""
    return {f"{draw.__name__}.svg": draw().svg() for draw in (step, gates, tree, packing)} | {"icon.svg": icon()}


if __name__ == "__main__":
    for name, content in drawings().items():
        (ASSETS / name).write_text(content, encoding="utf-8")
