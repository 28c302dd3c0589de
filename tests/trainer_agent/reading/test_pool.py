"""Processes that read for a trainer: what they give, and what follows when they die or are frozen."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import sys
import textwrap
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.trainer_agent.scripts import spec_for, write_script
from trainer_agent.data import default_collate, open_dataset
from trainer_agent.data.in_code import reading
from trainer_agent.reading.messages import Asked, Setup
from trainer_agent.reading.pool import ReadingProcesses
from trainer_agent.script.user_module import load
from trainer_agent.tasks.source import TaskSource
from trireme_shared.platform.runtime import clock
from trireme_shared.protocol.errors import DatasetError
from trireme_shared.protocol.records import JobSpec
from trireme_shared.protocol.records.datasets import MapStyle

RECORDS, SIZE, SEED = 64, 4, 7
LARGE = 40_000  # float32 of a record: a minibatch of them goes through memory
DATASET = """
    import os, random, signal, time
    from pathlib import Path
    from torch.utils.data import DataLoader, Dataset, get_worker_info

    HERE = Path(__file__).parent
    WORKERS = []

    class Items(Dataset):
        def __len__(self):
            return 64
        def __getitem__(self, number):
            wish = HERE / f"at-{number}"
            if wish.exists():
                what = wish.read_text()
                if not what.startswith("always"):
                    wish.unlink()
                match what.split()[-1]:
                    case "dies":
                        os.kill(os.getpid(), signal.SIGKILL)
                    case "crashes":
                        os._exit(3)
                    case "sleeps":
                        time.sleep(1000)
                    case "raises":
                        raise ValueError("no such picture")
            drawn = torch.rand(()).item() + random.random()
            info = get_worker_info()
            worker = (info.id, info.num_workers, WORKERS[0]) if info is not None else (0, 2, 0)
            return torch.full((40_000,), float(number)), drawn, torch.tensor(number), number, worker

    def pad(items):
        if (HERE / "collate-draws").exists():
            torch.rand(())
        x, drawn, small, number, worker = zip(*items)
        return {"x": torch.stack(x), "drawn": drawn, "small": torch.stack(small), "y": list(number),
                "workers": worker}

    def dataset():
        with (HERE / "made").open("a") as made:
            made.write("x")
        return DataLoader(Items(), 4, collate_fn=pad, num_workers=2, worker_init_fn=WORKERS.append)
