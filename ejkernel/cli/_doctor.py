"""`ejkernel doctor`: what this machine has, what runs on it, and why the rest does not."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
from collections.abc import Iterable
from typing import Any

import typer
from rich.text import Text

from ejkernel._checking import checking
from ejkernel._version import __version__
from ejkernel.cli import _options
from ejkernel.cli._screen import count, print_json, screen, table
from ejkernel.kernels._registry import NOT_WRITTEN, kernel_registry
from ejkernel.ops.config.shipped import device_name
from ejkernel.testing.record import find, records

INSTALL = 'pip install ".[cuda13]" in the checkout'
USED = ("jax", "jaxlib", "numpy", "triton", "matplotlib")
LIBRARIES = (*USED, "torch")  # only `bench` looks for torch, and for the rivals' libraries, which come from their records


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


MEASURED = "h200"  # the only GPU that has run the kernels of triton
NOT_RUN_ON_TPUS = (
    "The kernels of pallas are compiled for TPU v4 to 7x and verified interpreted; they have not yet been run on a TPU."
)
NOT_RUN_ON_THIS_GPU = "The kernels of triton are compiled for Ampere and later; they have been run on an H200 alone so far."
SEND = "`ejkernel verify --platform {}` runs them here: please send its output with an issue, right or wrong."


def examine() -> dict[str, Any]:
    """Everything that the command shows."""
    found: dict[str, Any] = {"versions": _versions(LIBRARIES), "device": _device(), "problems": [], "notes": []}
    if "error" in found["device"]:
        found["problems"].append(f"JAX cannot use its device: {found['device']['error']}")
        found |= {"operations": {}, "order": {}, "remedies": _remedies(found), "cache": _cache(), "policy": {}}
        return found
    found["operations"] = _operations()
    rivals = (make(record).library for record in records() for make in record.rivals.values())
    found["versions"] |= _versions(dict.fromkeys(filter(None, rivals)))
    found["notes"] += _notes(found["device"])
    found["order"] = {name: _order(name, platforms) for name, platforms in found["operations"].items()}
    found["remedies"] = _remedies(found)
    for name, platforms in found["operations"].items():
        if all(reason is not None for reason in platforms.values()):
            found["problems"].append(f"{name} runs on no platform here")
    found["cache"] = _cache()
    found["policy"] = _policy()
    if "error" in found["policy"]:
        found["problems"].append(found["policy"]["error"])
    try:
        checking()
    except ValueError as problem:
        found["problems"].append(str(problem))
    return found


def _notes(device: dict[str, Any]) -> list[str]:
    """Which kernels nobody has run on such a device."""
    if device["backend"] == "tpu":
        return [f"{NOT_RUN_ON_TPUS} {SEND.format('pallas')}"]
    if device["kind"].startswith("NVIDIA") and device_name(device["kind"]) != MEASURED:
        return [f"{NOT_RUN_ON_THIS_GPU} {SEND.format('triton')}"]
    return []


def _versions(libraries: Iterable[str]) -> dict[str, str | None]:
    versions: dict[str, str | None] = {"ejkernel": __version__, "python": platform.python_version()}
    for name in libraries:
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
    found = {op.name: op.registry.status(op.op_id) for op in records()}
    others = [name for name in kernel_registry.list_algorithms() if find(name) is None]
    found |= {name: kernel_registry.status(name) for name in others}
    return {
        name: {str(where): reason for where, reason in status.items() if reason != NOT_WRITTEN}
        for name, status in found.items()
    }


def _order(name: str, platforms: dict[str, str | None]) -> list[str]:
    """The platforms that a call is offered to here, in this order: the first that covers it takes it."""
    record = find(name)
    registry, op_id = (kernel_registry, name) if record is None else (record.registry, record.op_id)
    entries = registry.list_implementations(op_id)
    return list(dict.fromkeys(str(entry.platform) for entry in entries if platforms.get(str(entry.platform), "") is None))


def _remedies(found: dict[str, Any]) -> list[str]:
    """What to do so that more runs here, as far as this machine shows."""
    remedies = []
    if found["device"].get("backend", "cpu") == "cpu" and _has_nvidia_gpu():
        remedies.append(f"this machine has an NVIDIA GPU that JAX does not use: {INSTALL}")
    if found["device"].get("backend") == "gpu" and found["versions"]["triton"] is None:
        meant = [name for name, platforms in found["operations"].items() if "triton" in platforms]
        remedies.append(f"there is no Triton, so its kernels take no call of {', '.join(meant)}: {INSTALL}")
    return remedies


def _has_nvidia_gpu() -> bool:
    return os.path.exists("/dev/nvidia0") or shutil.which("nvidia-smi") is not None


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
    if found["operations"]:
        console.print(_matrix(found))
    _reasons(console, found)
    for remedy in found["remedies"]:
        console.print(Text.assemble(("to do: ", "bold yellow"), remedy))
    for note in found["notes"]:
        console.print(Text.assemble(("note: ", "bold"), note))
    for problem in found["problems"]:
        console.print(Text.assemble(("problem: ", "bold red"), problem))
    if not found["problems"]:
        console.print("Every operation runs here. `ejkernel verify` checks that it is right.")


def _matrix(found: dict[str, Any]) -> Any:
    """One line for each operation: who takes its calls here, and who does not run here."""
    matrix = table(["!operation", "!a call runs on", "not here"])
    for name, platforms in found["operations"].items():
        first, *rest = found["order"][name] or ["nothing"]
        taken = Text(first, "green" if found["order"][name] else "bold red").append(
            "".join(f", else {where}" for where in rest)
        )
        matrix.add_row(name, taken, ", ".join(where for where, reason in platforms.items() if reason is not None) or "-")
    return matrix


def _reasons(console: Any, found: dict[str, Any]) -> None:
    """Why the others do not run here, each reason once."""
    why: dict[str, list[str]] = {}
    for platforms in found["operations"].values():
        for where, reason in platforms.items():
            if reason is not None and where not in why.setdefault(reason, []):
                why[reason].append(where)
    for reason, platforms in why.items():
        console.print(Text(f"{', '.join(platforms)}: {reason}"))


def _facts(console: Any, found: dict[str, Any]) -> None:
    device, cache, policy = found["device"], found["cache"], found["policy"]
    facts = table(["!", ""])
    facts.show_header = False
    if "error" not in device:
        memory = f", {device['memory_bytes'] / 2**30:.0f} GiB" if device["memory_bytes"] else ""
        facts.add_row("device", f"{device['kind']} ({device['backend']}), {device['count']} here{memory}")
    versions = found["versions"]
    facts.add_row("versions", ", ".join(f"{name} {version}" for name, version in versions.items() if version))
    absent = [name for name, version in versions.items() if version is None]
    compared = [name for name in absent if name not in USED]
    parts = [", ".join(name for name in absent if name in USED), f"{', '.join(compared)} (for bench)" if compared else ""]
    facts.add_row("not installed", "; ".join(filter(None, parts)) or "-")
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
