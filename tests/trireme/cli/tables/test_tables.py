"""`trireme export` with tables, and `trireme table`, on the checkpoint of a job whose rows are on two
parameter servers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from pyarrow import parquet

from tests.pserver_service.checkpoints import parts
from tests.trainer_agent.cluster import TorchCluster, cluster
from tests.trainer_agent.scripts import spec_for, write_script
from tests.trireme.cli.test_checkpoint import ask, write_run
from trainer_agent.tables import whole_tables as checkpoint
from trainer_agent.tables.files import read_table
from trireme.cli.export import export
from trireme.cli.tables import show
from trireme.cli.tables.memory import plan
from trireme_shared.blocks.snapshot import Snapshot
from trireme_shared.checkpoints import stored
from trireme_shared.checkpoints.schedule import Schedule
from trireme_shared.protocol.errors import TooLarge
from trireme_shared.protocol.records import Phase
from trireme_shared.protocol.records.checkpoints import CheckpointRef, Manifest
from trireme_shared.protocol.records.layout import ROWS
from trireme_shared.protocol.records.step import StepRecord
from trireme_shared.tables.table import initial_values

MODEL = """
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.user = trireme.nn.Embedding(
                "user", 6, optimizer=trireme.nn.Adam(lr=0.05), evict_after_steps=2
            )
            self.item = trireme.nn.Embedding("item", 3)
            self.deep = nn.Linear(9, 3)

        def forward(self, x):
            ids = (x * 4).floor().long()
            return self.deep(torch.cat([self.user(ids[:, 0] * 10**15), self.item(ids[:, 1])], 1))

    def model():
        return Model()
"""


def checkpointed(job: TorchCluster, folder: Path) -> None:
    """What its parameter servers hold, as they would save it."""
    taken, stores = [], [pserver.store for pserver in job.pservers]
    for store in stores:
        record = StepRecord(version=store.rows.version, positions=parts.positions(store.rows.version))
        taken.append(Snapshot(record, 0, [*store.blocks, ROWS], store.slots))
        for number, block in store.blocks.items():
            taken[-1].add(number, block.current, block.optimizer_state(), store.pool)
        taken[-1].add_tables(store.rows.copies())
    parts.save(str(folder), stores[0].layout, taken, job.directory.slots)
    for snapshot in taken:
        snapshot.release()


def stored_checkpoint(job: Path) -> tuple[CheckpointRef, Manifest]:
    (ref,), _ = stored.found(str(job))
    return ref, stored.read_manifest(str(job), parts.JOB, ref)


@pytest_asyncio.fixture
async def job(tmp_path, capsys):
    """The folder of a job that has ended, with its export and a checkpoint of its end."""
    folder = tmp_path / "data" / parts.JOB
    folder.mkdir(parents=True)
    script = write_script(tmp_path, model=MODEL)
    spec = spec_for(script, job=parts.JOB, pservers=2, lanes=2, storage=str(folder), slot_count=128)
    async with cluster(spec, 1) as made:
        state = await made.ended()
        assert state.phase is Phase.COMPLETED, state
        checkpointed(made, folder)
    write_run(folder, str(script), **spec.model_dump(exclude={"job", "script", "storage"}))
    capsys.readouterr()  # logs
    return folder


@pytest.fixture
def files(job):
    """The tables of the cluster's own export."""
    found = {
        name: read_table(str(job / "export" / "tables" / f"{name}.safetensors")) for name in ("item", "user")
    }
    assert all(len(table.ids) > 5 for table in found.values())
    return found


def exported(capsys, job: Path, form: str) -> tuple[Path, dict[str, str]]:
    out = job.parent.parent / f"out-{form}"
    code = export(None, job.parent, None, out, tables=form, as_json=True)
    answer = json.loads(capsys.readouterr().out)
    assert code == 0, answer
    return out / "tables", {
        kind: path for kind, path in answer["exports"].items() if kind.startswith("table ")
    }


def test_export_of_the_checkpoint_has_the_bytes_of_the_clusters(capsys, job, files):
    folder, paths = exported(capsys, job, "safetensors")
    assert paths == {f"table {name}": str(folder / f"{name}.safetensors") for name in files}
    for path in folder.iterdir():
        assert path.read_bytes() == (job / "export" / "tables" / path.name).read_bytes()
    trained = np.unique(np.floor(np.load(job.parent.parent / "x.npy")[:, 0] * 4))
    assert len(files["user"].ids) < len(trained), "some have expired"


def test_export_writes_npy_and_parquet_and_none(capsys, job, files):
    folder, paths = exported(capsys, job, "npy")
    assert sorted(paths) == ["table item ids", "table item values", "table user ids", "table user values"]
    for name, table in files.items():
        assert np.array_equal(np.load(folder / f"{name}.ids.npy"), table.ids)
        assert np.array_equal(np.load(folder / f"{name}.values.npy"), table.values)
    folder, paths = exported(capsys, job, "parquet")
    found = parquet.read_table(paths["table user"])
    assert found["id"].to_pylist() == files["user"].ids.tolist()
    assert np.array_equal(np.array(found["values"].to_pylist(), np.float32), files["user"].values)
    assert exported(capsys, job, "none")[1] == {}


