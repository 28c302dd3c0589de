"""The user's own code counts in a process of its own: whatever it does is an error of its job, and this
process goes on."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from master_service.storage import user_code
from master_service.storage.job_storage import FileStorage
from tests.equipment.replaced import replaced
from tests.equipment.waiting import until
from trireme_shared.protocol.errors import DatasetError
from trireme_shared.protocol.records import JobSpec
from trireme_shared.protocol.records.datasets import Custom, Dataset, MapStyle

pytestmark = pytest.mark.processes

READER = """
import ctypes, os, re, signal, subprocess, sys, time
print("the module is imported")
{at_import}
class Reader:
    def read(self, url, first, count): return iter(())
    def count(self, url):
        print("counting", url, flush=True)
        {in_count}
        return 3
reader = Reader()
class Points:
    def __len__(self):
        {in_count}
        return 3
    def __getitem__(self, number): return {{"x": number}}
"""


def storage_in(folder: Path, dataset: Dataset, *, limit_s: float = 60.0, **code: str) -> FileStorage:
    folder.mkdir(exist_ok=True)
    (folder / "mine.py").write_text(READER.format(**{"at_import": "pass", "in_count": "pass"} | code))
    settings: dict[str, Any] = {"job": "j", "script": str(folder / "train.py"), "storage": str(folder / "s")}
    spec = JobSpec(**settings, dataset=dataset, task_timeout_floor_s=1, task_timeout_ceiling_s=limit_s)
    return FileStorage(spec)


CUSTOM, MAP = Custom("a", "b", reader="mine:reader"), MapStyle("mine:Points")


@pytest.mark.parametrize("dataset", [CUSTOM, MAP])
async def test_records_are_counted_and_nothing_of_the_user_is_imported_here(
    tmp_path: Path, dataset: Dataset
) -> None:
    ran = tmp_path / "ran"
    notes = f"open({str(ran)!r}, 'a').write(str(os.getpid()) + ' ')"
    table = await storage_in(tmp_path, dataset, at_import=notes, in_count=notes).count(dataset, 2)
    assert len(places := set(ran.read_text().split())) == 1
    assert str(os.getpid()) not in places
    assert [file.records for file in table.files] == [3] * len(dataset.urls)
    assert [path.name for path in (tmp_path / "s").iterdir()] == [f"dataset-{table.digest}.json"]


@pytest.mark.parametrize(
    ("where", "code", "told"),
    [
        ("at_import", "sys.exit('enough')", "SystemExit: enough"),
        ("in_count", "sys.exit('enough')", "SystemExit: enough"),
        ("at_import", "os._exit(3)", "ended its process with exit code 3"),
        ("in_count", "ctypes.string_at(0)", "ended its process with SIGSEGV"),
        ("in_count", "os.kill(os.getpid(), signal.SIGKILL)", "ended its process with SIGKILL"),
        ("at_import", "raise KeyboardInterrupt", "ended its process with exit code 1"),
        ("in_count", "raise ValueError('surprise')", "ValueError: surprise"),
    ],
)
async def test_whatever_it_does_is_an_error_of_its_job_alone(
    tmp_path: Path, where: str, code: str, told: str
) -> None:
    """A reader that calls sys.exit() ended each leader in turn, and then the cluster."""
    with pytest.raises(DatasetError, match=told) as raised:
        await storage_in(tmp_path, CUSTOM, **{where: code}).count(CUSTOM, 2)
    if "ended its process" in raised.value.message:
        last = raised.value.details["output"]
        assert "the module is imported" in last or last.endswith("KeyboardInterrupt")
    assert raised.value.hint


@pytest.mark.parametrize(
    "code", ["time.sleep(1e6)", "ctypes.PyDLL(None).sleep(1000000)", "re.match('(a+)+$', 'a' * 64 + 'b')"]
)
async def test_code_that_does_not_come_to_an_end_is_ended(tmp_path: Path, code: str) -> None:
    """Also if it keeps the interpreter."""
    with pytest.raises(
        DatasetError, match=r"was not done within 5 s \(task_timeout_ceiling_s\), after 0 files"
    ):
        await storage_in(tmp_path, CUSTOM, limit_s=5.0, in_count=code).count(CUSTOM, 2)
    assert processes() == []


async def test_what_it_starts_ends_with_it(tmp_path: Path) -> None:
    started = tmp_path / "pid"
    code = f"open({str(started)!r}, 'w').write(str(subprocess.Popen(['sleep', '1000']).pid)); os._exit(4)"
    with pytest.raises(DatasetError, match="exit code 4"):
        await storage_in(tmp_path, CUSTOM, in_count=code).count(CUSTOM, 2)
    pid = int(started.read_text())
    await until(lambda: not lives(pid), "what it has started to end")


async def test_a_flood_of_output_fills_nothing(tmp_path: Path) -> None:
    code = "[sys.stderr.write('x' * 100_000 + chr(10)) for _ in range(200)]; os._exit(5)"
    with pytest.raises(DatasetError) as raised:
        await storage_in(tmp_path, CUSTOM, in_count=code).count(CUSTOM, 2)
    assert len(raised.value.details["output"]) < 10_000


async def test_a_leader_that_steps_down_ends_it_and_what_is_counted_is_kept(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_text(name)
    dataset = Custom(str(tmp_path / "a"), str(tmp_path / "b"), reader="mine:reader")
    counted = tmp_path / "counted"
    notes = f"open({str(counted)!r}, 'a').write(url[-1])"
    code = f"time.sleep(2 if url.endswith('b') else 0); {notes}; time.sleep(1e6 if url.endswith('b') else 0)"
    counting = asyncio.ensure_future(storage_in(tmp_path, dataset, in_count=code).count(dataset, 2))
    await until(lambda: counted.exists() and counted.read_text() == "ab", "the second file to be begun")
    with replaced(user_code, "KEEP_S", 30.0):  # the machine may be busy
        counting.cancel()
        await asyncio.wait([counting])
    assert counting.cancelled()
    assert processes() == []
    assert len(list((tmp_path / "s").glob("counting-*.json"))) == 1
    counted.unlink()
    table = await storage_in(tmp_path, dataset, in_count=notes).count(dataset, 2)
    assert ([file.records for file in table.files], counted.read_text()) == ([3, 3], "b")


def processes() -> list[int]:
    """Those that count for this one."""
    module = "master_service.storage.counting_process"
    children = psutil.Process(os.getpid()).children()
    return [child.pid for child in children if lives(child.pid) and module in child.cmdline()]


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
