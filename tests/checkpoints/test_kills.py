"""A parameter server dies, or sleeps and wakes, at every single await of the checkpoint protocol: `latest` always loads,
never mixes versions, and the job goes on from it."""

from __future__ import annotations

import asyncio

import pytest

from shared.records import PserverMember
from tests.checkpoints import parts
from tests.checkpoints.cluster import KEYS, TTL_S, Cluster, expected, folders, play

SHARES = 2  # the awaits are dealt out over so many tests
WINDOW_S = 1.0  # of virtual time: a checkpoint of version 2 takes 0.1


async def opened(storage):
    """Two parameter servers one step before version 2, which is due; `latest` is version 0, and only one is kept."""
    cluster = Cluster(str(storage), keep_checkpoints=1)
    await cluster.open()
    await cluster.committed(0)
    await cluster.train(0, 1)
    return cluster


async def count_turns(storage, name):
    """Turns of that process before and after the checkpoint of version 2."""
    cluster = await opened(storage)
    process = next(node.process for node in cluster.every if node.process.name == name)
    first = process.turns
    await cluster.train(1, 2)
    await cluster.committed(2)
    return first, process.turns


async def go_on(cluster):
    """A replacement takes the index, all load what is latest, training goes on to the next checkpoints."""
    latest = await cluster.latest()
    assert latest.step in {0, 2}
    cluster.check_latest(latest)
    await cluster.start("ps-new")
    answers = await cluster.roll_back()
    assert [member.restored.error for member in answers] == ["", ""]
    step = (await cluster.latest()).step
    assert parts.state_of(cluster.stores) == expected(cluster.layout, step)
    await cluster.train(step, 4)
    newest = await cluster.committed(4)
    assert parts.state_of(cluster.stores) == expected(cluster.layout, 4)
    return newest


async def killed_at(storage, name, turn):
    cluster = await opened(storage)
    victim = next(node for node in cluster.every if node.process.name == name)
    victim.process.last_turn = turn
    await cluster.train(1, 2)
    await asyncio.sleep(WINDOW_S)
    assert victim.process.dead, (turn, victim.process.turns)
    cluster.etcd.disconnect(name)
    cluster.etcd.forget(name)
    newest = await go_on(cluster)
    cluster.check_latest(newest)
    assert folders(storage) == {newest.uuid}, "files of nobody are left"
    return newest


@pytest.mark.parametrize("name", ["ps-0", "ps-1"])
@pytest.mark.parametrize("share", range(SHARES))
def test_a_pserver_killed_at_any_await_leaves_latest_usable(tmp_path, name, share):
    first, last = play(count_turns, tmp_path / "counted", name)
    for turn in range(first + 2 * share, last + 4, 2 * SHARES):
        play(killed_at, tmp_path / str(turn), name, turn)


async def frozen_at(storage, name, turn):
    cluster = await opened(storage)
    victim = next(node for node in cluster.every if node.process.name == name)
    victim.process.at_last = victim.process.freeze
    victim.process.last_turn = turn
    await cluster.train(1, 2)
    await asyncio.sleep(WINDOW_S)
    assert victim.process.frozen
    newest = await go_on(cluster)
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


@pytest.mark.parametrize("name", ["ps-0", "ps-1"])
@pytest.mark.parametrize("share", range(SHARES))
def test_a_pserver_that_sleeps_at_any_await_and_wakes_after_its_replacement_publishes_nothing(tmp_path, name, share):
    first, last = play(count_turns, tmp_path / "counted", name)
    for turn in range(first + 2 * share, last + 4, 2 * SHARES):
        play(frozen_at, tmp_path / str(turn), name, turn)


async def killed_while_restoring(storage, turn):
    """The one that stays dies while it loads the latest checkpoint; both are replaced, and load it again."""
    cluster = await opened(storage)
    victim = cluster.nodes[0]
    cluster.nodes[1].process.kill()
    cluster.etcd.forget("ps-1")
    before = await cluster.latest()
    replaced = asyncio.ensure_future(cluster.start("ps-1-new"))
    await replaced
    victim.process.last_turn = victim.process.turns + turn
    rolling = asyncio.ensure_future(cluster.roll_back())
    await asyncio.sleep(WINDOW_S)
    if not victim.process.dead:
        await rolling
        return False
    cluster.etcd.forget("ps-0")
    rolling.cancel()
    await cluster.start("ps-0-new")
    answers = await cluster.roll_back()
    assert [member.restored.error for member in answers] == ["", ""]
    assert await cluster.latest() == before
    assert parts.state_of(cluster.stores) == expected(cluster.layout, 0)
    return True


def test_a_pserver_killed_at_any_await_of_a_roll_back_is_replaced(tmp_path):
    turn, died = 1, True
    while died:
        died = play(killed_while_restoring, tmp_path / str(turn), turn)
        turn += 2
    assert turn > 20


def test_the_lock_of_a_dead_committer_is_freed_and_another_commits(tmp_path):
    """Nobody rolls back here: the dead one's part is there already."""

    async def scenario():
        cluster = await opened(tmp_path)
        dead = []

        def kill_the_holder(event):
            if event.kv.key == KEYS.finish_lock and event.type == "put" and not dead:
                victim = next(n for n in cluster.every if n.pserver.incarnation == event.kv.value.decode())
                victim.process.kill()
                cluster.etcd.forget(victim.process.name)
                dead.append(victim)

        seen = len(cluster.etcd.events())
        await cluster.train(1, 2)

        def look():
            nonlocal seen
            events = cluster.etcd.events()
            for event in events[seen:]:
                kill_the_holder(event)
            seen = len(events)
            return bool(dead)

        while not look():
            await asyncio.sleep(0.0001)
        assert dead
        latest = await cluster.committed(2, limit_s=3 * TTL_S)
        cluster.check_latest(latest)

    play(scenario)
