"""Embedding tables of an asynchronous job: rows get each minibatch once, like blocks."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from tests.equipment.cluster import direct_ports
from tests.trainer_agent.cluster import TorchCluster, cluster
from tests.trainer_agent.loops.test_asynchronous import assert_exactly_once, job, spec_of
from tests.trainer_agent.loops.test_tables import files_of, tables_of
from tests.trainer_agent.scripts import RECORDS, differing, write_script
from trainer_agent.script.user_module import load
from trainer_agent.tables.trained import TrainedTables
from trireme import plain
from trireme_shared.protocol.errors import InvalidArgument
from trireme_shared.protocol.records import Mode, Phase

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")
EPOCHS = 3
MODEL = """
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.user = trireme.nn.Embedding("user", 4, optimizer=trireme.nn.Adam(0.05, follow_schedule=True))
            self.tags = trireme.nn.EmbeddingBag("tag", 3, optimizer=trireme.nn.Adagrad(lr=0.1), admit_after=2)
            self.seen = trireme.nn.Embedding("seen", 1, optimizer=trireme.nn.SGD(lr=1.0), init="zeros")
            self.deep = nn.Sequential(nn.Linear(4 + 3 + 5, 16), nn.Tanh(), nn.Linear(16, 3))

        def forward(self, x):
            ids = (x * 4).floor().long()
            return self.deep(torch.cat([self.user(ids[:, 0] * 10**15), self.tags(ids[:, 1:4]), x], 1))

    def model():
        return Model()
"""
IDS = """
    def ids(batch):
        found = (batch["x"] * 4).floor().long()
        return {"user": found[:, 0] * 10**15, "tag": found[:, 1:4]}
"""
LOSS = """
    def loss(model, batch):
        seen = model.seen((batch["x"][:, 0] * 1e6).long()).sum()  # the row of each record is stepped by -1
        return F.cross_entropy(model(batch["x"]), batch["y"]) + seen
"""


def assert_rows_once(made: TorchCluster) -> None:
    ids, content = tables_of(made)["seen"]
    assert len(ids) == RECORDS
    assert content.ravel().tolist() == [-EPOCHS] * RECORDS


async def test_each_minibatch_counts_once_for_all_rows_although_trainers_are_killed(tmp_path):
    spec = spec_of(write_script(tmp_path, model=MODEL, loss=LOSS), push_every=1, pservers=3)
    async with cluster(spec, 3) as made:
        for victim, version in (("trainer-0-x", 10), ("trainer-1-x", 25)):
            async with asyncio.timeout(30):
                while not (store := made.pservers[0].store) or store.rows.version < version:
                    await asyncio.sleep(0.001)
            await made.kill(victim)
        state = await made.ended()
        assert state.phase is Phase.COMPLETED
        assert_exactly_once(await job(made), spec)
        assert_rows_once(made)
        exported = files_of(spec, state)
        for name, (ids, content) in tables_of(made).items():
            assert np.array_equal(exported[name].ids, ids)
            assert np.array_equal(exported[name].values, content[:, : exported[name].spec.dim])


async def test_a_push_of_several_minibatches_steps_rows_by_their_mean(tmp_path):
    spec = spec_of(
        write_script(tmp_path, model=MODEL, loss=LOSS), push_every=3, pull_every=2, records_per_task=18
    )
    async with cluster(spec, 1) as made:
        assert (await made.ended()).phase is Phase.COMPLETED
        assert_exactly_once(await job(made), spec)
        _, content = tables_of(made)["seen"]
        sums = content.sum() / EPOCHS
        pushes = 3 * 2 + 1  # of 6 minibatches in each of three tasks, and of 2 in the last
        assert {store.store.rows.version for store in made.pservers} == {EPOCHS * pushes}
        # the mean of a push's minibatches, of 3 records each
        assert sums == pytest.approx(-3 * pushes, abs=1e-4)


async def test_one_trainer_that_pushes_and_pulls_each_minibatch_gives_the_rows_of_plain_python(tmp_path):
    script = write_script(
        tmp_path,
        model=MODEL,
        loss=LOSS,
        scheduler="def scheduler(optimizer):\n"
        "    return torch.optim.lr_scheduler.StepLR(optimizer, 9, 0.5)\n",
    )
    spec = spec_of(script, push_every=1, epochs=1)
    async with cluster(spec, 1) as made:
        assert (await made.ended()).phase is Phase.COMPLETED
        alone = plain.run(load(script), spec.model_copy(update={"mode": Mode.SYNC, "lanes": 1}))
        assert differing(made.exported(), dict(alone.model.state_dict())) == []
        found = tables_of(made)
        for table in alone.tables.stored():
            ids, content = found[table.spec.name]
            assert np.array_equal(ids, table.ids)
            assert np.array_equal(content[:, : table.spec.dim], table.values)


@pytest.mark.parametrize("push_every", [1, 2])
async def test_rows_that_the_script_names_are_asked_for_ahead_and_see_all_pushes_before_theirs(
    tmp_path, monkeypatch, push_every
):
    asked, whole = [], direct_ports.lookup

    async def counted(pserver, request, payload):
        asked.append(request.rows)
        return await whole(pserver, request, payload)

    monkeypatch.setattr(direct_ports, "lookup", counted)
    every = {"push_every": push_every, "pull_every": push_every, "epochs": 1, "pservers": 1}
    found = []
    for name, more in (("without", {}), ("named", {"ids": IDS})):
        asked.clear()
        spec = spec_of(
            write_script(tmp_path, name, model=MODEL, **more), storage=str(tmp_path / name), **every
        )
        async with cluster(spec, 1) as made:
            assert (await made.ended()).phase is Phase.COMPLETED
            found.append((made.exported(), tables_of(made)))
    assert len(asked) == 3 * 7  # minibatches
    assert all(all(counts[1:]) for counts in asked)  # of both tables
    assert differing(found[1][0], found[0][0]) == []
    for name, (ids, content) in found[0][1].items():
        assert np.array_equal(found[1][1][name][0], ids)
        assert np.array_equal(found[1][1][name][1], content)


def test_a_silent_parameter_server_cannot_be_left_out_where_it_has_rows(tmp_path):
    script = write_script(tmp_path, model=MODEL)
    with pytest.raises(
        InvalidArgument, match=r"tables \(seen, tag, user\), .* skip_after_seconds = 2"
    ) as refused:
        TrainedTables(load(script).call("model"), spec_of(script, skip_after_seconds=2.0))
    assert "rows of a silent parameter server" in refused.value.hint
