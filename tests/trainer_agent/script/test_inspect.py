"""`python -m trainer_agent inspect SCRIPT`: one JSON object, the right exit code, no traces."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys

import numpy as np
import pytest

from tests.trainer_agent.scripts import write_script
from trainer_agent.script.inspect import inspect_script


def inspected(script, capsys, *, check=True, settings=()):
    code = inspect_script(str(script), check=check, settings=list(settings))
    return code, json.loads(capsys.readouterr().out)


def test_a_good_script_is_described_and_tried(tmp_path, capsys):
    script = write_script(
        tmp_path,
        config="config = {'epochs': 3, 'lanes': 2}\n",
        evaluation="def evaluation_dataset():\n    return dataset()\n",
    )
    code, found = inspected(script, capsys)
    model = found.pop("model")
    dataset = {
        "urls": [f"{tmp_path}/x.npy", f"{tmp_path}/y.npy"],
        "kind": "npy",
        "aligned": True,
        "columns": None,
    }
    assert (code, found) == (
        0,
        {
            "config": {"epochs": 3, "lanes": 2},
            "dataset": dataset,
            "evaluation_dataset": dataset,
        },
    )
    assert model["optimizer"]["name"] == "SGD"
    sizes = [math.prod(shape) for kind, _, shape, _, _ in model["tensors"] if kind == "param"]
    assert sum(sizes) == 5 * 24 + 24 + 2 * 24 + 24 * 24 + 24 + 24 * 3 + 3
    assert {tuple(tensor[3:]) for tensor in model["tensors"] if tensor[0] == "param"} == {
        ("torch.float32", 0)
    }


def test_without_the_check_nothing_is_built_or_read(tmp_path, capsys):
    script = write_script(tmp_path, model="def model():\n    raise RuntimeError\n")
    (tmp_path / "x.npy").unlink()
    code, found = inspected(script, capsys, check=False)
    assert (code, sorted(found)) == (0, ["config", "dataset", "evaluation_dataset"])


@pytest.mark.parametrize(
    ("parts", "code", "message"),
    [
        ({"model": ""}, 2, "has no function 'model'"),
        ({"model": "def model():\n    return 3\n"}, 2, "model() returned int"),
        (
            {"optimizer": "def optimizer(m):\n    return torch.optim.LBFGS(m.parameters())\n"},
            2,
            "LBFGS cannot run",
        ),
        (
            {"scheduler": "def scheduler(o):\n    return torch.optim.lr_scheduler.ReduceLROnPlateau(o)\n"},
            2,
            "plateau_metric is not set",
        ),
        (
            {
                "scheduler": "def scheduler(o):\n    return torch.optim.lr_scheduler.ReduceLROnPlateau(o)\n",
                "evaluation": "def evaluation_dataset():\n    return dataset()\n",
                "config": "config = {'evaluate_every': 2, 'plateau_metric': 'accuracy'}\n",
            },
            2,
            "plateau_metric is accuracy, and an evaluation has the metrics loss",
        ),
        ({"dataset": "def dataset():\n    return Npy('/nowhere.npy')\n"}, 2, "/nowhere.npy does not exist"),
        (
            {"dataset": "def dataset():\n    return Npy('/no*where.npy')\n"},
            2,
            "/no*where.npy matches no file",
        ),
        (
            {"model": "def model():\n    return nn.Linear(7, 3)\n"},
            1,
            "mat1 and mat2 shapes cannot be multiplied",
        ),
        ({"loss": "def loss(model, batch):\n    raise KeyError('z')\n"}, 1, "KeyError: 'z'"),
        ({"head": "import nothing_of_that_name\n"}, 1, "ModuleNotFoundError"),
        ({"config": "config = {'lanes': 3}\n"}, 2, "lanes must be a power of two, got 3"),
    ],
)
def test_what_is_wrong_is_told_in_one_message(tmp_path, capsys, parts, code, message):
    found_code, found = inspected(write_script(tmp_path, **parts), capsys)
    assert found_code == code
    assert message in found["error"]["message"]
    if code == 1:
        assert found["error"]["details"]["traceback"].startswith("Traceback")
        assert "trainer_agent" not in found["error"]["details"]["traceback"]


def test_settings_that_are_not_possible_are_not_said_to_be_the_scripts(tmp_path, capsys):
    script = write_script(tmp_path, config="config = {'epochs': 2}\n")
    code, found = inspected(script, capsys, settings=["min-members=2"])
    error = found["error"]
    assert code == 2
    assert error["message"].startswith(
        "these settings are not possible together: min_members is 2, which only jobs"
    )
    assert error["details"]["config"] == ["epochs"]
    (problem,) = error["details"]["problems"]
    assert problem.startswith("min_members is 2")


WITH_TABLE = """
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            {layers}
            self.deep = nn.Linear(3, 3)

        def forward(self, x):
            ids = (x * 4).long()
            return self.deep(self.user({ids}))

    def model():
        return Model()
