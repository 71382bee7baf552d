"""Multi-process programs: process 0 decides, the others receive.

Choices travel through the key-value store of `jax.distributed`, not through a collective: a collective would hang as soon as
one process does not take part, while reading a key has a time limit. All processes of a program make the same key for the
same call, so the key is the address. What is written there first stays: a process that waited in vain writes that heuristics
are to be used, and a process 0 that comes later finds that and does the same. So all agree in every case.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax

from ejkernel.ops.config.codec import to_fields
from ejkernel.ops.invocation import Invocation
from ejkernel.ops.notices import warn_once

if TYPE_CHECKING:
    from ejkernel.ops.config.selection import Choice

Check = Callable[..., "Choice | None"]
_READING_SECONDS = 10.0  # for what is known to be there


def agree(inv: Invocation[Any, Any], purpose: str, decide: Callable[[], Choice], check: Check, seconds: float) -> Choice:
    """The same choice in every process.

    Args:
        purpose: "choose" or "tune"; what is chosen for want of better must not answer when tuning is asked for.
        decide: makes the choice; only process 0 calls it.
        check: `(inv, level, fields, record)` to a choice, None where this process cannot run with it.
        seconds: how long to wait for process 0. After that the heuristic is used with a warning.

    Raises:
        NoConfigError: process 0 could not choose, or its policy is "error".
    """
    client, address = _client(), _address(inv.key, purpose)
    if client is None:
        warn_once(("processes",), "several processes but no jax.distributed client: heuristics are used, so that all agree.")
        return _heuristic(inv, "several processes but no jax.distributed client")
    return (
        _lead(inv, client, address, decide, check)
        if jax.process_index() == 0
        else _follow(inv, client, address, check, seconds)
    )


def publish(key: str, choice: Choice) -> None:
    """Lets the other processes have what process 0 has in memory; nothing on other processes."""
    client = _client()
    if client is not None and jax.process_index() == 0:
        for purpose in ("choose", "tune"):
            _settle(client, _address(key, purpose), _message(choice))


def _lead(inv: Invocation[Any, Any], client: Any, address: str, decide: Callable[[], Choice], check: Check) -> Choice:
    try:
        choice = decide()
    except BaseException as problem:
        _settle(client, address, {"error": f"{type(problem).__name__}: {problem}"})
        raise
    message = _message(choice)
    settled = _settle(client, address, message)
    if settled == message:
        return choice
    warn_once(
        ("processes", inv.key),
        f"another process did not wait for the choice of {inv.kernel.op_id!r} for {inv.shapes}, so what it settled on is used.",
    )
    return _understood(inv, settled, check)


def _follow(inv: Invocation[Any, Any], client: Any, address: str, check: Check, seconds: float) -> Choice:
    try:
        message = _read(client, address, seconds)
    except Exception as problem:  # whatever ended the wait, this process goes on
        warn_once(
            ("processes", inv.key),
            f"process 0 did not say within {seconds:g} s how to run {inv.kernel.op_id!r} for {inv.shapes}, so the heuristic is "
            f"used ({type(problem).__name__}).",
        )
        message = _settle(client, address, _message(_heuristic(inv, f"process 0 did not say how within {seconds:g} s")))
    return _understood(inv, message, check)


def _understood(inv: Invocation[Any, Any], message: dict[str, Any], check: Check) -> Choice:
    from ejkernel.ops.config.selection import Level, NoConfigError

    if "error" in message:
        raise NoConfigError(f"process 0 could not choose a configuration of {inv.kernel.op_id!r}: {message['error']}")
    agreed = check(inv, Level(message["level"]), message["config"], message["record"])
    return agreed or _heuristic(inv, "what process 0 chose cannot run here")


def _heuristic(inv: Invocation[Any, Any], why: str) -> Choice:
    from ejkernel.ops.config.selection import Choice, Level

    return Choice(inv.kernel.heuristic_cfg(inv), Level.HEURISTICS, {"not_tuned": why})


def _message(choice: Choice) -> dict[str, Any]:
    content = {"level": str(choice.level), "config": to_fields(choice.config), "record": dict(choice.record)}
    read: dict[str, Any] = json.loads(json.dumps(content))  # as it will be read, tuples being lists
    return read


def _settle(client: Any, address: str, message: dict[str, Any]) -> dict[str, Any]:
    """Writes a message unless there is one; gives the one that is there afterwards."""
    try:
        client.key_value_set(address, json.dumps(message))
    except Exception as refusal:  # it is there already, or the service is gone
        try:
            return _read(client, address, _READING_SECONDS)
        except Exception:
            warn_once(("service",), f"configurations cannot be shared between processes: {type(refusal).__name__}: {refusal}")
    return message


def _read(client: Any, address: str, seconds: float) -> dict[str, Any]:
    message: dict[str, Any] = json.loads(client.blocking_key_value_get(address, int(seconds * 1000)))
    return message


def _address(key: str, purpose: str) -> str:
    return f"ejkernel/{purpose}/{hashlib.sha256(key.encode()).hexdigest()}"


def _client() -> Any | None:
    """The client of the coordination service. JAX has no public name for it."""
    from jax._src import distributed

    return distributed.global_state.client
