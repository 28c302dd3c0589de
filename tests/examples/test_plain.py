"""Plain training: an ordinary PyTorch loop over one lane's minibatches, with the seeds of a one-lane
cluster."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from master_service.core.queue.file_table import TaskSizes
from master_service.core.queue.streams import EpochOrder
from master_service.storage.job_storage import count_records
from tests.trainer_agent.cluster import trained
from tests.trainer_agent.loops.test_nonfinite import script_with
from tests.trainer_agent.scripts import differing, spec_for
from trainer_agent.data import minibatch_indices
from trainer_agent.script.user_module import load
from trireme.plain import epoch_minibatches, plain_spec, run, train
from trireme_shared.protocol.errors import DatasetError, InvalidArgument, UserCodeError
from trireme_shared.protocol.lanes import step_seed

pytestmark = pytest.mark.timeout(180)  # processes that import torch, on a busy machine
ROOT = Path(__file__).parents[2]
RECORDS = 50

SCRIPT = """
    import torch, trireme
    from torch import nn

    config = trireme.Config(
        epochs=2, global_batch_size=8, lanes=4, seed=5, records_per_task=20, clip_lane_norm=1.0
    )

    def model():
        return nn.Sequential(
            nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1)
        )
    def dataset(): return trireme.data.Npy("{data}/x.npy", "{data}/y.npy", aligned=True)
    def loss(model, batch): return ((model(batch["x"]).squeeze(1) - batch["y"]) ** 2).mean()
    def optimizer(model): return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    def scheduler(optimizer): return torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    def evaluation_dataset(): return dataset()
