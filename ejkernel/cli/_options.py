"""Options that several commands share, each described once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ejkernel.ops.config.persistent import VARIABLE

Ops = Annotated[
    list[str] | None,
    typer.Option("--op", metavar="NAME", help="Operation; repeat, or separate by commas. All when left out."),
]
Platforms = Annotated[
    list[str] | None,
    typer.Option("--platform", metavar="NAME", help="xla, triton, cuda, pallas; repeat, or separate by commas."),
]
Shapes = Annotated[
    list[str] | None,
    typer.Option(
        "--shapes", metavar="SHAPE", help="BxTxHxKxV or BxTxHxD, then :gates and :dtype if any; repeat, or use commas."
    ),
]
Gates = Annotated[
    str | None,
    typer.Option(
        "--gates",
        metavar="LIST",
        help="For shapes that name none: g (per head), gk (per key channel), gv, g_gamma joined by +, or none.",
    ),
]
Dtype = Annotated[
    str | None, typer.Option("--dtype", metavar="NAME", help="For shapes that name none: float32, bfloat16, float16.")
]
Load = Annotated[
    list[str] | None,
    typer.Option(
        "--load", metavar="MODULE", help="Import this first: a module that registers operations or implementations of yours."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]
CacheDir = Annotated[
    Path | None,
    typer.Option(
        "--cache-dir", metavar="DIR", envvar=VARIABLE, help="Folder of tuned configurations; else the user's cache folder."
    ),
]
Recorded = Annotated[
    Path | None,
    typer.Option("--recorded", metavar="FILE", help="What ejkernel.ops.report().save(FILE) wrote at the end of a run."),
]
