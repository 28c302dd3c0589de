"""A parameter server dies, or sleeps and wakes, at every single await of the checkpoint protocol: `latest` always loads,
never mixes versions, never gets older, and the job goes on from it; files of nobody go with the next checkpoint."""

from __future__ import annotations

import asyncio

import pytest

from shared.records import PserverMember
from tests.pserver_service.checkpoints import parts
from tests.pserver_service.checkpoints.cluster import KEYS, TTL_S, PserverCluster, expected, folders, run_scenario

WINDOW_S = 1.0  # of virtual time: a checkpoint of version 2 takes 0.1
NAMES = ("ps-0", "ps-1")
LAYOUT = parts.layout_of(elements=64)  # 4, 2 and 1 blocks: both have some


async def opened(storage):
    """Two parameter servers one step before version 2, which is due; `latest` is version 0, and only one is kept."""
    cluster = PserverCluster(str(storage), keep_checkpoints=1, layout=LAYOUT)
    await cluster.open()
    await cluster.committed(0)
    await cluster.train(0, 1)
    return cluster


def node_of(cluster, name):
    return next(node for node in cluster.every if node.process.name == name)


async def undisturbed(storage, name):
    """What that process does while the checkpoint of version 2 is made, and its turns before and after it."""
    cluster = await opened(storage)
    node = node_of(cluster, name)
    done, turns = len(node.crash_point.done), node.process.turns
    await cluster.train(1, 2)
    await cluster.committed(2)
    return node.crash_point.done[done:], range(turns, node.process.turns + 4)


async def go_on(cluster, before):
    """The dead are replaced, all load what is latest, training goes on to the next checkpoints."""
    latest = await cluster.latest()
    assert latest.step in {0, 2}
    assert (latest.timeline, latest.step) >= (before.timeline, before.step)
    cluster.check_latest(latest)
    for node in [node for node in cluster.nodes.values() if node.process.stopped]:
        await cluster.start(f"{node.process.name}-new")
    answers = await cluster.roll_back()
    assert [member.restored.error for member in answers] == ["", ""]
    return await trained_on(cluster)


async def trained_on(cluster):
    """From what all have loaded to version 4, which gets the latest, with nothing left of what was begun."""
    step = cluster.stores[0].lowest
    assert parts.state_of(cluster.stores) == expected(cluster.layout, step)
    await cluster.train(step, 4)
    newest = await cluster.committed(4)
    assert parts.state_of(cluster.stores) == expected(cluster.layout, 4)
    cluster.check_latest(newest)
    return newest


def assert_swept(cluster, newest):
    assert folders(cluster.storage) == {newest.uuid}, "files of nobody are left"


async def killed_before(storage, name, number, everybody=False):
    """`number` of what it does at this checkpoint is done, the next thing not; `everybody` dies at that moment, or it alone."""
    cluster = await opened(storage)
    victim, before = node_of(cluster, name), await cluster.latest()
    victims = list(cluster.nodes.values()) if everybody else [victim]
    victim.crash_point.last = len(victim.crash_point.done) + number
    victim.crash_point.at_last = lambda: [each.process.kill() for each in victims]
    await cluster.train(1, 2)
    await asyncio.sleep(WINDOW_S)
    assert victim.process.dead, (number, victim.crash_point.done)
    for each in victims:
        cluster.simulated.disconnect(each.process.name)
        cluster.simulated.forget(each.process.name)
    assert_swept(cluster, await go_on(cluster, before))


@pytest.mark.parametrize("everybody", [False, True], ids=["alone", "with everybody"])
@pytest.mark.parametrize("name", NAMES)
def test_a_pserver_killed_at_any_await_leaves_latest_usable(tmp_path, name, everybody):
    done, _ = run_scenario(undisturbed, tmp_path / "undisturbed", name)
    for number in range(len(done)):
        run_scenario(killed_before, tmp_path / str(number), name, number, everybody)


FILE = ["os.mkdir", "open", "os.fsync", "os.rename", "os.fsync"]
STARTED = FINISHED = LOCK = LATEST = UNLOCK = "/kv/txn"
OLDER_DELETED = ["os.remove"] * 3 + ["os.rmdir", "/kv/deleterange"]


def test_the_moments_of_death_are_those_of_the_whole_protocol(tmp_path):
    finisher, other = (run_scenario(undisturbed, tmp_path / name, name)[0] for name in NAMES)
    part = [STARTED, *FILE, FINISHED]
    assert finisher == [*part, LOCK, *FILE, LATEST, *OLDER_DELETED, UNLOCK]
    assert other == [*part, LOCK], "it sees all parts too, and comes too late for the lock"