"""


def script(folder: Path, extra: str = "", **replaced: str) -> Path:
    generator = np.random.default_rng(0)
    x = generator.standard_normal((RECORDS, 3)).astype(np.float32)
    np.save(folder / "x.npy", x)
    np.save(folder / "y.npy", x.sum(axis=1))
    text = textwrap.dedent(SCRIPT).format(data=folder) + textwrap.dedent(extra)
    for old, new in replaced.items():
        text = text.replace(old, new)
    (folder / "script.py").write_text(text)
    return folder / "script.py"


def test_the_result_is_that_of_a_loop_written_by_hand(tmp_path):
    user = load(script(tmp_path))
    spec = plain_spec(user, {})
    result = run(user, spec)

    x, y = torch.from_numpy(np.load(tmp_path / "x.npy")), torch.from_numpy(np.load(tmp_path / "y.npy"))
    torch.manual_seed(5)
    model = user.call("model")
    optimizer = user.call("optimizer", model)
    scheduler = user.call("scheduler", optimizer)
    step = 0
    for epoch in range(2):
        order = EpochOrder(3, 5, epoch)
        for task in (order.task_at(position) for position in range(3)):
            count = 10 if task == 2 else 20
            for number in range(-(-count // 8)):
                rows = task * 20 + minibatch_indices(5, epoch, task, count, 8, number, shuffle=True)
                torch.manual_seed(step_seed(5, step, 0))
                optimizer.zero_grad()
                loss = user.call("loss", model.train(), {"x": x[rows], "y": y[rows]})
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                step += 1

    assert (result.steps, result.records) == (step, 2 * RECORDS)
    found, expected = result.model.state_dict(), model.state_dict()
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert list(result.metrics) == ["loss"]
    user.call("loss", result.model, {"x": x[:8], "y": y[:8]}).backward()  # the model is the caller's now


def test_versions_are_evaluated_while_it_trains_and_the_best_one_is_kept(tmp_path):
    user = load(script(tmp_path))
    spec = plain_spec(user, {"evaluate_every": 3, "keep_best": "loss:min", "epochs": 3})
    undisturbed = run(user, spec.model_copy(update={"evaluate_every": None, "keep_best": None}))
    said: list[str] = []
    result = run(user, spec, said.append)
    assert result.steps == 24  # the last one is evaluated after training
    assert [(done.number, done.step) for done in result.evaluations] == [(n, 3 * n) for n in range(1, 8)]
    state, other = result.model.state_dict(), undisturbed.model.state_dict()
    assert all(torch.equal(state[name], other[name]) for name in other)
    losses = {done.step: done.metrics["loss"] for done in result.evaluations} | {24: result.metrics["loss"]}
    best = min(losses, key=lambda step: losses[step])
    assert result.best is not None
    assert (result.best.step, result.best.value) == (best, losses[best])
    assert sum(line.startswith("evaluation ") for line in said) == 7

    stopping = run(
        user, plain_spec(user, {"evaluate_every": 2, "stop_early": "loss:max", "epochs": 3}), said.append
    )
    assert stopping.steps == 2 * (len(stopping.evaluations) + 1) < 24
    assert said[-2].startswith(f"training ends at step {stopping.steps}")
    shorter = run(user, plain_spec(user, {"epochs": 1, "evaluate_every": 3}))
    assert shorter.evaluations == result.evaluations[:2]
    model = user.call("model")
    model.load_state_dict(result.best_state)
    x, y = torch.from_numpy(np.load(tmp_path / "x.npy")), torch.from_numpy(np.load(tmp_path / "y.npy"))
    with torch.no_grad():
        loss = user.call("loss", model.eval(), {"x": x, "y": y}).item()
    assert loss == pytest.approx(losses[best], rel=1e-5)


def test_a_metric_that_no_evaluation_reports_is_refused_at_the_first_one_and_told_at_the_end(tmp_path):
    user, said = load(script(tmp_path)), []
    why = "keep_best is acuracy, and an evaluation has the metrics loss"
    spec = plain_spec(user, {"evaluate_every": 3, "keep_best": "acuracy:max"})
    with pytest.raises(InvalidArgument, match=why):
        run(user, spec, said.append)
    assert not any(line.startswith("evaluation ") for line in said)
    result = run(user, plain_spec(user, {"evaluate_every": 300, "keep_best": "acuracy:max"}), said.append)
    assert result.best is None
    assert f"{why}: the last model alone is kept" in said


def test_each_epoch_has_every_record_once_in_another_order(tmp_path):
    user = load(script(tmp_path))
    spec = plain_spec(user, {})
    table = count_records(spec.dataset, TaskSizes.of(spec))
    epochs = [
        [record["y"] for m in epoch_minibatches(spec, table, epoch) for record in m] for epoch in range(2)
    ]
    written = Counter(np.load(tmp_path / "y.npy").tolist())
    assert [Counter(epoch) for epoch in epochs] == [written, written]
    assert epochs[0] != epochs[1]


def test_settings_come_from_flags_then_the_environment_then_the_script(tmp_path, monkeypatch):
    user = load(script(tmp_path))
    monkeypatch.setenv("TRIREME_SEED", "8")
    monkeypatch.setenv("TRIREME_EPOCHS", "7")
    spec = plain_spec(user, {"epochs": 3})
    assert (spec.epochs, spec.seed, spec.global_batch_size, spec.lanes, spec.minibatch_size) == (
        3,
        8,
        8,
        1,
        8,
    )


def test_a_loss_that_is_not_finite_ends_it_or_is_left_out(tmp_path):
    path = script(tmp_path)
    y = np.load(tmp_path / "y.npy")
    y[7] = np.nan
    np.save(tmp_path / "y.npy", y)
    user, said = load(path), []
    with pytest.raises(UserCodeError, match="NonFiniteError: the loss is nan; lower the learning rate"):
        run(user, plain_spec(user, {}))
    result = run(user, plain_spec(user, {"on_nonfinite": "skip"}), report=said.append)
    assert [line.partition(";")[0].partition(": ")[2] for line in said if "left out" in line] == [
        "the loss is nan"
    ] * 2
    assert 2 * (RECORDS - 8) <= result.records <= 2 * (RECORDS - 4)
    assert all(bool(value.isfinite().all()) for value in result.model.state_dict().values())
    ignored = run(user, plain_spec(user, {"on_nonfinite": "ignore"}))
    assert not all(bool(value.isfinite().all()) for value in ignored.model.state_dict().values())


async def test_what_is_left_out_is_the_same_as_in_a_cluster(tmp_path):
    spec = spec_for(script_with(tmp_path, "gradient"), shuffle=False, lanes=1, epochs=2, on_nonfinite="skip")
    exported = await trained(spec)
    assert differing(exported, run(load(spec.script), spec).model.state_dict()) == []


def test_the_users_collate_gets_records(tmp_path):
    collate = """
        seen = []
        def collate(records):
            seen.append(records)
            return {
                name: torch.stack([torch.as_tensor(record[name]) for record in records])
                for name in ("x", "y")
            }
    """
    user = load(script(tmp_path, collate))
    run(user, plain_spec(user, {"epochs": 1}))
    seen = sys.modules["script"].seen
    assert isinstance(seen[0], list)
    assert list(seen[0][0]) == ["x", "y"]


@pytest.mark.parametrize(
    ("extra", "replaced", "error", "message"),
    [
        ("def model(): return 3", {}, InvalidArgument, r"model\(\) returned int"),
        ("def loss(model, batch): return batch['z']", {}, UserCodeError, "KeyError: 'z'"),
        (
            "def loss(model, batch): model(batch['x']).sum().backward(); return model(batch['x']).mean()",
            {},
            UserCodeError,
            r"the script calls backward\(\) itself; return the loss",
        ),
        ("", {"y.npy": "none.npy"}, DatasetError, "none.npy does not exist"),
    ],
)
def test_what_is_wrong_is_told_by_its_own_kind_of_error(tmp_path, extra, replaced, error, message):
    user = load(script(tmp_path, extra, **replaced))
    with pytest.raises(error, match=message):
        run(user, plain_spec(user, {}))


def python(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(script), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150, check=False)


MAIN = """
    if __name__ == "__main__":
        trireme.train(__name__)
