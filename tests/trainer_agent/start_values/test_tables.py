"""`init_from` with embedding tables: rows start with those in `tables/` beside the file, in one process and
at any number of parameter servers."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from pserver_service import start_rows
from tests.trainer_agent.cluster import cluster
from tests.trainer_agent.scripts import differing, spec_for, write_script
from trainer_agent.model.torch_compute import write_model
from trainer_agent.script.user_module import load
from trainer_agent.start_values import load_start_values
from trainer_agent.tables.files import read_table, write_tables
from trireme.plain import PlainResult, run
from trireme_shared.checkpoints.start_tables import fit_tables, put_rows
from trireme_shared.protocol.errors import InvalidArgument
from trireme_shared.protocol.records import Phase
from trireme_shared.protocol.records.layout import RowInit, RowOptimizer, TableSpec
from trireme_shared.tables.sharded import ShardedTable

MODEL = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = trireme.nn.Embedding("user", DIM, optimizer=trireme.nn.Adam(lr=0.05), init="uniform(0.1)")
        adagrad = trireme.nn.Adagrad(lr=0.1, initial_accumulator_value=0.1)
        self.item = trireme.nn.Embedding("item", 2, optimizer=adagrad)
        self.deep = nn.Linear(DIM + 2, 3)

    def forward(self, x):
        found = (x * 4).floor().long()
        return self.deep(torch.cat([self.user(found[:, 0] * 10**15), self.item(found[:, 1])], 1))

def model():
    return Net()
"""


def scripted(folder: Path, model: str = MODEL, dim: int = 4) -> Path:
    folder.mkdir(exist_ok=True)
    return write_script(folder, model=model.replace("DIM", str(dim)))


