"""Many places of a cluster's pool in one process, for benchmarks/cluster_members.py: hosts, and the processes
that they would run, without models and data.

What a leader hears of a place is a real one's: its key under its host's lease, and once assigned the key
of a trainer or parameter server in the job, under a lease, and a trainer's requests for tasks, each over a
connection of its own. A task is held for `--task-seconds`.

    stdout: "ready" once all places are registered ─► stdin closes: "done", with counts
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from collections import Counter
from contextlib import AsyncExitStack, aclosing, suppress

import aiohttp

from benchmarks.dispatch import LAYOUT
from trireme_shared.platform import etcd as etcd_client
from trireme_shared.platform.etcd.reading import read_record
from trireme_shared.platform.runtime import http, ids, telemetry
from trireme_shared.protocol.errors import TriremeError
from trireme_shared.protocol.keys import ClusterKeys, Keys
from trireme_shared.protocol.records import JobState, PserverMember, TrainerMember
from trireme_shared.protocol.records.assignments import SlotMap
from trireme_shared.protocol.records.checkpoints import CheckpointLatest
from trireme_shared.protocol.records.cluster import Assignment, Kind, PoolMember

PLACES_OF_HOST = 8
TTL_S = 30.0
ASK_S = 20.0  # how long a request for a task may wait
PAUSE_S = 1.0
URL = "http://127.0.0.1:9"
# of each job, nobody reads it: without one, the leader would pause the job for its first one again and again
CHECKPOINT = CheckpointLatest(
    uuid="none",
    step=1,
    timeline=1,
    term=1,
    timestamp="2026-01-01T00:00:00Z",
    manifest="none",
    slots=SlotMap(version=1, owners=(0,)),
    kept=(),
)


def kind_of(number: int, places_of_job: int) -> Kind:
    """One parameter server, and trainers, for each job."""
    return "pserver" if number % places_of_job == 0 else "trainer"


class Places:
    """Those of this process. `given`: the command line."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.keys = given, ClusterKeys()
        self.counts: Counter[str] = Counter()
        self.etcd = etcd_client.connect([given.etcd], share_watches=True)
        self.leases: dict[int, etcd_client.Lease] = {}
        self.members: dict[str, PoolMember] = {}
        self.running: dict[str, asyncio.Task[None]] = {}
        self.keeping: list[asyncio.Task[None]] = []  # the hosts' leases
        self.group: asyncio.TaskGroup
        self.client: aiohttp.ClientSession

    async def run(self) -> None:
        given = self.given
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self.etcd.close)
            self.client = await stack.enter_async_context(http.session(given.token))
            self.group = await stack.enter_async_context(asyncio.TaskGroup())
            following = self.group.create_task(self._follow())
            for number in range(given.first, given.places, given.processes):
                await self._register(number)
            _tell("ready")
            await _end_of_input()
            following.cancel()
            for task in [*self.running.values(), *self.keeping]:
                task.cancel()
        _tell("done", **self.counts)

    # ------------------------------------------------------------ the pool

    async def _register(self, number: int) -> None:
        host = number // PLACES_OF_HOST
        if host not in self.leases:
            lease = self.leases[host] = await self.etcd.grant(TTL_S)
            self.keeping.append(self.group.create_task(lease.keep_alive()))
        kind, name = kind_of(number, self.given.places_of_job), f"h{host}-{number}"
        member = PoolMember(
            member=name, kind=kind, host=f"host-{host}", agent=f"h{host}", pid=1, incarnation=ids.new_id(name)
        )
        self.members[name] = member
        await self._tell(member, host)

    async def _tell(self, member: PoolMember, host: int) -> None:
        self.members[member.member] = member
        key = self.keys.member(member.kind, member.member)
        await self.etcd.put(key, member.to_bytes(), self.leases[host].id)

    async def _follow(self) -> None:
        async with aclosing(self.etcd.watch(self.keys.pool, prefix=True)) as batches:
            async for batch in batches:
                for kv, is_put in [(kv, True) for kv in batch.kvs] + [
                    (event.kv, event.type == "put") for event in batch.events
                ]:
                    found = self.keys.member_of(kv.key)
                    if found is not None and found[2] and found[1] in self.members:
                        self._assigned(
                            found[1], read_record(Assignment, kv.key, kv.value) if is_put else None
                        )

    def _assigned(self, name: str, held: Assignment | None) -> None:
        if (before := self.running.pop(name, None)) is not None:
            before.cancel()
        self.counts["assignments"] += held is not None
        self.running[name] = self.group.create_task(self._work(name, held))

    # ------------------------------------------------------------ a process of a job

    async def _work(self, name: str, held: Assignment | None) -> None:
        host = int(name.removeprefix("h").partition("-")[0])
        member = self.members[name]
        job, epoch = (held.job, held.epoch) if held is not None else ("", 0)
        await self._tell(member.with_fields(running=job, epoch=epoch), host)
        if held is None:
            return
        keys, own = Keys(job), f"{name}-{epoch}"
        place = {"url": URL, "incarnation": own, "host": member.host, "pid": 1, "lease": self.leases[host].id}
        if member.kind == "pserver":
            await self.etcd.put(keys.pserver(0), PserverMember(index=0, **place).to_bytes(), place["lease"])
            await self.etcd.put(keys.layout, LAYOUT.to_bytes())
            await self.etcd.put(keys.latest, CHECKPOINT.to_bytes())
            await self.etcd.put(keys.init_done, b"done")
            return
        await self.etcd.put(keys.trainer(own), TrainerMember(trainer=own, **place).to_bytes(), place["lease"])
        await asyncio.sleep(random.uniform(0, PAUSE_S))
        while True:
            with suppress(TriremeError, aiohttp.ClientError, TimeoutError):
                await self._train(keys, own)
            await asyncio.sleep(PAUSE_S)

    async def _train(self, keys: Keys, trainer: str) -> None:
        found = await self.etcd.get(keys.state)
        state = read_record(JobState, found.key, found.value) if found is not None else None
        if state is None:
            return
        base = f"{self.given.url}/v1/jobs/{keys.job}/task-leases"
        asked = {"trainer": trainer, "request": ids.new_id("r"), "generation": state.generation}
        async with self.client.post(base, json={**asked, "wait_s": ASK_S}) as response:
            answer = await response.json()
            self.counts[f"asked {response.status}"] += 1
        task = answer.get("task")
        while task is not None:
            await asyncio.sleep(self.given.task_seconds * random.uniform(0.5, 1.5))
            after = {"generation": state.generation, "request": ids.new_id("r")}
            done = {"trainer": trainer, "attempt": task["attempt"], "epoch": task["epoch"], "next": after}
            async with self.client.post(f"{base}/{task['task_id']}/complete", json=done) as response:
                task = (await response.json()).get("next")
                self.counts[f"completed {response.status}"] += 1


async def _end_of_input() -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    await reader.read()


def _tell(what: str, **fields: object) -> None:
    print(json.dumps({"what": what, **fields}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("etcd", "token", "url"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("first", "processes", "places", "places-of-job"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--task-seconds", type=float, required=True)
    import uvloop

    telemetry.configure(level="ERROR", service="places")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(Places(parser.parse_args()).run())


if __name__ == "__main__":
    main()
