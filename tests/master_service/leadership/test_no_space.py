"""An etcd without space takes no writes. The master says so, keeps its term, and goes on once there is
space."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.equipment.waiting import until
from tests.master_service.api.client import check_problem, client_of
from tests.master_service.cluster import KEYS, MasterCluster, done, running, spec_of, take
from trireme.cli.doctor import examine
from trireme_shared.platform.etcd import Etcd, NoSpace, connect
from trireme_shared.platform.etcd.embedded import EmbeddedEtcd

pytestmark = pytest.mark.processes


class RealCluster(MasterCluster):
    """On a real etcd."""

    def __init__(self, spec: Any, urls: list[str]) -> None:
        self._urls = urls
        self.clients: list[Etcd] = []
        super().__init__(spec)

    def etcd_of(self, client: str) -> Etcd:
        self.clients.append(connect(self._urls))
        return self.clients[-1]


@pytest_asyncio.fixture
async def cluster(small: EmbeddedEtcd) -> AsyncIterator[RealCluster]:
    made = RealCluster(spec_of(), [small.url])
    yield made
    for each in made.clients:
        await each.close()


@pytest_asyncio.fixture
async def small(tmp_path: Path) -> AsyncIterator[EmbeddedEtcd]:
    """An etcd that takes 4 MiB."""
    async with EmbeddedEtcd(tmp_path / "etcd", quota_bytes=4 << 20) as embedded:
        yield embedded


async def fill(etcd: Etcd) -> None:
    with pytest.raises(NoSpace):
        for number in range(40):
            await etcd.put(f"/filler/{number}", b"x" * 500_000)


async def free(etcd: Etcd) -> None:
    await etcd.delete("/filler/", prefix=True)
    await etcd.compact((await etcd.range(KEYS.state)).revision)
    await etcd.transport.call("/maintenance/defragment", {}, 10)
    for alarm in (await etcd.transport.call("/maintenance/alarm", {"action": "GET"}, 10))["alarms"]:
        await etcd.transport.call("/maintenance/alarm", {"action": "DEACTIVATE", **alarm}, 10)


async def test_no_space_is_named_by_status_events_and_doctor_and_training_goes_on_after_it(
    small: EmbeddedEtcd,
    cluster: RealCluster,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TRIREME_ETCD", small.url)
    async with running(cluster, "t1") as master, client_of(master) as client:
        term, task = master.term, await take(cluster, master)
        await fill(cluster.etcd)
        reporting = asyncio.ensure_future(master.complete_task(task.task_id, done(task)))
        await until(lambda: "etcd_out_of_space" in names(master), "the event", 10)
        problem = check_problem(await client.get("/v1/job"), 507, "ETCD_NO_SPACE")
        assert "etcd is out of space" in problem["detail"]
        assert "etcdctl alarm disarm" in problem["hint"]
        assert await asyncio.to_thread(examine, None, as_json=False) == 1
        told = capsys.readouterr().out
        assert "BAD  space    etcd is out of space" in told
        assert "etcdctl alarm disarm" in told
        await free(cluster.etcd)
        await reporting
        assert (await client.get("/v1/task-summary")).json()["done"] == 1
        assert names(master).count("etcd_out_of_space") == names(master).count("etcd_has_space_again") == 1
        assert master.term is term
        await asyncio.to_thread(examine, None, as_json=False)
        assert f"ok   space    etcd at {small.url} has stored" in capsys.readouterr().out


def names(master: Any) -> list[str]:
    return [event.name for event in master.events.after(0, 1000)]
