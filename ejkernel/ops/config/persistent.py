"""`PersistentCache`: measured configurations on disk, one file per entry.

An entry is `<folder>/<op_id>/<sha256 of the key>.json`, readable JSON with the key, the configuration's fields and the
record of its measurement. It is written to a temporary file beside it and renamed, so readers see an old entry or a new
one and never half of one; and because each key has its own file, processes that write at the same time lose nothing.
Whatever is wrong with a file or the folder is a miss and one warning, never an error of the call.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ejkernel.ops import names
from ejkernel.ops.config.codec import from_fields, to_fields
from ejkernel.ops.config.validity import finite_json, wrong_record
from ejkernel.ops.key import check_op_id
from ejkernel.ops.notices import warn_once

VARIABLE = "EJKERNEL_CACHE_DIR"
FORMAT = 1
_ENTRY, _TEMPORARY = re.compile(r"[0-9a-f]{40}\.json"), re.compile(r"[0-9a-f]{12}\.[0-9a-f]{16}\.tmp")
_LARGEST = 1 << 20  # bytes; a real entry has a few thousand
_STALE = 3600.0  # seconds after which a temporary file has no living writer


class NoFolderError(OSError):
    """The folder of the caches cannot be found: it is under a home that does not exist."""


def cache_folder() -> Path:
    """The folder of all caches: `EJKERNEL_CACHE_DIR`, else the platform's user cache folder. It may not exist yet.

    Raises:
        NoFolderError: this process has no home, or the variable names the home of nobody.
    """
    chosen = os.environ.get(VARIABLE)
    if chosen:
        return expanded(chosen)
    import platformdirs

    try:
        return Path(platformdirs.user_cache_dir("ejkernel", appauthor=False))
    except (RuntimeError, KeyError, OSError) as problem:
        raise NoFolderError(f"this process has no home to keep a cache in ({problem}); set {VARIABLE} to a folder") from None


def expanded(path: str | os.PathLike[str]) -> Path:
    """A path with `~` replaced by the home it means. NoFolderError where there is none."""
    try:
        return Path(path).expanduser()
    except (RuntimeError, KeyError) as problem:
        raise NoFolderError(f"{os.fspath(path)!r} is under a home that this machine does not have ({problem})") from None


class PersistentCache:
    """Configurations of one operation by key, on disk, shared by all processes that use the folder.

    >>> import tempfile
    >>> cache = PersistentCache("scale", path=tempfile.mkdtemp())
    >>> cache.put("a key", {"block": 64}, record={"seconds": 1e-3})
    >>> cache.get("a key"), cache.get("another")
    ({'block': 64}, None)
    """

    def __init__(self, op_id: str, path: str | os.PathLike[str] | None = None, config_cls: type | None = None):
        """Nothing is created before the first `put`.

        Args:
            op_id: the operation, or an alias of it; its entries have their own folder.
            path: the folder; None: `EJKERNEL_CACHE_DIR`, else the platform's user cache folder.
            config_cls: the dataclass that entries are read as; None gives their fields as a dict.
        """
        check_op_id(op_id, "op_id")
        self.op_id, self.config_cls = names.op_id_of(op_id) or op_id, config_cls
        self._path = path
        self._swept = False
        self._unread: dict[Path, str] = {}  # why a file could not be read

    @property
    def folder(self) -> Path:
        """Where this operation's entries are. NoFolderError where that is under a home that does not exist."""
        return (cache_folder() if self._path is None else expanded(self._path)) / self.op_id

    @classmethod
    def of_folder(cls, folder: Path) -> PersistentCache:
        """The cache in a folder named as it is on disk, though the name may have become an alias since it was written."""
        cache = cls(folder.name, folder.parent)
        cache.op_id = folder.name
        return cache

    def sibling(self, op_id: str, config_cls: type | None) -> PersistentCache:
        """The cache of another operation in the same place."""
        return PersistentCache(op_id, self._path, config_cls)

    def file(self, key: str) -> Path:
        """The file that holds the entry under this key, if there is one."""
        return self.folder / f"{hashlib.sha256(key.encode()).hexdigest()[:40]}.json"

    def get(self, key: str) -> Any | None:
        """The configuration under this key; None where there is none or it cannot be used."""
        entry = self.entry(key)
        return None if entry is None else entry[0]

    def record(self, key: str) -> Mapping[str, Any]:
        """What was recorded with the configuration under this key; empty when there is none."""
        entry = self.entry(key)
        return {} if entry is None else entry[1]

    def entry(self, key: str) -> tuple[Any, dict[str, Any]] | None:
        """`(configuration, record)` under this key, or None."""
        try:
            file = self.file(key)
        except NoFolderError as problem:
            self._homeless(problem)
            return None
        found = self._read(file)
        if found is not None and found[0] != key:
            self._distrust(file, "it belongs to another key")
            return None
        return None if found is None else found[1:]

    def put(self, key: str, config: Any, record: Mapping[str, Any] | None = None) -> None:
        """Stores a configuration, replacing what was there. A folder that cannot be written to is one warning."""
        content = {"format": FORMAT, "key": key, "config": to_fields(config), "record": dict(record or {})}
        text = json.dumps(content, indent=1, allow_nan=False) + "\n"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._sweep()
            write_atomically(self.file(key), text)
        except NoFolderError as problem:
            self._homeless(problem)
        except (OSError, ValueError) as problem:  # ValueError: a path with a character that no file has
            warn_once(
                ("write", str(self.folder)),
                f"tuned configurations are not stored: {self.folder} cannot be written to ({problem}). "
                f"Set {VARIABLE} to a folder that can.",
            )

    def items(self) -> Iterator[tuple[str, Any]]:
        """Every readable entry as `(key, configuration)`."""
        for key, config, _ in self.entries():
            yield key, config

    def entries(self) -> Iterator[tuple[str, Any, dict[str, Any]]]:
        """Every readable entry as `(key, configuration, record)`."""
        for _, found, _ in self.readings():
            if found is not None:
                yield found

    def readings(self) -> Iterator[tuple[Path, tuple[str, Any, dict[str, Any]] | None, str | None]]:
        """Every file as `(file, (key, configuration, record), None)`, or `(file, None, why it cannot be read)`.

        Files with other names than entries have are not this cache's: its folder may be one that others use too.
        """
        for file in self._files(_ENTRY):
            found = self._read(file)
            if found is not None or file.exists():  # not one that another process has just removed
                yield file, found, None if found is not None else self._unread.get(file, "it cannot be read")

    def clear(self) -> None:
        """Removes this operation's entries. OSError where the folder does not allow it."""
        for file in [*self._files(_ENTRY), *self._files(_TEMPORARY)]:
            file.unlink(missing_ok=True)

    def _files(self, named: re.Pattern[str]) -> list[Path]:
        """The files with such names."""
        try:
            return sorted(file for file in self.folder.glob("*") if named.fullmatch(file.name))
        except NoFolderError as problem:
            self._homeless(problem)
        except (OSError, ValueError) as problem:
            self._distrust(self.folder, str(problem))
        return []

    def _read(self, file: Path) -> tuple[str, Any, dict[str, Any]] | None:
        try:
            if not file.is_file():  # also keeps from opening a pipe, which would wait for ever
                if file.exists():
                    self._distrust(file, "it is not a regular file")
                return None
            with open(file, encoding="utf-8") as stream:
                text = stream.read(_LARGEST + 1)
            return self._parse(text)
        except FileNotFoundError:
            return None  # removed between the question and the opening
        except Exception as problem:  # whatever a file holds, it must not break the call
            self._distrust(file, f"{type(problem).__name__}: {problem}")
            return None

    def _parse(self, text: str) -> tuple[str, Any, dict[str, Any]]:
        """`(key, configuration, record)` of a file's text; ValueError for whatever is wrong with it."""
        if len(text) > _LARGEST:
            raise ValueError("it is larger than any entry")
        content = finite_json(text)
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError(f"it is not an entry of format {FORMAT}")
        key, config, record = content.get("key"), content.get("config"), content.get("record")
        if not isinstance(key, str) or not isinstance(config, dict) or not isinstance(record, dict):
            raise ValueError("its key, config or record is missing or of the wrong type")
        if (wrong := wrong_record(record)) is not None:
            raise ValueError(wrong)
        return key, config if self.config_cls is None else from_fields(self.config_cls, config), record

    def _homeless(self, problem: NoFolderError) -> None:
        warn_once(("folder", str(problem)), f"tuned configurations are neither read nor stored: {problem}.")

    def _distrust(self, file: Path, reason: str) -> None:
        self._unread[file] = reason
        warn_once(("read", str(file)), f"ignored the stored configuration {file}: {reason}. The next tuning replaces it.")

    def _sweep(self) -> None:
        """Removes what killed writers left behind, once per cache."""
        if self._swept:
            return
        self._swept = True
        for file in self._files(_TEMPORARY):
            with contextlib.suppress(OSError):  # another process sweeps too, and may be another user's, whose files stay
                if time.time() - file.stat().st_mtime > _STALE:
                    file.unlink()


def write_atomically(file: Path, text: str) -> None:
    """Replaces a file's content so that a reader sees the old one or the new one. OSError leaves the old one."""
    if not file.name:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(file))
    temporary = file.with_name(f"{file.stem[:12]}.{secrets.token_hex(8)}.tmp")
    # With the umask's permissions, unlike `tempfile`: others who share the folder must be able to read it.
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with open(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())  # or a crash could leave the new name on empty content
        os.replace(temporary, file)
    except BaseException:
        with contextlib.suppress(OSError):  # the failure that led here is the one to report
            os.unlink(temporary)
        raise
