"""Progress and messages, as a terminal of 80 columns shows them."""

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


MESSAGE = (
    "nothing is stored in /a/long/path/of/a/folder/that/is/wider/than/the/terminal/and/is/to/be/copied/whole.json yet: run "
    "`ejkernel tune --op gla_attention --shapes 2x2048x4x64x64:gk` first, which measures the candidates."
)


def told(monkeypatch, terminal):
    monkeypatch.setenv("TERM", "xterm")
    file = io.StringIO()
    _screen.tell(Console(file=file, force_terminal=terminal, width=80, color_system=None), MESSAGE, "error: ", "bold red")
    return file.getvalue().splitlines()


def test_on_a_terminal_lines_end_between_words(monkeypatch):
    lines = told(monkeypatch, terminal=True)
    assert " ".join(lines) == f"error: {MESSAGE}"
    assert all(len(line) <= 80 or " " not in line for line in lines)
    command = next(part for part in MESSAGE.split("`") if part.startswith("ejkernel"))
    assert any(command in line for line in lines)


def test_what_programs_read_is_one_line(monkeypatch):
    assert told(monkeypatch, terminal=False) == [f"error: {MESSAGE}"]


def test_a_terminal_that_does_not_know_its_width_shows_tables_whole(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "0")
    made = _screen.table(["operation", "a call runs on"])
    made.add_row("attention", "xla")
    _screen.screen().print(made)
    assert "attention  xla" in capsys.readouterr().out
    assert _screen.side().width > 0
