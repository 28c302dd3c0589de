"""Many members in one process, for benchmarks/members.py: trainers and parameter servers without models and
data.

What tells others of a member is a real member's code: its own connections to etcd, its key under its own
lease, the watch of the job, its requests for tasks at the master. Nothing is computed, pushed or saved.

    stdin: one line, when to begin ─► members join, evenly spread
        ─► stdout: "settled" once all of them know and have what they need
        ─► stdin closes: "done", with counts
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from pserver_service.context import OwnIndex
from trainer_agent.core.duties import Duty, Next, next_duty
from trainer_agent.membership.lease import Membership
from trainer_agent.tasks.master import HttpMaster
from trainer_agent.tasks.source import TaskSource
from trainer_agent.waiting import SingleErrorGroup
from trireme_shared.platform import etcd as etcd_client
from trireme_shared.platform.etcd.operations import Body, Transport
from trireme_shared.platform.membership.directory import Directory
from trireme_shared.platform.runtime import http, telemetry
from trireme_shared.protocol.errors import StaleGeneration
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import (
    AcquireTask,
    JobSpec,
    Phase,
    PserverMember,
    TaskAnswer,
    TrainerMember,
)

LOOK_S = 5.0
SPEC_S = 60.0
URL = "http://127.0.0.1:9"


@dataclass
class Counts:
    """Of all members of this process. `told`: keys and values that etcd sent them, in bytes; `events`:
    changes of keys; `requests` to etcd and to the master."""

    told: int = 0
    events: int = 0
    requests: Counter[str] = field(default_factory=Counter)


class CountingTransport:
    """The transport `inner`; counts what passes."""

    def __init__(self, inner: Transport, counts: Counts) -> None:
        self._inner, self._counts = inner, counts

    async def call(self, method: str, body: Body, timeout_s: float) -> Body:
        self._counts.requests[method] += 1
        answer = await self._inner.call(method, body, timeout_s)
        self._counts.told += sum(map(_size, answer.get("kvs", ())))
        return answer

    async def stream(self, method: str, body: Body) -> AsyncGenerator[Body, None]:
        self._counts.requests[method] += 1
        async with aclosing(self._inner.stream(method, body)) as messages:
            async for message in messages:
                events = message.get("events", ())
                self._counts.events += len(events)
                self._counts.told += sum(_size(event["kv"]) for event in events)
                yield message

    async def close(self) -> None:
        await self._inner.close()


class CountingMaster(HttpMaster):
    counts: Counts

    async def acquire_task(self, ask: AcquireTask) -> TaskAnswer:
        self.counts.requests["master"] += 1
        return await super().acquire_task(ask)


def _size(kv: Body) -> int:
    return len(kv.get("key", b"")) + len(kv.get("value", b""))


class Members:
    """The members of this process. `given`: the command line."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.counts = given, Counts()
        self.keys = Keys(given.job)
        self.last_joined = self.last_settled = 0.0
        self.generation = 0
        self.unsettled = asyncio.Semaphore(0)

    async def trainer(self, number: int) -> None:
        name = f"trainer-{number}-{number:012x}"
        async with self._job() as (etcd, directory), http.session(self.given.token) as client:
            spec = await _spec(directory)
            membership = Membership(etcd, TrainerMember(trainer=name, incarnation=name, **self._place()))
            await membership.register(directory.keys, spec.lease_ttl_s)
            self._joined()
            master = CountingMaster(directory, client, etcd)
            master.counts = self.counts
            source = TaskSource(spec, master, name, asyncio.to_thread)
            async with asyncio.TaskGroup() as group:
                group.create_task(membership.hold())
                group.create_task(self._work(spec, directory, source))

    async def _work(self, spec: JobSpec, directory: Directory, source: TaskSource) -> None:
        """Have a task of each lane, or (asynchronous) one task, in every generation."""
        had, settled = Next(Duty.WAIT), False
        while True:
            revision = directory.revision
            duty = next_duty(directory.state, directory.trainers, source.trainer, spec.mode)
            if duty.duty is Duty.TRAIN and duty != had and await _acquired(source, duty, had):
                had = duty
            if not settled and self._is_complete(directory) and (duty == had or duty.lanes == (0, 0)):
                settled = True
                self._settled(directory)
            await directory.changed(revision, LOOK_S)

    async def pserver(self, number: int) -> None:
        async with self._job() as (etcd, directory):
            await _spec(directory)
            record = PserverMember(index=-1, incarnation=f"pserver-{number}-{number:012x}", **self._place())
            own = OwnIndex(etcd, directory, record)
            await own.claim_index(SPEC_S)
            self._joined()
            async with asyncio.TaskGroup() as group:
                group.create_task(own.hold())
                group.create_task(self._follow_checkpoints(etcd))
                while not self._is_complete(directory):
                    await directory.changed(directory.revision, LOOK_S)
                self._settled(directory)

    async def _follow_checkpoints(self, etcd: etcd_client.Etcd) -> None:
        async with aclosing(etcd.watch(self.keys.checkpoints, prefix=True)) as batches:
            async for _ in batches:
                pass

    @asynccontextmanager
    async def _job(self) -> AsyncIterator[tuple[etcd_client.Etcd, Directory]]:
        async with AsyncExitStack() as stack:
            etcd = etcd_client.connect([self.given.etcd])
            etcd.transport = CountingTransport(etcd.transport, self.counts)
            stack.push_async_callback(etcd.close)
            directory = Directory(etcd, self.keys)
            group = await stack.enter_async_context(asyncio.TaskGroup())
            stack.callback(group.create_task(directory.run()).cancel)
            yield etcd, directory

    def _place(self) -> dict[str, Any]:
        return {"url": URL, "host": "a-host-of-some-rack", "pid": 1}

    def _is_complete(self, directory: Directory) -> bool:
        state = directory.state
        return (
            state is not None
            and state.phase is Phase.RUNNING
            and len(directory.trainers.names) == self.given.all_trainers
        )

    def _joined(self) -> None:
        self.last_joined = time.monotonic()

    def _settled(self, directory: Directory) -> None:
        assert directory.state is not None
        self.generation = directory.state.generation
        self.last_settled = time.monotonic()
        self.unsettled.release()


