"""A script gives a DataLoader: jobs and plain training have the bits of a loop over it in plain PyTorch."""

from __future__ import annotations

import json
import sys
import textwrap

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tests.trainer_agent.cluster import trained
from tests.trainer_agent.own_loop.scripts import write_loop
from tests.trainer_agent.scripts import RECORDS, differing, spec_for, write_script
from trainer_agent.data.loaders import WeightedOrder
from trainer_agent.script.inspect import inspect_script
from trainer_agent.script.user_module import load
from trireme.plain import count, epoch_minibatches, plain_spec, run
from trireme_shared.datasets.random_state import seed_everything
from trireme_shared.protocol.errors import InvalidArgument, UserCodeError
from trireme_shared.protocol.lanes import step_seed
from trireme_shared.protocol.records.datasets import MapStyle

DATA = """
    import numpy as np
    from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler
    columns = [torch.from_numpy(np.load({folder!r} + "/" + name)) for name in ("x.npy", "y.npy")]
    items = TensorDataset(*columns)
    config = {"epochs": 2, "lanes": 1, "seed": 7, "block_bytes": 256, "pservers": 1}
    def halved(found):
        xs, ys = zip(*found)
        return torch.stack(xs) / 2, torch.stack(ys), np.random.random()
"""
GIVEN = (
    DATA
    + """
    def dataset():
        return {given}
"""
)
LOSS = """
    def loss(model, batch):
        x, y, *more = batch
        return F.cross_entropy(model(x + sum(more)), y)
"""
EVALUATE = """
    def evaluation_dataset():
        return {held_out}
    def evaluate(model, batch):
        x, y, *more = batch
        return {"correct": (model(x + sum(more)).argmax(1) == y).sum(), "records": len(y)}
    def metrics(sums): return {"correct": sums["correct"], "records": sums["records"]}
"""
WEIGHTED = "DataLoader(items, 8, sampler=WeightedRandomSampler(1.0 + torch.arange(60) % 3, 44))"


def script(folder, name, given, **changes):
    text = GIVEN.replace("{given}", given)
    return write_script(folder, name, dataset=text, **{"loss": LOSS} | changes)


def job_spec(path, user, **values):
    dataset = user.dataset(seed=7)
    held_out = user.dataset("evaluation_dataset", 7) if user.has("evaluation_dataset") else None
    return spec_for(path, **{**user.config, "dataset": dataset, "evaluation_dataset": held_out} | values)


def looped(path, batches):
    """The state_dict after a loop over `batches`, as any script for PyTorch has it."""
    user = load(path)
    torch.set_num_threads(1)
    torch.manual_seed(7)
    model = user.call("model").train()
    optimizer = user.call("optimizer", model)
    for step, batch in enumerate(batches):
        seed = step_seed(7, step, 0)
        seed_everything(seed)
        batch = batch() if callable(batch) else batch
        optimizer.zero_grad()
        user.call("loss", model, batch).backward()
        optimizer.step()
    return model.state_dict()


def items_of(folder):
    return list(zip(*(torch.from_numpy(np.load(folder / name)) for name in ("x.npy", "y.npy")), strict=True))


async def test_a_loader_that_does_not_shuffle_gives_the_bits_of_a_loop_over_it(tmp_path):
    path = script(tmp_path, "loader_plain", "DataLoader(items, batch_size=8)")
    loader = DataLoader(items_of(tmp_path), batch_size=8)
    expected = looped(path, [batch for _ in range(2) for batch in loader])
    user = load(path)
    assert user.dataset() == MapStyle("loader_plain:dataset", records=RECORDS, loader=True)
    spec = plain_spec(user, {})
    assert (spec.global_batch_size, spec.shuffle, spec.drop_last) == (8, False, False)
    assert differing(run(user, spec).model.state_dict(), expected) == []
    assert differing(await trained(job_spec(path, user), 2), expected) == []


