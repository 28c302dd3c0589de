"""`trireme table delta | apply`: a feed of deltas brings an exported table to the bits of every later
checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import trireme
from tests.pserver_service.checkpoints import parts
from tests.pserver_service.checkpoints.cluster import run_scenario
from tests.pserver_service.checkpoints.tables import SPECS, TableCluster
from tests.trireme.cli.test_checkpoint import write_run
from trainer_agent.tables.files import read_table
from trireme.cli import checkpoint
from trireme.cli.export import write_checkpoint_tables
from trireme.cli.tables import feed
from trireme_shared.checkpoints import stored
from trireme_shared.protocol.errors import InvalidArgument

STEPS = range(2, 13)
NAMES = [spec.name for spec in SPECS]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a job with a checkpoint of each step, of which some are whole; below it `export-<step>/`
    of each, and a `feed` of every second."""
    root = tmp_path_factory.mktemp("fed")
    folder = root / "data" / parts.JOB
    folder.mkdir(parents=True)
    spec = write_run(folder, "s.py")

    async def scenario():
        cluster = TableCluster(str(folder), deltas_per_base=3, keep_checkpoints=2)
        await cluster.open()
        await cluster.checkpointed(0, STEPS[0] - 1)
        whole = set()
        for step in STEPS:
            await cluster.checkpointed(step - 1, step)
            ref = (await cluster.latest()).kept[0]
            manifest = stored.read_manifest(str(folder), parts.JOB, ref)
            write_checkpoint_tables(str(folder), ref, manifest, str(root / f"export-{step}"), "safetensors")
            if step % 2 == 0:
                written = feed.write_next(spec, str(root / "feed"), None, None)
                assert (written.step, written.since) == (step, step - 2 if step > STEPS[0] else None)
            if not manifest.on:
                whole.add(step)
        assert {2, 6, 10} <= whole <= {*STEPS} - {4, 8, 12}, "deltas are read, and whole parts compared"

    run_scenario(scenario)
    return root


def asked(capsys, code):
    return code, json.loads(capsys.readouterr().out)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "tables").iterdir()}


@pytest.mark.parametrize("first", [2, 6, 8])
def test_a_feed_brings_an_export_to_the_bits_of_the_newest_checkpoint(capsys, tmp_path, trained, first):
    code = feed.apply(str(trained / f"export-{first}"), [str(trained / "feed")], str(tmp_path), as_json=True)
    assert asked(capsys, code)[0] == 0
    assert content(tmp_path) == content(trained / "export-12")
    removed = [json.loads(path.read_text())["removed"] for path in (trained / "feed").glob("*/done.json")]
    assert sum(each["item"] for each in removed) > 20, "rows leave by max_rows and by age"


def test_one_delta_after_the_other_has_the_bits_of_each_checkpoint(capsys, tmp_path, trained):
    now = trained / "export-2"
    for number, step in enumerate(STEPS[2::2], 1):
        code = feed.apply(
            str(now), [str(trained / "feed" / f"{number:08d}")], str(tmp_path / str(step)), as_json=True
        )
        assert asked(capsys, code) == (
            0,
            {"tables": asked_urls(tmp_path / str(step)), "steps": dict.fromkeys(NAMES, step)},
        )
        now = tmp_path / str(step)
        assert content(now) == content(trained / f"export-{step}")


def asked_urls(folder: Path) -> dict[str, str]:
    return {f"table {name}": str(folder / "tables" / f"{name}.safetensors") for name in NAMES}


def test_a_model_in_plain_pytorch_takes_deltas(trained):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.user = trireme.nn.Embedding("user", 16)

    model = Model()
    trireme.nn.load_tables(model, str(trained / "export-4"), [str(trained / "feed")])
    live = read_table(str(trained / "export-12" / "tables" / "user.safetensors"))
    assert torch.equal(model.user(torch.from_numpy(live.ids)), torch.from_numpy(live.values))


def test_deltas_that_do_not_follow_are_refused(capsys, tmp_path, trained):
    gap = [str(trained / "feed" / f"{number:08d}") for number in (1, 3)]
    code = feed.apply(str(trained / "export-2"), gap, str(tmp_path / "out"), as_json=True)
    code, answer = asked(capsys, code)
    assert code == 2
    assert "is of step 4, and the delta leads from step 6 to 8" in answer["error"]["message"]
    code = feed.apply(
        str(trained / "export-2"), [str(trained / "export-4")], str(tmp_path / "out"), as_json=True
    )
    assert "no delta and no feed" in asked(capsys, code)[1]["error"]["message"]
    copy = tmp_path / "feed"
    shutil.copytree(trained / "feed", copy)
    (copy / "00000002" / "done.json").unlink()  # as if its writer had died
    code = feed.apply(str(trained / "export-2"), [str(copy)], str(tmp_path / "out"), as_json=True)
    assert "is of step 4, and the delta leads from step 6" in asked(capsys, code)[1]["error"]["message"]
    (copy / "00000001" / "user.safetensors").write_bytes(b"x" * 30)
    with pytest.raises(InvalidArgument, match=r"00000001/user.safetensors is no table"):
        trireme.nn.load_tables(
            nn.ModuleDict({"user": trireme.nn.Embedding("user", 16)}), str(trained / "export-2"), [copy]
        )


