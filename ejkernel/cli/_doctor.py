"""`ejkernel doctor`: what this machine has, what runs on it, and why the rest does not."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from typing import Any

import typer
from rich.text import Text

from ejkernel._version import __version__
from ejkernel.cli import _options
from ejkernel.cli._screen import count, print_json, screen, table
from ejkernel.testing.record import find, records

LIBRARIES = ("jax", "jaxlib", "numpy", "triton", "torch", "flash-linear-attention", "matplotlib")


def doctor(as_json: _options.Json = False) -> None:
    """Show what this machine has, what runs on it, and why not.

    Exits with 1 when something keeps an operation from running at all.

    \b
    Examples:
      ejkernel doctor
      ejkernel doctor --json | jq .operations.attention
    """
    found = examine()
    if as_json:
        print_json(found)
    else:
        _show(found)
    raise typer.Exit(1 if found["problems"] else 0)


def examine() -> dict[str, Any]:
    """Everything that the command shows."""
    found: dict[str, Any] = {"versions": _versions(), "device": _device(), "problems": []}
    if "error" in found["device"]:
        found["problems"].append(f"JAX cannot use its device: {found['device']['error']}")
        found |= {"operations": {}, "cache": _cache(), "policy": {}}
        return found
    found["operations"] = _operations()
    for name, platforms in found["operations"].items():
        if all(reason is not None for reason in platforms.values()):
            found["problems"].append(f"{name} runs on no platform here")
    found["cache"] = _cache()
    found["policy"] = _policy()
    if "error" in found["policy"]:
        found["problems"].append(found["policy"]["error"])
    return found


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"ejkernel": __version__, "python": platform.python_version()}
    for name in LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def _device() -> dict[str, Any]:
    import jax

    from ejkernel._device import backend_of
    from ejkernel.ops.key import device_kind

    try:
        device = jax.local_devices()[0]
        memory = (device.memory_stats() or {}).get("bytes_limit")
    except RuntimeError as problem:  # JAX names a backend that does not start
        return {"error": str(problem).splitlines()[0]}
    return {
        "kind": device_kind(device),
        "backend": backend_of(device),
        "count": jax.local_device_count(),
        "processes": jax.process_count(),
        "memory_bytes": memory,
    }


def _operations() -> dict[str, dict[str, str | None]]:
    from ejkernel.kernels._registry import kernel_registry

    found = {op.name: op.registry.status(op.op_id) for op in records()}
    others = [name for name in kernel_registry.list_algorithms() if find(name) is None]
    found |= {name: kernel_registry.status(name) for name in others}
    return {name: {str(where): reason for where, reason in status.items()} for name, status in found.items()}


def _cache() -> dict[str, Any]:
    from ejkernel.cli._entries import stored_entries, writable
    from ejkernel.ops.config.persistent import VARIABLE, NoFolderError, cache_folder

    where = VARIABLE if os.environ.get(VARIABLE) else "the user's cache folder"
    try:
        folder = cache_folder()
    except NoFolderError as problem:
        absent = {"folder": None, "from": where, "exists": False, "writable": False, "error": str(problem)}
        return {**absent, "entries": 0, "unreadable": 0, "entries_for_this_device": 0}
    entries = stored_entries(folder)
    return {
        "folder": str(folder),
        "from": where,
        "exists": folder.is_dir(),
        "writable": writable(folder),
        "entries": len(entries),
        "unreadable": sum(entry.unreadable is not None for entry in entries),
        "entries_for_this_device": sum(entry.here for entry in entries),
    }


def _policy() -> dict[str, Any]:
    from ejkernel._device import backend_of, default_device
    from ejkernel.ops import AutotunePolicy
    from ejkernel.ops.config.policy import VARIABLE

    found: dict[str, Any] = {"variable": VARIABLE, "set_to": os.environ.get(VARIABLE) or None}
    try:
        backend = backend_of(default_device())
        found["miss"] = {op.name: AutotunePolicy().fallback(op.kernel(), backend) for op in records()}
    except ValueError as problem:
        found["error"] = str(problem)
    return found


def _show(found: dict[str, Any]) -> None:
    console = screen()
    _facts(console, found)
    matrix = table(["!operation", "!platform", "!here", "why not"])
    for name, platforms in found["operations"].items():
        for number, (where, reason) in enumerate(platforms.items()):
            here = Text("yes", "green") if reason is None else Text("no", "yellow")
            matrix.add_row(name if number == 0 else "", where, here, reason or "")
    if found["operations"]:
        console.print(matrix)
    for problem in found["problems"]:
        console.print(Text.assemble(("problem: ", "bold red"), problem))
    if not found["problems"]:
        console.print("Every operation runs here. `ejkernel verify` checks that it is right.")


def _facts(console: Any, found: dict[str, Any]) -> None:
    device, cache, policy = found["device"], found["cache"], found["policy"]
    facts = table(["!", ""])
    facts.show_header = False
    if "error" not in device:
        memory = f", {device['memory_bytes'] / 2**30:.0f} GiB" if device["memory_bytes"] else ""
        facts.add_row("device", f"{device['kind']} ({device['backend']}), {device['count']} here{memory}")
    versions = found["versions"]
    facts.add_row("versions", ", ".join(f"{name} {version}" for name, version in versions.items() if version))
    facts.add_row("not installed", ", ".join(name for name, version in versions.items() if version is None) or "-")
    state = "" if cache["writable"] else ", CANNOT BE WRITTEN TO: nothing tuned will be kept"
    facts.add_row("cache", f"{cache['folder'] or cache['error']} (from {cache['from']}){state}")
    unreadable = f", {cache['unreadable']} unreadable" if cache["unreadable"] else ""
    facts.add_row(
        "",
        f"{count(cache['entries'], 'tuned call')}, {cache['entries_for_this_device']} for this device and versions{unreadable}",
    )
    if "miss" in policy:
        said = f"{policy['variable']}={policy['set_to']}" if policy["set_to"] else f"{policy['variable']} is not set"
        same = set(policy["miss"].values())
        each = same.pop() if len(same) == 1 else ", ".join(f"{name} {what}" for name, what in policy["miss"].items())
        facts.add_row("a call that is not tuned", f"{each} ({said})")
    console.print(facts)
