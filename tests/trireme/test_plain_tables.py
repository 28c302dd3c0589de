"""Tables under plain python: the bits of an ordinary PyTorch loop with sparse embeddings, and what is
exported."""

from __future__ import annotations

import atexit
import contextvars
import dataclasses
import runpy
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import trireme
from master_service.core.queue.file_table import TaskSizes
from master_service.storage.job_storage import count_records
from trainer_agent.data import default_collate
from trainer_agent.script.inspect import inspect_script
from trainer_agent.script.user_module import load
from trainer_agent.tables.embedding import tables_of
from trainer_agent.tables.files import read_table, write_tables
from trireme.plain import PlainResult, epoch_minibatches, plain_spec, run, train
from trireme_shared.protocol.errors import InvalidArgument, UserCodeError
from trireme_shared.protocol.lanes import step_seed
from trireme_shared.tables.table import initial_values

# torch says it once, of its own optimizers
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")
IDS, RECORDS = 60, 96

SCRIPT = """
    import torch, trireme
    from torch import nn
    from torch.nn import functional as F

    config = trireme.Config(epochs=2, global_batch_size=16, seed=5, records_per_task=48)

    class Net(nn.Module):
        "A field: a number, and a vector whose products are summed (FM); all vectors into a small network."
        def __init__(self, user, item, genre):
            super().__init__()
            self.user, self.item, self.genre = user, item, genre
            self.deep = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))

        def forward(self, batch):
            fields = [self.user(batch["user"]), self.item(batch["item"]), self.genre(batch["genre"])]
            x = torch.stack(fields, 1)
            pairs = (x.sum(1) ** 2 - (x ** 2).sum(1)).sum(1) / 2
            return pairs + self.deep(x.flatten(1)).squeeze(1)

    def model():
        user = trireme.nn.Embedding("user", 4, optimizer=trireme.nn.Adam(lr=0.01))
        item = trireme.nn.Embedding("item", 4, optimizer=trireme.nn.Adagrad(lr=0.05), init="uniform(0.1)")
        genre = trireme.nn.EmbeddingBag("genre", 4, optimizer=trireme.nn.SGD(lr=0.5), padding_idx=0)
        return Net(user, item, genre)

    def dataset():
        files = [f"{folder}/{name}.npy" for name in ("user", "item", "genre", "label")]
        return trireme.data.Npy(*files, aligned=True)

    def evaluation_dataset(): return dataset()
    def loss(model, batch): return F.binary_cross_entropy_with_logits(model(batch), batch["label"])
    def optimizer(model): return torch.optim.Adam(model.parameters(), lr=0.01)

    if __name__ == "__main__":
        trireme.train(__name__)
"""


def script(folder: Path, **replaced: str) -> Path:
    rng = np.random.default_rng(3)
    for name in ("user", "item"):
        np.save(folder / f"{name}.npy", np.minimum(rng.zipf(1.5, RECORDS), IDS - 1).astype(np.int64))
    np.save(folder / "genre.npy", rng.integers(0, 6, (RECORDS, 3)))
    np.save(folder / "label.npy", rng.integers(0, 2, RECORDS).astype(np.float32))
    text = textwrap.dedent(SCRIPT).replace("{folder}", str(folder))
    for old, new in replaced.items():
        assert old in text
        text = text.replace(old, new)
    (folder / "recommend.py").write_text(text)
    return folder / "recommend.py"


def ordinary_loop(user: Any, spec: Any, scheduled: Sequence[int] = ()) -> tuple[nn.Module, list[float]]:
    """What anybody would write: sparse embeddings, and an optimizer for each; `scheduled`: which of them have
    a scheduler like the script's."""
    starts = {table.name: initial_values(table, np.arange(IDS)) for table in tables_of(user.call("model"), 5)}
    weights = {name: torch.from_numpy(start) for name, start in starts.items()}
    weights["genre"][0] = 0
    layers = [nn.Embedding(IDS, 4, sparse=True), nn.Embedding(IDS, 4, sparse=True)]
    bag = nn.EmbeddingBag(IDS, 4, sparse=True, padding_idx=0)
    torch.manual_seed(5)
    model = sys.modules["recommend"].Net(*layers, bag)
    for name, weight in weights.items():
        getattr(model, name).weight.data = weight
    optimizers = [
        torch.optim.SparseAdam([model.user.weight], lr=0.01),
        torch.optim.Adagrad([model.item.weight], lr=0.05),
        torch.optim.SGD([model.genre.weight], lr=0.5),
        torch.optim.Adam(model.deep.parameters(), lr=0.01),
    ]
    schedulers = [user.call("scheduler", optimizers[number]) for number in scheduled]
    losses, step = [], 0
    for epoch in range(spec.epochs):
        total = 0.0
        for minibatch in epoch_minibatches(spec, count_records(spec.dataset, TaskSizes.of(spec)), epoch):
            torch.manual_seed(step_seed(5, step, 0))
            model.train()
            model.zero_grad()
            loss = user.call("loss", model, default_collate(minibatch))
            loss.backward()
            # torch's SGD rounds a row after each occurrence; the others, as ours, add them up first
            model.genre.weight.grad = model.genre.weight.grad.coalesce()
            for optimizer in optimizers:
                optimizer.step()
            for scheduler in schedulers:
                scheduler.step()
            total += loss.item() * len(minibatch)
            step += 1
        losses.append(total / RECORDS)
    return model, losses


