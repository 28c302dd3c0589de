"""A parameter server dies at every single await of a paused checkpoint of an asynchronous job: `latest`
always loads, ledger and values of every block are of one instant, and the job goes on from it with each
minibatch in each block once."""

from __future__ import annotations

import asyncio

import pytest

from tests.pserver_service.checkpoints import parts
from tests.pserver_service.checkpoints.async_job import opened, paused_checkpoint, push, replace
from tests.pserver_service.checkpoints.cluster import KEYS, folders, run_scenario
from tests.pserver_service.checkpoints.kill_scenarios import (
    FILE,
    FINISHED,
    IN_FOLDER,
    LATEST,
    LOCK,
    NAMES,
    OLDER_DELETED,
    STARTED,
    UNLOCK,
    node_of,
)
from trireme_shared.checkpoints import stored

TASK = 3
WINDOW_S = 1.0  # of virtual time: writing takes 0.1
COPIED = "/kv/txn"


def values(stores):
    """Without versions, which count updates since the process began."""
    return {name: value for name, value in parts.state_of(stores).items() if not name.endswith("version")}


async def before_the_second(storage):
    """Checkpoint 1 holds one minibatch and is committed; the second one is trained; only one checkpoint is
    kept."""
    cluster = await opened(storage, keep_checkpoints=1, checkpoint_every_seconds=None)
    await cluster.etcd.put(KEYS.pending(str(TASK)), b"{}")
    assert await paused_checkpoint(cluster, 1)
    await cluster.committed(1)
    await push(cluster, TASK, 1)
    return cluster


async def undisturbed(storage, name):
    """What that process does while checkpoint 2 is taken, and the values after 1, 2 and 3 minibatches."""
    cluster = await opened(storage / "values")
    bits = [{}, values(cluster.stores)]
    for start in (1, 2):
        await push(cluster, TASK, start)
        bits.append(values(cluster.stores))
    cluster = await before_the_second(storage)
    node = node_of(cluster, name)
    done = len(node.crash_point.done)
    assert await paused_checkpoint(cluster, 2)
    await cluster.committed(2)
    return node.crash_point.done[done:], bits


def check_latest(storage, latest, bits):
    for ref in latest.kept:
        manifest = stored.read_manifest(str(storage), parts.JOB, ref)
        stored.verify_parts(str(storage), ref, manifest)
        for pservers in (1, 3):
            stores = parts.load(str(storage), ref, pservers)
            assert [store.ledger.next_of(0, TASK).next for store in stores] == [ref.step] * pservers
            assert values(stores) == bits[ref.step]


async def killed_before(storage, name, number, bits, everybody):
    """`number` of what it does for checkpoint 2 is done, the next thing not."""
    cluster = await before_the_second(storage)
    victim = node_of(cluster, name)
    victims = list(cluster.nodes.values()) if everybody else [victim]
    victim.crash_point.last = len(victim.crash_point.done) + number
    victim.crash_point.at_last = lambda: [each.process.kill() for each in victims]
    await paused_checkpoint(cluster, 2)
    await push(cluster, TASK, 2)  # while it is written
    await asyncio.sleep(WINDOW_S)
    assert victim.process.dead, (number, victim.crash_point.done)
    for each in victims:
        cluster.simulated.disconnect(each.process.name)
        cluster.simulated.forget(each.process.name)
    latest = await cluster.latest()
    assert latest.step in {1, 2}
    check_latest(storage, latest, bits)
    if everybody:
        for each in victims:
            await cluster.start(f"{each.process.name}-again")
        assert [member.restored.error for member in await cluster.roll_back()] == ["", ""]
    else:
        _, said = await replace(cluster, victim.pserver.index)
        assert (said.error, said.damaged, said.checkpoint) == ("", "", latest.uuid)
        assert said.positions == {str(TASK): latest.step}
    for start in range(3):  # from the lowest entry on, as trainers resume
        await push(cluster, TASK, start)
    assert values(cluster.stores) == bits[3]
    assert await paused_checkpoint(cluster, 3)
    newest = await cluster.committed(3)
    check_latest(storage, newest, bits)
    assert folders(storage) == {newest.uuid}, "files of nobody are left"


@pytest.mark.parametrize("everybody", [False, True], ids=["alone", "with everybody"])
@pytest.mark.parametrize("name", NAMES)
def test_a_pserver_killed_at_any_await_of_a_pause_leaves_latest_usable(tmp_path, name, everybody):
    done, bits = run_scenario(undisturbed, tmp_path / "undisturbed", name)
    for number in range(len(done)):
        run_scenario(killed_before, tmp_path / str(number), name, number, bits, everybody)


def test_the_moments_of_death_are_those_of_the_whole_protocol(tmp_path):
    finisher, other = (run_scenario(undisturbed, tmp_path / name, name)[0] for name in NAMES)
    part = [COPIED, STARTED, *FILE, FINISHED]
    assert finisher == [*part, LOCK, *IN_FOLDER, LATEST, *OLDER_DELETED, UNLOCK]
    assert other == [COPIED, STARTED, *IN_FOLDER, FINISHED, LOCK]
