"""`python -m benchmarks.dispatch --masterless 1,4,8`: tasks taken and finished per second, without a master
and with one, on a real etcd.

Each trainer is a process that takes a task and finishes it, again and again, with no training in between: the
queue alone. With a master the trainers ask one over REST. A group commit carries what waits, so two
transactions make at most one pair.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path

from benchmarks.measurements import clean_environment
from master_service.core.queue.file_table import FileTable, TableFile, TaskSizes
from master_service.masterless.dispatcher import Dispatcher
from trainer_agent.tasks.master import HttpMaster, MasterPort
from trireme_shared.platform.etcd import connect
from trireme_shared.platform.etcd.embedded import EmbeddedEtcd
from trireme_shared.platform.membership.directory import Directory
from trireme_shared.platform.runtime import clock
from trireme_shared.platform.runtime.http import session
from trireme_shared.protocol.errors import TriremeError
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import (
    AcquireTask,
    CompleteTask,
    Dispatch,
    JobSpec,
    Mode,
    PserverMember,
    TakeNext,
    TrainerMember,
)
from trireme_shared.protocol.records.datasets import Dataset, TextLines

TASKS = 10_000_000
START_S = 60.0
KEYS = Keys("bench")


class NoFiles:
    """A dataset without files."""

    async def count(self, source: Dataset, sizes: TaskSizes) -> FileTable:
        task_records = sizes.choose([TASKS * sizes.minibatch])
        return FileTable((TableFile(source.urls[0], TASKS * task_records),), task_records, "digest")

    async def load_table(self, _: str) -> FileTable:
        return await self.count(TextLines("none"), TaskSizes(1, fixed=1))


def spec_of(dispatch: Dispatch, folder: str) -> JobSpec:
    return JobSpec(
        job="bench",
        script="none.py",
        dataset=TextLines(f"{folder}/lines.txt"),
        mode=Mode.ASYNC,
        dispatch=dispatch,
        records_per_task=1,
        storage=folder,
        lease_ttl_s=10.0,
        checkpoint_kind="independent",  # no pauses: nobody is behind the parameter server
    )


async def be_member(etcd, name: str) -> None:
    lease = await etcd.grant(3600)
    member = TrainerMember(trainer=name, url="", incarnation=name, host="h", pid=1, lease=lease.id)
    await etcd.put(KEYS.trainer(name), member.to_bytes(), lease.id)


async def work(port: MasterPort, name: str, seconds: float, requests: int) -> tuple[int, list[float]]:
    """Pairs done, and the seconds of each. `requests` 1: the end of a task brings the next one."""
    request, waits = 0, []
    while True:  # until the job runs with this trainer
        try:
            request += 1
            answer = await port.acquire_task(
                AcquireTask(trainer=name, request=f"{name}-{request}", generation=0)
            )
            if answer.task is not None:
                break
        except TriremeError:
            pass
        await asyncio.sleep(0.05)
    end = clock.monotonic() + seconds
    pairs = 0
    task = answer.task
    while clock.monotonic() < end:
        since = clock.monotonic()
        request += 1
        following = TakeNext(request=f"{name}-{request}", generation=0)
        done = CompleteTask(trainer=name, attempt=task.attempt, epoch=task.epoch)
        if requests == 1:
            done = done.model_copy(update={"next": following})
        task = (await port.complete_task(task.task_id, done)).next
        pairs += 1
        while task is None:  # also while a trainer joins
            ask = AcquireTask(trainer=name, request=following.request, generation=0)
            answer = await port.acquire_task(ask)
            task = answer.task
            await asyncio.sleep(answer.retry_after_s)
        waits.append(clock.monotonic() - since)
    return pairs, waits


async def child(dispatch: Dispatch, url: str, folder: str, name: str, seconds: float, requests: int) -> None:
    etcd = connect([url])
    await be_member(etcd, name)
    losses = commits = 0
    if dispatch is Dispatch.ETCD:
        left = asyncio.Event()
        port = Dispatcher(
            etcd,
            KEYS,
            name=name,
            url="",
            spec=spec_of(dispatch, folder),
            storage=lambda _: NoFiles(),
            probe=_alive,
        )
        running = asyncio.ensure_future(port.run(left))
        pairs, waits = await work(port, name, seconds, requests)
        losses, commits = port.writer.losses, port.writer.commits
        left.set()
        await running
    else:
        directory = Directory(etcd, KEYS)
        following = asyncio.ensure_future(directory.run())
        async with session("") as client:
            pairs, waits = await work(HttpMaster(directory, client, etcd), name, seconds, requests)
        following.cancel()
    waits.sort()
    middle, late = (waits[int(len(waits) * q)] for q in (0.5, 0.99))
    print(json.dumps({"pairs": pairs, "losses": losses, "commits": commits, "p50": middle, "p99": late}))
    await etcd.close()


async def _alive(_: str) -> bool:
    return False


async def measure(dispatch: Dispatch, trainers: int, requests: int, seconds: float) -> dict:
    with tempfile.TemporaryDirectory(prefix="trireme-bench-") as folder:
        (Path(folder) / "lines.txt").write_text("line\n" * 1_000_000 if dispatch is Dispatch.MASTER else "")
        async with EmbeddedEtcd(Path(folder) / "etcd") as embedded:
            etcd = connect([embedded.url])
            lease = await etcd.grant(3600)
            member = PserverMember(index=0, url="", incarnation="p", host="h", pid=1)
            await etcd.put(KEYS.pserver(0), member.to_bytes(), lease.id)
            await etcd.put(KEYS.layout, b"{}")
            await etcd.put(KEYS.init_done, b"done")
            master = None
            if dispatch is Dispatch.MASTER:
                (Path(folder) / "spec.json").write_bytes(spec_of(dispatch, folder).to_bytes())
                variables = {
                    "TRIREME_JOB": "bench",
                    "TRIREME_ETCD": embedded.url,
                    "TRIREME_LOG_LEVEL": "ERROR",
                }
                # PYTHONPATH too: benchmarks.compare says there which tree is measured
                variables |= {"TRIREME_SPEC": f"{folder}/spec.json"} | clean_environment()
                argv = [sys.executable, "-m", "master_service"]
                master = await asyncio.create_subprocess_exec(*argv, env=variables)
            argv = [sys.executable, "-m", "benchmarks.masterless", dispatch, embedded.url, folder]
            children = [
                await asyncio.create_subprocess_exec(
                    *argv, f"t{n}", str(seconds), str(requests), stdout=asyncio.subprocess.PIPE
                )
                for n in range(trainers)
            ]
            try:
                async with asyncio.timeout(START_S + seconds):
                    said = [json.loads((await each.communicate())[0].splitlines()[-1]) for each in children]
            finally:  # a master that cannot begin lets trainers wait
                for each in [*children, *([master] if master is not None else [])]:
                    if each.returncode is None:
                        each.terminate()
                        await each.wait()
            await etcd.close()
    pairs, losses, commits = (sum(each[key] for each in said) for key in ("pairs", "losses", "commits"))
    return {
        "dispatch": dispatch.value,
        "trainers": trainers,
        "requests": requests,
        "pairs_per_s": round(pairs / seconds),
        "lost_per_commit": round(losses / commits, 2) if commits else 0,
        "pair_p50_ms": round(1e3 * max(each["p50"] for each in said), 1),
        "pair_p99_ms": round(1e3 * max(each["p99"] for each in said), 1),
    }


async def rows(trainers: list[int], seconds: float) -> list[dict]:
    return [
        await measure(dispatch, number, requests, seconds)
        for number in trainers
        for dispatch in (Dispatch.ETCD, Dispatch.MASTER)
        for requests in (2, 1)
    ]


def table(found: list[dict]) -> str:
    head = ("dispatch", "trainers", "requests a pair", "pairs/s", "commits lost a commit", "p50 ms", "p99 ms")
    lines = [
        " | ".join(head),
        "|".join("---" for _ in head),
        *(" | ".join(map(str, row.values())) for row in found),
    ]
    return "\n".join(f"| {line} |" for line in lines)


if __name__ == "__main__":
    one, url, folder, name, seconds, requests = sys.argv[1:]
    asyncio.run(child(Dispatch(one), url, folder, name, float(seconds), int(requests)))