def test_a_trainer_reads_tables_that_are_not_too_large(capsys, job, files, monkeypatch):
    """Those of the best evaluation and of evaluations while a job trains."""
    ref, manifest = stored_checkpoint(job)
    item = len(files["item"].ids) * (8 + 4 * 3)
    assert item < len(files["user"].ids) * (8 + 4 * 6)
    monkeypatch.setattr(checkpoint, "MOST_BYTES", item)
    urls = checkpoint.write_checkpoint_tables(str(job), ref, manifest, str(job / "best"))
    assert urls == {"table item": str(job / "best" / "tables" / "item.safetensors")}
    written = (job / "best" / "tables" / "item.safetensors").read_bytes()
    assert written == (job / "export" / "tables" / "item.safetensors").read_bytes()
    said = capsys.readouterr().err
    assert f"table user is not in the export: table user has more than {item} bytes of ids and values" in said
    with pytest.raises(
        TooLarge, match=f"table user has more than {item} bytes of ids and values in checkpoint u1"
    ):
        checkpoint.read_tables(str(job), ref, manifest)


def test_a_damaged_part_is_told(capsys, job):
    [part] = (job / "checkpoints" / "u1").glob("pserver-1*")
    content = bytearray(part.read_bytes())
    content[-5] ^= 1
    part.write_bytes(content)
    for code, answer in (ask(capsys, show.stats, job), ask(capsys, show.top, job, None, "item", "step", 3)):
        assert code == 1
        assert "has checksum" in answer["error"]["message"]


def test_stats_count_the_rows(capsys, job, files):
    code, answer = ask(capsys, show.stats, job)
    assert (code, answer["checkpoint"], answer["step"]) == (0, "u1", files["item"].version)
    assert [(row["table"], row["rows"], row["optimizer"], row["bytes"]) for row in answer["tables"]] == [
        ("item", len(files["item"].ids), "adagrad", len(files["item"].ids) * (16 + 4 * 6)),
        ("user", len(files["user"].ids), "adam", len(files["user"].ids) * (16 + 4 * 18)),
    ]
    assert {row["trained_last"] for row in answer["tables"]} == {answer["step"]}
    assert show.stats(None, job.parent, as_json=False) == 0
    assert capsys.readouterr().out.startswith(f"of checkpoint u1, step {answer['step']}, the newest one\n")


def test_get_gives_rows_and_initial_values(capsys, job, files):
    table = files["item"]
    known, unknown = int(table.ids[2]), -(2**63)
    code, answer = ask(capsys, show.get, job, None, "item", [str(known), str(unknown)])
    assert code == 0
    assert [(row["id"], row["row"]) for row in answer["rows"]] == [(known, True), (unknown, False)]
    values = np.array([row["values"] for row in answer["rows"]], np.float32)
    assert np.array_equal(values, [table.values[2], initial_values(table.spec, np.array([unknown]))[0]])


def test_top_gives_those_that_come_first(capsys, job, files):
    measures = {
        "frequency": lambda row: row["minibatches"],
        "step": lambda row: row["step"],
        "norm": lambda row: np.linalg.norm(row["values"]),
    }
    for by, measure in measures.items():
        whole, some = (ask(capsys, show.top, job, None, "item", by, count)[1]["rows"] for count in (1000, 4))
        assert sorted(row["id"] for row in whole) == files["item"].ids.tolist()
        assert some == whole[:4]
        assert [measure(row) for row in whole] == sorted(map(measure, whole), reverse=True)
        assert measure(whole[0]) > measure(whole[-1])


def test_what_is_not_there_is_told(capsys, job):
    code, answer = ask(capsys, show.get, job, None, "ad", ["1"])
    assert (code, answer["error"]["message"]) == (3, "job ctr has no table 'ad'; there are: item, user")
    for wrong in ("x", "1.5", str(2**63)):
        code, answer = ask(capsys, show.get, job, None, "item", [wrong])
        assert (code, answer["error"]["message"]) == (
            2,
            f"{wrong!r} is no id: ids are whole numbers in [-2**63, 2**63)",
        )


def test_a_job_without_tables_has_none(capsys, tmp_path):
    folder = tmp_path / "data" / parts.JOB
    folder.mkdir(parents=True)
    layout = parts.layout_of()
    stores = parts.fresh(layout, 1, Schedule(every_steps=1, every_epochs=None, epochs=9))
    parts.train(layout, stores, 0, 1)
    parts.save(str(folder), layout, parts.snapshots(stores), parts.slot_map(1))
    write_run(folder, "s.py")
    code, answer = ask(capsys, show.stats, folder)
    assert (code, answer["error"]["message"]) == (3, "job ctr has no embedding tables")


def test_plan_tells_the_memory_that_a_table_will_take_at_each_parameter_server(capsys):
    assert plan(3_000_000, 16, "adam", 3, 0, 1, limited=False, as_json=True) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["count"], answer["rows"]) == (1_000_000, 192_000_000)
    assert (
        answer["total"]
        == answer["rows"] + answer["cells"] + answer["snapshot"] + answer["step"] + answer["other"]
    )
    assert plan(3_000_000, 16, "adam", 3, 0, 1, limited=True, as_json=False) == 0
    assert capsys.readouterr().out.startswith(
        "at each of 3 parameter servers: 1,000,000 rows take at most 0.51 GB: "
    )
