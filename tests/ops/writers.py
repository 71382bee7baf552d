"""Processes that write into one cache folder; run by the tests of promises 1 to 3.

The children are forked after the imports and never touch JAX, so sixteen of them cost little.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import sys
import time
import warnings

from ejkernel.ops import PersistentCache
from tests.ops.toy import ToyConfig


def fork(child) -> int:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            child()
            status = 0
        finally:
            os._exit(status)
    return pid


def many(folder: str) -> None:
    """Sixteen processes write 200 keys each, and one that all of them write."""

    def child(number: int) -> None:
        stored = PersistentCache("toy", folder, ToyConfig)
        for key in range(200):
            stored.put(f"process {number} key {key}", ToyConfig(key, str(number)), {"seconds": 1.0})
            stored.put("shared", ToyConfig(key, str(number)))
            assert stored.get("shared") is not None

    children = [fork(lambda number=number: child(number)) for number in range(16)]
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 16


def killed(folder: str) -> None:
    """Two hundred writers are killed at random moments; after each, every file must be readable."""
    warnings.simplefilter("error")
    stored = PersistentCache("toy", folder, ToyConfig)
    draw, died, seen = random.Random(0), 0, 0

    def child() -> None:
        for key in range(100_000):
            PersistentCache("toy", folder, ToyConfig).put(f"key {key % 7}", ToyConfig(key), {"text": "x" * 5000})

    for _ in range(200):
        pid = fork(child)
        time.sleep(draw.uniform(0.0, 0.008))
        os.kill(pid, signal.SIGKILL)
        died += os.WIFSIGNALED(os.waitpid(pid, 0)[1])
        seen += sum(1 for key in range(7) if stored.get(f"key {key}") is not None)
    print(died, seen)


def limited(folder: str) -> None:
    """The system itself refuses to write more than some bytes, as a full disk does."""
    stored = PersistentCache("toy", folder, ToyConfig)
    stored.put("kept", ToyConfig(1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, 50))
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        stored.put("kept", ToyConfig(2), {"text": "x" * 5000})
        stored.put("new", ToyConfig(2), {"text": "x" * 5000})
    entries, left = list(stored.items()), list(stored.folder.glob("*.tmp"))
    assert entries == [("kept", ToyConfig(1))]
    print(f"{len(given)} warning, {len(entries)} entry, {len(left)} temporary files")


if __name__ == "__main__":
    {"many": many, "killed": killed, "limited": limited}[sys.argv[1]](sys.argv[2])
