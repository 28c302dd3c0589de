"""Checkpoints of asynchronous jobs at the parameter servers: copied in a pause or alone, with the ledger, and
the way back."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
from contextlib import aclosing

import pytest
import torch

from pserver_service.checkpoints import copies, ledger_text
from tests.equipment.waiting import until
from tests.pserver_service.checkpoints import parts
from tests.pserver_service.checkpoints.async_job import (
    count_losses,
    opened,
    paused_checkpoint,
    push,
    push_of,
    replace,
)
from tests.pserver_service.checkpoints.cluster import KEYS, TTL_S, Away, Node, run_scenario, stream
from trireme_shared.checkpoints import stored, writer
from trireme_shared.platform.runtime import clock
from trireme_shared.protocol.errors import NotReady
from trireme_shared.protocol.records import JobState, Mode, Phase, PserverMember
from trireme_shared.protocol.records.checkpoints import OwnCheckpoints
from trireme_shared.protocol.records.job import Saving
from trireme_shared.protocol.records.step import StepRecord
from trireme_shared.protocol.wire.messages import Verdict
from trireme_shared.serving.core.ledger import Ledger
from trireme_shared.serving.core.stores import AsyncStore


def judged(ledger, task, start, end, block):
    header = push_of(task, start, end)
    verdict = ledger.judge(header, task, block)
    if verdict is Verdict.APPLIED:
        ledger.enter(header, task, block)
    return verdict


def filled(blocks, **tasks):
    """Task names `t5` -> how many minibatches of 4 each block has."""
    ledger = Ledger(blocks)
    for name, counts in tasks.items():
        for block, count in enumerate(counts):
            for start in range(count):
                assert judged(ledger, int(name[1:]), start, start + 1, block) is Verdict.APPLIED
    return ledger


def test_a_ledger_survives_its_text():
    ledger = filled(3, t5=(4, 4, 4), t2000=(1, 1, 1), t7=(2, 0, 1))
    found, blocks = ledger_text.from_text(ledger_text.to_text(ledger.saved(), (10, 12, 14)))
    assert (found, blocks) == (ledger.saved(), (10, 12, 14))
    again = Ledger.loaded([(found, position) for position in range(3)])
    assert again.counts() == ledger.counts()
    assert [again.next_of(0, task) for task in (5, 7, 2000)] == [
        ledger.next_of(0, task) for task in (5, 7, 2000)
    ]


def test_blocks_from_several_parts_bring_their_own_books():
    one, other = filled(2, t5=(4, 4), t6=(4, 4), t7=(1, 1)).saved(), filled(1, t5=(4,), t7=(3,)).saved()
    ledger = Ledger.loaded([(one, 1), (other, 0)])
    assert ledger.next_of(0, 5).closed, "closed at all of them"
    assert (ledger.next_of(0, 6).closed, ledger.next_of(0, 6).next) == (False, 0), (
        "closed at one, unknown at the other"
    )
    assert judged(ledger, 6, 0, 1, 0) is Verdict.DUPLICATE
    assert [judged(ledger, 6, start, start + 1, 1) for start in range(4)] == [Verdict.APPLIED] * 4
    assert ledger.next_of(0, 6).closed
    assert judged(ledger, 7, 1, 2, 0) is Verdict.APPLIED
    assert judged(ledger, 7, 1, 2, 1) is Verdict.DUPLICATE
    assert judged(ledger, 7, 4, 5, 1) is Verdict.TOO_EARLY
    assert ledger.positions({5: 0, 7: 0, 8: 0}) == {5: -1, 7: 2, 8: 0}


def test_a_paused_checkpoint_is_of_one_instant_while_training_goes_on(tmp_path):
    async def scenario():
        cluster = await opened(tmp_path)
        before = parts.state_of(cluster.stores)
        await cluster.etcd.put(KEYS.cursor("0"), b"4")
        await paused_checkpoint(cluster, 1)
        await push(cluster, 3, 1)
        await cluster.etcd.put(KEYS.cursor("0"), b"5")
        latest = await cluster.committed(1)
        manifest = stored.read_manifest(str(tmp_path), parts.JOB, latest.kept[0])
        assert (manifest.queue["cursor/0"], manifest.mode) == ("4", Mode.ASYNC)
        for pservers in (1, 3):
            stores = parts.load(str(tmp_path), latest.kept[0], pservers)
            loaded = parts.state_of(stores)
            values = {name: value for name, value in before.items() if not name.endswith("version")}
            assert {name: loaded[name] for name in values} == values
            assert [store.ledger.next_of(0, 3).next for store in stores] == [1] * pservers
            schedules = [[state.number for state in store.schedules.kept] for store in stores]
            assert schedules == [[0]] * pservers  # who joins behind a restart goes on from there

    run_scenario(scenario)


def test_a_pause_that_was_not_confirmed_is_never_committed(tmp_path):
    async def scenario():
        cluster = await opened(tmp_path)
        await paused_checkpoint(cluster, 1, confirmed=False)
        await asyncio.sleep(20.0)
        assert await cluster.latest() is None
        await paused_checkpoint(cluster, 2)
        assert [ref.step for ref in (await cluster.committed(2)).kept] == [2]

    run_scenario(scenario)


def copied_in_parts(cluster, number, meanwhile):
    """Parameter server 0 copies in parts, with `meanwhile()` after the first one. Whether it keeps the copy,
    the blocks it told, and whether a copy waits."""
    pserver, told = cluster.nodes[0].pserver, []

    def goes_on(blocks):
        told.append(blocks)
        return blocks > 1 or meanwhile() is not False

    async def copied():
        kept = await copies.copy(
            pserver, StepRecord(version=number, positions=()), cluster.state.generation, goes_on
        )
        return kept, told, pserver.store is not None and pserver.store.snapshot_waits

    return copied()


def update_a_block(pserver):
    """One that is copied already: a push between two parts, which no pause allows."""
    state = next(iter(pserver.store.blocks.values()))
    state.update(torch.ones(state.place.elements), {"lr": 0.1})


@pytest.mark.parametrize("checked", [True, False])
def test_a_copy_in_parts_is_kept_only_if_it_is_of_one_instant(tmp_path, monkeypatch, checked):
    monkeypatch.setattr(copies, "COPY_BYTES", 1)
    if not checked:
        monkeypatch.setattr(AsyncStore, "_versions", 0)

    async def scenario():
        cluster = await opened(tmp_path)
        pserver = cluster.nodes[0].pserver
        every = list(range(1, len(pserver.store.blocks)))
        assert await copied_in_parts(cluster, 1, lambda: False) == (False, [1], False), (
            "the pause was given up"
        )
        torn = await copied_in_parts(cluster, 2, lambda: update_a_block(pserver))
        assert torn == (not checked, every, not checked)
        assert await copied_in_parts(cluster, 3, lambda: True) == (True, every, True)
        assert await copied_in_parts(cluster, 4, lambda: pserver.drop(0)) == (False, [1], False)

    run_scenario(scenario)


def copies_slowly(monkeypatch, seconds):
    copy_block = AsyncStore.copy_block

    def slow(self, copying, number):
        asyncio.get_running_loop().spend(seconds)
        copy_block(self, copying, number)

    monkeypatch.setattr(copies, "COPY_BYTES", 1)
    monkeypatch.setattr(AsyncStore, "copy_block", slow)


async def told_by_the_first(cluster, said):
    """Appends each `copying` that parameter server 0 writes."""
    async with aclosing(cluster.etcd.watch(KEYS.pserver(0))) as batches:
        async for batch in batches:
            said += [PserverMember.model_validate_json(event.kv.value).copying for event in batch.events]


def test_a_pserver_that_copies_for_longer_than_its_lease_says_how_far_it_is_and_keeps_its_index(
    tmp_path, monkeypatch
):
    copies_slowly(monkeypatch, 0.2)

    async def scenario():
        cluster, said = await opened(tmp_path, layout=parts.layout_of(elements=1500)), []
        before = {index: member.incarnation for index, member in (await cluster.members()).items()}
        told = asyncio.create_task(told_by_the_first(cluster, said))
        await asyncio.sleep(0.1)
        began = clock.monotonic()
        assert await paused_checkpoint(cluster, 1)
        assert clock.monotonic() - began > 2 * TTL_S
        told.cancel()
        blocks = [number for number in said if number]
        assert len(blocks) > 5
        assert blocks == sorted(set(blocks))
        assert said[-1] == 0
        assert {index: member.incarnation for index, member in (await cluster.members()).items()} == before
        await cluster.committed(1)

    run_scenario(scenario)


def test_a_pserver_ends_its_copy_with_the_pause(tmp_path, monkeypatch):
    copies_slowly(monkeypatch, 0.2)

    async def scenario():
        cluster = await opened(tmp_path, layout=parts.layout_of(elements=1500))
        running = cluster.state
        saving = Saving(uuid="u", step=1, cut=True)
        await cluster.write_state(running.model_copy(update={"phase": Phase.CHECKPOINTING, "saving": saving}))
        await until(lambda: cluster.nodes[0].own_index.record.copying > 0, "it copies")
        await cluster.write_state(running)
        await asyncio.sleep(60.0)
        assert [member.copied for member in (await cluster.members()).values()] == ["", ""]
        assert not any(store.snapshot_waits for store in cluster.stores)
        assert cluster.nodes[0].own_index.record.copying < len(cluster.stores[0].blocks) / 2

    run_scenario(scenario)


def test_a_paused_checkpoint_that_somebody_asked_for_is_not_pushed_out_by_the_schedule(tmp_path):
    async def scenario():
        cluster = await opened(tmp_path, keep_checkpoints=1)
        await paused_checkpoint(cluster, 1, operation="op-7")
        assert (await cluster.committed(1)).operation == "op-7"
        for step in (2, 3):
            await paused_checkpoint(cluster, step)
            latest = await cluster.committed(step)
        assert latest.operation == ""
        assert [(ref.step, ref.asked) for ref in latest.kept] == [(3, False), (1, True)]
        assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {
            ref.uuid for ref in latest.kept
        }

    run_scenario(scenario)


def test_a_push_of_before_the_cut_is_stale_at_who_has_copied(tmp_path):
    async def scenario():
        cluster = await opened(tmp_path)
        old = cluster.state
        await paused_checkpoint(cluster, 1)
        cluster.state = old
        answers = await asyncio.gather(push(cluster, 3, 1), return_exceptions=True)
        assert "stale" in str(answers[0])

    run_scenario(scenario)


def test_a_replaced_pserver_takes_its_blocks_from_the_checkpoint_and_the_others_keep_theirs(tmp_path):
    async def scenario():
        cluster = await opened(tmp_path)
        await cluster.etcd.put(KEYS.pending("3"), b"{}")
        await paused_checkpoint(cluster, 1)
        latest = await cluster.committed(1)
        await push(cluster, 3, 1)
        other = parts.state_of([cluster.nodes[0].pserver.store])
        node, said = await replace(cluster, 1)
        assert (said.rejoined, said.checkpoint, said.error, said.positions) == (
            True,
            latest.uuid,
            "",
            {"3": 1},
        )
        assert parts.state_of([cluster.nodes[0].pserver.store]) == other
        answers = await push(cluster, 3, 2)
        assert [(answer.applied > 0, bool(answer.refused)) for answer in answers] == [
            (True, False),
            (False, True),
        ]
        assert {refusal.code for refusal in answers[1].refused} == {"TOO_EARLY"}
        assert [answer.applied > 0 for answer in await push(cluster, 3, 1)] == [False, True]
        assert node.pserver.timeline == 0

    run_scenario(scenario)


def test_a_replaced_pserver_takes_no_push_before_what_it_lacks_is_on_record(tmp_path):
    """What it lacks is counted as the tasks that are done: one that gets done by a push to it must not be
    counted."""

    async def scenario():
        cluster = await opened(tmp_path)
        await paused_checkpoint(cluster, 1)
        await cluster.committed(1)
        node, said = await replace(cluster, 1, counted=False)
        assert (said.rejoined, said.error) == (True, "")
        header = push_of(3, 1, 2, generation=cluster.state.generation)
        with pytest.raises(NotReady, match="has no parameters yet"):
            await node.pserver.push(header, stream([]))
        assert [answer.applied > 0 for answer in await push(cluster, 3, 1)] == [True]
        await count_losses(cluster, node)
        assert [answer.applied > 0 for answer in await push(cluster, 3, 1)] == [False, True]

    run_scenario(scenario)


def test_a_replaced_pserver_waits_for_a_storage_that_is_not_reached_and_says_so(tmp_path):
    async def scenario():
        cluster = await opened(tmp_path)
        await paused_checkpoint(cluster, 1)
        latest = await cluster.committed(1)
        cluster.nodes[1].process.kill()
        cluster.simulated.forget(cluster.nodes[1].process.name)
        node = Node(cluster, "ps-1-again")
        away = Away(node.crash_point.offload, times=50)
        cluster.every.append(node)
        node.member.rejoin.context = dataclasses.replace(node.member.rejoin.context, offload=away)
        await until(
            lambda: any(member.waits for member in node.directory.pservers.values()), "it says why", 60.0
        )
        assert (await cluster.members())[1].waits == (
            f"pserver-1 waits to load checkpoint {latest.uuid} (step 1): the storage is not "
            "reached: no answer from http://s3"
        )
        await until(lambda: node.own_index.record.restored is not None, "it comes back", 60.0)
        assert (node.own_index.record.restored.error, node.own_index.record.waits, away.refused) == (
            "",
            "",
            50,
        )

    run_scenario(scenario)


def test_a_replaced_pserver_loads_a_checkpoint_that_is_committed_after_it_has_looked(tmp_path):
    """It said at once that there was none, and the job failed with a checkpoint."""

    async def scenario():
        cluster = await opened(tmp_path)
        await paused_checkpoint(cluster, 1)
        latest = await cluster.committed(1)
        found = await cluster.etcd.get(KEYS.latest)
        await cluster.etcd.delete(KEYS.latest)
        cluster.nodes[1].process.kill()
        cluster.simulated.forget(cluster.nodes[1].process.name)
        node = await cluster.start("ps-1-again")
        await asyncio.sleep(5.0)
        assert node.own_index.record.restored is None
        await cluster.etcd.put(KEYS.latest, found.value)
        await until(lambda: node.own_index.record.restored is not None, "it comes back", 60.0)
        restored = node.own_index.record.restored
        assert (restored.error, restored.checkpoint) == ("", latest.uuid)

    run_scenario(scenario)


async def own(cluster, index):
    found = await cluster.etcd.get(KEYS.own_checkpoints(index))
    return OwnCheckpoints.model_validate_json(found.value) if found else None


async def saved_alone(cluster, index, number):
    async def newest():
        saved = await own(cluster, index)
        return saved.kept[0].step if saved else 0

    while await newest() < number:
        await asyncio.sleep(0.1)
    return await own(cluster, index)


def damage(storage, ref):
    [part] = (storage / "checkpoints" / ref.uuid).glob("pserver-*")
    part.write_bytes(part.read_bytes()[:-1])


def test_independent_checkpoints_keep_two_and_fall_back_from_damage(tmp_path):
    async def scenario():
        cluster = await opened(tmp_path, checkpoint_kind="independent", checkpoint_every_seconds=10.0)
        await saved_alone(cluster, 1, 2)
        await push(cluster, 3, 1)
        saved = await saved_alone(cluster, 1, 3)
        assert [ref.step for ref in saved.kept] == [3, 2]
        folders = {path.name for path in (tmp_path / "checkpoints").iterdir()}
        assert folders == {ref.uuid for index in (0, 1) for ref in (await own(cluster, index)).kept}
        damage(tmp_path, saved.kept[0])
        node, said = await replace(cluster, 1, counted=False)
        assert (said.checkpoint, said.error) == (saved.kept[1].uuid, "")
        assert saved.kept[0].uuid in said.damaged
        await asyncio.sleep(30.0)
        assert await own(cluster, 1) == saved, (
            "what it came back from stays until the master has counted the loss"
        )
        await count_losses(cluster, node)
        newest = await saved_alone(cluster, 1, 4)
        assert [ref.step for ref in newest.kept] == [4, 2], "the damaged one counts no more"
        for ref in newest.kept:
            damage(tmp_path, ref)
        _, said = await replace(cluster, 1)
        assert said.error.startswith("no checkpoint of pserver-1 is left: 2 cannot be used: ")

    run_scenario(scenario)


def test_an_independent_checkpoint_whose_manifest_fails_leaves_no_part_behind(tmp_path, monkeypatch):
    async def scenario():
        cluster = await opened(tmp_path, checkpoint_kind="independent", checkpoint_every_seconds=10.0)
        await saved_alone(cluster, 1, 1)
        write, remove = writer.write_manifest, writer.remove
        refused = []

        def refuse(storage, manifest):
            refused.append(manifest.uuid)
            raise OSError(errno.ENOSPC, "no space left on device")

        def refuse_to_remove(storage, uuids):
            raise OSError(errno.EIO, "the disk is away")

        monkeypatch.setattr(writer, "write_manifest", refuse)
        await until(lambda: len(refused) >= 2, "both parameter servers to fail", 60.0)
        await until(lambda: cluster.nodes[1].pserver.checkpoint_error, "it to be told")
        assert folders_of(tmp_path) == await named(cluster)
        monkeypatch.setattr(writer, "remove", refuse_to_remove)
        await until(lambda: len(refused) >= 4, "both to fail again", 60.0)
        assert folders_of(tmp_path) > await named(cluster), "they could not be deleted"
        monkeypatch.setattr(writer, "remove", remove)
        monkeypatch.setattr(writer, "write_manifest", write)
        await saved_alone(cluster, 0, 4)
        await saved_alone(cluster, 1, 4)
        await asyncio.sleep(1.0)
        assert folders_of(tmp_path) == await named(cluster), "the next checkpoint deletes them"

    run_scenario(scenario)


def folders_of(storage):
    return {path.name for path in (storage / "checkpoints").iterdir()}


async def named(cluster):
    """Those that the keys of the parameter servers name."""
    return {ref.uuid for index in (0, 1) for ref in (await own(cluster, index)).kept}


def test_the_states_of_saving_are_read_back():
    state = JobState(
        phase=Phase.CHECKPOINTING, saving=Saving(uuid="u", step=3), saved=3, absent=(1,), mends={"1": "x"}
    )
    assert JobState.model_validate_json(state.to_bytes()) == state