"""


def setup_of(folder: Path, script: str = DATASET) -> Setup:
    path = write_script(folder, f"reads_{folder.name}".replace("-", "_"), dataset=textwrap.dedent(script))
    dataset = MapStyle(f"{path.stem}:dataset", records=RECORDS, loader=True)
    spec = spec_for(path, dataset=dataset, data_workers=2, seed=SEED)
    return Setup(spec, path)


def asked(spec: JobSpec, *numbers: int) -> Asked:
    assert isinstance(spec.dataset, MapStyle)
    return Asked(False, 1, spec.dataset.reader, list(numbers), "")


@asynccontextmanager
async def processes(setup: Setup, limit_s: float = 60.0) -> AsyncIterator[ReadingProcesses]:
    """None of them is left afterwards."""
    made = ReadingProcesses(setup, limit_s, frozen_s=0.5)
    try:
        made.begin()
        await made.begun()
        yield made
    finally:
        pids = made.pids
        await asyncio.to_thread(made.close)
    assert await until(lambda: not any(map(lives, pids)))


async def until(is_so: Callable[[], bool], limit_s: float = 5.0) -> bool:
    end = clock.monotonic() + limit_s
    while not is_so() and clock.monotonic() < end:
        await asyncio.sleep(0.01)
    return is_so()


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wish(setup: Setup, number: int, what: str) -> None:
    (setup.script.parent / f"at-{number}").write_text(what)


async def test_minibatches_are_those_of_the_trainer_whoever_reads_them_and_no_death_loses_one(tmp_path):
    setup = setup_of(tmp_path)
    spec = setup.spec
    before = set(os.listdir("/dev/shm"))  # noqa: PTH208
    numbers = [[first + 3, first, first + 2, first + 1] for first in range(0, RECORDS, SIZE)]
    async with processes(setup) as made:
        assert (tmp_path / "made").read_text() == "x"  # the template makes it for all
        wish(setup, 5, "dies")
        wish(setup, 21, "crashes")
        shards = await asyncio.gather(*(made.read(asked(spec, *each)) for each in numbers))
        told = sorted(made.told)
        assert len(told) == 2
        assert "was killed by SIGKILL (out of memory?), while it read records 4, 5, 6, 7 of" in "".join(told)
        assert "ended with exit code 3, while it read records 20, 21, 22, 23 of" in "".join(told)
        assert set(os.listdir("/dev/shm")) == before  # noqa: PTH208
        os.kill(made.pids[0], signal.SIGKILL)  # of nobody's work
        assert await made.read(asked(spec, 1)) is not None
        # collate draws: the trainer does it, in its step
        (tmp_path / "collate-draws").touch()
        uncollated = [await made.read(asked(spec, *each)) for each in numbers[:3]]
        (tmp_path / "collate-draws").unlink()
    batches = [shard.ready() for shard in shards if shard.ready is not None]
    assert len(batches) == len(numbers)
    load(setup.script)
    reader = open_dataset(spec.dataset, SEED)
    for chosen, shard, batch in zip(numbers, shards, batches, strict=True):
        with reading(1):
            alone = reader.chosen(spec.dataset.reader, chosen)
        expected = default_collate(alone.minibatch(np.arange(SIZE)))
        assert len(shard) == SIZE
        for name in ("x", "small"):
            assert batch[name].dtype is expected[name].dtype
            assert torch.equal(batch[name], expected[name])
        assert batch["drawn"] == expected["drawn"]
        assert batch["y"] == chosen
        assert {worker[1:] for worker in batch["workers"]} <= {(2, 0), (2, 1)}
        assert all(worker[0] == worker[2] for worker in batch["workers"])
        batch["x"].zero_()  # a script may change its batch, and the step may be made again
        assert torch.equal(shard.ready()["x"], expected["x"])
    for chosen, shard in zip(numbers, uncollated, strict=False):
        assert shard.ready is None
        assert shard.collate is None
        assert [item[3] for item in shard.records(np.arange(SIZE))] == chosen


async def test_records_that_end_every_worker_fail_their_task_and_frozen_or_dead_processes_are_replaced(
    tmp_path,
):
    setup = setup_of(tmp_path)
    async with processes(setup, limit_s=1.5) as made:
        wish(setup, 9, "always dies")
        with pytest.raises(
            DatasetError, match=r"records 8, 9 of .*: the process .* SIGKILL .*, the next one .* SIGKILL"
        ):
            await made.read(asked(setup.spec, 8, 9))
        wish(setup, 30, "always sleeps")
        with pytest.raises(DatasetError, match=r"took longer than 1.5 s \(task_timeout_ceiling_s\)"):
            await made.read(asked(setup.spec, 30))
        wish(setup, 31, "raises")
        with pytest.raises(DatasetError, match=r"item 31 of .* ValueError: no such picture") as raised:
            await made.read(asked(setup.spec, 31))
        assert "__getitem__" in raised.value.details["traceback"]
        made.told.clear()
        for pid in made.pids:
            os.kill(pid, signal.SIGSTOP)
        found = await asyncio.gather(*(made.read(asked(setup.spec, number)) for number in range(4)))
        assert [len(shard) for shard in found] == [1] * 4
        assert "was frozen (SIGSTOP) for 0.5 s" in made.told[0]
        pids = made.pids
        (template,) = {parent_of(pid) for pid in pids}
        os.kill(template, signal.SIGKILL)
        assert await until(lambda: not any(map(lives, pids)))  # workers end with it
        assert len(await made.read(asked(setup.spec, 3, 1))) == 2
        assert (tmp_path / "made").read_text() == "xx"


async def test_what_the_data_loader_says_otherwise_than_the_job_is_told_by_the_process_that_made_it(tmp_path):
    setup, told = setup_of(tmp_path), list[str]()
    setup = replace(setup, spec=setup.spec.with_fields(global_batch_size=6, shuffle=False))
    async with processes(setup) as made:
        source = TaskSource(setup.spec, None, "t", asyncio.to_thread, warn=told.append, processes=made)  # type: ignore[arg-type]
        await source.make_datasets()
    (sentence,) = told
    assert sentence.startswith("the job has global_batch_size = 6, and the DataLoader of ")


async def test_a_dataset_that_cannot_be_made_is_told_with_the_task(tmp_path):
    broken = DATASET.replace('made.write("x")', 'raise OSError("no such folder")')
    setup = setup_of(tmp_path, broken)
    made = ReadingProcesses(setup, 60.0)
    try:
        with pytest.raises(DatasetError, match="no such folder"):
            await made.read(asked(setup.spec, 1))
    finally:
        await asyncio.to_thread(made.close)


TRAINER = """
import asyncio, pickle, sys
from trainer_agent.reading.pool import ReadingProcesses

made = ReadingProcesses(pickle.loads(sys.stdin.buffer.read()), 60.0)
made.begin()
asyncio.run(made.begun())
print(*made.pids, flush=True)
asyncio.run(asyncio.sleep(1000))
"""


async def test_no_process_outlives_a_trainer_that_is_killed(tmp_path):
    setup = setup_of(tmp_path)
    trainer = await asyncio.create_subprocess_exec(
        sys.executable, "-c", TRAINER, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert trainer.stdin is not None
    assert trainer.stdout is not None
    trainer.stdin.write(pickle.dumps(setup))
    trainer.stdin.close()
    pids = [int(word) for word in (await trainer.stdout.readline()).split()]
    (template,) = {parent_of(pid) for pid in pids}
    assert parent_of(template) == trainer.pid
    trainer.kill()
    await trainer.wait()
    assert await until(lambda: not any(map(lives, (template, *pids))))
