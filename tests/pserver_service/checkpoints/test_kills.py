"""A parameter server dies, or sleeps and wakes, at every single await of the checkpoint protocol: `latest`
always loads, never mixes versions, never gets older, and the job goes on from it; files of nobody go with the
next checkpoint."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from tests.equipment.replaced import replaced
from tests.pserver_service.checkpoints import parts
from tests.pserver_service.checkpoints.cluster import KEYS, TTL_S, expected, folders, run_scenario
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
    WINDOW_S,
    assert_swept,
    frozen_at,
    go_on,
    node_of,
    opened,
    trained_on,
    undisturbed,
)
from trireme_shared.checkpoints import writer
from trireme_shared.protocol.errors import CheckpointUnusable
from trireme_shared.protocol.records.checkpoints import CheckpointLatest


async def killed_before(storage, name, number, everybody=False):
    """`number` of what it does at this checkpoint is done, the next thing not; `everybody` dies at that
    moment, or it alone."""
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


def test_the_moments_of_death_are_those_of_the_whole_protocol(tmp_path):
    finisher, other = (run_scenario(undisturbed, tmp_path / name, name)[0] for name in NAMES)
    part = [STARTED, *FILE, FINISHED]
    assert finisher == [*part, LOCK, *IN_FOLDER, LATEST, *OLDER_DELETED, UNLOCK]
    assert other == [STARTED, *IN_FOLDER, FINISHED, LOCK], (
        "it sees all parts too, and comes too late for the lock"
    )


async def looked_at_in_between(storage):
    """The steps that `latest` had each time that any process was about to change something that others can
    see, and why it could not be loaded."""
    cluster, steps, damage = await opened(storage), [], []

    def look(what, meet):
        put = [event.kv for event in cluster.simulated.events() if event.kv.key == KEYS.latest]
        latest = CheckpointLatest.model_validate_json(put[-1].value)
        steps.append(latest.step)
        try:
            cluster.check_latest(latest)
        except CheckpointUnusable as error:
            damage.append(error.message)
        meet(what)

    for node in cluster.every:
        node.crash_point.meet = partial(look, meet=node.crash_point.meet)
    await cluster.train(1, 4)
    await cluster.committed(4)
    return steps, damage


def test_latest_names_whole_checkpoints_at_every_moment(tmp_path):
    """Only one is kept, so a reader that has just read `latest` finds all files unless `latest` has changed
    since."""
    steps, damage = run_scenario(looked_at_in_between, tmp_path / "with")
    assert not damage
    moments = len([*FILE, STARTED, FINISHED, LOCK, LATEST, UNLOCK, *IN_FOLDER, *OLDER_DELETED])
    assert steps == sorted(steps)
    assert set(steps) == {0, 2, 4}
    assert len(steps) > 2 * moments
    write = writer.write_manifest

    def hasty(url, manifest):
        name = write(url, manifest)
        writer.remove(url, set(folders(url)) - {manifest.uuid})
        return name

    with replaced(writer, "write_manifest", hasty):
        _, damage = run_scenario(looked_at_in_between, tmp_path / "without")
    assert "cannot be read" in damage[0]


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


@pytest.mark.parametrize("name", NAMES)
def test_a_pserver_that_sleeps_at_any_await_and_wakes_after_its_replacement_publishes_nothing(tmp_path, name):
    _, turns = run_scenario(undisturbed, tmp_path / "undisturbed", name)
    for turn in turns:
        run_scenario(frozen_at, tmp_path / str(turn), name, turn)


async def killed_while_restoring(storage, name, turn):
    """One stays when the other dies, and dies while it loads the latest checkpoint; both are replaced, and
    load it again."""
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