"""


def test_python_script_prints_progress_metrics_and_exports(tmp_path):
    done = python(
        script(tmp_path, MAIN),
        "--epochs",
        "3",
        "--set",
        "records_per_task=8",
        "--export",
        str(tmp_path / "out"),
    )
    assert done.returncode == 0, done.stderr
    checking, *epochs = done.stderr.splitlines()
    assert checking == "checking script.py"
    assert [line.split()[1] for line in epochs] == ["1/3", "2/3", "3/3"]
    lines = done.stdout.splitlines()
    assert lines[0].startswith("loss ")
    assert {Path(line).name for line in lines[1:]} == {"model.safetensors", "model.pt"}
    state = torch.load(tmp_path / "out" / "model.pt", weights_only=True)
    assert state["0.weight"].shape == (8, 3)


def test_python_script_tells_a_user_error_once_without_our_own_frames(tmp_path):
    done = python(script(tmp_path, "def loss(model, batch): return 1 / 0\n" + textwrap.dedent(MAIN)))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-2:] == [
        "ZeroDivisionError: division by zero",
        "in the first minibatch, where batch = {'x': float32 (2, 3), 'y': float32 (2,)}",
    ]
    assert "trireme/plain.py" not in done.stderr
    assert done.stderr.count("Traceback") == 1


@pytest.mark.parametrize(
    ("extra", "arguments", "code", "told"),
    [
        ("", ["--epochs", "0"], 2, "error: --epochs = 0: input should be greater than or equal to 1"),
        ("", ["--set", "colour=1"], 2, "error: --set: there is no setting 'colour'"),
        ("def dataset(): return trireme.data.Csv('none.csv')", [], 2, "error: none.csv does not exist"),
        (
            "def dataset(): return trireme.data.Csv('none.csv')",
            ["--no-check"],
            1,
            "error: none.csv does not exist",
        ),
    ],
)
def test_what_is_wrong_is_told_in_one_message_with_its_exit_code(
    tmp_path, capsys, extra, arguments, code, told
):
    load(script(tmp_path, extra))
    with pytest.raises(SystemExit) as caught:
        train("script", arguments)
    said = capsys.readouterr().err
    assert (caught.value.code, said.count("error: ")) == (code, 1)
    assert told in said


DICT = """

    def loss(model, batch):
        trireme.log(rows=len(batch["y"]))
        error = (model(batch["x"]).squeeze(1) - batch["y"]) ** 2
        return {"loss": error.mean(), "worst": error.max()}
"""


def test_a_loss_with_metrics_trains_the_same_bits_and_says_what_they_were_in_each_epoch(tmp_path):
    for name in ("scalar", "dict"):
        (tmp_path / name).mkdir()
    user, plain = load(script(tmp_path / "dict", DICT)), load(script(tmp_path / "scalar"))
    lines: list[str] = []
    result, expected = run(user, plain_spec(user, {}), lines.append), run(plain, plain_spec(plain, {}))
    assert differing(dict(result.model.state_dict()), dict(expected.model.state_dict())) == []
    assert [epoch["loss"] for epoch in result.epochs] == result.losses == expected.losses
    assert [sorted(epoch) for epoch in result.epochs] == [["loss", "rows", "worst"]] * 2
    assert result.epochs[0]["rows"] == RECORDS / 8  # 8, 8 and 4 of two tasks, 8 and 2 of the third
    assert result.epochs[0]["worst"] > result.epochs[0]["loss"]
    assert "records_per_task 20 is no multiple of the 8 records of a minibatch" in lines[0]
    assert all("worst" in line for line in lines[1:])
    assert result.metrics.keys() == {"loss", "worst"}
