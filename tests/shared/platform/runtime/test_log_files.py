"""Logs as their readers see them: the last lines, what comes, several files in the order of time, no
tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.equipment.replaced import replaced
from trireme_shared.platform.runtime import log_files
from trireme_shared.platform.runtime.log_files import LogFile, Logs, is_of
from trireme_shared.platform.security.tokens import Role, new_token


def logged(second: int, event: str) -> str:
    return json.dumps({"event": event, "timestamp": f"2026-01-01T00:00:{second:02}.000000Z"})


def write(path: Path, *lines: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(
    lines=st.lists(
        st.text(st.characters(codec="utf-8", exclude_characters="\n\r"), max_size=60), max_size=30
    ),
    count=st.integers(0, 35),
    block=st.integers(1, 64),
)
def test_the_last_lines_are_found_whatever_the_blocks_are(
    tmp_path: Path, lines: list[str], count: int, block: int
) -> None:
    path = tmp_path / "trainer-0.log"
    path.write_bytes("".join(f"{line}\n" for line in lines).encode())
    with replaced(log_files, "BLOCK_BYTES", block):
        file = LogFile(path)
        assert [line.text for line in file.last(count)] == (lines[-count:] if count else [])
        assert file.news() == []


def test_news_are_whole_lines_and_a_file_that_was_cut_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "trainer-0.log"
    write(path, "one")
    file = LogFile(path)
    assert [line.text for line in file.last(10)] == ["one"]
    with path.open("a") as writing:
        writing.write("tw")
        writing.flush()
        assert file.news() == []
        writing.write("o\nthree\n")
    assert [line.text for line in file.news()] == ["two", "three"]
    path.write_text("new\n")
    assert [line.text for line in file.news()] == ["new"]


def test_a_print_has_the_time_of_the_line_before_it_and_files_are_merged_by_time(tmp_path: Path) -> None:
    write(tmp_path / "trainer-0.log", "torch warns", logged(2, "begins"), "loss 0.5", logged(6, "ends"))
    write(tmp_path / "pserver-0.log", logged(1, "registered"), logged(4, "saved"))
    logs = Logs(lambda: tmp_path.glob("*.log"))
    shown = [(line.member, line.time[17:19], line.text[:15]) for line in logs.last(100)]
    assert shown == [
        ("pserver-0", "01", '{"event": "regi'),
        ("trainer-0", "02", "torch warns"),
        ("trainer-0", "02", '{"event": "begi'),
        ("trainer-0", "02", "loss 0.5"),
        ("pserver-0", "04", '{"event": "save'),
        ("trainer-0", "06", '{"event": "ends'),
    ]
    assert [line.text for line in Logs(lambda: tmp_path.glob("*.log"), "trainer").last(2)] == [
        "loss 0.5",
        logged(6, "ends"),
    ]
    since = Logs(lambda: tmp_path.glob("*.log")).last(100, "2026-01-01T00:00:03.000+00:00")
    assert [line.member for line in since] == ["pserver-0", "trainer-0"]
    write(tmp_path / "pserver-0.log", "killed")
    write(tmp_path / "trainer-1.log", logged(5, "a new member"))
    assert [(line.member, line.time[17:19]) for line in logs.news()] == [
        ("pserver-0", "04"),
        ("trainer-1", "05"),
    ]


def test_a_token_that_a_script_prints_is_not_shown(tmp_path: Path) -> None:
    token = new_token(Role.ADMIN)
    write(tmp_path / "trainer-0.log", f"os.environ: TRIREME_TOKEN={token};")
    [line] = LogFile(tmp_path / "trainer-0.log").last(1)
    assert line.text == "os.environ: TRIREME_TOKEN=trireme_admin_***;"


def test_a_line_is_cut_and_memory_is_bounded(tmp_path: Path) -> None:
    write(tmp_path / "trainer-0.log", "x" * 500_000, "after it")
    first, second = LogFile(tmp_path / "trainer-0.log").last(10)
    assert (len(first.text), second.text) == (log_files.LINE_BYTES, "after it")


@pytest.mark.parametrize(
    ("member", "wanted", "meant"),
    [
        ("trainer-0", "trainer-0", True),
        ("trainer-0", "trainer", True),
        ("trainer-0-2", "trainer-0", True),
        ("trainer-0", "trainer-0-9f2c51ab03de", True),
        ("trainer-1", "trainer-0", False),
        ("trainer-10", "trainer-1", False),
        ("pserver-0", "trainer", False),
    ],
)
def test_members_are_named_as_people_name_them(member: str, wanted: str, meant: bool) -> None:
    assert is_of(member, wanted) is meant
