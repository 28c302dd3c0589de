"""`trireme checkpoint list | verify` and `trireme export` on what a job left behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.end_to_end.scripts import write_script
from tests.pserver_service.checkpoints import parts
from trireme.cli import checkpoint
from trireme.cli.export import export
from trireme_shared.checkpoints.schedule import Schedule
from trireme_shared.protocol.records import JobSpec, Mode
from trireme_shared.protocol.records.step import LanePosition, StepRecord
from trireme_shared.protocol.wire.messages import InitHeader
from trireme_shared.serving.core.stores import store_of

EVERY = Schedule(every_steps=2, every_epochs=None, epochs=9)


@pytest.fixture
def job(tmp_path):
    """A job's folder with checkpoints of steps 2 and 4, by two parameter servers."""
    folder = tmp_path / "data" / parts.JOB
    folder.mkdir(parents=True)
    layout = parts.layout_of()
    stores = parts.fresh(layout, 2, EVERY)
    for number, step in enumerate((2, 4)):
        parts.train(layout, stores, step - 2, step)
        parts.save(str(folder), layout, parts.snapshots(stores), parts.slot_map(2), uuid=f"{number}-{number}")
    write_run(folder, "s.py")
    return folder


def write_run(folder: Path, script: str, **fields):
    fixed = {"script": script, "dataset": {"kind": "text_lines", "urls": ("-",)}, "storage": str(folder)}
    spec = JobSpec(**{"job": parts.JOB, **fixed, **fields})
    (folder / "spec.json").write_bytes(spec.to_bytes())
    (folder / "run.json").write_text(
        json.dumps({"job": parts.JOB, "url": "http://127.0.0.1:1"}), encoding="utf-8"
    )
    return spec


def ask(capsys, command, folder, *arguments):
    code = command(None, folder.parent, *arguments, as_json=True)
    return code, json.loads(capsys.readouterr().out)


def test_list_shows_the_newest_first(capsys, job):
    code, answer = ask(capsys, checkpoint.list_checkpoints, job)
    assert code == 0
    rows = [(row["checkpoint"], row["step"], row["pservers"]) for row in answer["checkpoints"]]
    assert rows == [("1-1", 4, 2), ("0-0", 2, 2)]


