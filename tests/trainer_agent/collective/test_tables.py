"""Embedding tables in collective jobs: each trainer has all rows, with the bits of parameter servers and of
plain Python."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from pserver_service.recovery import load_store
from tests.trainer_agent import cluster as with_pservers
from tests.trainer_agent.collective import cluster as with_shares
from tests.trainer_agent.scripts import differing, spec_for, write_script
from trainer_agent.collective import rows
from trainer_agent.collective.rows import whole_table
from trainer_agent.collective.state import rows as joining
from trainer_agent.script.user_module import load
from trireme import plain
from trireme_shared.checkpoints import stored
from trireme_shared.checkpoints.tables import read_rows
from trireme_shared.protocol.records import JobSpec, Phase, SlotMap, Strategy
from trireme_shared.protocol.records.assignments import spread
from trireme_shared.protocol.records.checkpoints import CheckpointLatest
from trireme_shared.tables import snapshot
from trireme_shared.tables.table import RowsOfIds

COLLECTIVE = {"strategy": Strategy.COLLECTIVE, "pservers": 0}
MODEL = """
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            adam, adagrad = trireme.nn.Adam(lr=0.05, follow_schedule=True), trireme.nn.Adagrad(lr=0.1)
            self.user = trireme.nn.Embedding(
                "user", 4, optimizer=adam, init="uniform(0.1)", evict_after_steps=6
            )
            self.tag = trireme.nn.EmbeddingBag("tag", 3, optimizer=adagrad, admit_after=2, max_rows=1024)
            self.deep = nn.Sequential(nn.Linear(4 + 3 + 5, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 3))

        def forward(self, x):
            found = (x * 4).floor().long()
            return self.deep(torch.cat([self.user(found[:, 0] * 10**15), self.tag(found[:, 1:4]), x], 1))

    def model():
        return Model()
"""
SCHEDULER = """
    def scheduler(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.7)
"""
IDS = """
    def ids(batch):
        found = (batch["x"] * 4).floor().long()
        return {"user": found[:, 0] * 10**15, "tag": found[:, 1:4]}
