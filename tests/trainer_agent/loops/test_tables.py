"""Embedding tables on parameter servers: the bits of one process, whoever computes, and whoever owns the
rows."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.equipment.cluster import direct_ports
from tests.equipment.cluster.direct_ports import DirectPserver
from tests.trainer_agent.cluster import TorchCluster, cluster
from tests.trainer_agent.scripts import PARTS, differing, spec_for, write_script
from trainer_agent.script.user_module import load
from trainer_agent.tables import whole_tables
from trainer_agent.tables.files import StoredTable, read_table, write_tables
from trireme import plain
from trireme_shared.protocol.errors import NotReady
from trireme_shared.protocol.records import Phase
from trireme_shared.serving.core.table import rows
from trireme_shared.tables.table import joined

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")
MODEL = """
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.user = trireme.nn.Embedding(
                "user", 4, optimizer=trireme.nn.Adam(lr=0.05), init="uniform(0.1)"
            )
            self.tags = trireme.nn.EmbeddingBag("tag", 3, mode="mean", optimizer=trireme.nn.Adagrad(lr=0.1))
            self.deep = nn.Sequential(nn.Linear(4 + 3 + 5, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))

        def forward(self, x):
            ids = (x * 4).floor().long()
            return self.deep(torch.cat([self.user(ids[:, 0] * 10**15), self.tags(ids[:, 1:4]), x], 1))

    def model():
        return Model()
"""


IDS = """
    def ids(batch):
        torch.rand(7)  # what it draws is nobody's
        found = (batch["x"] * 4).floor().long()
        return {"user": found[:, 0] * 10**15, "tag": found[:, 1:4]}
"""
COLLATE = """
    import numpy as np
    def collate(records):
        drawn = np.random.standard_normal((len(records), 5)).astype("float32")
        noise = torch.from_numpy(drawn) + torch.rand(len(records), 1)
        trireme.log(noise=noise[0, 0])
        x = torch.stack([torch.as_tensor(r["x"]) for r in records]) + noise
        return {"x": x, "y": torch.tensor([int(r["y"]) for r in records])}