def rows(result: PlainResult) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    return {table.spec.name: (table.ids, table.values) for table in result.tables.stored()}


def test_the_bits_are_those_of_an_ordinary_loop_with_sparse_embeddings(tmp_path):
    user = load(script(tmp_path))
    spec = plain_spec(user, {})
    result = run(user, spec)
    model, losses = ordinary_loop(user, spec)
    dense = result.model.state_dict()
    assert result.losses == losses
    assert all(torch.equal(value, model.get_parameter(name)) for name, value in dense.items())
    assert len(dense) == 4
    for name, (ids, values) in rows(result).items():
        expected = model.get_parameter(f"{name}.weight").detach().numpy()[ids]
        assert np.array_equal(values.view(np.int32), expected.view(np.int32))
        assert set(ids) == set(np.load(tmp_path / f"{name}.npy").ravel()) - (
            {0} if name == "genre" else set()
        )


def test_rows_follow_the_scheduler_where_their_table_says_so(tmp_path):
    step_lr = "def scheduler(optimizer): return torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.5)"
    follow = {
        "Adam(lr=0.01))": "Adam(lr=0.01, follow_schedule=True))",
        "Adagrad(lr=0.05)": "Adagrad(lr=0.05, follow_schedule=True)",
        "if __name__": f"{step_lr}\n\nif __name__",
    }
    user = load(script(tmp_path, **follow))
    spec = plain_spec(user, {})
    result = run(user, spec)
    model, losses = ordinary_loop(user, spec, scheduled=(0, 1, 3))  # not the bags
    assert result.losses == losses
    for name, (ids, values) in rows(result).items():
        expected = model.get_parameter(f"{name}.weight").detach().numpy()[ids]
        assert np.array_equal(values.view(np.int32), expected.view(np.int32))


def test_an_exported_model_gets_its_rows_in_plain_pytorch(tmp_path, capsys):
    path = script(tmp_path)
    user = load(path)
    out = str(tmp_path / "out")
    result = train("recommend", ["--export", out, "--set", "keep_best=loss:max", "--set", "evaluate_every=1"])
    printed = capsys.readouterr().out.splitlines()
    expected = [f"tables/{name}.safetensors" for name in ("genre", "item", "user")]
    for folder in (out, f"{out}/best"):
        assert [line for line in printed if line.startswith(f"{folder}/tables")] == [
            f"{folder}/{p}" for p in expected
        ]
    model, best = user.call("model"), user.call("model")
    for each, folder in ((model, out), (best, f"{out}/best")):
        each.load_state_dict(torch.load(f"{folder}/model.pt", weights_only=True))
        trireme.nn.load_tables(each, folder)
        each.eval()
    columns = ("user", "item", "genre", "label")
    batch = {name: torch.from_numpy(np.load(tmp_path / f"{name}.npy")) for name in columns}
    unseen = {**batch, "user": batch["user"] - 10**12}
    with torch.no_grad():
        for data in (batch, unseen):
            assert torch.equal(model(data), result.model.eval()(data))
        found = user.call("loss", best, batch).item()
    assert result.best is not None
    assert (result.best.step, found) == (1, pytest.approx(result.best.value, rel=1e-5))

    (saved,) = {Path(path).parent for path in trireme.nn.save_tables(model, tmp_path / "again")}
    assert [path.read_bytes() for path in sorted(saved.iterdir())] == [
        (Path(out) / p).read_bytes() for p in expected
    ]
    with pytest.raises(InvalidArgument, match=r"tables \(genre, item, user\) are not in this process"):
        trireme.nn.save_tables(user.call("model"), out)

    model.user = trireme.nn.Embedding("user", 8)
    with pytest.raises(InvalidArgument, match="holds the table user of dim 4, the model has user of dim 8"):
        trireme.nn.load_tables(model, out)
    model.user = trireme.nn.Embedding("other", 4)
    with pytest.raises(
        InvalidArgument, match=r"the table .*/tables/other.safetensors cannot be read: No such file"
    ):
        trireme.nn.load_tables(model, out)
    (Path(out) / "tables" / "other.safetensors").write_bytes((Path(out) / "model.safetensors").read_bytes())
    with pytest.raises(InvalidArgument, match=r"other\.safetensors is no table that Trireme exported"):
        trireme.nn.load_tables(model, out)