"""
ONE = 'self.user = trireme.nn.Embedding("user", 3)'
BAG = 'self.user = trireme.nn.EmbeddingBag("user", 3)'
FEW = 'self.user = trireme.nn.Embedding("user", 3, max_rows=1024)'


@pytest.mark.parametrize(
    ("layers", "ids", "code", "message"),
    [
        (
            ONE,
            "x[:, 0]",
            1,
            (
                "InvalidArgument: table user: got a tensor of torch.float32; ids are int64, int32, "
                "uint64 or uint32"
            ),
        ),
        (ONE, "ids[:, 0].tolist()", 1, "InvalidArgument: table user: got list; give a tensor of integers"),
        (
            BAG,
            "ids[:, 0]",
            1,
            "got ids of shape (8,) without offsets; bags are (bags, ids) without offsets, or (ids,) with",
        ),
        (
            BAG,
            "ids.unflatten(1, (5, 1))",
            1,
            "got ids of shape (8, 5, 1) without offsets; bags are (bags, ids)",
        ),
        (
            f'{ONE}; self.item = trireme.nn.Embedding("user", 4)',
            "ids[:, 0]",
            2,
            "two layers use the table user with different settings: dim 3 and 4",
        ),
        (
            f'{ONE}; self.item = trireme.nn.Embedding("user", 3, optimizer=trireme.nn.Adagrad(lr=0.5))',
            "ids[:, 0]",
            2,
            "two layers use the table user with different settings: optimizer.lr 0.05 and 0.5",
        ),
        (
            FEW,
            "torch.arange(8 * 129).view(8, 129)).mean(1",
            1,
            "a minibatch has 1032 ids of table user, whose max_rows is 1024",
        ),
        (FEW.replace("1024", "8"), "ids[:, 0]", 2, "table user: max_rows is 8, and the job has 1024 slots"),
    ],
)
def test_what_is_wrong_with_a_table_is_told_in_one_message(tmp_path, capsys, layers, ids, code, message):
    script = write_script(tmp_path, model=WITH_TABLE.format(layers=layers, ids=ids))
    found_code, found = inspected(script, capsys, settings=["global_batch_size=8", "lanes=1"])
    error = found["error"]
    assert found_code == code, found
    assert message in f"{error['details'].get('traceback', '')}\n{error['message']}"
    assert "trainer_agent" not in str(error["details"].get("traceback", ""))


def test_an_optimizer_that_cannot_run_on_the_servers_is_told_with_those_that_can(tmp_path, capsys):
    optimizer = "def optimizer(m):\n    return torch.optim.LBFGS(m.parameters())\n"
    _, found = inspected(write_script(tmp_path, optimizer=optimizer), capsys)
    assert found["error"]["hint"].startswith("use one of torch.optim: SGD, Adam")


@pytest.mark.parametrize(
    ("reader", "file", "message"),
    [
        ("Parquet", "x.npy", "x.npy cannot be read as Parquet"),
        ("Parquet", "none-*.parquet", "none-*.parquet matches no file"),
        ("Npy", "none.npy", "none.npy has no records"),
    ],
)
def test_a_dataset_without_records_to_read_is_named(tmp_path, capsys, reader, file, message):
    np.save(tmp_path / "none.npy", np.zeros((0, 5), np.float32))
    head = f"import torch\nfrom torch import nn\nimport trireme\nPATH = {str(tmp_path / file)!r}\n"
    dataset = f"def dataset():\n    return trireme.data.{reader}(PATH)\n"
    code, found = inspected(write_script(tmp_path, head=head, dataset=dataset), capsys)
    assert code == 2
    assert message in found["error"]["message"]


def test_an_error_in_the_first_minibatch_says_so(tmp_path, capsys):
    _, found = inspected(write_script(tmp_path, loss="def loss(model, batch):\n    return 1 / 0\n"), capsys)
    assert found["error"]["details"]["task"] == (
        "the first minibatch, where batch = {'x': float32 (32, 5), 'y': int64 (32,)}"
    )


def test_records_that_make_no_batch_show_what_to_do_and_no_frames_of_ours(tmp_path, capsys):
    (tmp_path / "x.jsonl").write_text('{"x": [1]}\n{"x": [1, 2]}\n')
    parts = {
        "dataset": "def dataset():\n    from trireme_shared.protocol.records.datasets import JsonLines\n"
        "    return JsonLines({folder!r} + '/x.jsonl')\n",
        "config": "config = {'lanes': 1}\n",
    }
    code, found = inspected(write_script(tmp_path, **parts), capsys)
    told = (
        "column 'x': record 0 of the minibatch has shape (1,), record 1 has shape (2,); one tensor "
        "needs one shape; "
        "define collate(records) in your script, or make the values alike in the data"
    )
    details = found["error"]["details"]
    assert (code, details["error_message"]) == (1, told)
    assert details["traceback"] == f"DatasetError: {told}\n"


def test_an_error_below_backward_shows_no_frames_of_ours(tmp_path, capsys):
    loss = (
        "def loss(model, batch):\n    z = model(batch['x']).exp()\n    total = z.sum()\n    z.add_(1)\n"
        "    return total\n"
    )
    _, found = inspected(write_script(tmp_path, loss=loss), capsys)
    assert "modified by an inplace operation" in found["error"]["details"]["traceback"]
    assert "trainer_agent" not in found["error"]["details"]["traceback"]


def test_a_file_with_fewer_records_than_a_minibatch_is_enough(tmp_path, capsys):
    script = write_script(tmp_path, config="config = {'global_batch_size': 10_000, 'lanes': 1}\n")
    assert inspected(script, capsys)[0] == 0


def test_settings_given_to_inspect_win_over_the_scripts(tmp_path, capsys):
    script = write_script(tmp_path, config="config = {'lanes': 3}\n")
    assert inspected(script, capsys, settings=["lanes=4"])[0] == 0


@pytest.mark.processes
def test_the_command_prints_one_object_whatever_the_script_prints_and_leaves_nothing(tmp_path):
    script = write_script(
        tmp_path, noise="print('noise')\n", main="if __name__ == '__main__':\n    raise SystemExit(9)\n"
    )
    before = sorted(path.name for path in tmp_path.iterdir())
    done = subprocess.run(
        [sys.executable, "-P", "-m", "trainer_agent", "inspect", str(script)],
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model"]["optimizer"]["name"] == "SGD"
    assert "noise" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == before


JSON_FILES = """
    from trireme_shared.protocol.records.datasets import JsonLines
    def dataset():
        return JsonLines({folder!r} + "/*.jsonl")
    def loss(model, batch):
        return model(torch.stack([batch[name].float() for name in batch], 1)).square().mean()
