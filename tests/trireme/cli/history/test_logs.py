"""`trireme logs` and `trireme events`: of a run in the data folder, of a cluster's jobs; and events through a
change of the master."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Self

import pytest

from tests.equipment.replaced import replaced
from tests.equipment.virtual_loop import run_virtually
from trireme.cli import exit_codes
from trireme.cli.history import logs as command
from trireme.launch.run_folder import RUN_FILE, write_json
from trireme_shared.platform.security import private_files
from trireme_shared.protocol.errors import CursorExpired, PeerError
from trireme_shared.protocol.events import EventRecord
from trireme_shared.protocol.rest import EventPage


def logged(second: int, event: str) -> str:
    return json.dumps({"event": event, "timestamp": f"2026-01-01T00:00:{second:02}.000000Z"})


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """With one run; its trainer-1 is dead."""
    folder = tmp_path / "digits"
    private_files.make_folder(folder / "logs")
    write_json(folder / RUN_FILE, {"job": "digits", "url": "http://127.0.0.1:1"})
    (folder / "logs" / "trainer-0.log").write_text(f"{logged(1, 'begins')}\nloss 0.5\n")
    (folder / "logs" / "trainer-1.log").write_text(f"{logged(2, 'begins too')}\n")
    (folder / "logs" / "master-0.log").write_text(f"{logged(3, 'leads')}\n")
    return tmp_path


def shown(
    capsys: pytest.CaptureFixture[str], member: str | None, data_dir: Path, **values: object
) -> list[str]:
    options: dict[str, object] = {"follow": False, "since": None, "tail": 200, "as_json": False, **values}
    assert command.logs(member, None, data_dir, **options) == exit_codes.OK  # type: ignore[arg-type]
    return capsys.readouterr().out.splitlines()


def test_logs_of_all_members_in_the_order_of_time_or_of_one(
    data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [line.split("  ")[0] for line in shown(capsys, None, data_dir)] == [
        *("trainer-0", "trainer-0", "trainer-1", "master-0")
    ]
    assert shown(capsys, "trainer-0", data_dir, tail=1) == ["trainer-0  loss 0.5"]
    assert shown(capsys, None, data_dir, since="2026-01-01T00:00:03Z") == [f"master-0  {logged(3, 'leads')}"]
    assert shown(capsys, None, data_dir, since="5m") == []
    [line] = shown(capsys, "trainer-1", data_dir, as_json=True)
    assert json.loads(line) == {
        "member": "trainer-1", "time": "2026-01-01T00:00:02.000000Z", "text": logged(2, "begins too"),
    }  # fmt: skip


def test_a_member_without_a_log_and_a_time_that_is_none_are_told(
    data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(member: str | None, since: str | None) -> tuple[int, str]:
        code = command.logs(member, None, data_dir, follow=False, since=since, tail=1, as_json=False)
        return code, capsys.readouterr().err

    code, text = told("pserver-0", None)
    assert (code, "there are: master-0, trainer-0, trainer-1" in text) == (exit_codes.NOT_FOUND, True)
    code, text = told(None, "yesterday")
    assert (code, "2h" in text) == (exit_codes.USAGE, True)
    empty = command.logs(None, "other", data_dir, follow=False, since=None, tail=1, as_json=False)
    assert empty == exit_codes.NOT_FOUND


def page_of(told: list[EventRecord], next_after: int) -> EventPage:
    return EventPage(events=tuple(told), next_after=next_after, oldest=1, newest=9)


class Master:
    """A master that dies once, and forgets once."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    async def __aenter__(self) -> tuple[Self, str]:
        return self, "digits"

    async def __aexit__(self, *_: object) -> None:
        pass

    async def list_events(self, _: str, *, after: int, wait_s: float) -> EventPage:
        self.asked.append(after)
        told = EventRecord(
            event_id=after + 1, event_time="2026-01-01T00:00:00Z", name="told", message="", fields={}
        )
        match len(self.asked):
            case 1 | 4:
                return page_of([told], after + 1)
            case 2:
                raise PeerError("nobody leads")
            case 3:
                raise CursorExpired("the oldest is 7", oldest=7)
            case _:
                raise KeyboardInterrupt


def test_events_are_followed_through_a_change_of_the_master(capsys: pytest.CaptureFixture[str]) -> None:
    client = Master()

    async def main() -> None:
        with replaced(command, "open_job", lambda *_, **__: client), pytest.raises(KeyboardInterrupt):
            await command.follow_events(lambda: command.Target("http://m"), 0, follow=True, as_json=False)

    run_virtually(main)
    assert client.asked == [0, 1, 1, 6, 7]
    out = capsys.readouterr()
    assert [line.split("  ")[0] for line in out.out.splitlines()] == ["1", "7"]
    assert "the oldest is 7" in out.err


class Pages:
    """A master that tells two events a request, and then fails."""

    def __init__(self, told: list[EventRecord], ends: bool) -> None:
        self._told, self._ends = told, ends

    async def __aenter__(self) -> tuple[Self, str]:
        return self, "digits"

    async def __aexit__(self, *_: object) -> None:
        pass

    async def list_events(self, _: str, *, after: int) -> EventPage:
        found = [event for event in self._told if event.event_id > after][:2]
        if not found and not self._ends:
            raise PeerError("the master is gone")
        return page_of(found, after)


@pytest.mark.parametrize("ends", [True, False])
def test_a_run_that_has_ended_tells_its_events(
    data_dir: Path, capsys: pytest.CaptureFixture[str], ends: bool
) -> None:
    at = "2026-11-24T10:00:00Z"
    told = [
        EventRecord(event_id=number, event_time=at, name="epoch_done", message=f"epoch {number}", fields={})
        for number in range(1, 6)
    ]
    command.keep_events(
        data_dir / "digits",
        run_virtually(lambda: command.all_events(lambda: Pages(told, ends))),  # type: ignore[arg-type, return-value]
    )

    def shown_after(after: int, *, as_json: bool) -> list[str]:
        assert (
            command.events("digits", data_dir, None, after=after, follow=True, as_json=as_json)
            == exit_codes.OK
        )
        return capsys.readouterr().out.splitlines()

    assert shown_after(3, as_json=False) == [
        f"{number}  2026-11-24T10:00:00Z  epoch_done  epoch {number}" for number in (4, 5)
    ]
    assert [json.loads(line)["event_id"] for line in shown_after(0, as_json=True)] == [1, 2, 3, 4, 5]
