"""Checkpoints of a synchronous job: what a parameter server does in order, and how the job continues after it
was stopped."""

from __future__ import annotations

import asyncio

from tests.pserver_service.checkpoints import parts
from tests.pserver_service.checkpoints.cluster import TTL_S, PserverCluster, expected, folders
from trireme_shared.protocol.records import PserverMember

WINDOW_S = 1.0  # of virtual time: a checkpoint of version 2 takes 0.1
NAMES = ("ps-0", "ps-1")
LAYOUT = parts.layout_of(elements=64)  # 4, 2 and 1 blocks: both have some


async def opened(storage):
    """Two parameter servers one step before version 2, which is due; `latest` is version 0, and only one is
    kept."""
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


FILE = ["os.mkdir", "open", "os.fsync", "os.rename", "os.fsync"]
IN_FOLDER = FILE[1:]  # a further one in a folder that is there
STARTED = FINISHED = LOCK = LATEST = UNLOCK = "/kv/txn"
OLDER_DELETED = ["os.remove"] * 3 + ["os.rmdir", "/kv/deleterange"]


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