async def going_back_before(storage, name, number):
    """Nobody dies, but the job begins to roll back at that moment, with a checkpoint half made."""
    cluster = await opened(storage)
    victim, before, begun = node_of(cluster, name), await cluster.latest(), asyncio.Event()
    victim.crash_point.last = len(victim.crash_point.done) + number
    victim.crash_point.at_last = begun.set
    await cluster.train(1, 2)
    async with asyncio.timeout(WINDOW_S):
        await begun.wait()
    answers = await cluster.roll_back()
    latest = await cluster.latest()
    assert (latest.timeline, latest.step) >= (before.timeline, before.step)
    cluster.check_latest(latest)
    assert [member.restored.error for member in answers] == ["", ""]
    assert_swept(cluster, await trained_on(cluster))


@pytest.mark.parametrize("name", NAMES)
def test_a_roll_back_that_begins_at_any_await_finds_latest_usable(tmp_path, name):
    done, _ = run_scenario(undisturbed, tmp_path / "undisturbed", name)
    for number in range(len(done)):
        run_scenario(going_back_before, tmp_path / str(number), name, number)


async def frozen_at(storage, name, turn):
    cluster = await opened(storage)
    victim, before = node_of(cluster, name), await cluster.latest()
    victim.process.at_last = victim.process.freeze
    victim.process.last_turn = turn
    await cluster.train(1, 2)
    await asyncio.sleep(WINDOW_S)
    assert victim.process.frozen
    newest = await go_on(cluster, before)
    members, tree = await cluster.members(), await cluster.tree()
    files = {path: path.stat().st_mtime_ns for path in storage.rglob("*.*")}
    victim.process.thaw()
    await asyncio.sleep(3 * TTL_S)
    assert victim.task.done(), "it has lost its index and leaves"
    assert await cluster.members() == members
    assert await cluster.tree() == tree, "it published nothing"
    cluster.check_latest(newest)
    assert {path: path.stat().st_mtime_ns for path in files} == files, "it overwrote nothing"
    assert all(
        isinstance(member, PserverMember) and member.incarnation != victim.pserver.incarnation
        for member in members.values()
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_pserver_that_sleeps_at_any_await_and_wakes_after_its_replacement_publishes_nothing(tmp_path, name):
    _, turns = run_scenario(undisturbed, tmp_path / "undisturbed", name)
    for turn in turns:
        run_scenario(frozen_at, tmp_path / str(turn), name, turn)


async def killed_while_restoring(storage, name, turn):
    """One stays when the other dies, and dies while it loads the latest checkpoint; both are replaced, and load it again."""
    cluster = await opened(storage)
    victim = node_of(cluster, name)
    [other] = [node for node in cluster.nodes.values() if node is not victim]
    other.process.kill()
    cluster.simulated.forget(other.process.name)
    before = await cluster.latest()
    await cluster.start("ps-new")
    victim.process.last_turn = victim.process.turns + turn
    rolling = asyncio.ensure_future(cluster.roll_back())
    await asyncio.sleep(WINDOW_S)
    if not victim.process.dead:
        await rolling
        return False
    cluster.simulated.forget(name)
    rolling.cancel()
    await cluster.start("ps-newer")
    answers = await cluster.roll_back()
    assert [member.restored.error for member in answers] == ["", ""]
    assert await cluster.latest() == before
    assert parts.state_of(cluster.stores) == expected(cluster.layout, 0)
    return True


@pytest.mark.parametrize("name", NAMES)
def test_a_pserver_killed_at_any_await_of_a_roll_back_is_replaced(tmp_path, name):
    turn, died = 1, True
    while died:
        died = run_scenario(killed_while_restoring, tmp_path / str(turn), name, turn)
        turn += 1
    assert turn > 12


def test_the_lock_of_a_dead_committer_is_freed_and_another_commits(tmp_path):
    """Nobody rolls back here: the dead one's part is there already."""

    async def scenario():
        cluster = await opened(tmp_path)
        dead = []

        def kill_the_holder(event):
            if event.kv.key == KEYS.finish_lock and event.type == "put" and not dead:
                victim = next(n for n in cluster.every if n.pserver.incarnation == event.kv.value.decode())
                victim.process.kill()
                cluster.simulated.forget(victim.process.name)
                dead.append(victim)

        seen = len(cluster.simulated.events())
        await cluster.train(1, 2)

        def look():
            nonlocal seen
            events = cluster.simulated.events()
            for event in events[seen:]:
                kill_the_holder(event)
            seen = len(events)
            return bool(dead)

        while not look():
            await asyncio.sleep(0.0001)
        assert dead
        latest = await cluster.committed(2, limit_s=3 * TTL_S)
        cluster.check_latest(latest)

    run_scenario(scenario)