async def _spec(directory: Directory) -> JobSpec:
    await directory.wait_for(lambda view: view.spec is not None, SPEC_S, "the job's spec")
    assert directory.spec is not None
    return directory.spec


async def _acquired(source: TaskSource, duty: Next, had: Next) -> bool:
    """Ask for what `duty` needs and `had` had not: all lanes at once, as lane_reader.py does. False: a newer
    generation is there."""
    new: list[int | None] = [lane for lane in range(*duty.lanes) if not had.lanes[0] <= lane < had.lanes[1]]
    if duty.lanes == (0, 0):
        new = [None] if had.duty is Duty.WAIT else []
    try:
        async with SingleErrorGroup() as group:
            for lane in new:
                group.create_task(source.acquire(duty.generation, lane))
    except StaleGeneration:
        return False
    return True


async def _later(at: float, member: Any) -> None:
    await asyncio.sleep(at - time.monotonic())
    await member


async def run(given: argparse.Namespace) -> None:
    members = Members(given)
    _tell("ready")
    lines = await _input()
    begin = float(await lines.readline())
    async with asyncio.TaskGroup() as group:
        joining = []
        for number in range(given.first, given.all_trainers, given.processes):
            at = begin + given.join_seconds * (number + 0.5) / given.all_trainers
            joining.append(group.create_task(_later(at, members.trainer(number))))
        for number in range(given.first, given.all_pservers, given.processes):
            at = begin + given.pserver_seconds * (number + 0.5) / given.all_pservers
            joining.append(group.create_task(_later(at, members.pserver(number))))
        ended = group.create_task(lines.read())
        counting = group.create_task(_settled(members, len(joining)))
        await ended
        for task in (*joining, counting):
            task.cancel()
    _tell("done", **vars(members.counts))


async def _settled(members: Members, count: int) -> None:
    for _ in range(count):
        await members.unsettled.acquire()
    times = {"joined": members.last_joined, "settled": members.last_settled, "generation": members.generation}
    _tell("settled", **times, **vars(members.counts))


async def _input() -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    return reader


def _tell(what: str, **fields: Any) -> None:
    print(json.dumps({"what": what, **fields}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("job", "etcd", "token"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("first", "processes", "all-trainers", "all-pservers"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("join-seconds", "pserver-seconds"):
        parser.add_argument(f"--{name}", type=float, required=True)
    import uvloop

    telemetry.configure(level="ERROR", service="members")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
