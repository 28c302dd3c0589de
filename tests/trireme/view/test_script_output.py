"""What scripts print in trainers, on the terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from trireme.view import live_progress
from trireme.view.live_progress import (
    AT_ONCE,
    BEHIND_BYTES,
    PER_SECOND,
    TELL_S,
    ScriptOutput,
    shown,
)
from trireme.view.progress import LineDisplay, LiveDisplay, Progress

OURS = (
    '{"room": "process", "event": "model_built", "service": "trainer", "level": "info", "timestamp": '
    '"2026-11-24T20:29:03Z"}\n'
)


class Terminal:
    def __init__(self, folder, monkeypatch):
        self.folder, self.now, self.lines = folder, 100.0, []
        monkeypatch.setattr(live_progress.clock, "monotonic", lambda: self.now)
        self.output = ScriptOutput(folder, self.lines.extend)

    def write(self, member, text):
        with (self.folder / f"{member}.log").open("a") as file:
            file.write(text)

    def look(self, after_s=0.2, *, last=False):
        self.now += after_s
        self.lines.clear()
        self.output.look(self.now, last=last)
        return list(self.lines)


@pytest.fixture
def terminal(tmp_path, monkeypatch):
    return Terminal(tmp_path, monkeypatch)


def test_what_trainers_print_is_shown_once_and_our_own_lines_are_not(terminal):
    terminal.write("trainer-0", f"{OURS}loss is 3\n{OURS}and ")
    terminal.write("pserver-0", "no script runs here\n")
    assert terminal.look() == [("trainer-0", "loss is 3")]
    terminal.write("trainer-0", "4\n")
    terminal.write("trainer-1", '{"loss": 5}\n')
    assert terminal.look() == [("trainer-0", "and 4"), ("trainer-1", '{"loss": 5}')]
    assert terminal.look() == []


def test_what_an_earlier_run_has_shown_is_not_shown_again(terminal):
    terminal.write("trainer-0", "before\n")
    again = ScriptOutput(terminal.folder, terminal.lines.extend)
    terminal.write("trainer-0", "after\n")
    again.look(terminal.now)
    assert terminal.lines == [("trainer-0", "after")]


def test_a_last_line_without_an_end_is_shown_when_trainers_have_ended(terminal):
    terminal.write("trainer-0", "Segmentation fault")
    assert terminal.look() == []
    assert terminal.look(last=True) == [("trainer-0", "Segmentation fault")]


def test_of_a_flood_the_beginning_is_shown_and_the_number_of_the_others(terminal):
    terminal.write("trainer-0", "".join(f"line {number}\n" for number in range(5000)))
    terminal.write("trainer-1", "quiet\n")
    *first, told, other = terminal.look()
    assert first == [("trainer-0", f"line {number}") for number in range(AT_ONCE)]
    assert told == (
        "trainer-0",
        f"… 4,900 lines are left out here; all are in {terminal.folder / 'trainer-0.log'}",
    )
    assert other == ("trainer-1", "quiet")


def test_a_flood_that_goes_on_shows_so_many_lines_a_second_and_is_told_now_and_then(terminal):
    told = shown_lines = 0
    for _ in range(100):  # 20 s
        terminal.write("trainer-0", "again\n" * 200)
        for _, line in terminal.look():
            told, shown_lines = told + line.startswith("…"), shown_lines + (line == "again")
    assert shown_lines <= AT_ONCE + 20 * PER_SECOND + 1
    assert 2 <= told <= 20 / TELL_S + 1
    left = terminal.look(TELL_S)
    assert [line for _, line in left if line.startswith("…")], "the rest is told when the flood has ended"


def test_what_is_too_far_behind_is_not_read(terminal):
    terminal.write("trainer-0", "x" * 1000 + "\n" + ("y" * 99 + "\n") * (BEHIND_BYTES // 100))
    lines = terminal.look()
    assert "more than " in lines[-1][1]
    assert {line for _, line in lines[:-1]} == {"y" * 99}
    assert terminal.look() == []


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b"\x1b[31mred\x1b[0m \x1b[2J\x1b]0;title\x07\x07bell", "red bell"),
        (b"  5%|\r 50%|\r100%|#|\r", "100%|#|"),
        ("größer\ttab".encode(), "größer\ttab"),
        (b"token trireme_admin_" + b"a" * 40, "token trireme_admin_***"),
        (b"\xff", "\ufffd"),
        (b"[/red] [bold]no markup", "[/red] [bold]no markup"),
    ],
)
def test_lines_are_shown_as_a_terminal_leaves_them_and_cannot_move_the_cursor(line, text):
    assert shown(line) == text


def test_long_lines_are_cut():
    assert len(shown(b"x" * 100_000)) == live_progress.LINE_CHARACTERS + 1


@pytest.mark.parametrize("kind", [LineDisplay, LiveDisplay])
def test_lines_appear_beside_the_progress_with_their_member(kind):
    out = io.StringIO()
    display = kind(Console(file=out, width=40, force_terminal=kind is LiveDisplay, color_system=None))
    display.show(Progress(phase="RUNNING", stage="TRAIN", epochs=3), 0.0)
    display.output([("trainer-0", "[bold]x" * 10), ("trainer-1", "y")])
    display.close()
    written = out.getvalue()
    assert f"trainer-0 │ {'[bold]x' * 10}\n" in written
    assert "trainer-1 │ y\n" in written
