"""The progress bar, as a terminal of 80 columns shows it."""

from __future__ import annotations

import io

from rich.console import Console

from ejkernel.cli import _screen


def test_the_bar_names_what_is_done_and_moves_within_a_step(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")  # whatever terminal the tests run in
    console = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    monkeypatch.setattr(_screen, "side", lambda: console)
    at: list[float] = []
    update = _screen.Progress.update

    def spy(bar, task, **fields):
        at.append(fields["completed"])
        update(bar, task, **fields)

    monkeypatch.setattr(_screen.Progress, "update", spy)
    with _screen.progress("verifying", 300) as step:
        step("a case")
        step("recurrent_attention triton gk-gv-infinite", 0, 0.5)
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "verifying recurrent_attention triton gk-gv-infinite " in shown
    assert "1/300 0:00:00" in shown  # to the end of the line: nothing was cut off
    assert at == [1, 1.5]
