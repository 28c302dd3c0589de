"""What is loaded is what was: values, optimizer state, versions and records, at any number of parameter
servers."""

from __future__ import annotations

import pytest
import safetensors.torch
import torch

from pserver_service.recovery import load_store
from tests.pserver_service.checkpoints import parts
from trireme_shared.checkpoints import stored
from trireme_shared.checkpoints.schedule import Schedule

EVERY_4 = Schedule(every_steps=4, every_epochs=None, epochs=9)


def saved_at_4(storage, layout, pservers):
    """Stores trained to version 4 and beyond, and the checkpoint of version 4."""
    stores = parts.fresh(layout, pservers, EVERY_4)
    parts.train(layout, stores, 0, 4)
    at_4 = parts.state_of(stores)
    parts.train(layout, stores, 4, 6)  # training goes on before anything is written
    ref = parts.save(storage, layout, parts.snapshots(stores), parts.slot_map(pservers))
    return stores, at_4, ref


@pytest.mark.parametrize("optimizer", parts.OPTIMIZERS)
def test_a_loaded_job_trains_on_to_the_same_bits(tmp_path, optimizer):
    layout = parts.layout_of(optimizer)
    stores, at_4, ref = saved_at_4(str(tmp_path), layout, 2)
    loaded = parts.load(str(tmp_path), ref, 2)
    assert parts.state_of(loaded) == at_4
    parts.train(layout, loaded, 4, 6)
    assert parts.state_of(loaded) == parts.state_of(stores)


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "Adagrad"])
def test_three_pservers_load_as_one_and_then_as_four(tmp_path, optimizer):
    layout = parts.layout_of(optimizer)
    _, at_4, ref = saved_at_4(str(tmp_path), layout, 3)
    one = parts.load(str(tmp_path), ref, 1, EVERY_4)
    assert parts.state_of(one) == at_4
    parts.train(layout, one, 4, 8)
    again = parts.save(str(tmp_path), layout, parts.snapshots(one), parts.slot_map(1), uuid="u2")
    four = parts.load(str(tmp_path), again, 4)
    assert parts.state_of(four) == parts.state_of(one)

    undisturbed = parts.fresh(layout, 2)
    parts.train(layout, undisturbed, 0, 11)
    parts.train(layout, four, 8, 11)
    assert parts.state_of(four) == parts.state_of(undisturbed)


@pytest.mark.parametrize("optimizer", parts.OPTIMIZERS)
def test_the_initial_version_loads_with_no_state_yet(tmp_path, optimizer):
    layout = parts.layout_of(optimizer)
    stores = parts.fresh(layout, 2, EVERY_4)
    for store in stores:
        store.save_first()
    at_0 = parts.state_of(stores)
    ref = parts.save(str(tmp_path), layout, parts.snapshots(stores), parts.slot_map(2))
    loaded = parts.load(str(tmp_path), ref, 3)
    assert parts.state_of(loaded) == at_0
    parts.train(layout, stores, 0, 2)
    parts.train(layout, loaded, 0, 2)
    assert parts.state_of(loaded) == parts.state_of(stores)


def test_a_loaded_job_has_the_options_that_its_user_accepted_since(tmp_path):
    """The learning rate is in each push, the weight decay is not."""
    layout = parts.layout_of("AdamW")
    _, at_4, ref = saved_at_4(str(tmp_path), layout, 2)
    changed = layout.optimizer.with_fields(defaults={**layout.optimizer.defaults, "weight_decay": 0.7})
    accepted = layout.with_fields(optimizer=changed)
    args = (str(tmp_path), parts.JOB, layout.digest, ref, 0, parts.slot_map(1), None)
    (as_saved, _), (as_accepted, _) = load_store(*args), load_store(*args, optimizer=changed)
    assert parts.state_of([as_accepted]) == at_4
    for each in (as_saved, as_accepted):
        parts.train(layout, [each], 4, 6)
    assert parts.state_of([as_accepted]) != parts.state_of([as_saved])
    assert as_accepted.layout == accepted, "its next checkpoint says so"


def test_the_record_of_the_version_comes_back(tmp_path):
    layout = parts.layout_of()
    _, _, ref = saved_at_4(str(tmp_path), layout, 2)
    record = parts.load(str(tmp_path), ref, 1)[0].history.record(4)
    assert record is not None
    assert record.positions == parts.positions(4)
    assert record.lane_zero.scheduler == {"last_epoch": 3}
    assert record.lane_zero.options == ({"lr": 0.1 / 4},)


def test_a_pserver_without_blocks_loads_an_empty_store(tmp_path):
    layout = parts.layout_of(elements=16)  # 4 blocks
    _, at_4, ref = saved_at_4(str(tmp_path), layout, 2)
    stores = parts.load(str(tmp_path), ref, 6)
    assert [len(store.blocks) for store in stores] == [1, 1, 1, 1, 0, 0]
    assert stores[5].lowest == 4
    assert parts.state_of(stores) == at_4


def test_a_loaded_store_copies_no_version_until_the_next_one_is_due(tmp_path):
    layout = parts.layout_of()
    _, _, ref = saved_at_4(str(tmp_path), layout, 1)
    loaded = parts.load(str(tmp_path), ref, 1, EVERY_4)
    assert loaded[0].take_snapshot() is None
    parts.train(layout, loaded, 4, 7)
    assert loaded[0].take_snapshot() is None
    parts.train(layout, loaded, 7, 8)
    assert loaded[0].take_snapshot().version == 8


def test_plain_safetensors_reads_a_part(tmp_path):
    layout = parts.layout_of("SGD")
    _, _, ref = saved_at_4(str(tmp_path), layout, 1)
    found = safetensors.torch.load_file(f"{stored.folder(str(tmp_path), ref.uuid)}/pserver-0.x.safetensors")
    store = parts.load(str(tmp_path), ref, 1)[0]
    assert set(found) == {f"block.{n}" for n in range(13)} | {f"block.{n}.momentum_buffer" for n in range(10)}
    for number, block in store.blocks.items():
        assert torch.equal(found[f"block.{number}"], block.current.tensor)