"""


@pytest.mark.parametrize(
    ("last", "told"),
    [
        ('{"a": 1, "b": 2, "c": 3, "d": 4}', "2.jsonl records 0-0 have no column 'e'"),
        ('{"a": 1, "b": 2, "c": 3, "d": 4, "e": 0.5}', "column 'e': .*2.jsonl record 0 has 0.5"),
        ('{"a": 1, "b": 2, "c": 3, "d": 4, "e": 9}', ""),
    ],
)
def test_files_without_a_schema_are_compared_unless_the_script_collates(tmp_path, capsys, last, told):
    for number in range(3):
        record = last if number == 2 else json.dumps(dict.fromkeys("abcde", 1))
        (tmp_path / f"{number}.jsonl").write_text(f"{record}\n" * 4)
    small = "def model():\n    return nn.Linear(5, 3)\n"
    code, found = inspected(
        write_script(tmp_path, "plain_json", dataset=JSON_FILES, loss="", model=small), capsys
    )
    assert (code == 0) == (not told)
    assert not told or re.search(told, found["error"]["message"])
    collate = "def collate(records):\n    return {'a': torch.zeros(len(records), 5)}\n"
    loss = "def loss(model, batch):\n    return model(batch['a']).square().mean()\n"
    script = write_script(
        tmp_path, "collated_json", dataset=JSON_FILES, loss=loss, model=small, collate=collate
    )
    assert inspected(script, capsys)[0] == 0
