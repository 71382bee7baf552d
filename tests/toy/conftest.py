"""The command as the tests of the command run it."""

from tests.cli.conftest import run

__all__ = ["run"]
