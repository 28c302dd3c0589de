"""A leader keeps nothing of jobs that were deleted, in its memory or in etcd. A real etcd; the host agents
are keys and calls."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

import pytest

from master_service.cluster.leader import ClusterMaster
from master_service.cluster.term import JobTerm
from master_service.core.state import kept as event_log
from tests.equipment.etcd.real import embedded_etcd  # noqa: F401  a fixture
from tests.equipment.replaced import replaced
from tests.equipment.waiting import until
from tests.master_service.many_jobs import Jobs, job_of
from trireme_shared.platform import etcd as etcd_client
from trireme_shared.platform.etcd import Etcd
from trireme_shared.platform.etcd.embedded import EmbeddedEtcd
from trireme_shared.platform.etcd.errors import Compacted
from trireme_shared.platform.etcd.operations import STATUS
from trireme_shared.protocol.errors import NotReady
from trireme_shared.protocol.records.cluster import Standing

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]
LIMIT_S = 120
BYTES_OF_A_JOB = 8 << 10  # 1 to 2 KiB were seen: Python's lists of free tuples and floats
# buffers of connections and caches come once, up to 200 KiB together; what jobs leave comes with each wave
WAVES = 4
EVENTS = 10  # the cluster's log is full before anything is measured


class RealJobs(Jobs):
    """As Jobs, on a real etcd."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.clients: list[Etcd] = []
        super().__init__(tasks=2, task_s=0.01)

    def etcd_of(self, client: str) -> Etcd:
        self.clients.append(etcd_client.connect([self._url]))
        return self.clients[-1]

    async def stored(self) -> set[str]:
        """Keys; not the cluster's events, which come and go."""
        found = {kv.key for kv in (await self.etcd.range("/", prefix=True, keys_only=True)).kvs}
        return {key for key in found if "/cluster/events/" not in key}

    async def bytes_in_use(self) -> int:
        """Of etcd's file, without history."""
        with suppress(Compacted):
            await self.etcd.compact((await self.etcd.range("/", prefix=True, count_only=True)).revision)
        for _ in range(3):  # etcd frees the pages of old revisions with its next commits
            await self.etcd.put("/scratch", b"")
            await self.etcd.delete("/scratch")
            await asyncio.sleep(0.3)
        return int((await self.etcd.transport.call(STATUS, {}, 5.0))["dbSizeInUse"])


@asynccontextmanager
async def leading(etcd: EmbeddedEtcd):
    """A leader and a pool of eight."""
    with replaced(event_log, "KEPT_EVENTS", EVENTS), no_others():
        jobs = RealJobs(etcd.url)
        try:
            async with jobs.leading(ttl_s=10.0) as leader, jobs.pool(5, 3):
                await until(lambda: len(leader.state.members) == 8, "the pool")
                yield jobs, leader
        finally:
            for client in jobs.clients:
                await client.close()


@contextmanager
def no_others() -> Iterator[None]:
    """Collections pass over what other tests of this process left: millions of objects, which take longer
    than a lease."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


async def wave(leader: ClusterMaster, names: list[str]) -> None:
    """All are submitted, end, and are deleted."""
    for name in names:
        await leader.create_job(job_of(name, {"max_trainers": 2}), None)
    await until(
        lambda: all(leader.state.job(name).standing is Standing.COMPLETED for name in names),
        "the jobs to end",
        LIMIT_S,
    )
    for name in names:
        while True:
            try:
                await leader.delete_job(name)
            except NotReady:
                await asyncio.sleep(0.05)
            else:
                break
    await until(
        lambda: not any(member.running for member in leader.state.members.values()), "members to be idle"
    )


def objects_of_the_master() -> Counter[str]:
    gc.collect()
    kinds = (type(each) for each in gc.get_objects())
    found = Counter(kind.__qualname__ for kind in kinds if str(kind.__module__).startswith("master_service"))
    del found["PutEvents"]  # the cluster's log keeps EVENTS events, in more or fewer chunks
    return found


async def left_by(jobs: RealJobs, leader: ClusterMaster, count: int, name: str = "job") -> Counter[str]:
    """Objects that were not there before so many jobs came and went."""
    before = objects_of_the_master()
    await wave(leader, [f"{name}-{number}" for number in range(count)])
    return objects_of_the_master() - before


async def test_what_a_dozen_jobs_took_is_free_again_once_they_are_deleted(embedded_etcd) -> None:  # noqa: F811
    async with leading(embedded_etcd) as (jobs, leader):
        await wave(leader, ["first"])
        keys, in_use = await jobs.stored(), await jobs.bytes_in_use()
        gc.collect()
        tracemalloc.start()
        try:
            grown = []
            for number in range(WAVES):
                gc.collect()
                before = tracemalloc.get_traced_memory()[0]
                left = await left_by(jobs, leader, 12, f"wave-{number}")
                gc.collect()
                grown.append(tracemalloc.get_traced_memory()[0] - before)
                assert left == Counter(), f"objects are left: {left}"
                if grown[-1] < 12 * BYTES_OF_A_JOB:
                    break
        finally:
            tracemalloc.stop()
        assert grown[-1] < 12 * BYTES_OF_A_JOB, f"bytes left by each wave: {grown}"
        assert await jobs.stored() == keys
        assert await jobs.bytes_in_use() < in_use + (64 << 10)


async def test_without_the_end_of_a_jobs_term_the_leader_keeps_it(embedded_etcd) -> None:  # noqa: F811
    kept, run = [], JobTerm.run

    async def keeps(self: JobTerm) -> None:
        kept.append(self)
        await run(self)

    async with leading(embedded_etcd) as (jobs, leader):
        await wave(leader, ["first"])
        with replaced(JobTerm, "run", keeps):
            left = await left_by(jobs, leader, 2)
        assert {"JobTerm", "Master"} <= left.keys(), left
        assert len(kept) == 2
