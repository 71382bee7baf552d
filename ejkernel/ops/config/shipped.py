"""Tuned configurations that come with the package, by device kind.

`ejkernel/ops/defaults/<device>.json` says for each call that was measured on that device who won: `"heuristic"`, or the fields
of another configuration with the record of its race. A device without an entry for a call uses that of a near relative;
versions of libraries are not compared, since a good configuration outlives them. A call that is in no file is tuned.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ejkernel.ops.config.codec import to_fields
from ejkernel.ops.invocation import Invocation
from ejkernel.ops.key import device_kind, without_environment
from ejkernel.ops.notices import warn_once

FOLDER = Path(__file__).resolve().parent.parent / "defaults"
FORMAT = 2
HEURISTIC = "heuristic"
Won = str | dict[str, Any]  # HEURISTIC, or {"config": fields, "record": record}

# Devices of one architecture, the most common first; a relative is looked for in this order.
_FAMILIES = (
    ("h100", "h200", "gh200", "h800", "h20"),
    ("b200", "gb200", "b100", "b300", "gb300"),
    ("a100", "a800", "a30"),
    ("rtx-4090", "l40s", "l40", "rtx-6000-ada", "l4"),
    ("rtx-3090", "a40", "a6000", "a10"),
    ("tpu-v5p", "tpu-v5", "tpu-v4"),
    ("tpu-v6e", "tpu-v6-lite", "tpu-v5e", "tpu-v5-lite"),
)


def device_name(kind: str) -> str:
    """A device kind as the name of its file, without what does not matter to tuning.

    >>> [device_name(kind) for kind in ("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-40GB", "TPU v5 lite", "cpu AMD EPYC x2")]
    ['h100', 'a100', 'tpu-v5-lite', 'cpu']
    """
    slug = re.sub(r"[^a-z0-9]+", "-", kind.lower()).strip("-")
    if slug.startswith("cpu-") or slug == "cpu":
        return "cpu"
    known = sorted((name for family in _FAMILIES for name in family), key=len, reverse=True)
    return next((name for name in known if re.search(rf"(^|-){name}(-|$)", slug)), slug)


def relatives(name: str) -> tuple[str, ...]:
    """The device itself, then those of its architecture.

    >>> relatives("h200")
    ('h200', 'h100', 'gh200', 'h800', 'h20')
    """
    family = next((family for family in _FAMILIES if name in family), ())
    return (name, *(other for other in family if other != name))


def shipped_default(inv: Invocation[Any, Any]) -> tuple[Any, dict[str, Any]] | None:
    """`(configuration or its fields, record)` for a call from the nearest device that has it, or None.

    The record says which device it was.
    """
    for name in relatives(device_name(device_kind(inv.device))):
        won = _defaults(FOLDER / f"{name}.json").get(inv.call)
        if won is not None:
            there = {"shipped_for": name}
            if isinstance(won, str):
                return inv.kernel.heuristic_cfg(inv), {**there, "note": "the heuristic won when this call was measured"}
            return won["config"], {**won["record"], **there}
    return None


def read(file: Path) -> dict[str, Won]:
    """Who won each call of a file. ValueError that says what is wrong with it."""
    content = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or content.get("format") != FORMAT or not isinstance(content.get("calls"), dict):
        raise ValueError(f"expected format {FORMAT} with calls")
    calls: dict[str, str | dict[str, Any]] = content["calls"]
    for call, won in calls.items():
        fields = isinstance(won, dict) and all(isinstance(won.get(part), dict) for part in ("config", "record"))
        if won != HEURISTIC and not fields:
            raise ValueError(f"{call} must be {HEURISTIC!r}, or have a config and a record; found {won!r}")
    return calls


def write(file: Path, kind: str, measured: Iterable[tuple[str, Any, Mapping[str, Any]]]) -> None:
    """Adds measured configurations, as `(key, configuration, record)`, to a file; calls that it has already are replaced.

    Args:
        kind: the device that they were measured on.
    """
    calls = read(file) if file.exists() else {}
    for key, config, record in measured:
        fields = to_fields(config)
        won: Won = HEURISTIC if fields == record.get("heuristic") else {"config": fields, "record": dict(record)}
        calls[without_environment(key)] = won
    lines = ",\n".join(f"  {json.dumps(call)}: {json.dumps(won, allow_nan=False)}" for call, won in sorted(calls.items()))
    file.write_text(f'{{"format": {FORMAT}, "device": {json.dumps(kind)}, "calls": {{\n{lines}\n}}}}\n', encoding="utf-8")


@functools.cache
def _defaults(file: Path) -> dict[str, Won]:
    if not file.is_file():
        return {}
    try:
        return read(file)
    except (OSError, ValueError) as problem:
        warn_once(("shipped", str(file)), f"ignored the shipped configurations {file}: {problem}.")
        return {}
