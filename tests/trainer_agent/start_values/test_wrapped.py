"""What DataParallel and torch.compile put before the names of a model: files with it fit a model without it
and the other way round, and no export has it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from tests.trainer_agent.cluster import trained
from tests.trainer_agent.scripts import differing, spec_for, write_script
from trainer_agent.model.block_states import write_training
from trainer_agent.model.torch_compute import write_model
from trainer_agent.script.user_module import load
from trainer_agent.start_values import load_state
from trireme.plain import run
from trireme_shared.protocol.errors import InvalidArgument


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


class Own(nn.Module):
    """Its part is called `module`, as that of DataParallel is."""

    def __init__(self) -> None:
        super().__init__()
        self.module = net()


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = compiled(net()), nn.DataParallel(nn.Linear(4, 2))


def bare_parts() -> set[str]:
    return {f"encoder.{name}" for name in net().state_dict()} | {"head.weight", "head.bias"}


WRAPPED = {
    "parallel": lambda: nn.DataParallel(net()),
    "compiled": lambda: compiled(net()),
    "both": lambda: nn.DataParallel(compiled(net())),
    "both_otherwise": lambda: compiled(nn.DataParallel(net())),
}


@pytest.mark.parametrize("wrapped", WRAPPED.values(), ids=WRAPPED)
def test_a_file_with_prefixes_fits_a_model_without_them_and_the_other_way_round(wrapped) -> None:
    model = wrapped()
    values = {name: torch.full_like(value, 3) for name, value in model.state_dict().items()}
    loaded = net()
    assert not values.keys() & loaded.state_dict().keys()
    load_state(loaded, values, "begun.pt")
    assert all(bool((value == 3).all()) for value in loaded.state_dict().values())
    load_state(model, loaded.state_dict(), "bare.pt")
    assert differing(model.state_dict(), values) == []


@pytest.mark.parametrize("wrapped", WRAPPED.values(), ids=WRAPPED)
def test_no_export_has_prefixes(tmp_path: Path, wrapped) -> None:
    model = wrapped()
    paths = write_model(model, str(tmp_path))
    names = net().state_dict().keys()
    assert load_file(paths["safetensors"]).keys() == names
    assert torch.load(paths["state_dict"], weights_only=True).keys() == names
    training = write_training(
        str(tmp_path / "training.pt"), model, torch.optim.SGD(model.parameters(), lr=1), None
    )
    assert torch.load(training, weights_only=True)["model"].keys() == names


def test_parts_that_are_wrapped_and_names_that_only_look_so(tmp_path: Path) -> None:
    assert load_file(write_model(Parts(), str(tmp_path))["safetensors"]).keys() == bare_parts()
    own = Own()
    paths = write_model(own, str(tmp_path / "own"))
    assert load_file(paths["safetensors"]).keys() == own.state_dict().keys(), "the script's own name stays"
    load_state(net(), load_file(paths["safetensors"]), "own.pt")


def test_two_tensors_for_one_name_are_refused() -> None:
    values = net().state_dict() | {
        f"_orig_mod.{name}": value + 1 for name, value in net().state_dict().items()
    }
    with pytest.raises(InvalidArgument, match=r"the model lacks 7: _orig_mod\.0\.weight"):
        load_state(net(), values, "two.pt")


def test_the_file_says_that_it_is_of_pytorch(tmp_path: Path) -> None:
    """transformers loads no other."""
    with safe_open(write_model(net(), str(tmp_path))["safetensors"], "pt") as file:
        assert file.metadata() == {"format": "pt"}


async def test_a_job_begins_with_a_compiled_models_file_and_exports_bare_names(tmp_path: Path) -> None:
    script = write_script(tmp_path)
    torch.manual_seed(99)
    begun = {
        f"module._orig_mod.{name}": value.clone()
        for name, value in load(script).call("model").state_dict().items()
    }
    save_file(begun, tmp_path / "start.safetensors")
    save_file(
        {name.removeprefix("module._orig_mod."): value for name, value in begun.items()},
        tmp_path / "bare.safetensors",
    )
    spec = spec_for(script, init_from=str(tmp_path / "start.safetensors"))
    plain = run(load(script), spec_for(script, init_from=str(tmp_path / "bare.safetensors")))
    assert differing(await trained(spec), dict(plain.model.state_dict())) == []
