"""What a key is made of: values written the same way in every process, and the environment that a result depends on.

Nothing here uses `hash()`, object ids or line numbers, so a key made today is found again tomorrow.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import os
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from ejkernel._device import Device, backend_of
from ejkernel._sizes import known
from ejkernel._version import __version__

_settings: Any = jax.config  # whose attributes come from flags, which type checkers do not see
_LEGAL_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def is_op_id(op_id: Any) -> bool:
    """Whether `op_id` can name an operation and its folder."""
    return isinstance(op_id, str) and _LEGAL_ID.fullmatch(op_id) is not None


def check_op_id(op_id: Any, where: str) -> None:
    """ValueError unless `op_id` can name an operation and its folder."""
    if not is_op_id(op_id):
        raise ValueError(f"{where} must be letters, digits, '_', '.' and '-', not starting with '.' or '-'; got {op_id!r}.")


def bucket(length: Any) -> int | str:
    """The power of two that a length is rounded up to: lengths of one bucket share a configuration.

    A length that `jax.export` leaves open is written as it was given.

    >>> [bucket(n) for n in (0, 1, 2, 3, 1000, 1024, 1025)]
    [0, 1, 2, 4, 1024, 1024, 2048]
    >>> bucket(jax.export.symbolic_shape("tokens")[0])
    'tokens'
    """
    if not known(length):
        return str(length)
    return 0 if length == 0 else 1 << (length - 1).bit_length()


def stable_text(value: Any, where: str) -> str:
    """Writes a static value so that equal values give equal text in every process.

    Args:
        value: a scalar, string, enum, dtype, class, function, dataclass, a container of these, or anything whose `repr`
            does not show an address.
        where: the argument's name, for the error.

    Raises:
        TypeError: the value shows nothing but its address.
    """
    if value is None or isinstance(value, enum.Enum):
        return "None" if value is None else f"{type(value).__name__}.{value.name}"
    if isinstance(value, (bool, int, float, complex, str, bytes)):
        return repr(value)
    if isinstance(value, (np.dtype, np.generic)):
        return str(value) if isinstance(value, np.dtype) else f"{value.dtype}({value})"
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__}({','.join(stable_text(item, where) for item in value)})"
    if isinstance(value, (set, frozenset)):
        return f"{type(value).__name__}({','.join(sorted(stable_text(item, where) for item in value))})"
    if isinstance(value, Mapping):
        items = sorted(f"{stable_text(name, where)}:{stable_text(item, where)}" for name, item in value.items())
        return f"{type(value).__name__}({','.join(items)})"
    if isinstance(value, Device):
        return "device"  # what of it matters is in the environment
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = (f"{f.name}={stable_text(getattr(value, f.name), where)}" for f in dataclasses.fields(value))
        return f"{type(value).__name__}({','.join(fields)})"
    if isinstance(value, functools.partial):
        return f"partial({stable_text((value.func, value.args, value.keywords), where)})"
    name = getattr(value, "__qualname__", None)
    if callable(value) and name is not None:
        return f"{getattr(value, '__module__', '')}.{name}"
    text = repr(value)
    if _ADDRESS.search(text):
        raise TypeError(
            f"{where} holds a {type(value).__name__} whose repr shows an address ({text}), so no two processes would write "
            f"it alike; give the class a repr that shows its value, or make it a frozen dataclass."
        )
    return text


def structure_text(treedef: Any, where: str) -> str:
    """Writes the structure of a pytree, with the static data of its nodes and `*` for each leaf."""
    node = treedef.node_data()
    if node is None:
        return "*" if treedef.num_leaves else "None"
    kind, static = node
    inside = ",".join(structure_text(child, where) for child in treedef.children())
    data = "" if static is None else f"[{stable_text(static, where)}]"
    return f"{kind.__name__}{data}({inside})"


@functools.cache
def device_kind(device: jax.Device) -> str:
    """The device's model. JAX calls every CPU "cpu", so there it is the processor's name and the number of its cores."""
    if device.platform != "cpu":
        return str(device.device_kind)
    return f"cpu {_processor()} x{os.cpu_count()}"


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux: the machine's type is the best that is known without starting another program
    return os.uname().machine if hasattr(os, "uname") else "unknown"


@functools.cache
def environment(device: jax.Device) -> dict[str, str]:
    """What a measurement depends on besides the call: device, its runtime, and the libraries' versions."""
    import jaxlib

    return {
        "backend": backend_of(device),
        "device": device_kind(device),
        "runtime": " ".join(device.client.platform_version.split()),
        "ejkernel": __version__,
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
    }


def without_environment(key: str) -> str:
    """The part of a key that does not depend on device and versions: what `Invocation.call` gives.

    >>> without_environment('{"environment":{"jax":"0.10.2"},"op":"scale"}')
    '{"op":"scale"}'
    """
    parts = json.loads(key)
    parts.pop("environment", None)
    return json.dumps(parts, sort_keys=True, separators=(",", ":"))


def settings() -> dict[str, str]:
    """JAX's settings of this thread that change what is computed, where they are not the usual ones."""
    x64, precision, _ = thread_settings()
    found = {"x64": x64 or None, "matmul_precision": precision}
    return {name: str(value) for name, value in found.items() if value is not None}


def thread_settings() -> tuple[bool, Any, Any]:
    """This thread's `(x64, matmul precision, default device)`."""
    return _settings.jax_enable_x64, _settings.jax_default_matmul_precision, _settings.jax_default_device