def test_delta_since_a_checkpoint_and_on_from_the_last_folder(capsys, tmp_path, trained):
    data, out = trained / "data", tmp_path / "out"
    code, answer = asked(capsys, feed.delta(None, data, None, "11", None, str(out), as_json=True))
    assert (code, answer["number"], answer["since"], answer["step"]) == (0, 1, 11, 12)
    code = feed.apply(str(trained / "export-11"), [str(out)], str(tmp_path / "now"), as_json=True)
    assert asked(capsys, code)[0] == 0
    assert content(tmp_path / "now") == content(trained / "export-12")
    code, answer = asked(capsys, feed.delta(None, data, None, None, None, str(out), as_json=True))
    assert (code, "no checkpoint is newer" in answer["error"]["message"]) == (3, True)
    code, answer = asked(capsys, feed.delta(None, data, None, "10", None, str(out), as_json=True))
    assert (code, "would begin at step 10" in answer["error"]["message"]) == (2, True)


def test_a_feed_whose_last_checkpoint_is_gone_begins_again_with_all_rows(capsys, tmp_path, trained):
    folder = tmp_path / "feed"
    shutil.copytree(trained / "feed" / "00000001", folder / "00000001")
    code, answer = asked(
        capsys, feed.delta(None, trained / "data", None, None, None, str(folder), as_json=True)
    )
    assert (code, answer["number"], answer["since"]) == (0, 2, None)
    code = feed.apply(str(trained / "export-4"), [str(folder)], str(tmp_path / "now"), as_json=True)
    assert asked(capsys, code)[0] == 0
    assert {
        name: read_table(str(tmp_path / "now" / "tables" / f"{name}.safetensors")).version for name in NAMES
    } == {
        "item": 12,
        "user": 12,
    }
    assert content(tmp_path / "now") == content(trained / "export-12")


def test_list_tells_base_from_delta_and_verify_reads_what_each_builds_on(capsys, tmp_path, trained):
    shutil.copytree(trained / "data", tmp_path / "data")
    folder = tmp_path / "data" / parts.JOB
    write_run(folder, "s.py")
    rows = asked(capsys, checkpoint.list_checkpoints(None, folder.parent, as_json=True))[1]["checkpoints"]
    assert [(row["step"], row["kind"], row["deltas"]) for row in rows[:4]] == [
        (12, "delta", 2), (11, "delta", 1), (10, "base", 0), (9, "delta", 3),
    ]  # fmt: skip
    assert [row["needed_bytes"] for row in rows[:3]] == [
        sum(row["bytes"] for row in rows[n:3]) for n in range(3)
    ]
    code, answer = asked(capsys, checkpoint.verify(None, folder.parent, None, as_json=True))
    assert (code, {row["damage"] for row in answer["checkpoints"]}) == (0, {None})
    [file] = (folder / "checkpoints" / rows[1]["checkpoint"]).glob("pserver-0*")
    file.write_bytes(file.read_bytes()[:-1])
    code, answer = asked(capsys, checkpoint.verify(None, folder.parent, None, as_json=True))
    assert (code, [row["step"] for row in answer["checkpoints"] if row["damage"]]) == (1, [12, 11])
    assert checkpoint.list_checkpoints(None, folder.parent, as_json=False) == 0
    head, newest, *_ = (line.split() for line in capsys.readouterr().out.splitlines())
    assert (head[4:6], newest[4:8]) == (["kind", "MiB"], ["delta", "2", "of", "10"])


def test_the_feed_of_a_job_that_has_ended_gets_its_last_checkpoint(capsys, tmp_path, trained):
    shutil.copytree(trained / "data", tmp_path / "data")
    folder, out = tmp_path / "data" / parts.JOB, tmp_path / "feed"
    write_run(folder, "s.py")
    (folder / "result.json").write_text(
        json.dumps({"job": parts.JOB, "phase": "COMPLETED"}), encoding="utf-8"
    )
    for written in (1, 0):
        code, answer = asked(capsys, feed.feed(None, folder.parent, None, str(out), 30.0, as_json=True))
        assert (code, answer["written"]) == (0, written)
    assert json.loads((out / "00000000" / "done.json").read_text())["step"] == 12
