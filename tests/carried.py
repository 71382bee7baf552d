"""Triton's cache as one small file, for a machine that is to start from there:

    python -m tests.carried pack build/triton build/triton.tar.xz
    python -m tests.carried unpack build/triton.tar.xz build/triton

What JAX launches is a kernel's PTX with what Triton noted of it. The stages before it, and the machine code that Triton made of
it for its own launcher, are left behind: a tenth of the size before it is packed. The cache may lie elsewhere there.
"""

from __future__ import annotations

import json
import sys
import tarfile
from pathlib import Path

LAUNCHED = (".ptx", ".json")


def pack(cache: Path, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w:xz") as archive:
        for path in sorted(cache.glob("*/*")):
            whole = any(path.parent.glob("__grp__*.json"))  # not one that is being compiled just now
            if whole and path.suffix in LAUNCHED:
                archive.add(path, f"{path.parent.name}/{path.name}")


def unpack(file: Path, cache: Path) -> None:
    """Adds to the cache what it does not have."""
    cache = cache.absolute()
    there = {path.name for path in cache.glob("*")}
    with tarfile.open(file) as archive:
        new = [member for member in archive.getmembers() if member.name.partition("/")[0] not in there]
        archive.extractall(cache, new, filter="data")
    for name in sorted({member.name.partition("/")[0] for member in new}):
        for group in (cache / name).glob("__grp__*.json"):
            _belong(group)


def _belong(group: Path) -> None:
    """Names a kernel's files where they lie; machine code, which Triton reads without using it, is an empty file."""
    kernel = group.name.removeprefix("__grp__").removesuffix(".json")
    (group.parent / f"{kernel}.cubin").touch()
    files = [path for path in group.parent.iterdir() if path != group]
    group.write_text(json.dumps({"child_paths": {path.name: str(path) for path in files}}))


if __name__ == "__main__":
    what, *paths = sys.argv[1:]
    {"pack": pack, "unpack": unpack}[what](*map(Path, paths))
