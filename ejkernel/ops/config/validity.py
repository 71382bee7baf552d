"""Whether what was read is a key or a record of ours: whoever shows or carries entries asks here first."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from ejkernel.ops.key import check_op_id

_NUMBERS = ("seconds", "heuristic_seconds", "tuning_seconds")
_TEXTS = ("route", "time", "measured", "note", "failed", "shipped_for", "not_tuned")
_OBJECTS = ("heuristic", "environment", "shapes")


def finite_json(text: str) -> Any:
    """What a text of JSON says. ValueError also for NaN and infinities, which Python reads but cannot pass on.

    >>> finite_json('{"seconds": 0.5}')
    {'seconds': 0.5}
    """
    return json.loads(text, parse_float=_finite, parse_constant=_finite)


def _finite(number: str) -> float:
    if not math.isfinite(value := float(number)):
        raise ValueError(f"it holds {number}, which is no number in JSON")
    return value


def wrong_key(key: Any) -> str | None:
    """Why a text is no key that `Invocation.key` gives; None when it is.

    >>> wrong_key('{"op":"scale","arrays":{"x":"float32[3]"}}'), wrong_key("a key")
    (None, 'its key is not JSON')
    """
    try:
        parts = json.loads(key)
    except (TypeError, ValueError):
        return "its key is not JSON"
    if not isinstance(parts, dict):
        return "its key is not an object"
    try:
        check_op_id(parts.get("op"), "the operation in its key")
    except ValueError as problem:
        return str(problem).rstrip(".")
    for name in ("arrays", "static", "environment"):
        found = parts.get(name, {})
        if not isinstance(found, dict) or not all(isinstance(text, str) for text in found.values()):
            return f"{name!r} in its key is not an object of texts"
    return None


def wrong_record(record: Any) -> str | None:
    """Why something is no record of a measurement; None when it is. Fields that nobody reads may hold anything.

    >>> wrong_record({"seconds": 1e-3}), wrong_record({"seconds": "fast"})
    (None, "'seconds' in its record is not a number: 'fast'")
    """
    if not isinstance(record, Mapping):
        return "its record is not an object"
    for names, kind, word in ((_NUMBERS, None, "number"), (_TEXTS, str, "text"), (_OBJECTS, Mapping, "object")):
        for name in names:
            if name in record and not (_is_number(record[name]) if kind is None else isinstance(record[name], kind)):
                return f"{name!r} in its record is not {'an' if word == 'object' else 'a'} {word}: {record[name]!r:.60}"
    candidates = record.get("candidates", ())
    if not isinstance(candidates, (list, tuple)) or not all(map(_is_candidate, candidates)):
        return "'candidates' in its record are not a list of configurations with times or reasons"
    return None


def _is_candidate(found: Any) -> bool:
    if not isinstance(found, Mapping) or not isinstance(found.get("config"), Mapping):
        return False
    return isinstance(found["reason"], str) if "reason" in found else _is_number(found.get("seconds"))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
