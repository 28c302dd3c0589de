"""Hosts of a cluster are cut off, come back with living children, die and start again: work moves once, and
no index is held twice."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from master_service.cluster import term
from tests.equipment.replaced import replaced
from tests.equipment.virtual_loop import run_virtually
from tests.equipment.waiting import until
from tests.master_service.many_jobs import create_once, job_of
from tests.simulation.hosts import SimulatedHost, held_twice, watched
from tests.simulation.many_jobs import SimulatedJobs
from trireme_shared.platform.membership.directory import OwnKey
from trireme_shared.protocol.records import Mode
from trireme_shared.protocol.records.cluster import Kind, Standing

LEASE_S, AGENT_TTL_S = 3.0, 2.0
FAULTS_S = 60.0
REST_S = 120.0


def made(jobs: SimulatedJobs, folder: Path, count: int) -> list[SimulatedHost]:
    """Each has a place for a trainer and one for a parameter server."""
    return [
        SimulatedHost(jobs, f"h{number}", folder / f"h{number}", agent_ttl_s=AGENT_TTL_S, lease_ttl_s=LEASE_S)
        for number in range(count)
    ]


def runs(host: SimulatedHost, kind: Kind) -> bool:
    return any(member.key is not None for member in host.running(kind))


async def begun(jobs: SimulatedJobs, hosts: list[SimulatedHost], names: str = "a") -> None:
    for name in ("m1", "m2"):
        jobs.start_master(name)
    await until(lambda: jobs.leading_node is not None, "a master to lead")
    for name in names:
        asked = job_of(name, {"max_trainers": 1}, mode=Mode.SYNC, lease_ttl_s=LEASE_S)
        await jobs.insist(lambda leader, asked=asked: create_once(leader, asked))
    await until(lambda: all(served(hosts, name) for name in names), "the jobs to run")


def served(hosts: list[SimulatedHost], job: str) -> bool:
    """The job has its parameter server and a trainer."""
    pservers = [member for host in hosts for member in host.running("pserver") if member.job == job]
    trainers = [member for host in hosts for member in host.running("trainer") if member.job == job]
    return any(member.index is not None for member in pservers) and any(member.key for member in trainers)


def moved_after(folder: Path, cut_s: float, seed: int) -> tuple[float, list[str]]:
    """A host with a job's parameter server is cut off for so long. After how long another host serves it, and
    broken promises."""

    async def main() -> tuple[float, list[str]]:
        jobs, clock = SimulatedJobs(), asyncio.get_running_loop().time
        hosts, broken = made(jobs, folder, 2), []
        await begun(jobs, hosts)
        await asyncio.sleep(random.Random(seed).uniform(3, 6))
        first = next(host for host in hosts if runs(host, "pserver"))
        other = next(host for host in hosts if host is not first)
        with watched(hosts, broken):
            first.cut()
            at = clock()
            asyncio.get_running_loop().call_later(cut_s, first.join)
            await until(lambda: runs(other, "pserver"), "the other host to take over", 30)
            took_s = clock() - at
            await asyncio.sleep(max(0.0, at + cut_s - clock()) + 15)
            broken += [] if runs(other, "pserver") else ["it did not stay there"]
            broken += [f"{member.name} still runs" for member in first.running("pserver")]
            broken += jobs.check_history()
        await jobs.end()
        return took_s, broken

    return run_virtually(main, seed=seed)


@pytest.mark.parametrize("seed", range(4))
def test_a_host_that_is_cut_off_is_replaced_as_soon_as_its_members_leases_end(
    tmp_path: Path, seed: int
) -> None:
    took_s, broken = moved_after(tmp_path, 60.0, seed)
    assert took_s < LEASE_S + 1.5, (
        "the simulated etcd ends a lease up to a second late; a member starts in 0.3 s"
    )
    assert broken == []


@pytest.mark.parametrize("cut_s", [3.2, 3.5, 4.0, 5.0, 8.0])
def test_an_agent_that_comes_back_with_its_child_alive_ends_it_and_no_index_is_held_twice(
    tmp_path: Path, cut_s: float
) -> None:
    for seed in range(4):
        _, broken = moved_after(tmp_path / str(seed), cut_s, seed)
        assert broken == [], f"seed {seed}"


def test_without_a_look_at_the_members_a_lost_host_keeps_its_places_for_ten_seconds(tmp_path: Path) -> None:
    with replaced(term, "lost_places", lambda *_: frozenset()):
        took_s, _ = moved_after(tmp_path, 60.0, 0)
    assert took_s > AGENT_TTL_S + 9


def test_without_the_fence_of_a_member_two_processes_hold_one_index(tmp_path: Path) -> None:
    with replaced(OwnKey, "in_doubt", property(lambda _: False)):
        _, broken = moved_after(tmp_path, 8.0, 0)
    assert "index 0 of a is held by 2 processes" in broken


def test_a_host_that_comes_back_within_its_leases_keeps_its_places(tmp_path: Path) -> None:
    async def main() -> None:
        jobs = SimulatedJobs()
        hosts = made(jobs, tmp_path, 2)
        await begun(jobs, hosts)
        first = next(host for host in hosts if runs(host, "pserver"))
        kept = first.running("pserver")
        for _ in range(5):
            await asyncio.sleep(4)
            first.cut()
            await asyncio.sleep(1.0)
            first.join()
        await asyncio.sleep(15)
        assert first.running("pserver") == kept
        assert [len(host.members) for host in hosts if host is not first] == [0]
        await jobs.end()

    run_virtually(main)


def lost_agents(folder: Path) -> list[bool]:
    """Agents alone lose their leases; their children go on. Whether the parameter server was the same process
    after each time."""

    async def main() -> list[bool]:
        jobs = SimulatedJobs()
        hosts = made(jobs, folder, 2)
        await begun(jobs, hosts)
        await asyncio.sleep(3)
        first = next(host for host in hosts if runs(host, "pserver"))
        kept, same = first.running("pserver"), []
        for _ in range(3):
            lease = jobs.leading_node.master.state.members[("pserver", f"{first.name}-pserver-0")].lease
            jobs.simulated.expire_lease(lease)
            await asyncio.sleep(8)
            same.append([each for host in hosts for each in host.running("pserver")] == kept)
        await jobs.end()
        return same

    return run_virtually(main)


def test_an_agent_that_alone_loses_its_lease_keeps_its_places(tmp_path: Path) -> None:
    assert lost_agents(tmp_path) == [True] * 3


def test_without_a_look_at_the_members_such_an_agent_would_lose_its_places(tmp_path: Path) -> None:
    with replaced(term, "lost_places", lambda state, _: frozenset(state.gone_since)):
        assert lost_agents(tmp_path) != [True] * 3


def silenced(folder: Path, seed: int) -> tuple[bool, list[str]]:
    """etcd is silent for longer than all leases, again and again. Whether every process is the same one then,
    and broken promises."""

    async def main() -> tuple[bool, list[str]]:
        jobs = SimulatedJobs()
        hosts, broken = made(jobs, folder, 3), []
        await begun(jobs, hosts)
        kept = [host.running(kind) for host in hosts for kind in ("pserver", "trainer")]
        with watched(hosts, broken):
            for _ in range(3):
                jobs.simulated.freeze()
                await asyncio.sleep(8)
                jobs.simulated.thaw()
                await asyncio.sleep(25)
        same = [host.running(kind) for host in hosts for kind in ("pserver", "trainer")] == kept
        await jobs.end()
        return same, broken

    return run_virtually(main, seed=seed)


def test_after_a_silence_of_etcd_that_ends_all_leases_every_process_keeps_its_place(tmp_path: Path) -> None:
    assert [silenced(tmp_path / str(seed), seed) for seed in range(3)] == [(True, [])] * 3


def test_without_the_time_to_come_back_a_silence_moves_work_in_vain(tmp_path: Path) -> None:
    with replaced(term, "may_return_s", lambda *_: 0.0):
        assert not all(silenced(tmp_path / str(seed), seed)[0] for seed in range(3))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(8))
def test_jobs_outlive_hosts_that_are_cut_off_and_killed_at_any_time(tmp_path: Path, seed: int) -> None:
    async def main() -> None:
        jobs, draw = SimulatedJobs(), random.Random(seed)
        hosts, broken = made(jobs, tmp_path, 4), []
        await begun(jobs, hosts, "ab")
        loop = asyncio.get_running_loop()
        end = loop.time() + FAULTS_S
        with watched(hosts, broken):
            while loop.time() < end:
                await asyncio.sleep(draw.uniform(0.5, 6))
                host, lasts_s = draw.choice(hosts), draw.choice([0.5, 2.5, 3.5, 5.0, 12.0])
                if draw.random() < 0.6:
                    host.cut()
                    loop.call_later(lasts_s, host.join)
                elif draw.random() < 0.7:
                    host.kill()
                    loop.call_later(lasts_s, host.start)
                else:
                    jobs.simulated.cut("m1")
                    loop.call_later(lasts_s, jobs.simulated.mend, "m1")
            await asyncio.sleep(30)
            for name in "ab":
                await until(lambda name=name: served(hosts, name), f"job {name} to go on", REST_S)
                assert await jobs.standing(name) is Standing.ACTIVE
            await asyncio.sleep(20)
            members = [
                member for host in hosts for kind in ("pserver", "trainer") for member in host.running(kind)
            ]
            assert len(members) == 4, members
        assert broken + held_twice(hosts) + jobs.check_history() == []
        await jobs.end()

    run_virtually(main, seed=seed)