"""


async def trained(spec, trainers: int = 1, *, kill: bool = False):
    """The exported model, and the rows of all parameter servers."""
    async with cluster(spec, trainers) as job:
        if kill:
            await job.version(5)
            await job.kill("trainer-0-x")
        state = await job.ended()
        assert state.phase is Phase.COMPLETED, state
        found = tables_of(job)
        exported = files_of(spec, state)
        for name, (ids, content) in found.items():
            assert np.array_equal(exported[name].ids, ids)
            assert np.array_equal(exported[name].values, content[:, : exported[name].spec.dim])
        return job.exported(), found


def files_of(spec, state) -> dict[str, StoredTable]:
    """What the export of the job says that it wrote, and what is there."""
    folder = Path(spec.storage) / "export" / "tables"
    written = {name: url for name, url in state.result.exports.items() if name.startswith("table ")}
    assert written == {f"table {path.stem}": str(path) for path in folder.iterdir()}
    return {path.stem: read_table(str(path)) for path in folder.iterdir()}


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
        spec = spec_for(
            script, lanes=4, records_per_task=8, pservers=pservers, storage=str(tmp_path / f"s{trainers}")
        )
        found = await trained(spec, trainers)
        expected = expected or found
        assert_same(found, expected)


@pytest.fixture
def requests(monkeypatch):
    """How many ids each lookup asked for, of each table."""
    asked, whole = [], DirectPserver.lookup

    async def counted(port, request, payload):
        asked.append(request.rows)
        return await whole(port, request, payload)

    monkeypatch.setattr(DirectPserver, "lookup", counted)
    return asked


async def test_rows_that_the_script_names_come_in_one_request_a_minibatch_and_change_no_bit(
    tmp_path, requests
):
    """Also where collate draws random numbers and reports metrics."""
    script = write_script(tmp_path, model=MODEL, collate=COLLATE, ids=IDS)
    spec = spec_for(script, records_per_task=24)
    async with cluster(spec, 1) as job:
        assert (await job.ended()).phase is Phase.COMPLETED
        found = job.exported(), tables_of(job)
        assert job.computes["trainer-0-x"].result().metrics.keys() == {"noise"}
    assert len(requests) == 2 * 8
    assert all(all(counts) for counts in requests)
    alone = plain.run(load(script), spec)
    assert differing(alone.model.state_dict(), found[0]) == []
    for table in alone.tables.stored():
        assert np.array_equal(table.values, found[1][table.spec.name][1][:, : table.spec.dim])


async def test_rows_of_the_next_step_are_asked_for_before_its_version_is_there(tmp_path, monkeypatch):
    early, whole = [], direct_ports.lookup

    async def watched(pserver, request, payload):
        early.append(pserver.store.rows.version < request.version)
        return await whole(pserver, request, payload)

    monkeypatch.setattr(direct_ports, "lookup", watched)
    common = {"lanes": 4, "epochs": 1, "stragglers": "off"}
    expected = await trained(
        spec_for(write_script(tmp_path, "without", model=MODEL), storage=str(tmp_path / "without"), **common)
    )
    assert not any(early)
    early.clear()
    async with cluster(spec_for(write_script(tmp_path, model=MODEL, ids=IDS), **common), 2) as job:
        await job.version(1)
        slow = job.computes["trainer-1-x"]
        whole_gradient = slow.gradient

        async def late(*arguments):
            await asyncio.sleep(0.03)
            return await whole_gradient(*arguments)

        slow.gradient = late
        assert (await job.ended()).phase is Phase.COMPLETED
        assert_same((job.exported(), tables_of(job)), expected)
    assert sum(early) >= 2


async def test_rows_that_the_script_does_not_name_are_asked_for_and_it_is_said_once(
    tmp_path, requests, capsys
):
    half = IDS.replace('"tag": found[:, 1:4]', '"tag": found[:4, 1:2]')
    script = write_script(tmp_path, model=MODEL, ids=half)
    spec = spec_for(script, epochs=1)
    found = await trained(spec)
    said = "".join(capsys.readouterr())
    alone = plain.run(load(script), spec)
    assert differing(alone.model.state_dict(), found[0]) == []
    assert len(re.findall("ids_not_named.*table=tag", said)) == 1
    assert len(requests) > 8


async def test_ids_that_cannot_be_end_the_job_with_one_error(tmp_path):
    script = write_script(tmp_path, model=MODEL, ids='def ids(batch):\n    return {"users": batch["y"]}\n')
    async with cluster(spec_for(script), 1) as job:
        state = await job.ended()
    assert state.phase is Phase.FAILED
    assert "ids(batch) names the table 'users', and the model's tables are tag, user" in state.reason


async def test_a_killed_trainer_leaves_no_trace_in_the_rows(tmp_path):
    script = write_script(tmp_path, model=MODEL)
    spec = spec_for(script, lanes=4, records_per_task=8, pservers=2, epochs=3)
    expected = await trained(spec)
    assert_same(
        await trained(spec.model_copy(update={"storage": str(tmp_path / "other")}), 2, kill=True), expected
    )


async def test_clipped_gradients_wait_for_their_norm_though_the_rows_are_stepped(tmp_path):
    script = write_script(tmp_path, model=MODEL)
    expected = None
    for trainers, pservers in ((1, 1), (2, 3)):
        more = {"pservers": pservers, "clip_grad_norm": 0.05, "storage": str(tmp_path / f"s{trainers}")}
        spec = spec_for(script, lanes=4, records_per_task=8, epochs=1, **more)
        async with asyncio.timeout(60):
            found = await trained(spec, trainers)
        expected = expected or found
        assert_same(found, expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
async def test_rows_that_travel_narrow_are_rounded_in_the_same_way_whoever_computes(tmp_path, dtype):
    """The export has them as they are at the parameter servers."""
    narrow = {"gradient_dtype": dtype, "parameter_dtype": dtype, "epochs": 1, "lanes": 4}
    script = write_script(tmp_path, model=MODEL, ids=IDS)
    found = [
        await trained(
            spec_for(script, pservers=members, storage=str(tmp_path / f"s{members}"), **narrow), members
        )
        for members in (1, 3)
    ]
    assert_same(*found)
    values = torch.from_numpy(found[0][1]["user"][1])
    assert not torch.equal(values, values.to(getattr(torch, dtype)).float())
    exact = await trained(spec_for(script, epochs=1, lanes=4, storage=str(tmp_path / "exact")))
    assert not np.array_equal(exact[1]["user"][1], found[0][1]["user"][1])


async def test_a_gradient_of_rows_beyond_float16_fails_the_task_with_what_to_do(tmp_path):
    steep = PARTS["loss"].replace("F.cross_entropy", "1e8 * F.cross_entropy")
    script = write_script(tmp_path, model=MODEL, loss=steep)
    # rows are not clipped
    values = {"gradient_dtype": "float16", "clip_lane_norm": 1e-3, "max_user_failures": 1}
    async with cluster(spec_for(script, **values), 1) as job:
        state = await job.ended()
    assert state.phase is Phase.FAILED
    assert state.failure is not None
    assert "a gradient of rows of embedding tables: " in state.failure.message
    assert "does not fit float16, which ends at 65504; use gradient_dtype bfloat16" in state.failure.message


@pytest.fixture
def small_portions(monkeypatch):
    monkeypatch.setattr(rows, "PORTION_BYTES", 40)


@pytest.mark.usefixtures("small_portions")
async def test_one_lanes_export_has_the_bytes_of_plain_python(tmp_path):
    script = write_script(tmp_path, model=MODEL)
    spec = spec_for(script, lanes=1, pservers=2, slot_count=128)
    await trained(spec, 2)
    alone = plain.run(load(script), spec)
    write_tables(alone.tables.stored(), str(tmp_path))
    for name in ("user", "tag"):
        path = f"tables/{name}.safetensors"
        assert (Path(spec.storage) / "export" / path).read_bytes() == (tmp_path / path).read_bytes()


TOO_MANY = """
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.user = trireme.nn.Embedding("user", 3, max_rows=128)
            self.passes = 0

        def forward(self, x):
            self.passes += 1
            ids = torch.arange(200 if self.passes == 3 else 100)
            return self.user(ids).mean(0) + x[:, :3] + self.bias

    def model():
        made = Model()
        made.bias = nn.Parameter(torch.zeros(3))
        return made