def test_people_get_a_table(capsys, job, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")  # of a terminal
    assert checkpoint.list_checkpoints(None, job.parent, as_json=False) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["step", "epoch"]
    assert "…" not in "".join(lines), "a pipe has no edge: nothing is cut"


def test_verify_finds_all_good(capsys, job):
    code, answer = ask(capsys, checkpoint.verify, job, None)
    assert code == 0
    assert [(row["step"], row["damage"]) for row in answer["checkpoints"]] == [(4, None), (2, None)]


def test_verify_names_the_damaged_file_and_exits_with_1(capsys, job):
    part = job / "checkpoints" / "0-0" / "pserver-1.x.safetensors"
    part.write_bytes(part.read_bytes()[:-1] + b"x")
    code, answer = ask(capsys, checkpoint.verify, job, None)
    assert code == 1
    good, damaged = answer["checkpoints"]
    assert good["damage"] is None
    assert str(part) in damaged["damage"]
    assert ask(capsys, checkpoint.verify, job, "4")[0] == 0
    assert ask(capsys, checkpoint.verify, job, "0-")[0] == 1


def replaced(path: Path, content: bytes) -> None:
    path.write_bytes(content)


DAMAGES = {
    "a part cut short": ("pserver-0*", lambda path: replaced(path, path.read_bytes()[:-9]), "bytes, "),
    "a bit that flipped": (
        "pserver-0*",
        lambda path: replaced(path, path.read_bytes()[:-1] + b"x"),
        "has checksum",
    ),
    "a part that is missing": ("pserver-1*", Path.unlink, "cannot be read"),
    "an edited manifest": (
        "manifest*",
        lambda path: replaced(path, path.read_bytes().replace(b'"lanes":2', b'"lanes":4')),
        "was changed after it was written",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_verify_names_each_problem_with_its_file(capsys, job, damage):
    pattern, harm, message = DAMAGES[damage]
    [path] = (job / "checkpoints" / "0-0").glob(pattern)
    harm(path)
    code, answer = ask(capsys, checkpoint.verify, job, None)
    assert code == 1
    assert [row["damage"] is None for row in answer["checkpoints"]] == [True, False]
    assert message in answer["checkpoints"][1]["damage"]
    assert str(path) in answer["checkpoints"][1]["damage"]


def test_verify_names_a_checkpoint_of_another_job(capsys, job):
    write_run(job, "s.py", job="other")
    (job.parent / "other").symlink_to(job)
    code, answer = ask(capsys, checkpoint.verify, job.parent / "other", None)
    assert code == 1
    assert all("is of job 'ctr'" in row["damage"] for row in answer["checkpoints"])
    assert all("expected job 'other'" in row["damage"] for row in answer["checkpoints"])


def test_verify_tells_of_a_manifest_that_is_none(capsys, job):
    [manifest] = (job / "checkpoints" / "1-1").glob("manifest-*")
    manifest.write_text("{", encoding="utf-8")
    code, answer = ask(capsys, checkpoint.verify, job, None)
    assert code == 1
    assert answer["unreadable"] == [str(manifest)]


def test_a_checkpoint_that_is_not_there_is_told_with_those_that_are(capsys, job):
    code, answer = ask(capsys, checkpoint.verify, job, "7")
    assert code == 3
    assert "there are: step 4, step 2" in answer["error"]["message"]


def test_a_job_that_is_not_there(capsys, tmp_path):
    code, answer = ask(capsys, checkpoint.list_checkpoints, tmp_path / "data" / "nobody")
    assert code == 3
    assert "holds no run" in answer["error"]["message"]


def test_a_job_without_checkpoints(capsys, tmp_path):
    folder = tmp_path / "data" / parts.JOB
    folder.mkdir(parents=True)
    write_run(folder, "s.py")
    assert ask(capsys, checkpoint.list_checkpoints, folder)[1]["checkpoints"] == []
    assert ask(capsys, checkpoint.verify, folder, None)[0] == 3
    assert ask(capsys, export, folder, None, None)[0] == 3


# ------------------------------------------------------------ export


@pytest.fixture
def trained(tmp_path):
    """A checkpoint of the model of a real script, with the values 0, 1, 2, ... laid end to end."""
    from concurrent.futures import ThreadPoolExecutor

    from trainer_agent.model.torch_compute import TorchCompute
    from trainer_agent.script.user_module import load

    script = write_script(tmp_path)
    folder = tmp_path / "data" / parts.JOB
    folder.mkdir(parents=True)
    spec = write_run(folder, str(script), block_bytes=256, lanes=2)
    with ThreadPoolExecutor(1) as executor:
        layout = TorchCompute(load(script), spec, executor).layout
    record = StepRecord(version=0, positions=tuple(LanePosition(lane=lane) for lane in range(2)))
    header = InitHeader(
        job=parts.JOB, generation=0, mode=Mode.SYNC, lanes=2, layout=layout, pserver=0, record=record
    )
    store = store_of(header, EVERY)
    for block in layout.blocks():
        values = torch.arange(block.first, block.first + block.elements, dtype=torch.float32)
        store.add_block(block.number, parts.bytes_view(values))
    store.seal()
    store.save_first()
    parts.save(str(folder), layout, [store.take_snapshot()], parts.slot_map(1))
    return folder, script


def test_export_writes_what_plain_pytorch_loads(capsys, trained, tmp_path):
    folder, _ = trained
    code, answer = ask(capsys, export, folder, None, tmp_path / "out")
    assert code == 0
    values = load_file(answer["exports"]["safetensors"])
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1)
    )
    model.load_state_dict(values)
    model.load_state_dict(torch.load(answer["exports"]["state_dict"], weights_only=True))
    assert torch.equal(model[0].weight, torch.arange(128, dtype=torch.float32).reshape(16, 8))
    assert torch.equal(model[0].bias, torch.arange(128, 144, dtype=torch.float32))
    assert torch.equal(model[3].weight, torch.arange(144, 160, dtype=torch.float32).reshape(1, 16))
    assert model[3].bias.item() == 160


def test_export_refuses_a_script_whose_model_has_changed(capsys, trained):
    folder, script = trained
    script.write_text(
        script.read_text(encoding="utf-8").replace("nn.Linear(16, 1)", "nn.Linear(16, 2)"), "utf-8"
    )
    code, answer = ask(capsys, export, folder, None, None)
    assert code == 2
    assert "model is not the job's" in answer["error"]["message"]


def test_export_refuses_a_damaged_checkpoint(capsys, trained, tmp_path):
    folder, _ = trained
    part = folder / "checkpoints" / "u1" / "pserver-0.x.safetensors"
    part.write_bytes(part.read_bytes()[:-1] + b"x")
    code, answer = ask(capsys, export, folder, None, tmp_path / "out")
    assert code == 1
    assert "checksum" in answer["error"]["message"]
    assert not (tmp_path / "out").exists()
