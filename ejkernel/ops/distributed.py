"""Multi-process programs: process 0 decides, the others receive.

Choices travel through the key-value store of `jax.distributed`, not through a collective: a collective would hang as soon as
one process does not take part, while reading a key has a time limit. All processes of a program make the same key for the
same call, so the key is the address.
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

_sent: dict[str, str] = {}  # what was last sent to each address


def agree(
    inv: Invocation,
    purpose: str,
    decide: Callable[[], Choice],
    check: Callable[..., Choice | None],
    seconds: float,
) -> Choice:
    """The choice of process 0, here as everywhere.

    Args:
        purpose: "choose" or "tune"; what is chosen for want of better must not answer when tuning is asked for.
        decide: makes the choice; only process 0 calls it.
        check: `(inv, level, fields, record)` to a choice, None where this process cannot run with it.
        seconds: how long to wait for process 0. After that, or when it is gone, the heuristic is used with a warning.
    """
    client = _client()
    if client is None:
        warn_once(("processes",), "several processes but no jax.distributed client: heuristics are used, so that all agree.")
        return _heuristic(inv)
    if jax.process_index() == 0:
        return _lead(_address(inv.key, purpose), decide)
    return _follow(inv, _address(inv.key, purpose), client, check, seconds)


def publish(key: str, choice: Choice) -> None:
    """Lets the other processes have what process 0 knows; nothing on other processes."""
    if jax.process_index() == 0:
        for purpose in ("choose", "tune"):
            _send(_address(key, purpose), _message(choice))


def _lead(address: str, decide: Callable[[], Choice]) -> Choice:
    try:
        choice = decide()
    except BaseException as problem:
        _send(address, {"error": f"{type(problem).__name__}: {problem}"})
        raise
    _send(address, _message(choice))
    return choice


def _message(choice: Choice) -> dict[str, Any]:
    return {"level": str(choice.level), "config": to_fields(choice.config), "record": dict(choice.record)}


def _follow(inv: Invocation, address: str, client: Any, check: Callable[..., Choice | None], seconds: float) -> Choice:
    from ejkernel.ops.config.selection import Level, NoConfigError

    try:
        message = json.loads(client.blocking_key_value_get(address, int(seconds * 1000)))
    except Exception as problem:  # whatever ended the wait, this process goes on
        warn_once(
            ("processes", inv.key),
            f"process 0 did not say within {seconds:g} s how to run {inv.kernel.op_id!r} for {inv.shapes}, so the heuristic is "
            f"used here ({type(problem).__name__}).",
        )
        return _heuristic(inv)
    if "error" in message:
        raise NoConfigError(f"process 0 could not choose a configuration of {inv.kernel.op_id!r}: {message['error']}")
    return check(inv, Level(message["level"]), message["config"], message["record"]) or _heuristic(inv)


def _heuristic(inv: Invocation) -> Choice:
    from ejkernel.ops.config.selection import Choice, Level

    return Choice(inv.kernel.heuristic_cfg(inv), Level.HEURISTICS)


def _send(address: str, message: dict[str, Any]) -> None:
    client, text = _client(), json.dumps(message)
    if client is not None and _sent.get(address) != text:
        client.key_value_set(address, text, allow_overwrite=True)
        _sent[address] = text


def _address(key: str, purpose: str) -> str:
    return f"ejkernel/{purpose}/{hashlib.sha256(key.encode()).hexdigest()}"


def _client() -> Any | None:
    """The client of the coordination service. JAX has no public name for it."""
    from jax._src import distributed

    return distributed.global_state.client
