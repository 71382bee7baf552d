"""Choices of a run as a file: to look at elsewhere, and to tune the same calls ahead of the next run.

A call is written as its kernel, its arguments with the shape and dtype of every array, and the vmaps around it. Classes are
written by name; reading looks them up in this library and in modules that are already imported, and imports nothing else.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import json
import math
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.ops.config.codec import to_fields
from ejkernel.ops.config.persistent import write_atomically
from ejkernel.ops.invocation import Invocation, MappedAxis
from ejkernel.ops.kernel import Kernel
from ejkernel.ops.key import without_environment

if TYPE_CHECKING:
    from ejkernel.ops.reporting import Chosen

FORMAT = 1
_KIND = "ejkernel choices"


class NotRecordable(ValueError):
    """A call that cannot be written, or not be made again from what was written; the message says why."""


def save(choices: Iterable[Chosen], path: str | os.PathLike[str]) -> Path:
    """Writes choices to a file; see `Report.save`."""
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    content = {"format": FORMAT, "kind": _KIND, "choices": [_choice(chosen) for chosen in choices]}
    write_atomically(file, json.dumps(content, indent=1, allow_nan=False) + "\n")
    return file


def load(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The choices of a file that `save` wrote: key, level, config, record, route and call of each; older ones have no route.

    Raises:
        ValueError: it is no such file.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except UnicodeDecodeError as problem:
        raise ValueError(f"it is not text ({problem})") from None
    if not isinstance(content, dict) or content.get("kind") != _KIND or content.get("format") != FORMAT:
        raise ValueError(f"expected format {FORMAT} of {_KIND!r}")
    kinds = {"key": str, "level": str, "config": dict, "record": dict}
    choices = content.get("choices")
    if not isinstance(choices, list):
        raise ValueError("it has no list of choices")
    for number, choice in enumerate(choices):
        if not isinstance(choice, dict) or not all(isinstance(choice.get(name), kind) for name, kind in kinds.items()):
            raise ValueError(f"choice {number} must have a key and a level (strings), a config and a record (objects)")
        if not isinstance(choice.get("route"), (str, NoneType)):
            raise ValueError(f"the route of choice {number} must be a string; got {choice['route']!r}")
    return choices


def invocation(choice: Mapping[str, Any]) -> Invocation[Any, Any]:
    """The call of a choice that `load` gave.

    Raises:
        NotRecordable: the call could not be written, its classes are not there, or this process would give it another key.
    """
    written = choice.get("call")
    if not isinstance(written, dict):
        raise NotRecordable(str(choice.get("why_no_call") or "its arguments were not recorded"))
    try:
        kernel = _kernel(written["kernel"])
        mapped = tuple(MappedAxis(axis["size"], tuple(axis["axes"])) for axis in written["mapped"])
        inv = Invocation(kernel, tuple(_decode(written["args"])), _decode(written["kwargs"]), mapped=mapped)
        same = inv.call == without_environment(choice["key"])
    except (KeyError, TypeError, AttributeError) as problem:
        raise NotRecordable(f"it cannot be read: {type(problem).__name__}: {problem}") from None
    if not same:
        raise NotRecordable("this process would give it another key: other settings (such as x64) or another version")
    return inv


def _choice(chosen: Chosen) -> dict[str, Any]:
    try:
        fields = to_fields(chosen.config)
    except TypeError:  # a user's kernel may have configurations that are no dataclasses; they are never stored
        fields = {"value": repr(chosen.config)}
    written = {"key": chosen.key, "level": chosen.level, "config": fields, "record": dict(chosen.record), "route": chosen.route}
    try:
        if chosen.invocation is None:
            raise NotRecordable("its arguments were not kept")
        return {**written, "call": _encode_call(chosen.invocation)}
    except NotRecordable as why:
        return {**written, "call": None, "why_no_call": str(why)}


def _encode_call(inv: Invocation[Any, Any]) -> dict[str, Any]:
    return {
        "kernel": {"class": _class_name(type(inv.kernel)), "attributes": _encode(vars(inv.kernel))},
        "args": [_encode(argument) for argument in inv.args],
        "kwargs": _encode(dict(inv.kwargs)),
        "mapped": [{"size": axis.size, "axes": list(axis.axes)} for axis in inv.mapped],
    }


def _encode(value: Any) -> Any:
    if value is None or (isinstance(value, (bool, int, str)) and not isinstance(value, enum.Enum)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, jax.ShapeDtypeStruct):
        if value.sharding is not None:
            raise NotRecordable("an array is split between devices; tune such a call in its own program with ejkernel.ops.tune")
        return {"array": str(value.dtype), "shape": list(value.shape)}
    if isinstance(value, np.dtype) or _is_dtype_class(value):
        return {"dtype": jnp.dtype(value).name, **({} if isinstance(value, np.dtype) else {"class": True})}
    if isinstance(value, enum.Enum):
        return {"enum": _class_name(type(value)), "value": _encode(value.value)}
    if isinstance(value, tuple):
        kind = {"class": _class_name(type(value))} if hasattr(value, "_fields") else {}
        return {"tuple": [_encode(item) for item in value], **kind}
    if isinstance(value, list):
        return [_encode(item) for item in value]
    if isinstance(value, Mapping):
        return {"mapping": [[_encode(name), _encode(item)] for name, item in value.items()]}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: _encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"dataclass": _class_name(type(value)), "fields": fields}
    raise NotRecordable(f"a {type(value).__name__} among its arguments cannot be written")


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "float" in value:
        return float(value["float"])
    if "array" in value:
        return jax.ShapeDtypeStruct(tuple(value["shape"]), _dtype(value["array"]))
    if "dtype" in value:
        dtype = jnp.dtype(value["dtype"])
        return getattr(jnp, dtype.name) if value.get("class") else dtype
    if "enum" in value:
        return _class(value["enum"], lambda cls: issubclass(cls, enum.Enum))(_decode(value["value"]))
    if "tuple" in value:
        items = [_decode(item) for item in value["tuple"]]
        return _class(value["class"], lambda cls: hasattr(cls, "_fields"))(*items) if "class" in value else tuple(items)
    if "mapping" in value:
        return {_decode(name): _decode(item) for name, item in value["mapping"]}
    fields = {name: _decode(item) for name, item in value["fields"].items()}
    return _class(value["dataclass"], dataclasses.is_dataclass)(**fields)


def _is_dtype_class(value: Any) -> bool:
    """Whether a value is a dtype as JAX names it: `jnp.float32`."""
    return getattr(value, "dtype", None) in _DTYPES and getattr(jnp, value.dtype.name, None) is value


_DTYPES = frozenset(jnp.dtype(name) for name in ("float32", "bfloat16", "float16", "float64"))


def _dtype(name: str) -> Any:
    """The dtype of an array; random keys have one of their own."""
    if not name.startswith("key<"):
        return jnp.dtype(name)
    kinds = (jax.eval_shape(lambda impl=impl: jax.random.key(0, impl=impl)).dtype for impl in _KEYS)
    found = next((kind for kind in kinds if str(kind) == name), None)
    if found is None:
        raise NotRecordable(f"random keys of kind {name} are not known here")
    return found


_KEYS = ("threefry2x32", "rbg", "unsafe_rbg")


def _kernel(written: Mapping[str, Any]) -> Kernel[Any, Any]:
    cls = _class(written["class"], lambda cls: issubclass(cls, Kernel))
    kernel: Kernel[Any, Any] = cls.__new__(cls)
    vars(kernel).update(_decode(written["attributes"]))
    return kernel


def _class_name(cls: type) -> str:
    if "<locals>" in cls.__qualname__:
        raise NotRecordable(f"{cls.__qualname__} is defined inside a function, where no other process finds it")
    return f"{cls.__module__}:{cls.__qualname__}"


def _class(name: str, fits: Any) -> Any:
    """The class of a name, if it is of the kind that belongs there."""
    module, _, path = name.partition(":")
    if module.split(".")[0] == "ejkernel":
        importlib.import_module(module)
    found: Any = sys.modules.get(module)
    if found is None:
        raise NotRecordable(f"{module} is not imported; name it with --load, or import it before")
    for part in path.split("."):
        found = getattr(found, part)
    if not isinstance(found, type) or not fits(found):
        raise NotRecordable(f"{name} is not a class that belongs in a recorded call")
    return found
