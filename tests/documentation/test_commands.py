"""The commands that pages print exist, with every option they are printed with."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shlex
import subprocess
import sys

import pytest

from tests.documentation.pages import PAGES, ROOT, blocks

COMMANDS = sorted(
    {
        line.split("#")[0].strip()
        for page in PAGES
        for block in blocks(page)
        if block.info == "sh"
        for line in block.code.splitlines()
        if line.split("#")[0].strip()
    }
)


@functools.cache
def help_of(*command: str) -> str:
    wide = {**os.environ, "COLUMNS": "250", "NO_COLOR": "1", "TERM": "dumb"}
    done = subprocess.run(
        [sys.executable, "-m", "ejkernel", *command, "--help"], env=wide, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_a_printed_command_exists(command):
    words = [word for word in shlex.split(command) if not re.fullmatch(r"[A-Z_]+=\w+", word)]
    program, rest = words[0].removeprefix(".venv/bin/"), words[1:]
    if program == "make":
        assert re.search(rf"^{rest[0]}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    elif program == "python":
        assert rest[0] == "-m"
        assert importlib.util.find_spec(rest[1]) is not None
    elif program == "pip":
        extras = set(re.findall(r"\[([\w,]+)\]", command)[0].split(",")) if "[" in command else set()
        if "cli" in extras:
            skip_without("ejkernel.cli")
        declared = set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE))
        assert extras <= declared
    else:
        assert program == "ejkernel"
        has_options(rest)


def skip_without(*modules: str) -> None:
    for module in modules:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"there is no {module} here")


def has_options(words: list[str]) -> None:
    skip_without("ejkernel.cli", "typer")
    names = words[: 2 if words[0] == "cache" else 1]
    known = help_of(*names)
    for word in words:
        if word.startswith("--"):
            assert re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", known), f"{' '.join(names)} has no {word}"
