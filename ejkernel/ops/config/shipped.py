"""Tuned configurations that come with the package, by device kind.

`ejkernel/ops/defaults/<device>.json` holds what `dumps` gave on that device. A device without an entry for a call uses that
of a near relative; versions of libraries are not compared, since a good configuration outlives them.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

from ejkernel.ops.invocation import Invocation
from ejkernel.ops.key import device_kind, without_environment
from ejkernel.ops.notices import warn_once

FOLDER = Path(__file__).resolve().parent.parent / "defaults"

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


def shipped_default(inv: Invocation) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """`(fields, record)` for a call from the nearest device that has it, or None. The record says which device it was."""
    for name in relatives(device_name(device_kind(inv.device))):
        found = _defaults(FOLDER / f"{name}.json").get(inv.call)
        if found is not None:
            return found[0], {**found[1], "shipped_for": name}
    return None


@functools.cache
def _defaults(file: Path) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """The entries of a file by the part of the key that device and versions have no part in."""
    if not file.is_file():
        return {}
    from ejkernel.ops.config.exchange import read

    try:
        return {without_environment(key): (fields, record) for key, fields, record in read(file)}
    except (OSError, ValueError) as problem:
        warn_once(("shipped", str(file)), f"ignored the shipped configurations {file}: {problem}.")
        return {}
