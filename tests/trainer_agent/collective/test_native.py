"""Jobs whose trainers exchange gradients by native groups (real ones of Gloo, in threads)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from tests.trainer_agent.collective.cluster import CollectiveCluster, cluster, trained
from tests.trainer_agent.scripts import differing, spec_for, write_script
from trainer_agent.collective.mean_blocks import MeanStore, released
from trainer_agent.collective.native import link as link_module
from trainer_agent.collective.native.exchange import NativeExchange
from trainer_agent.collective.native.link import Link, OperationLimit
from trainer_agent.collective.native.reducing import Given
from trainer_agent.collective.native.step import Made, StepMaker
from trainer_agent.collective.server import ShareServer
from trireme_shared.collective.group import Broken, Group
from trireme_shared.protocol.records import Phase, Strategy
from trireme_shared.protocol.records.step import StepRecord

COLLECTIVE = {
    "strategy": Strategy.COLLECTIVE,
    "pservers": 0,
    "lanes": 4,
    "global_batch_size": 12,
    "records_per_task": 6,
    "epochs": 1,
    "trainers": 3,
}
NATIVE = {**COLLECTIVE, "exchange": "native", "bucket_bytes": 4096}


def exchange_of(made: CollectiveCluster, name: str) -> NativeExchange:
    member = made.agents[name].collective
    assert member is not None
    native = member.group.means.native
    assert native is not None
    return native


async def test_canonical_reduction_gives_the_bits_of_direct_exchange_whoever_trains(tmp_path):
    """Three trainers of four lanes, so one has more nodes than the others; a model with buffers; a step
    without data in most lanes at the end."""
    script = write_script(tmp_path)
    direct = await trained(spec_for(script, **COLLECTIVE, storage=str(tmp_path / "a")), 1)
    native = await trained(spec_for(script, **NATIVE, storage=str(tmp_path / "b")), 3)
    assert differing(direct, native) == []


@pytest.mark.soak
@pytest.mark.parametrize("options", [{"gradient_dtype": "bfloat16"}, {"clip_grad_norm": 0.3}, {"lanes": 8}])
async def test_narrow_and_clipped_gradients_have_the_bits_of_direct_exchange(tmp_path, options):
    script = write_script(tmp_path)
    size = {"global_batch_size": 16, **options}
    direct = await trained(spec_for(script, **COLLECTIVE | size, storage=str(tmp_path / "a")), 2)
    native = await trained(spec_for(script, **NATIVE | size, storage=str(tmp_path / "b")), 3)
    assert differing(direct, native) == []


@pytest.mark.soak
async def test_fast_reduction_gives_all_trainers_the_same_bits_and_nearly_those_of_direct_exchange(tmp_path):
    script = write_script(tmp_path)
    direct = await trained(spec_for(script, **COLLECTIVE, storage=str(tmp_path / "a")), 1)
    async with cluster(spec_for(script, **NATIVE, reduction="fast", storage=str(tmp_path / "b")), 3) as made:
        await made.version(4)
        stores = {name: made.shares[name].store for name in made.running}
        both = [store for store in stores.values() if store is not None and store.has >= 3]
        values = [store.blocks[0].kept[3] for store in both if 3 in store.blocks[0].kept]
        assert len(values) > 1
        assert all(torch.equal(each.tensor, values[0].tensor) for each in values)
        assert (await made.ended()).phase is Phase.COMPLETED
        native = made.exported()
    assert direct.keys() == native.keys()
    for name, value in direct.items():
        torch.testing.assert_close(native[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.soak
async def test_trainers_that_die_and_come_do_not_show_in_the_bits(tmp_path):
    script = write_script(tmp_path)
    undisturbed = await trained(
        spec_for(script, **COLLECTIVE | {"epochs": 6}, storage=str(tmp_path / "a")), 1
    )
    async with cluster(spec_for(script, **NATIVE | {"epochs": 6}, storage=str(tmp_path / "b")), 3) as made:
        await made.version(3)
        await made.kill("trainer-0-x")
        await made.version(7)
        made.add_trainer("trainer-3-x")
        await made.version(16)
        await made.kill("trainer-1-x")
        assert (await made.ended()).phase is Phase.COMPLETED
        assert differing(undisturbed, made.exported()) == []


@pytest.mark.soak
@pytest.mark.parametrize("reduction", ["canonical", "fast"])
async def test_a_group_that_breaks_without_a_death_is_built_again_in_the_same_generation(tmp_path, reduction):
    script = write_script(tmp_path)
    settings = {"epochs": 6, "reduction": reduction}
    undisturbed = await trained(spec_for(script, **NATIVE | settings, storage=str(tmp_path / "a")), 3)
    async with cluster(spec_for(script, **NATIVE | settings, storage=str(tmp_path / "b")), 3) as made:
        for version in (2, 5, 8, 11):
            await made.version(version)
            link = exchange_of(made, f"trainer-{version % 3}-x").link
            if link is not None and isinstance(link.group, Group):
                link.group.cut()
        generation = made.directory.known_state.generation
        assert (await made.ended()).phase is Phase.COMPLETED
        assert made.directory.known_state.generation == generation
        assert exchange_of(made, "trainer-0-x").attempts[1] > 1
        assert differing(undisturbed, made.exported()) == []


@pytest.mark.parametrize("ablated", [False, True])
async def test_an_operation_that_does_not_end_is_given_up_after_what_steps_take_here(
    tmp_path, monkeypatch, ablated
):
    """One trainer is in no operation of a step, as if it did not reach the others; it lives, so nobody is
    left out. Ablated: the limit of the first step."""
    monkeypatch.setattr(link_module, "FLOOR_S", 0.5)
    if ablated:
        monkeypatch.setattr(OperationLimit, "took", lambda *_: None)
    script, silent = write_script(tmp_path), [True]
    made_by = StepMaker.made

    async def made(self: StepMaker, link: Link, given: Given, store: MeanStore, server: ShareServer) -> Made:
        if store.has == 5 and server.trainer == "trainer-1-x" and silent:
            silent.clear()
            await asyncio.Event().wait()  # until others build the group again
        return await made_by(self, link, given, store, server)

    monkeypatch.setattr(StepMaker, "made", made)
    undisturbed = await trained(
        spec_for(script, **COLLECTIVE | {"epochs": 3}, storage=str(tmp_path / "a")), 1
    )
    async with cluster(
        spec_for(script, **NATIVE | {"epochs": 3}, storage=str(tmp_path / "b")), 3
    ) as cluster_made:
        await cluster_made.version(5)
        if ablated:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(cluster_made.version(7), 2.5)
            return
        assert (await cluster_made.ended()).phase is Phase.COMPLETED
        assert not silent
        assert differing(undisturbed, cluster_made.exported()) == []


Versions = dict[int, list[bytes]]


def versions_of(monkeypatch: pytest.MonkeyPatch) -> Versions:
    """By version: with which bits trainers took it into use."""
    found: Versions = {}
    complete = MeanStore.complete

    def recorded(store: MeanStore, version: int, arrived: Any, record: StepRecord) -> None:
        complete(store, version, arrived, record)
        kept = [block.kept[version] for _, block in sorted(store.blocks.items())]
        bits = b"".join(bytes(buffer.view) for buffer in kept if buffer is not None)
        found.setdefault(version, []).append(bits)

    monkeypatch.setattr(MeanStore, "complete", recorded)
    return found


async def nobody_waits(self: StepMaker, link: Link, made: Made) -> None:
    """The ablation of `all_have`."""


@pytest.mark.soak
@pytest.mark.parametrize("ablated", [False, True])
@pytest.mark.parametrize("dies", ["when it has it", "when it has received it"])
async def test_with_the_fast_reduction_no_version_is_used_with_two_kinds_of_bits(
    tmp_path, monkeypatch, ablated, dies
):
    """At version 4 the last operation of the group ends well in one trainer alone, which then dies."""
    if ablated and dies != "when it has it":
        pytest.skip("the same as the other one")
    script = write_script(tmp_path)
    versions, moment = versions_of(monkeypatch), asyncio.Event()
    made_by = StepMaker.made
    failed: set[int] = set()

    async def made(self: StepMaker, link: Link, given: Given, store: MeanStore, server: ShareServer) -> Made:
        result = await made_by(self, link, given, store, server)
        if result.version != 4 or server.trainer in failed or server.generation > 1:
            return result
        failed.add(server.trainer)
        if server.trainer == "trainer-0-x":
            if dies == "when it has received it":
                moment.set()
            return result
        released(result.arrived)
        raise Broken("the connection was closed")

    monkeypatch.setattr(StepMaker, "made", made)
    if ablated:
        monkeypatch.setattr(StepMaker, "all_have", nobody_waits)
    async with cluster(spec_for(script, **NATIVE, reduction="fast"), 3) as made_cluster:
        if dies == "when it has received it":
            await moment.wait()
        else:
            await made_cluster.version(4)
        await made_cluster.kill("trainer-0-x")
        assert (await made_cluster.ended()).phase is Phase.COMPLETED
    assert len(failed) == 3
    different = [version for version, taken in versions.items() if len(set(taken)) > 1]
    assert bool(different) is ablated


@pytest.mark.soak
async def test_trainers_that_are_told_different_things_end_the_job_with_a_sentence(tmp_path):
    script = write_script(tmp_path)
    async with cluster(spec_for(script, **NATIVE)) as made:
        made.add_trainer("trainer-0-x")
        made.spec = made.spec.model_copy(update={"bucket_bytes": 8192, "reduction": "fast"})
        made.add_trainer("trainer-1-x")
        state = await made.ended()
        assert state.phase is Phase.FAILED
        assert "reduction is" in state.reason
        await asyncio.sleep(0)
