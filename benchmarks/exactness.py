"""Errors of chunked gated linear attention against float64 as a table; `ejkernel.testing.exactness` says what is compared.

    python -m benchmarks.exactness

Prints docs/tables/exactness.md.
"""

from __future__ import annotations

import datetime
import platform

import jax
import numpy as np

from ejkernel.testing.exactness import KINDS, errors


def table() -> str:
    """The errors as Markdown."""
    lines = [
        f"<!-- python -m benchmarks.exactness, {datetime.date.today()}, jax {jax.__version__}, {platform.machine()} -->",
        "| log gates | form | output | dq, dk, dv (worst) | gate gradient |",
        "|---|---|---|---|---|",
    ]
    before = ""
    for kind, name, found in errors():
        worst = max(found[n] for n in ("query", "key", "value")) if "query" in found else None
        cells = [_cell(found.get("output")), _cell(worst), _cell(found["gk"])]
        lines.append(f"| {'' if kind == before else KINDS[kind]} | {name} | {' | '.join(cells)} |")
        before = kind
    return "\n".join(lines)


def _cell(error: float | None) -> str:
    if error is None:
        return ""
    return "NaN or inf" if np.isinf(error) else f"{error:.1e}".replace("e-0", "e-").replace("e+0", "e")


if __name__ == "__main__":
    print(table())
