"""A job of real processes is resized while it trains, and a process is killed in each resize: no bit and no
minibatch is lost."""

from __future__ import annotations

import asyncio
import random
import signal
from contextlib import suppress

import pytest

from tests.end_to_end.local_cluster import (
    EPOCHS,
    RECORDS,
    cluster_of,
    completed,
    ended,
    reach_step,
    same_bits,
    spec_of,
)
from trireme.launch.cluster import LocalCluster
from trireme.view.job_address import client_of
from trireme_shared.platform.runtime import ids
from trireme_shared.protocol.errors import DeadlineExceeded, PeerError
from trireme_shared.protocol.records import Mode
from trireme_shared.protocol.rest import ResizeView

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

RESIZE_S = 120.0
SLOW_S = 0.1
SIZES = ((3, 4), (2, 2))  # parameter servers and trainers
KINDS = ("trainer", "pserver", "pserver", "master")


async def resized(cluster: LocalCluster, pservers: int, trainers: int) -> ResizeView:
    """The resize once it has ended, whoever leads."""
    key = ids.new_id("test")

    async def call(invoke):
        async with asyncio.timeout(RESIZE_S):
            while True:
                with suppress(PeerError, DeadlineExceeded):
                    async with client_of(await cluster.master_url()) as client:
                        return await invoke(client)
                await asyncio.sleep(0.1)

    job, numbers = cluster.spec.job, {"pservers": pservers, "trainers": trainers}
    name = (await call(lambda client: client.create_resize(job, key=key, **numbers))).operation_id
    async with asyncio.timeout(RESIZE_S):
        while (
            found := await call(lambda client: client.get_resize(job, name, wait_s=1.0))
        ).state == "RUNNING":
            pass
    return found


async def killed_meanwhile(cluster: LocalCluster, rng: random.Random) -> None:
    await asyncio.sleep(rng.random() * 1.5)
    kind = rng.choice(KINDS)
    alive = sorted(name for name, child in cluster.children.items() if name.startswith(kind) and child.alive)
    if alive:
        cluster.kill(rng.choice(alive), signal.SIGKILL)


async def disturbed(cluster: LocalCluster, seed: int | None) -> list[dict]:
    """Resize it twice; with a seed a process is killed in each."""
    done = []
    await reach_step(cluster, 3)
    for number, (pservers, trainers) in enumerate(SIZES):
        async with asyncio.TaskGroup() as group:
            if seed is not None:
                group.create_task(killed_meanwhile(cluster, random.Random(f"{seed}-{number}")))
            resize = group.create_task(resized(cluster, pservers, trainers))
        done.append(resize.result())
    return done


def alive(cluster: LocalCluster, kind: str) -> int:
    return sum(child.alive for name, child in cluster.children.items() if name.startswith(kind))


def test_a_job_grows_and_shrinks_while_it_trains_and_no_bit_differs(tmp_path, undisturbed):
    async def main():
        async with cluster_of(spec_of(tmp_path, slow_s=SLOW_S, trainers=1, pservers=1), tmp_path) as cluster:
            grown, shrunk = await disturbed(cluster, None)
            assert (grown.phase, shrunk.phase) == ("COMMITTED", "COMMITTED"), (grown, shrunk)
            assert grown.bytes_moved == pytest.approx(grown.bytes, rel=0.2)
            assert 0 < grown.groups_moved == grown.groups
            async with asyncio.timeout(60):
                while (alive(cluster, "pserver"), alive(cluster, "trainer")) != (2, 2):
                    await asyncio.sleep(0.1)
            assert not cluster.deaths
            return await completed(cluster)

    assert same_bits(asyncio.run(main()), undisturbed)


def seeds():
    """The first three in every run of the tests, the others with `pytest -m soak`."""
    return [pytest.param(seed, marks=[pytest.mark.soak] if seed >= 1 else []) for seed in range(20)]


@pytest.mark.parametrize("seed", seeds())
def test_a_process_killed_in_each_resize_costs_no_bit(tmp_path, undisturbed, seed):
    async def main():
        async with cluster_of(
            spec_of(tmp_path, slow_s=SLOW_S, trainers=1, pservers=1), tmp_path, standbys=1
        ) as cluster:
            for resize in await disturbed(cluster, seed):
                assert resize.phase in {"COMMITTED", "ROLLED_BACK", "FAILED"}, resize
            return await completed(cluster)

    assert same_bits(asyncio.run(main()), undisturbed)


@pytest.mark.parametrize("seed", seeds())
def test_an_asynchronous_job_trains_each_minibatch_once_whatever_moves(tmp_path, seed):
    """What a killed parameter server lacks is on record; the ledgers of all others are exact."""

    async def main():
        spec = spec_of(
            tmp_path, slow_s=SLOW_S, mode=Mode.ASYNC, trainers=1, pservers=1, checkpoint_every_seconds=1.0
        )
        async with cluster_of(spec, tmp_path, standbys=1) as cluster:
            await reach_checkpoint(cluster)
            for resize in await disturbed(cluster, seed):
                assert resize.phase in {"COMMITTED", "ROLLED_BACK", "FAILED"}, resize
            state = await ended(cluster)
            assert (state.phase, state.result.trained_records) == ("COMPLETED", EPOCHS * RECORDS), state
            if not any(name.startswith("pserver") for name in cluster.deaths):
                assert not state.result.losses.lost

    asyncio.run(main())


async def reach_checkpoint(cluster: LocalCluster) -> None:
    """Without one an asynchronous job cannot survive a parameter server."""
    async with asyncio.timeout(60):
        while await cluster.saved_step() is None:
            await asyncio.sleep(0.1)