"""
FOUR_LANES = {"lanes": 4, "global_batch_size": 12, "records_per_task": 6, "epochs": 2}


def script_in(folder: Path, **changes: str) -> Path:
    return write_script(folder, model=MODEL, scheduler=SCHEDULER, **changes)


def tables_of(spec: JobSpec) -> dict[str, dict[str, np.ndarray]]:
    return {name: load_file(f"{spec.storage}/export/tables/{name}.safetensors") for name in ("user", "tag")}


def same_tables(one: JobSpec, other: JobSpec) -> bool:
    ours, theirs = tables_of(one), tables_of(other)
    assert all(len(table["ids"]) for table in ours.values())
    pairs = [(ours[name][what], theirs[name][what]) for name in ours for what in ("ids", "values")]
    return all(a.shape == b.shape and a.tobytes() == b.tobytes() for a, b in pairs)


async def test_one_lane_gives_the_bits_of_plain_python(tmp_path):
    script = script_in(tmp_path)
    spec = spec_for(script, **COLLECTIVE)
    found = await with_shares.trained(spec)
    alone = plain.run(load(script), spec)
    assert differing(found, dict(alone.model.state_dict())) == []
    ours = tables_of(spec)
    for table in alone.tables.stored():
        assert ours[table.spec.name]["ids"].tobytes() == table.ids.tobytes()
        assert ours[table.spec.name]["values"].tobytes() == table.values.tobytes()


@pytest.mark.parametrize(
    ("trainers", "options"),
    [
        (2, {"gradient_dtype": "bfloat16", "clip_grad_norm": 0.3}),
        (3, {}),
    ],
)
async def test_trainers_give_the_bits_of_parameter_servers(tmp_path, trainers, options):
    script = script_in(tmp_path, ids=IDS)
    common = {**FOUR_LANES, **options}
    servers = spec_for(script, **common, pservers=2, storage=str(tmp_path / "a"))
    members = spec_for(script, **common, **COLLECTIVE, storage=str(tmp_path / "b"))
    expected = await with_pservers.trained(servers, 2)
    assert differing(expected, await with_shares.trained(members, trainers)) == []
    assert same_tables(servers, members)


@pytest.mark.parametrize("most", [rows.SMALL_BYTES, 100])
async def test_means_of_rows_come_with_pulls_if_they_are_small_and_else_are_asked_for(
    tmp_path, monkeypatch, most
):
    asked, answer = [], rows.MeanRows.portion_of_means

    def counted(rows, request):
        asked.append(request.version)
        return answer(rows, request)

    monkeypatch.setattr(rows.MeanRows, "portion_of_means", counted)
    monkeypatch.setattr(rows, "SMALL_BYTES", most)
    script = script_in(tmp_path, ids=IDS)
    servers = spec_for(script, **FOUR_LANES, pservers=1, storage=str(tmp_path / "a"))
    members = spec_for(script, **FOUR_LANES, **COLLECTIVE, storage=str(tmp_path / "b"))
    expected = await with_pservers.trained(servers, 1)
    assert differing(expected, await with_shares.trained(members, 2)) == []
    assert same_tables(servers, members)
    assert bool(asked) == (most == 100)


@pytest.mark.parametrize("most", [rows.SMALL_BYTES, 100])
async def test_kills_and_a_trainer_that_joins_do_not_show_in_the_rows(tmp_path, monkeypatch, most):
    monkeypatch.setattr(rows, "SMALL_BYTES", most)
    monkeypatch.setattr(joining, "PART_BYTES", 256)
    monkeypatch.setattr(snapshot, "GROUP_BYTES", 1024)
    script = script_in(tmp_path)
    common = {**FOUR_LANES, "epochs": 8, **COLLECTIVE}
    one = spec_for(script, **common, storage=str(tmp_path / "a"))
    expected = await with_shares.trained(one, 1)
    other = spec_for(script, **common, storage=str(tmp_path / "b"))
    async with with_shares.cluster(other, 2) as made:
        made.portion_s, made.last_step = 0.003, 36
        await made.version(2)
        made.add_trainer("trainer-2-x")
        await made.directory.wait_for(lambda view: "trainer-2-x" in view.trainers, 20.0, "it is a member")
        made.last_step = 100
        await made.kill("trainer-0-x")
        await made.kill("trainer-1-x")
        assert (await made.ended()).phase is Phase.COMPLETED
        assert differing(expected, made.exported()) == []
    assert same_tables(one, other)


async def saved(made: with_shares.CollectiveCluster, step: int) -> CheckpointLatest:
    async with asyncio.timeout(20.0):
        while True:
            found = await made.etcd.get(made.keys.latest)
            latest = CheckpointLatest.model_validate_json(found.value) if found else None
            if latest is not None and latest.step >= step:
                return latest
            await asyncio.sleep(0.005)


async def test_checkpoints_have_all_rows_once_for_both_strategies(tmp_path):
    script = script_in(tmp_path)
    common = {**FOUR_LANES, **COLLECTIVE, "checkpoint_every_steps": 3}
    one = spec_for(script, **common, storage=str(tmp_path / "a"))
    expected = await with_shares.trained(one, 1)
    other = spec_for(script, **common, storage=str(tmp_path / "b"))
    async with with_shares.cluster(other, 2) as made:
        await saved(made, 3)
        await made.kill("trainer-0-x")
        await made.kill("trainer-1-x")
        made.add_trainer("trainer-2-x")
        made.add_trainer("trainer-3-x")
        state = await made.ended()
        assert state.phase is Phase.COMPLETED
        assert state.timeline > 0
        assert differing(expected, made.exported()) == []
        latest = await saved(made, 12)
        layout = made.directory.layout
    assert same_tables(one, other)
    ref = next(ref for ref in latest.kept if ref.uuid == latest.uuid)
    manifest = stored.read_manifest(other.storage, other.job, ref)
    assert len(manifest.parts) == 2
    slots = SlotMap(version=0, owners=spread(layout.slot_count, 3))
    exported = tables_of(other)
    for number, name in ((0, "tag"), (1, "user")):
        parts: list[RowsOfIds] = []
        read_rows(other.storage, ref, manifest, layout.tables[number], parts.append)
        once = np.sort(np.concatenate([rows.ids for rows in parts]))
        assert once.tolist() == exported[name]["ids"].tolist()
        found = {}
        for index in range(3):
            store, _ = load_store(other.storage, other.job, layout.digest, ref, index, slots, None)
            ids, values = whole_table(store.rows, number, None)
            assert found.keys().isdisjoint(ids.tolist())
            found |= dict(zip(ids.tolist(), values.tolist(), strict=True))
        assert sorted(found) == exported[name]["ids"].tolist()
        assert [found[each] for each in exported[name]["ids"].tolist()] == exported[name]["values"].tolist()


async def test_a_new_job_starts_with_the_rows_of_another_one(tmp_path):
    script = script_in(tmp_path)
    first = spec_for(script, **FOUR_LANES, **COLLECTIVE, storage=str(tmp_path / "a"))
    await with_shares.trained(first, 2)
    common = {**FOUR_LANES, "epochs": 1, "init_from": f"{first.storage}/export/model.safetensors"}
    servers = spec_for(script, **common, pservers=2, storage=str(tmp_path / "b"))
    members = spec_for(script, **common, **COLLECTIVE, storage=str(tmp_path / "c"))
    expected = await with_pservers.trained(servers, 1)
    assert differing(expected, await with_shares.trained(members, 2)) == []
    assert same_tables(servers, members)
