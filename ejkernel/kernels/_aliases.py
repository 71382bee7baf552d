"""Platform packages that offer functions by the names of operations, whatever was imported before.

`from ejkernel.kernels._triton import recurrent` is a function, and so is `recurrent` in
`ejkernel.kernels._triton.recurrent._interface`, although all linear operations of a platform lie in one directory. Importing
the package imports no platform code; asking for a name does.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any


def offer(package: str, **families: str) -> list[str]:
    """Makes `package` offer the platform-level function of each operation; returns their names.

    A submodule of the same name as an operation would shadow its function once it is imported, so the functions are
    properties of the package's class, which nothing shadows.

    Args:
        families: for each operation, the directory of the package whose `_interface` defines it.
    """
    module = sys.modules[package]
    names = {name: _function(package, name, family) for name, family in families.items()}
    everything = lambda module: sorted({*vars(module), *names})
    module.__class__ = type("PlatformPackage", (types.ModuleType,), {**names, "__dir__": everything})
    for name, family in families.items():
        if name != family:
            _alias(package, name, family)
    return sorted(families)


def _function(package: str, name: str, family: str) -> property:
    def get(module: types.ModuleType) -> Any:
        return getattr(_interface(package, family, name), name)

    def keep(module: types.ModuleType, value: Any) -> None:
        """The import system binds submodules here; the function stays what the name means."""

    return property(get, keep)


def _interface(package: str, family: str, name: str) -> types.ModuleType:
    try:
        return importlib.import_module(f"{package}.{family}._interface")
    except ImportError as problem:
        raise ImportError(f"{package}.{name} cannot be used here: {problem}.", name=problem.name) from problem


def _alias(package: str, name: str, family: str) -> None:
    """`package.name` and `package.name._interface` as modules in which `name` is the function."""
    for path, children in ((f"{package}.{name}", ["_interface"]), (f"{package}.{name}._interface", [])):
        module = types.ModuleType(path, f"`{name}` of {package}, which lies in `{family}`.")
        module.__dict__.update(__path__=[], __package__=path, __all__=[name])
        module.__dict__["__getattr__"] = _getter(package, name, family, path, children)
        sys.modules[path] = module


def _getter(package: str, name: str, family: str, path: str, children: list[str]) -> Any:
    def get(attribute: str) -> Any:
        if attribute == name:
            return getattr(_interface(package, family, name), name)
        if attribute in children:
            return sys.modules[f"{path}.{attribute}"]
        raise AttributeError(f"module {path!r} has no attribute {attribute!r}")

    return get
