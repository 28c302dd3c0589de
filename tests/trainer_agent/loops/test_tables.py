"""Embedding tables on parameter servers: the bits of one process, whoever computes, and whoever owns the rows."""

from __future__ import annotations

import numpy as np
import pytest

from shared.records import Phase
from shared.tables.table import joined
from tests.trainer_agent.cluster import TorchCluster, cluster
from tests.trainer_agent.scripts import differing, spec_for, write_script

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")
MODEL = """
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.user = trireme.nn.Embedding("user", 4, optimizer=trireme.nn.Adam(lr=0.05), init="uniform(0.1)")
            self.tags = trireme.nn.EmbeddingBag("tag", 3, mode="mean", optimizer=trireme.nn.Adagrad(lr=0.1))
            self.deep = nn.Sequential(nn.Linear(4 + 3 + 5, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))

        def forward(self, x):
            ids = (x * 4).floor().long()
            return self.deep(torch.cat([self.user(ids[:, 0] * 10**15), self.tags(ids[:, 1:4]), x], 1))

    def model():
        return Model()
"""


async def trained(spec, trainers: int = 1, *, kill: bool = False):
    """The exported model, and the rows of all parameter servers."""
    async with cluster(spec, trainers) as job:
        if kill:
            await job.version(5)
            await job.kill("trainer-0-x")
        state = await job.ended()
        assert state.phase is Phase.COMPLETED, state
        return job.exported(), tables_of(job)


def tables_of(job: TorchCluster) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    found = {}
    stores = [pserver.store for pserver in job.pservers]
    for number, spec in enumerate(stores[0].layout.tables):
        tables = [store.rows.tables[number] for store in stores]
        whole = joined([t.read_slot(slot) for t in tables for slot in t.slots()], tables[0].width)
        found[spec.name] = whole.ids, whole.content
    return found


def assert_same(found, expected) -> None:
    assert differing(found[0], expected[0]) == []
    assert found[1].keys() == expected[1].keys() == {"tag", "user"}
    for name, (keys, content) in expected[1].items():
        assert len(keys) > 5
        assert np.array_equal(found[1][name][0], keys)
        assert np.array_equal(found[1][name][1], content)


async def test_the_bits_do_not_depend_on_how_many_trainers_and_parameter_servers_there_are(tmp_path):
    script = write_script(tmp_path, model=MODEL)
    expected = None
    for trainers, pservers in ((1, 1), (2, 3), (3, 2)):
        spec = spec_for(script, lanes=4, records_per_task=8, pservers=pservers, storage=str(tmp_path / f"s{trainers}"))
        found = await trained(spec, trainers)
        expected = expected or found
        assert_same(found, expected)


async def test_a_killed_trainer_leaves_no_trace_in_the_rows(tmp_path):
    script = write_script(tmp_path, model=MODEL)
    spec = spec_for(script, lanes=4, records_per_task=8, pservers=2, epochs=3)
    expected = await trained(spec)
    assert_same(await trained(spec.model_copy(update={"storage": str(tmp_path / "other")}), 2, kill=True), expected)
