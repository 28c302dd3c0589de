"""Reading a task: in which thread, and what is tried again."""

from __future__ import annotations

import errno
from typing import Any

import pytest

from tests.trainer_agent.tasks.test_last_end import SPEC
from trainer_agent.tasks.source import TaskFailed, TaskSource
from trireme_shared.platform.runtime import begun
from trireme_shared.protocol.records import Task, TaskKind
from trireme_shared.protocol.records.datasets import Custom, MapStyle
from trireme_shared.protocol.records.tasks import READING, BegunWork

TASK = Task(task_id="3", kind=TaskKind.TRAIN, attempt=1, file="part-0", first=48, count=2)


class Failing:
    """A reader whose reads raise each of `errors` once."""

    errors: list[BaseException] = []  # noqa: RUF012  of the test that runs

    @staticmethod
    def count(_: str) -> int:
        return 100

    @staticmethod
    def read(_: str, first: int, count: int) -> Any:
        if Failing.errors:
            raise Failing.errors.pop(0)
        return [{"n": first + number} for number in range(count)]


class Hearing:
    """A master that is told what tasks wait for."""

    async def report_progress(self, task_id: str, _: Any) -> None:
        assert task_id == TASK.task_id


def source(threads: list[str]) -> TaskSource:
    async def run(name: str, work: Any, *arguments: Any) -> Any:
        threads.append(name)
        return work(*arguments)

    spec = SPEC.model_copy(update={"dataset": Custom("part-0", reader=f"{__name__}:Failing")})
    return TaskSource(
        spec,
        Hearing(),  # type: ignore[arg-type]  nothing else is asked or reported
        "t",
        lambda work, *arguments: run("reading", work, *arguments),
        lambda work, *arguments: run("computing", work, *arguments),
    )


LOADER = """
import torch

def dataset():
    return torch.utils.data.DataLoader([{"x": 1.0}] * 6, batch_size=3, shuffle=True, drop_last=True)
"""


async def test_what_the_data_loader_says_otherwise_than_a_job_made_by_rest_is_told(tmp_path, monkeypatch):
    (tmp_path / "loader_of_rest.py").write_text(LOADER)
    monkeypatch.syspath_prepend(tmp_path)
    told: list[str] = []

    async def at_once(work: Any, *arguments: Any) -> Any:
        return work(*arguments)

    for size in (3, 4):
        dataset = MapStyle("loader_of_rest:dataset", records=6, loader=True)
        spec = SPEC.with_fields(dataset=dataset, global_batch_size=size, drop_last=True)
        made = TaskSource(spec, Hearing(), "t", at_once, warn=told.append)  # type: ignore[arg-type]
        await made.make_datasets()
    sentence = (
        "the job has global_batch_size = 4, and the DataLoader of loader_of_rest:dataset says 3: the job's "
        "counts; to train as the DataLoader says, create the job with global_batch_size = 3"
    )
    assert told == [sentence]


async def test_a_task_at_which_a_process_died_is_read_while_nothing_is_computed():
    threads: list[str] = []
    made = source(threads)
    await made.load(TASK)
    await made.load(TASK.model_copy(update={"alone": True}))
    assert threads == ["reading", "computing"]


async def test_objects_of_the_script_are_made_ahead_and_once_and_what_fails_there_is_told_with_a_task(
    monkeypatch,
):
    calls: list[str] = []

    def made(name: str) -> Any:
        def make() -> list[dict[str, int]]:
            calls.append(name)
            if name == "broken":
                raise ValueError("no such folder")
            return [{"n": number} for number in range(100)]

        monkeypatch.setitem(globals(), name, make)
        return MapStyle(f"{__name__}:{name}", records=100)

    its = source([])
    its.spec = SPEC.model_copy(update={"dataset": made("training"), "evaluation_dataset": made("held_out")})
    await its.make_datasets()
    assert calls == ["training", "held_out"]
    await its.load(TASK)
    assert calls == ["training", "held_out"]
    failing = source([])
    failing.spec = SPEC.model_copy(update={"dataset": made("broken")})
    await failing.make_datasets()
    with pytest.raises(TaskFailed, match="no such folder"):
        await failing.load(TASK)


async def test_errors_of_the_environment_are_tried_again_and_those_of_records_are_not():
    threads: list[str] = []
    Failing.errors = [
        OSError(errno.EMFILE, "too many open files"),
        ConnectionRefusedError(errno.ECONNREFUSED, "no"),
    ]
    assert len((await source(threads).load(TASK)).shard) == 2
    assert len(threads) == 3
    for error in (
        OSError("image file is truncated"),
        SystemExit("no"),
        FileNotFoundError(errno.ENOENT, "gone"),
    ):
        Failing.errors = [error] * 5  # the first records are looked at once, to see whether they draw
        with pytest.raises(TaskFailed, match=type(error).__name__):
            await source(threads).load(TASK)
    Failing.errors = []


async def test_what_is_read_and_what_is_computed_is_on_record(tmp_path):
    journal = begun.open_journal(tmp_path / "journal")
    journal.begin("trainer-0-1")
    seen: list[BegunWork | None] = []

    class Looking(Failing):
        @staticmethod
        def read(file: str, first: int, count: int) -> Any:
            seen.extend(map(BegunWork.from_bytes, begun.left_by(journal.path).works))  # type: ignore[union-attr]
            return Failing.read(file, first, count)

    globals()["Looking"] = Looking
    try:
        made = source([])
        made.spec = made.spec.model_copy(update={"dataset": Custom("part-0", reader=f"{__name__}:Looking")})
        loaded = await made.load(TASK)
    finally:
        begun.close_journal()
        del globals()["Looking"]
    assert set(seen) == {BegunWork("3", 0, READING, "part-0", 48, 2)}
    work = BegunWork.from_bytes(made.minibatch(loaded, 0).work)  # type: ignore[attr-defined]
    assert work == BegunWork("3", 0, 0, "part-0", 48, 2)