async def test_a_loader_that_shuffles_has_the_order_of_the_job_and_its_own_collate(tmp_path):
    given = "DataLoader(items, batch_size=8, shuffle=True, collate_fn=halved, drop_last=True)"
    path = script(tmp_path, "loader_shuffled", given)
    user = load(path)
    spec = job_spec(path, user)
    assert (spec.global_batch_size, spec.shuffle, spec.drop_last) == (8, True, True)
    result = run(user, plain_spec(user, {}, ["records_per_task=16"]))
    collate = sys.modules["loader_shuffled"].halved
    table = count(spec, lambda _: None).table
    items, orders = items_of(tmp_path), []
    for epoch in range(2):
        orders += [list(found) for found in epoch_minibatches(spec, table, epoch)]
    assert sum(map(len, orders)) == 2 * (RECORDS - RECORDS % 8)
    known = {tuple(x.tolist()) for x, _ in items}
    assert {tuple(x.tolist()) for found in orders for x, _ in found} <= known
    expected = looped(path, [lambda found=found: collate(found) for found in orders])
    assert differing(result.model.state_dict(), expected) == []
    assert differing(await trained(spec, 2), expected) == []


async def test_weights_decide_which_records_an_epoch_has(tmp_path):
    path = script(tmp_path, "loader_weighted", WEIGHTED)
    user, items = load(path), items_of(tmp_path)
    assert user.dataset().records == 44
    order, batches = WeightedOrder(1.0 + np.arange(60) % 3, 7), []
    for epoch in range(2):
        drawn = [order.drawn(epoch, number) for number in range(44)]
        batches += list(DataLoader([items[number] for number in drawn], batch_size=8))
    expected = looped(path, batches)
    assert differing(run(user, plain_spec(user, {})).model.state_dict(), expected) == []
    assert differing(await trained(job_spec(path, user), 2), expected) == []


async def test_four_lanes_have_the_same_bits_whoever_trains(tmp_path):
    path = script(tmp_path, "loader_lanes", WEIGHTED)
    user = load(path)
    one = await trained(job_spec(path, user, lanes=4, records_per_task=2), 1)
    three = await trained(
        job_spec(path, user, lanes=4, records_per_task=2, storage=str(tmp_path / "three")), 3
    )
    assert differing(one, three) == []
    assert all(value.isfinite().all() for value in one.values())


def test_an_evaluation_has_the_collate_of_its_own_loader(tmp_path):
    held_out = "DataLoader(items, batch_size=7, collate_fn=halved)"
    path = script(
        tmp_path,
        "loader_evaluated",
        "DataLoader(items, batch_size=8)",
        evaluate=EVALUATE.replace("{held_out}", held_out),
    )
    user, seen = load(path), []
    module = sys.modules["loader_evaluated"]
    halved = module.halved
    module.halved = lambda found: seen.append(len(found)) or halved(found)
    metrics = run(user, plain_spec(user, {})).metrics
    assert metrics["records"] == RECORDS
    assert sum(seen) == RECORDS, "the loader of the training has torch's collate"
    assert "evaluation_dataset: batch_size=7 is not used" in "\n".join(user.taken_over({}))


def test_a_loop_of_ones_own_loops_over_its_loader(tmp_path):
    for given, name in (("DataLoader(items, 8)", "loop_loader"), (WEIGHTED, "loop_weighted")):
        functions = script(tmp_path, f"{name}_functions", given)
        user = load(functions)
        expected = run(user, plain_spec(user, {})).model.state_dict()
        path = write_loop(
            tmp_path,
            name,
            head="import torch, trireme\nfrom torch import nn\nfrom torch.nn import functional as F\n"
            + textwrap.dedent(DATA),
            prepare=f"model, optimizer, batches = trireme.prepare(model, optimizer, {given}, config=config)",
            loop="""
                for x, y in batches:
                    optimizer.zero_grad()
                    trireme.backward(F.cross_entropy(model(x), y))
                    optimizer.step()
            """,
        )
        loop = load(path)
        with torch.random.fork_rng():
            torch.manual_seed(7)
            spec = plain_spec(loop, {})
        assert (spec.global_batch_size, spec.shuffle) == (8, False)
        assert differing(run(loop, spec).model.state_dict(), expected) == []


