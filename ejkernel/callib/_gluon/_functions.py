"""A Gluon function as a Python function that computes with the words of `_language`."""

from __future__ import annotations

import dis
import functools
import types
from typing import Any

from ejkernel.callib._gluon import _language as language

MODULES = {"mbarrier": language.MBARRIER, "async_copy": language.ASYNC_COPY}


@functools.cache
def interpreted(function: types.FunctionType) -> types.FunctionType:
    """The same code, where every name of Triton's or Gluon's means what it means here, and so in all functions that it calls.

    Annotations (`gl.constexpr`) are not evaluated: what the compiler has to know is a Python value here.
    """
    known = {"range": language.counted}
    names = {x.argval for code in _codes(function.__code__) for x in dis.get_instructions(code) if x.opname == "LOAD_GLOBAL"}
    module = function.__globals__
    found = {name: _meaning(name, module[name]) for name in names - set(known) if name in module}
    return types.FunctionType(
        function.__code__, {**found, **known}, function.__name__, function.__defaults__, function.__closure__
    )


def _codes(code: types.CodeType) -> list[types.CodeType]:
    """A function's code and those of functions inside it."""
    return [code, *(inner for x in code.co_consts if isinstance(x, types.CodeType) for inner in _codes(x))]


def _meaning(name: str, value: Any) -> Any:
    """What a global of a kernel's module means to the interpreter."""
    import triton.language as tl

    if isinstance(value, tl.constexpr):
        return value.value
    if isinstance(value, types.ModuleType) and value.__name__.startswith("triton"):
        return MODULES.get(value.__name__.rpartition(".")[2], language.GL)
    if (getattr(value, "__module__", None) or "").startswith("triton") and getattr(
        value, "__name__", None
    ) in language.FUNCTIONS:
        return language.FUNCTIONS[value.__name__]
    if isinstance(getattr(value, "fn", None), types.FunctionType):  # decorated, for Triton or Gluon
        return language.Words(name, {}) if value.fn.__module__.startswith("triton") else interpreted(value.fn)
    if (getattr(value, "__module__", None) or "").startswith("triton"):
        return language.Words(name, {})  # an error where it is used
    return value
