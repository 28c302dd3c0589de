"""A host agent with real children: what it is assigned runs, comes back when it dies, and leaves when it is
told to."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import psutil
import pytest
import pytest_asyncio

from tests.end_to_end.scripts import RECORDS
from tests.equipment.etcd.real import embedded_etcd
from tests.equipment.metric_names import wrong_metrics
from tests.equipment.waiting import until
from tests.trireme.pool.hosts import KEYS, Host, family, final_state, job_in, led, slow_file, training
from trireme_shared.platform.etcd import Etcd, connect
from trireme_shared.platform.etcd.embedded import EmbeddedEtcd
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import Phase
from trireme_shared.protocol.records.cluster import PoolMember

__all__ = ["embedded_etcd"]
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the agent's children are forked, as Linux can"),
]
LONG = 400  # epochs of a job that does not end during a test


@pytest_asyncio.fixture
async def etcd(embedded_etcd: EmbeddedEtcd) -> AsyncIterator[Etcd]:
    client = connect([embedded_etcd.url])
    yield client
    await client.close()


@pytest_asyncio.fixture
async def host(tmp_path: Path, etcd: Etcd, embedded_etcd: EmbeddedEtcd, mark: str) -> AsyncIterator[Host]:
    """Ended by SIGTERM; nobody of it may be left then."""
    agent = Host(tmp_path / "host", etcd, embedded_etcd.url, mark)
    yield agent
    if agent.process is not None and agent.process.returncode is None:
        agent.process.send_signal(signal.SIGTERM)
        assert await agent.end() == 0, agent.log()
    await until(lambda: not family(mark), "all processes to end", 10)


async def said_by(log: Path) -> str:
    await until(lambda: log.is_file() and log.stat().st_size, f"{log.name} to be written", 30)
    return log.read_text()


async def processes_of(member: PoolMember) -> dict[str, dict[str, object]]:
    async with aiohttp.ClientSession() as client, client.get(f"{member.url}/readyz") as answer:
        return (await answer.json())["processes"]


async def metrics_of(member: PoolMember) -> str:
    async with aiohttp.ClientSession() as client:
        for page in ("healthz", "readyz"):
            async with client.get(f"{member.url}/{page}") as answer:
                assert answer.status == 200
        async with client.get(f"{member.url}/metrics") as answer:
            return await answer.text()


async def test_a_job_runs_to_its_end_through_killed_and_frozen_children(
    host, etcd, embedded_etcd, mark, tmp_path
):
    spec, source = job_in(tmp_path, "long", epochs=12)
    await host.start()
    async with led(spec, source, etcd, embedded_etcd.url, mark, tmp_path):
        await host.assign_all("long", 1)
        for kind, number in (("pserver", 0), ("trainer", 0), ("trainer", 1)):
            said = await host.when(
                kind, number, lambda member: member.running == "long", f"{kind}-{number} to run"
            )
            assert (said.epoch, said.ended, said.trouble, said.pid) == (1, False, "", host.pid)
        await training(etcd, "long")
        killed = await host.child("trainer", 0)
        killed.kill()
        again = await host.child("trainer", 0, other_than=killed.pid)
        assert again.ppid() == host.pid
        frozen = await host.child("trainer", 1)
        frozen.suspend()
        await host.child("trainer", 1, other_than=frozen.pid)
        registered = await host.registered()
        async with asyncio.timeout(60):
            while len(found := await processes_of(registered)) < 3 or not all(
                each["ready"] for each in found.values()
            ):
                await asyncio.sleep(0.1)
        text = await metrics_of(registered)
        assert wrong_metrics(text) == []
        for line in (
            'places{kind="trainer",state="running"} 2.0',
            "ready 1.0",
            'deaths_total{kind="trainer"} 2.0',
        ):
            assert f"trireme_host_{line}" in text
        slow_file(tmp_path, "long").unlink()
        state = await final_state(etcd, "long")
        assert (state.phase, state.result.trained_records) == (Phase.COMPLETED, 12 * RECORDS)
        for number in range(2):
            await host.when("trainer", number, lambda member: member.ended, "the trainers to have ended")
        assert [
            process for process in host.children() if "pserver-0" not in " ".join(process.cmdline())
        ] == []
        for kind, number in (("pserver", 0), ("trainer", 0), ("trainer", 1)):
            await host.unassign(kind, number)
            await host.when(kind, number, lambda member: member.running == "", f"{kind}-{number} to be idle")
        assert host.children() == []
    logs = {path.name for path in (tmp_path / "host" / "logs" / "long").iterdir()}
    assert logs == {f"h-{name}-1.log" for name in ("pserver-0", "trainer-0", "trainer-1")}


async def test_the_logs_of_its_children_are_kept_in_bounds(host, tmp_path):
    host.environment["TRIREME_LOG_BYTES"] = str(1 << 16)
    await host.start()
    await host.registered()
    log = tmp_path / "host" / "logs" / "long" / "h-trainer-0-1.log"
    log.parent.mkdir(parents=True)
    log.write_bytes(b"x" * (1 << 17))
    await until(lambda: log.stat().st_size == 0, "it to begin again", 30)
    assert log.with_name(f"{log.name}.1").stat().st_size == 1 << 17


async def test_killing_the_agent_kills_its_children_and_the_next_one_does_not_wait_for_its_lease(
    host, etcd, embedded_etcd, mark, tmp_path
):
    host.environment["TRIREME_AGENT_TTL_S"] = "3600"
    spec, source = job_in(tmp_path, "killed", epochs=LONG)
    await host.start()
    async with led(spec, source, etcd, embedded_etcd.url, mark, tmp_path):
        await host.assign_all("killed", 1)
        await training(etcd, "killed")
        before, children = await host.registered(), host.children()
        assert len(children) == 3
        host.process.kill()
        await host.end()
        await until(
            lambda: not any(psutil.pid_exists(child.pid) for child in children), "its children to die", 10
        )
        await host.start()
        now = await host.when(
            "trainer", 0, lambda member: member.pid == host.pid, "its places to be registered"
        )
        assert now.incarnation != before.incarnation
        await asyncio.sleep(0.5)
        assert host.children() == [], "it runs what was assigned to the agent before"
        await host.assign_all("killed", 1)
        await host.child("trainer", 1)


async def test_a_place_that_is_assigned_to_another_job_starts_a_fresh_process(
    host, etcd, embedded_etcd, mark, tmp_path
):
    one, source_one = job_in(tmp_path, "one", epochs=LONG)
    two, source_two = job_in(tmp_path, "two", epochs=LONG)
    await host.start()
    url = embedded_etcd.url
    leader_of_two = led(two, source_two, etcd, url, mark, tmp_path)
    async with led(one, source_one, etcd, url, mark, tmp_path), leader_of_two:
        await host.assign_all("one", 1)
        await training(etcd, "one")
        before = await host.child("trainer", 1)
        await host.assign("trainer", 1, "two", 1)
        after = await host.child("trainer", 1, other_than=before.pid)
        assert not psutil.pid_exists(before.pid)
        assert '"job": "two"' in (await said_by(tmp_path / "host" / "logs" / "two" / "h-trainer-1-1.log"))
        said = await host.when(
            "trainer", 1, lambda member: member.running == "two", "trainer-1 to be the other job's"
        )
        assert said.epoch == 1
        await host.assign("trainer", 1, "two", 2)
        later = await host.child("trainer", 1, other_than=after.pid)
        await host.when("trainer", 1, lambda member: member.epoch == 2, "the next epoch")
        await host.assign("trainer", 1, "two", 2)
        await asyncio.sleep(0.5)
        assert [child.pid for child in host.children("trainer-1")] == [later.pid]
        host.process.send_signal(signal.SIGTERM)
        assert await host.end() == 0
        assert await host.member("trainer", 1) is None
        assert not (await etcd.range(Keys("one").trainers, prefix=True)).kvs
    await until(lambda: not family(mark), "nobody to be left", 10)


async def test_children_outlive_an_etcd_that_is_silent_for_longer_than_the_lease(
    host, etcd, embedded_etcd, mark, tmp_path
):
    host.environment["TRIREME_AGENT_TTL_S"] = "2"
    spec, source = job_in(tmp_path, "silent", epochs=LONG)
    await host.start()
    async with led(spec, source, etcd, embedded_etcd.url, mark, tmp_path):
        await host.assign_all("silent", 1)
        await training(etcd, "silent")
        before, pids = await host.registered(), {child.pid for child in host.children()}
        embedded_etcd.send(signal.SIGSTOP)
        await asyncio.sleep(6)
        embedded_etcd.send(signal.SIGCONT)
        after = await host.when("trainer", 0, lambda member: member.lease != before.lease, "a new lease")
        assert after == before.model_copy(update={"lease": after.lease})
        await host.when("pserver", 0, lambda member: member.lease == after.lease, "one lease for all places")
        await asyncio.sleep(2)
        assert {child.pid for child in host.children()} == pids


async def test_a_child_that_cannot_start_is_given_up_and_its_last_words_are_told(
    host, etcd, embedded_etcd, tmp_path
):
    host.environment["TRIREME_SPEC_WAIT_S"] = "0.2"
    await host.start()
    await host.assign("trainer", 0, "nobodys", 1)
    said = await host.when("trainer", 0, lambda member: "was ready" in member.trouble, "the trouble")
    assert said.trouble.startswith(
        "trainer-0 ended 2 times before it was ready on h, the last time with exit code 1"
    )
    assert "the job's spec" in said.trouble
    await host.assign("trainer", 1, "../../etc", 1)
    said = await host.when("trainer", 1, lambda member: member.trouble, "the refusal")
    assert said.trouble == "'../../etc' is no name of a job"
    await host.unassign("trainer", 0)
    await host.when("trainer", 0, lambda member: not member.trouble and not member.running, "an idle place")


async def test_a_second_agent_in_the_same_folder_and_one_without_places_are_refused(
    host, etcd, embedded_etcd, mark
):
    await host.start()
    await host.registered()
    second = Host(host.folder, etcd, embedded_etcd.url, mark, name="other")
    await second.start()
    assert await second.end() == 1
    assert f"another host agent (process {host.pid}) uses" in second.log()
    assert "Traceback" not in second.log()
    idle = Host(
        host.folder.parent / "idle", etcd, embedded_etcd.url, mark, name="idle", trainers=0, pservers=0
    )
    await idle.start()
    assert (await idle.end(), "a host without places is of no use" in idle.log()) == (1, True)
    bad = Host(host.folder.parent / "bad", etcd, embedded_etcd.url, mark, name="bad", trainers=-1)
    await bad.start()
    assert (await bad.end(), "TRIREME_TRAINERS" in bad.log()) == (2, True)
    assert len((await etcd.range(KEYS.pool, prefix=True, keys_only=True)).kvs) == 3


async def test_a_host_says_the_node_and_the_cores_that_it_was_given(tmp_path, etcd, embedded_etcd, mark):
    agent = Host(tmp_path / "placed", etcd, embedded_etcd.url, mark, "placed", node="10.1.2.3", cores=6)
    try:
        await agent.start()
        member = await agent.registered()
        assert (member.host, member.cores) == ("10.1.2.3", 2)
    finally:
        agent.process.send_signal(signal.SIGTERM)
        assert await agent.end() == 0, agent.log()
