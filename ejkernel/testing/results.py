"""What a long run finds, in a file as it comes: what is stopped loses nothing, and the next run with the same file goes on.

A line of the file is a JSON object: what it is of, what was found, and what that holds for (`here`).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ejkernel._device import default_device

ROOT = Path(__file__).parents[2]
LIBRARIES = ("jax", "triton")
Line = dict[str, Any]


@functools.cache
def code(*folders: str) -> str:
    """A digest of all Python sources under these folders (or files) of the checkout, and of the package itself."""
    roots = [ROOT / "ejkernel", *(ROOT / folder for folder in folders)]
    digest = hashlib.sha256()
    for root in roots:
        for path in sorted(root.rglob("*.py")) if root.is_dir() else [root]:
            digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def here(*folders: str) -> Line:
    """What results of this process hold for: its device, its libraries' versions, the code of the package and these folders."""
    return {"device": default_device().device_kind, **_versions(), "code": code(*folders)}


def _versions() -> Line:
    found = {}
    for name in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def read(path: str | Path) -> list[Line]:
    """The lines of a file, without one whose writing was cut off."""
    lines = []
    for text in Path(path).read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return lines


class Results:
    """Lines that a file has for `about`, and those that are added.

    Args:
        path: the file; None keeps nothing.
        about: what they hold for. Lines of others stay in the file and are not seen here.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "results.jsonl"
        >>> _ = Results(file, {"code": "a"}).add({"row": "long"}, ms=2.5)
        >>> Results(file, {"code": "a"}).of(row="long")["ms"], Results(file, {"code": "b"}).of(row="long")
        (2.5, None)
    """

    def __init__(self, path: str | Path | None, about: Mapping[str, Any]):
        self.path = None if path is None else Path(path)
        self.about = dict(about)
        self.lines: list[Line] = []
        if self.path is not None and self.path.exists():
            self.lines = [line for line in read(self.path) if self.about.items() <= line.items()]
            self._end_last_line(self.path)

    @staticmethod
    def _end_last_line(path: Path) -> None:
        """So that what is added does not continue a line whose writing was cut off."""
        if (text := path.read_bytes()) and not text.endswith(b"\n"):
            path.write_bytes(text + b"\n")

    def of(self, **key: Any) -> Line | None:
        """The newest line of this key."""
        return next((line for line in reversed(self.lines) if key.items() <= line.items()), None)

    def add(self, key: Mapping[str, Any], **found: Any) -> Line:
        """Adds a line, to the file at once."""
        text = json.dumps({**key, **found, **self.about})
        self.lines.append(json.loads(text))  # as another run would read it
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(text + "\n")
        return self.lines[-1]