async def test_a_loop_of_ones_own_in_a_job_reads_the_object_that_it_made(tmp_path):
    records = "[{'x': x, 'y': y} for x, y in items]"
    functions = script(
        tmp_path,
        "loop_objects_functions",
        records,
        loss="def loss(model, batch): return F.cross_entropy(model(batch['x']), batch['y'])",
    )
    user = load(functions)
    expected = run(user, plain_spec(user, {}, ["global_batch_size=8"])).model.state_dict()
    head = "import torch, trireme\nfrom torch import nn\nfrom torch.nn import functional as F\n"
    path = write_loop(
        tmp_path,
        "loop_objects",
        head=head + textwrap.dedent(DATA),
        prepare=f"model, optimizer, batches = trireme.prepare(model, optimizer, {records}, config=config)",
        after="",
    )
    spec = spec_for(path, dataset=MapStyle("loop_objects:dataset", records=RECORDS))
    loop = load(path)
    assert loop.dataset() == spec.dataset
    loop.loop.close()
    found = await trained(spec.with_fields(records_per_task=None), 1)
    assert differing(found, expected) == []


def test_two_statements_about_one_thing_are_refused_with_both(tmp_path):
    path = script(
        tmp_path, "loader_twice", "DataLoader(items, 8)", config="config = {'global_batch_size': 16}"
    )
    with pytest.raises(InvalidArgument, match=r"global_batch_size = 16, and the DataLoader .* says 8"):
        load(path).dataset()
    path = script(
        tmp_path,
        "loader_collates",
        "DataLoader(items, 8, collate_fn=halved)",
        collate="def collate(records): return halved(records)",
    )
    with pytest.raises(InvalidArgument, match=r"has a collate, and .* a DataLoader with a collate_fn"):
        load(path).dataset()


def test_the_check_tells_what_the_loader_decides_and_what_is_not_used(tmp_path, capsys):
    path = script(tmp_path, "loader_told", "DataLoader(items, 8, num_workers=2, pin_memory=True)")
    assert inspect_script(str(path), check=True, settings=["global_batch_size=4"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["config"]["global_batch_size"] == 8
    assert answer["dataset"]["loader"] is True
    told = answer["notice"]
    assert (
        "the DataLoader of loader_told:dataset decides global_batch_size = 8, shuffle = False, data_workers"
        in told
    )
    assert "global_batch_size = 4 was given, and wins over 8" in told
    assert "not used: pin_memory=True; they decide only how fast records are read" in told
    assert inspect_script(str(path), check=True, settings=["global_batch_size=4", "lanes=2"]) == 0
    told = json.loads(capsys.readouterr().out)["notice"]
    assert "loader_told.py: in a job with 2 lanes, loss and BatchNorm see minibatches of 2 records" in told


def test_the_check_refuses_as_usage_what_a_job_cannot_keep(tmp_path, capsys):
    path = script(tmp_path, "loader_refused", "DataLoader(items, 8, sampler=[1, 2])")
    assert inspect_script(str(path), check=True, settings=[]) == 2
    assert "the sampler list" in json.loads(capsys.readouterr().out)["error"]["message"]


def test_a_collate_gets_items_that_are_no_dicts_as_they_are(tmp_path):
    collate = "def collate(records): return [torch.stack(part) for part in zip(*records)]"
    path = script(tmp_path, "items_collated", "items", collate=collate)
    user = load(path)
    found = run(user, plain_spec(user, {}, ["global_batch_size=8", "shuffle=false"])).model.state_dict()
    expected = looped(path, [batch for _ in range(2) for batch in DataLoader(items_of(tmp_path), 8)])
    assert differing(found, expected) == []


def test_an_error_in_collate_fn_has_the_lines_of_the_script(tmp_path):
    path = script(tmp_path, "loader_fails", "DataLoader(items, 8, collate_fn=lambda found: found['missing'])")
    user = load(path)
    with pytest.raises(UserCodeError, match="list indices must be integers") as caught:
        run(user, plain_spec(user, {}))
    assert "collate_fn=lambda found" in caught.value.details["traceback"]
