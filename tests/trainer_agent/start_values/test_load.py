"""`init_from`: a job starts with the values in a file; frozen ones reach every trainer, and later ones take
the job's own copy."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.trainer_agent.cluster import cluster, trained
from tests.trainer_agent.scripts import differing, spec_for, write_script
from trainer_agent.membership.lease import check_layout
from trainer_agent.script.user_module import load
from trainer_agent.start_values import start_values
from trireme.plain import run
from trireme_shared.protocol.errors import InvalidArgument, LayoutMismatch
from trireme_shared.protocol.records import Phase

MODEL = (
    "def model():\n"
    "    return nn.Sequential(nn.Linear(5, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 3))\n"
)
FROZEN = MODEL.replace("return", "net =") + "    net[0].requires_grad_(False)\n    return net\n"
REST = "def optimizer(model):\n    return torch.optim.SGD(model[1:].parameters(), lr=0.1, momentum=0.9)\n"


def other_values(script: Path) -> dict[str, torch.Tensor]:
    torch.manual_seed(99)
    state = load(script).call("model").state_dict()
    return {name: value.clone() for name, value in state.items()}


def saved(script: Path, name: str = "start.safetensors", **changes: torch.Tensor | None) -> str:
    values = {**other_values(script), **{key.replace("__", "."): value for key, value in changes.items()}}
    kept = {key: value for key, value in values.items() if value is not None}
    path = script.parent / name
    if name.endswith(".safetensors"):
        save_file(kept, path)
    else:
        torch.save({"state_dict": kept}, path)
    return str(path)


@pytest.mark.parametrize("model", [MODEL, FROZEN], ids=["all", "frozen"])
@pytest.mark.parametrize("name", ["start.safetensors", "start.pt"])
async def test_one_lane_has_the_bits_of_plain_training(tmp_path, model, name):
    script = write_script(tmp_path, model=model)
    spec = spec_for(script, init_from=saved(script, name), pservers=2)
    plain = dict(run(load(script), spec).model.state_dict())
    assert differing(await trained(spec, trainers=2), plain) == []
    assert differing(dict(run(load(script), spec_for(script)).model.state_dict()), plain) != []
    first = torch.equal(plain["0.weight"], other_values(script)["0.weight"])
    assert first == (model is FROZEN)


async def test_a_trainer_that_comes_later_needs_no_file(tmp_path):
    """Without the copy it would have other frozen parameters."""
    script = write_script(tmp_path, model=FROZEN, optimizer=REST)
    spec = spec_for(script, init_from=saved(script))
    user = load(script)
    digest = start_values(user.call("model"), spec).digest
    Path(str(spec.init_from)).unlink()
    later = user.call("model")
    assert start_values(later, spec, digest).digest == digest
    assert differing(later.state_dict(), other_values(script)) == []
    with pytest.raises(InvalidArgument, match="cannot be read"):
        start_values(user.call("model"), spec)
    copy = tmp_path / "storage" / "initial" / f"{digest}.safetensors"
    save_file({name: value + 1 for name, value in other_values(script).items()}, copy)
    with pytest.raises(InvalidArgument, match="was changed"):
        start_values(user.call("model"), spec, digest)


async def test_a_file_that_changes_while_the_job_begins_is_noticed(tmp_path):
    script = write_script(tmp_path, model=FROZEN, optimizer=REST)
    spec = spec_for(script, init_from=saved(script))
    async with cluster(spec) as made:
        made.add_trainer("trainer-0-x")
        saved(script, **{"0__bias": torch.ones(24)})
        made.add_trainer("trainer-1-x")
        mine, job = made.computes["trainer-1-x"].layout, made.computes["trainer-0-x"].layout
        with pytest.raises(LayoutMismatch, match="the file was changed"):
            check_layout(mine, job)
        outcomes = [await made.running[name] for name in made.running]
        assert sum(isinstance(outcome, LayoutMismatch) for outcome in outcomes) == 1
        assert (await made.ended()).phase is Phase.COMPLETED


def test_what_does_not_fit_is_named_and_partial_leaves_it_out(tmp_path):
    script = write_script(tmp_path, model=MODEL)
    changes = {"3__weight": torch.zeros(7, 24), "3__bias": None, "extra": torch.zeros(2)}
    path = saved(script, **changes)
    user = load(script)
    torch.manual_seed(1)
    model = user.call("model")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(InvalidArgument) as refused:
        start_values(model, spec_for(script, init_from=path))
    assert "the file lacks 1: 3.bias; the model lacks 1: extra" in refused.value.message
    assert "1: 3.weight (float32 [7, 24], the model has float32 [3, 24])" in refused.value.message
    assert "--init-partial (init_partial = true) leaves out" in refused.value.hint
    with pytest.raises(InvalidArgument) as refused:
        start_values(model, spec_for(script, init_from=path).model_copy(update={"init_optimizer": True}))
    assert "without it --init-partial leaves out" in refused.value.hint, "the two cannot be set together"
    assert differing(model.state_dict(), before) == []
    started = start_values(model, spec_for(script, init_from=path, init_partial=True))
    assert "7 of the model's 9 tensors" in started.sentence
    assert "3.bias" in started.sentence
    changed = set(differing(model.state_dict(), before))
    assert "0.weight" in changed
    assert changed.isdisjoint({"3.weight", "3.bias"})


def test_a_file_with_nothing_of_the_model_is_refused_with_the_first_names_and_counts(tmp_path):
    script = write_script(tmp_path, model=MODEL)
    save_file({f"module.{n}": torch.zeros(1) for n in range(14)}, tmp_path / "wrong.safetensors")
    spec = spec_for(script, init_from=str(tmp_path / "wrong.safetensors"), init_partial=True)
    with pytest.raises(InvalidArgument, match=r"the model lacks 14: .* and 4 more"):
        start_values(load(script).call("model"), spec)


class Harmful:
    def __reduce__(self):
        return (Path.touch, (Path("harmed"),))


def test_no_code_in_a_file_is_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = write_script(tmp_path, model=MODEL)
    (tmp_path / "bad.pt").write_bytes(pickle.dumps({"0.weight": Harmful()}, protocol=2))
    torch.save({"0.weight": Harmful()}, tmp_path / "zipped.pt")
    for name in ("bad.pt", "zipped.pt"):
        with pytest.raises(InvalidArgument, match="cannot be read as a state_dict"):
            start_values(load(script).call("model"), spec_for(script, init_from=str(tmp_path / name)))
    assert not (tmp_path / "harmed").exists()