@pytest.fixture
def first(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The exported model of a run; its tables lie beside it. Of each test: scripts that it loads are
    forgotten behind it."""
    folder = tmp_path_factory.mktemp("first")
    written(run(load(scripted(folder)), spec_for(folder / "script.py", seed=11)), folder)
    return str(folder / "model.safetensors")


def written(result: PlainResult, folder: Path) -> None:
    write_model(result.model, str(folder))
    write_tables(result.tables.stored(), str(folder))


def rows_of(folder: str | Path) -> dict[str, dict[int, list[float]]]:
    files = sorted(Path(folder, "tables").glob("*.safetensors"))
    tables = [read_table(str(path)) for path in files]
    return {t.spec.name: dict(zip(t.ids.tolist(), t.values.tolist(), strict=True)) for t in tables}


@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_a_job_starts_with_the_rows_beside_the_file_as_plain_python_does(
    tmp_path, first, mode, monkeypatch
):
    monkeypatch.setattr(start_rows, "WAIT_S", 0.0)  # they take longer than a request waits
    script = scripted(tmp_path)
    plain = run(load(script), spec_for(script, init_from=first))
    written(plain, tmp_path / "plain")
    assert rows_of(tmp_path / "plain") != rows_of(Path(first).parent)
    assert rows_of(tmp_path / "plain")["user"].keys() == rows_of(Path(first).parent)["user"].keys()
    spec = spec_for(script, init_from=first, pservers=3, mode=mode)
    async with cluster(spec, 2 if mode == "sync" else 1) as made:
        state = await made.ended()
        assert state.phase is Phase.COMPLETED, state
        assert differing(made.exported(), dict(plain.model.state_dict())) == []
    assert rows_of(f"{spec.storage}/export") == rows_of(tmp_path / "plain")


OTHER = "table user (float32 rows of 4, the model has float32 rows of 3)"
RENAMED = "the file lacks 1: table thing (tables/thing.safetensors beside it); the model lacks 1: table item"
NEW_NAME = MODEL.replace('"item"', '"thing"')


@pytest.mark.parametrize(
    ("change", "said", "taken"),
    [
        ({"dim": 3}, OTHER, ("1 of the model's 2 tensors and 1 of its tables were", "item")),
        ({"model": NEW_NAME}, RENAMED, ("2 of the model's 2 tensors and 1 of its tables were", "user")),
    ],
)
def test_tables_that_do_not_fit_are_named_in_one_error(tmp_path, first, change: dict[str, Any], said, taken):
    """`--init-partial` takes what fits."""
    script = scripted(tmp_path, **change)
    spec = spec_for(script, init_from=first)
    with pytest.raises(InvalidArgument, match=re.escape(said)) as told:
        load_start_values(load(script).call("model"), spec)
    assert "--init-partial" in told.value.hint
    found = load_start_values(load(script).call("model"), spec.model_copy(update={"init_partial": True}))
    assert [table.name for table in found.tables] == [taken[1]]
    assert taken[0] in found.sentence


def test_a_model_without_tables_is_told_of_those_beside_its_file(tmp_path, first):
    script = scripted(tmp_path, model="def model():\n    return nn.Linear(6, 3)\n")
    with pytest.raises(InvalidArgument, match=r"the model lacks 4: deep.*, table item, table user"):
        load_start_values(load(script).call("model"), spec_for(script, init_from=first))


def test_states_of_rows_are_asked_for_with_init_optimizer(tmp_path, first):
    """Their files have none."""
    script = scripted(tmp_path)
    torch.save(load(script).call("model").state_dict(), tmp_path / "begun.pt")
    shutil.copytree(Path(first).parent / "tables", tmp_path / "tables")
    spec = spec_for(script, init_from=str(tmp_path / "begun.pt"), init_optimizer=True)
    said = (
        "table item has no state of an optimizer, the model's adagrad needs 2; table user has no state "
        "of an optimizer, the model's adam needs 8"
    )
    with pytest.raises(InvalidArgument, match=said):
        load_start_values(load(script).call("model"), spec)


async def test_files_that_change_while_the_job_begins_end_it_at_once(tmp_path, first):
    """Or a parameter server that sees other files than the trainer."""
    shutil.copytree(Path(first).parent, tmp_path / "first")
    copy = tmp_path / "first"
    spec = spec_for(scripted(tmp_path / "job"), init_from=str(copy / "model.safetensors"), pservers=2)
    async with cluster(spec) as made:
        agent = made.add_trainer("trainer-0-x")
        table = read_table(str(copy / "tables" / "user.safetensors"))
        table.values[-1] += 1
        write_tables([table], str(copy))
        state = await made.ended()
    assert agent.done.records == 0
    assert "not the same for pserver-" in state.reason


def table_file(folder: Path, ids: np.ndarray, values: np.ndarray) -> str:
    (folder / "tables").mkdir(exist_ok=True)
    save_file({"ids": ids, "values": values}, folder / "tables" / "t.safetensors")
    return str(folder / "model.safetensors")


def spec_of_table(**more: Any) -> TableSpec:
    adagrad, init = (
        RowOptimizer(kind="adagrad", lr=0.1, initial_accumulator_value=0.5),
        RowInit(kind="constant", scale=0),
    )
    return TableSpec(name="t", dim=2, seed=7, optimizer=adagrad, init=init, **more)


def test_rows_start_with_the_state_of_new_ones_and_no_slot_has_more_than_its_share(tmp_path):
    ids = np.arange(-500, 500, dtype=np.int64) * 10**12
    start = table_file(tmp_path, ids, np.arange(2000, dtype=np.float32).reshape(1000, 2))
    spec = spec_of_table(max_rows=1000)
    fit = fit_tables([spec], start)
    table = ShardedTable(spec, 8)
    put_rows(table, fit.tables[0])
    counts = table.counts_by_slot()
    assert counts.max() == 125
    assert 875 < table.rows < 1000  # rows left out are of full slots alone
    kept = table.rows_of(ids)
    assert np.array_equal(kept.content[:, 2:], np.full((len(kept), 2), 0.5))
    assert np.array_equal(kept.content[:, 0], (kept.ids // 10**12 + 500) * 2)
    table.step(
        ids[:1] * 3 + 1, np.ones((1, 2), np.float32)
    )  # a new row in whatever slot: one leaves if that one is full
    assert table.counts_by_slot().max() == 125
    half = ShardedTable(spec_of_table(), 8)
    put_rows(half, fit.tables[0], np.arange(8) < 4)
    assert 0 < half.rows < 1000
    assert not half.counts_by_slot()[4:].any()
    assert fit_tables([spec_of_table(max_rows=999)], start).too_many == (
        "table t (1000 rows, max_rows is 999)",
    )


@pytest.mark.parametrize(
    ("ids", "values", "said"),
    [
        (np.array([3, 2, 9]), np.zeros((3, 2), np.float32), "do not ascend"),
        (np.array([3, 3, 9]), np.zeros((3, 2), np.float32), "do not ascend"),
        (
            np.array([3, 5]),
            np.zeros((3, 2), np.float32),
            "is no table: it has ids int64 .2., values float32 .3, 2.",
        ),
    ],
)
def test_a_file_that_is_no_table_is_told(tmp_path, ids, values, said):
    start = table_file(tmp_path, ids.astype(np.int64), values)
    with pytest.raises(InvalidArgument, match=said):
        put_rows(ShardedTable(spec_of_table(), 8), fit_tables([spec_of_table()], start).tables[0])


def test_a_file_of_pretrained_vectors_needs_no_metadata(tmp_path):
    values = torch.randn(5, 2).numpy()
    table = ShardedTable(spec_of_table(), 8)
    put_rows(table, fit_tables([spec_of_table()], table_file(tmp_path, np.arange(5), values)).tables[0])
    found = np.empty((6, 2), np.float32)
    table.lookup(np.arange(6), found)
    assert np.array_equal(found, np.vstack([values, np.zeros((1, 2), np.float32)]))
