"""Configurations as JSON fields, and back with every field checked against its class."""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Mapping
from typing import Any

import numpy as np


def unfit(config: Any) -> str | None:
    """Why something cannot be a configuration; None when it can.

    A frozen dataclass can. So can another value that can be hashed, such as a number; but it is never tuned nor stored.

    >>> unfit(3), unfit({"block": 3})
    (None, 'it cannot be hashed')
    """
    if isinstance(config, type):
        return f"it is the class {config.__name__} itself, not one of its instances"
    if dataclasses.is_dataclass(config) and not getattr(config, "__dataclass_params__").frozen:  # noqa: B009  (untyped)
        return f"{type(config).__name__} can be changed; declare it with @dataclass(frozen=True)"
    try:
        hash(config)
    except TypeError:
        return "it cannot be hashed"
    return None


def check_config(config: Any, where: str) -> None:
    """TypeError naming `where` it came from, unless something can be a configuration."""
    if (reason := unfit(config)) is not None:
        raise TypeError(f"{where} must be a frozen dataclass, hashable in all its fields; got {config!r}: {reason}.")


def to_fields(config: Any) -> dict[str, Any]:
    """The fields of a configuration as JSON values. TypeError for anything but a dataclass of plain values."""
    if isinstance(config, Mapping):
        return {name: _to_json(value, name) for name, value in config.items()}
    if not dataclasses.is_dataclass(config) or isinstance(config, type):
        raise TypeError(f"a configuration must be a dataclass instance; got {config!r}.")
    return {field.name: _to_json(getattr(config, field.name), field.name) for field in dataclasses.fields(config)}


def in_words(fields: Mapping[str, Any]) -> str:
    """The fields of a configuration in a few words; those that say nothing are left out.

    >>> in_words({"schedule": "chunked", "block_q": 64, "platform": "xla", "backend": "any", "num_warps": None})
    'xla chunked block_q=64'
    """
    said = {name: value for name, value in fields.items() if value not in (None, "any", "auto")}
    ordered = sorted(said.items(), key=lambda item: (not isinstance(item[1], str), item[0] != "platform"))
    return " ".join(value if isinstance(value, str) else f"{name}={value}" for name, value in ordered)


def _to_json(value: Any, name: str) -> Any:
    if isinstance(value, enum.Enum):
        return _to_json(value.value, name)
    if isinstance(value, np.generic):
        return _to_json(value.item(), name)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (tuple, list)):
        return [_to_json(item, name) for item in value]
    if isinstance(value, Mapping) or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
        return to_fields(value)
    raise TypeError(f"field {name!r} of a configuration must be a number, string, enum or tuple of these; got {value!r}.")


def from_fields(cls: type, fields: Any) -> Any:
    """The configuration of class `cls` with these fields. Only those whose metadata says `optional` may be left out.

    Raises:
        ValueError: a field is unknown, missing or of the wrong type, or the class itself refuses the values.
    """
    if isinstance(fields, cls):
        return fields
    if not isinstance(fields, Mapping):
        raise ValueError(f"expected the fields of {cls.__name__}, found {type(fields).__name__}")
    hints = _hints(cls)
    unknown, missing = sorted(map(str, fields.keys() - hints.keys())), sorted(hints.keys() - fields.keys() - _optional(cls))
    if unknown or missing:
        what = [f"unknown field {name!r}" for name in unknown] + [f"missing field {name!r}" for name in missing]
        raise ValueError(f"{cls.__name__} has {', '.join(what)}")
    values = {name: _from_json(hints[name], value, f"{cls.__name__}.{name}") for name, value in fields.items()}
    try:
        return cls(**values)
    except (TypeError, ValueError) as refusal:
        raise ValueError(f"{cls.__name__} refuses its fields: {refusal}") from None


@functools.cache
def _optional(cls: type) -> frozenset[str]:
    """Fields that entries may lack, since they were stored before the class had them."""
    return frozenset(field.name for field in dataclasses.fields(cls) if field.metadata.get("optional"))


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    if not dataclasses.is_dataclass(cls):
        raise ValueError(f"{cls.__name__} is not a dataclass")
    try:
        hints = typing.get_type_hints(cls)
    except (NameError, TypeError, AttributeError):
        hints = {}  # annotations that only a type checker can look up: the fields' names are still checked
    return {field.name: hints.get(field.name, Any) for field in dataclasses.fields(cls) if field.init}


def _from_json(hint: Any, value: Any, where: str) -> Any:
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _from_union(inside, value, where)
    if hint is Any:
        return tuple(_from_json(Any, item, where) for item in value) if isinstance(value, list) else value
    if origin is typing.Literal and any(value == item and type(value) is type(item) for item in inside):
        return value
    if origin is tuple and isinstance(value, (list, tuple)):
        kinds = [inside[0]] * len(value) if len(inside) == 2 and inside[1] is ... else list(inside)
        if len(kinds) == len(value):
            return tuple(_from_json(kind, item, where) for kind, item in zip(kinds, value, strict=True))
    elif isinstance(hint, type):
        if issubclass(hint, enum.Enum) and any(value == member.value for member in hint):
            return hint(value)
        if dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
            return from_fields(hint, value)
        if hint is float and type(value) is int:
            return float(value)
        if type(value) is hint or (hint is type(None) and value is None):
            return value
    raise ValueError(f"{where} must be {_name(hint)}, found {value!r}")


def _from_union(options: tuple[Any, ...], value: Any, where: str) -> Any:
    for option in options:
        try:
            return _from_json(option, value, where)
        except ValueError:
            continue  # another member of the union may fit
    raise ValueError(f"{where} must be one of {', '.join(map(_name, options))}, found {value!r}")


def _name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint)