def test_files_hold_what_was_written_also_an_empty_table(tmp_path):
    user = load(script(tmp_path))
    result = run(user, plain_spec(user, {"epochs": 1}))
    for table in result.tables.stored():
        for kept in (table, dataclasses.replace(table, ids=table.ids[:0], values=table.values[:0])):
            (url,) = write_tables([kept], str(tmp_path)).values()
            found = read_table(url)
            assert (found.spec, found.version) == (kept.spec, 6)
            assert np.array_equal(found.ids, kept.ids)
            assert np.array_equal(found.values, kept.values)


NOT_FINITE = """
    def loss(model, batch):
        x = model.user(batch["user"])
        if x.requires_grad and RUINED in batch["user"]:
            x.register_hook(lambda gradient: gradient * float("nan"))
        return F.mse_loss(x.sum(1) + model.deep[3].bias, batch["label"])
"""


def test_rows_whose_gradient_is_not_finite_are_told_or_left_alone(tmp_path):
    ruined = int(np.bincount(np.load(script(tmp_path).parent / "user.npy")).argmax())  # in every minibatch
    path = script(tmp_path)
    text = path.read_text()
    path.write_text(text + textwrap.dedent(NOT_FINITE).replace("RUINED", str(ruined)))
    user = load(path)
    with pytest.raises(
        UserCodeError, match=r"NonFiniteError: the gradient of table user has .* of .* not finite"
    ):
        run(user, plain_spec(user, {}))
    said: list[str] = []
    skipped = run(user, plain_spec(user, {"on_nonfinite": "skip"}), said.append)
    assert sum("left out: the gradient of table user" in line for line in said) == skipped.steps == 12
    assert [(table.version, len(table.ids)) for table in skipped.tables.stored()] == [(12, 0)] * 3
    ignored = run(user, plain_spec(user, {"on_nonfinite": "ignore"}))
    assert np.isnan(rows(ignored)["user"][1]).any()


def test_a_backward_of_the_scripts_own_is_refused_for_rows_too(tmp_path):
    own = "def loss(model, batch):\n    model.user(batch['user']).sum().backward()\n"
    path = script(tmp_path)
    path.write_text(path.read_text() + own)
    user = load(path)
    with pytest.raises(UserCodeError, match=r"the script calls backward\(\) itself; return the loss"):
        run(user, plain_spec(user, {}))


OWN_LOOP = """
    if __name__ == "__main__":
        torch.manual_seed(5)
        net = model()
        net, steps, batches = trireme.prepare(net, optimizer(net), dataset())
        for batch in batches:
            steps.zero_grad()
            trireme.backward(loss(net, batch))
            steps.step()
        trireme.nn.save_tables(net, "{folder}/own")
"""


def test_a_loop_of_the_scripts_own_gives_the_same_rows(tmp_path, monkeypatch):
    path = script(tmp_path)
    user = load(path)
    result = run(user, plain_spec(user, {}))
    own = path.with_name("own.py")
    text = path.read_text()
    own.write_text(
        text[: text.index("if __name__")] + textwrap.dedent(OWN_LOOP).replace("{folder}", str(tmp_path))
    )
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(own), raising=False)
    monkeypatch.setattr(atexit, "register", lambda _: None)
    contextvars.copy_context().run(runpy.run_path, str(own), run_name="__main__")
    for table in result.tables.stored():
        found = read_table(str(tmp_path / "own" / "tables" / f"{table.spec.name}.safetensors"))
        assert np.array_equal(found.ids, table.ids)
        assert np.array_equal(found.values, table.values)


def test_the_check_of_a_script_tries_its_tables_and_tells_what_they_do_not_go_with(tmp_path, capsys):
    path = str(script(tmp_path))
    assert inspect_script(path, check=True, settings=[]) == 0
    capsys.readouterr()
    assert inspect_script(path, check=True, settings=["mode=async"]) == 0
    capsys.readouterr()
    assert inspect_script(path, check=True, settings=["mode=async", "skip_after_seconds=5"]) == 2
    told = "tables (genre, item, user), which do not go together with skip_after_seconds = 5.0 yet"
    assert told in capsys.readouterr().out
    assert inspect_script(path, check=True, settings=["strategy=collective"]) == 0
    capsys.readouterr()
    assert inspect_script(path, check=True, settings=["strategy=collective", "exchange=native"]) == 2
    told = "tables (genre, item, user), and exchange is native, which carries gradients of parameters alone"
    assert told in capsys.readouterr().out


def test_what_is_wrong_in_forward_is_an_error_of_the_script(tmp_path):
    path = script(tmp_path, **{'self.user(batch["user"])': 'self.user(batch["user"].float())'})
    user = load(path)
    with pytest.raises(
        UserCodeError, match=r"InvalidArgument: table user: got a tensor of torch\.float32"
    ) as caught:
        run(user, plain_spec(user, {}))
    assert "recommend.py" in caught.value.details["traceback"]