"""


async def test_a_later_minibatch_with_more_ids_than_max_rows_fails_the_job_with_that_message(tmp_path):
    script = write_script(tmp_path, model=TOO_MANY)
    async with asyncio.timeout(60), cluster(spec_for(script, slot_count=128), 1) as job:
        state = await job.ended()
    assert state.phase is Phase.FAILED
    assert "a minibatch has 200 ids of table user, whose max_rows is 128" in state.reason


async def test_rows_follow_the_scheduler_at_every_parameter_server(tmp_path):
    """One lane has the bits of plain python; the table that does not follow has others than without."""
    follow = MODEL.replace("Adam(lr=0.05)", "Adam(lr=0.05, follow_schedule=True)")
    scheduler = "def scheduler(optimizer): return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)"
    found = {}
    for name, model in (("follow", follow), ("constant", MODEL)):
        script = write_script(tmp_path, name, model=model, scheduler=scheduler)
        spec = spec_for(script, pservers=2, epochs=1, storage=str(tmp_path / name))
        await trained(spec, 2)
        write_tables(plain.run(load(script), spec).tables.stored(), str(tmp_path / name))
        files = {table: f"tables/{table}.safetensors" for table in ("user", "tag")}
        found[name] = {
            table: (Path(spec.storage) / "export" / path).read_bytes() for table, path in files.items()
        }
        assert found[name] == {table: (tmp_path / name / path).read_bytes() for table, path in files.items()}
    assert found["follow"]["user"] != found["constant"]["user"]


async def test_a_table_that_is_too_large_for_a_trainer_is_left_out_of_the_export_with_a_word(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(whole_tables, "MOST_BYTES", 400)
    script = write_script(tmp_path, model=MODEL)
    spec = spec_for(script, pservers=2)
    async with cluster(spec, 1) as job:
        state = await job.ended()
        assert state.phase is Phase.COMPLETED, state
        sizes = {
            name: len(tables_of(job)[name][0]) * (8 + 4 * dim) for name, dim in (("tag", 3), ("user", 4))
        }
        assert sizes["user"] <= 400 < sizes["tag"]
        assert files_of(spec, state).keys() == {"user"}
    said = capsys.readouterr().err
    assert re.search(
        r"table tag is not in the export: its \d+ rows are \d+ bytes, and a trainer writes at most 400", said
    )
    assert "`trireme export` writes it from a checkpoint" in said


@pytest.mark.usefixtures("small_portions")
async def test_an_export_goes_on_when_a_parameter_server_is_away_for_a_moment(tmp_path, monkeypatch):
    """Between two answers; what came before counts."""
    calls, whole = [], DirectPserver.table

    async def flaky(port, request):
        calls.append(request.first)
        if len(calls) in (4, 9):
            raise NotReady("away")
        return await whole(port, request)

    monkeypatch.setattr(DirectPserver, "table", flaky)
    script = write_script(tmp_path, model=MODEL)
    await trained(spec_for(script, pservers=2, slot_count=128, epochs=1))
    assert len(calls) > 12
