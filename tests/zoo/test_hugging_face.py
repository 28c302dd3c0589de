"""docs/huggingface.md: models of transformers and adapters of PEFT as people bring them, made here, offline:
the bits of plain PyTorch, and files as their libraries save them; what TrainingArguments are called."""

from __future__ import annotations

import dataclasses
import json
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.equipment.accelerate_state import forget_accelerators
from tests.tidy.sources import ROOT
from tests.trainer_agent.cluster import cluster, trained_in
from tests.trainer_agent.collective.cluster import cluster as collective_cluster
from tests.trainer_agent.scripts import spec_for
from trainer_agent.model.torch_compute import write_model
from trainer_agent.script.user_module import load
from trainer_agent.start_values import load_start_values
from trireme.plain import run
from trireme.settings import SETTINGS
from trireme_shared.protocol.errors import InvalidArgument, UserCodeError
from trireme_shared.protocol.records import JobSpec
from trireme_shared.protocol.records.datasets import Npy

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of their imports
    import peft
    import transformers
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

#: Of transformers, about names that peft uses.
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
PAGE = (ROOT / "docs" / "huggingface.md").read_text(encoding="utf-8")
HEAD = """
from pathlib import Path

import torch, trireme, transformers, peft
from transformers import GPT2LMHeadModel

HERE = Path(__file__).parent

def dataset():
    return trireme.data.Npy(str(HERE / "ids.npy"))

def loss(model, batch):
    return model(input_ids=batch["ids"], labels=batch["ids"]).loss
"""
PRETRAINED = """
def model():
    return GPT2LMHeadModel.from_pretrained(HERE / "tiny")

def optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)
"""
ADAPTED = """
def model():
    base = GPT2LMHeadModel.from_pretrained(HERE / "tiny")
    return peft.get_peft_model(base, peft.LoraConfig(target_modules=["c_attn"], r=2, fan_in_fan_out=True))

def optimizer(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
"""
#: The arguments of ARGUMENTS, as docs/huggingface.md says it.
AS_ARGUMENTS = """
def model():
    return GPT2LMHeadModel.from_pretrained(HERE / "tiny")

def optimizer(model):
    decays = [p for n, p in model.named_parameters() if p.dim() > 1]
    others = [p for n, p in model.named_parameters() if p.dim() < 2]
    groups = [{"params": decays, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.99), eps=1e-7)

def scheduler(optimizer):
    return transformers.get_scheduler("linear", optimizer, 2, trireme.total_steps())

config = trireme.Config(epochs=2, global_batch_size=4, shuffle=False)
"""
ARGUMENTS = {
    "per_device_train_batch_size": 4, "num_train_epochs": 2, "learning_rate": 1e-2, "weight_decay": 0.1,
    "adam_beta1": 0.8, "adam_beta2": 0.99, "adam_epsilon": 1e-7, "optim": "adamw_torch",
    "lr_scheduler_type": "linear", "warmup_steps": 2, "max_grad_norm": 0.0, "use_cpu": True,
    "train_sampling_strategy": "sequential", "report_to": "none", "save_strategy": "no", "disable_tqdm": True,
    "logging_strategy": "no", "remove_unused_columns": False,
}  # fmt: skip
NEITHER = ("compute_metrics", "EarlyStoppingCallback")  # arguments of Trainer itself


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A folder with a model of two tied weights, and records of tokens beside it."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    GPT2LMHeadModel(GPT2Config(**sizes, **off)).save_pretrained(tmp_path / "tiny")
    np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(0, 32, (18, 8)))
    return tmp_path


def script_in(folder: Path, text: str) -> Path:
    path = folder / "script_hugging.py"
    path.write_text(HEAD + text)
    return path


def spec_of(script: Path, **values: object) -> JobSpec:
    chosen = {"global_batch_size": 4, "shuffle": False, "records_per_task": 18, **values}
    return spec_for(script, dataset=Npy(str(script.parent / "ids.npy")), **chosen)


def plainly(script: Path, spec: JobSpec) -> torch.nn.Module:
    user = load(script)
    torch.set_num_threads(1)
    torch.manual_seed(spec.seed)
    model = user.call("model")
    optimizer = user.call("optimizer", model)
    ids = torch.from_numpy(np.load(script.parent / "ids.npy"))
    for _ in range(spec.epochs):
        for batch in ids.split(spec.global_batch_size):
            optimizer.zero_grad()
            user.call("loss", model.train(), {"ids": batch}).backward()
            optimizer.step()
    return model


def contents(folder: Path) -> dict[str, object]:
    """Of the files, by name; without what peft tells people."""
    found = {}
    for file in folder.iterdir():
        if file.name != "README.md":
            found[file.name] = json.loads(file.read_text()) if file.suffix == ".json" else file.read_bytes()
    return found


async def test_a_pretrained_model_has_the_bits_of_plain_pytorch_and_is_saved_as_by_its_library(tiny: Path):
    script = script_in(tiny, PRETRAINED)
    spec = spec_of(script)
    state, _ = await trained_in(cluster, spec)
    plain = plainly(script, spec)
    assert list(state) == list(plain.state_dict())
    assert [n for n, v in plain.state_dict().items() if not torch.equal(v, state[n])] == []
    assert torch.equal(state["lm_head.weight"], state["transformer.wte.weight"])
    plain.save_pretrained(tiny / "theirs")
    ours = tiny / "storage" / "export" / "pretrained"
    assert contents(ours) == contents(tiny / "theirs")
    assert not list(ours.parent.glob(".pretrained*"))
    again = GPT2LMHeadModel.from_pretrained(ours)
    assert torch.equal(again.lm_head.weight, state["lm_head.weight"])
    # the file has one of the tied weights
    started = GPT2LMHeadModel.from_pretrained(tiny / "tiny")
    told = load_start_values(started, spec.with_fields(init_from=str(ours / "model.safetensors")))
    assert told.sentence == ""
    assert torch.equal(started.lm_head.weight, state["lm_head.weight"])


async def test_adapters_are_saved_as_adapters(tiny: Path):
    script = script_in(tiny, ADAPTED)
    spec = spec_of(script, strategy="collective", pservers=0)
    state, _ = await trained_in(collective_cluster, spec)
    plain = plainly(script, spec)
    assert [n for n, v in plain.state_dict().items() if not torch.equal(v, state[n])] == []
    plain.save_pretrained(tiny / "theirs")
    ours = tiny / "storage" / "export" / "adapter"
    assert contents(ours) == contents(tiny / "theirs")
    assert {"adapter_model.safetensors", "adapter_config.json"} == contents(ours).keys()
    base = GPT2LMHeadModel.from_pretrained(tiny / "tiny")
    ids = torch.arange(8)[None]
    with torch.no_grad():
        before = base(ids).logits
        adapted = peft.PeftModel.from_pretrained(base, str(ours)).eval()
        assert torch.equal(adapted(ids).logits, plain.eval()(ids).logits)
        assert not torch.equal(adapted(ids).logits, before)


def test_a_part_of_a_model_is_saved_below_its_name(tiny: Path):
    class Head(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = GPT2LMHeadModel.from_pretrained(tiny / "tiny")
            self.head = torch.nn.Linear(32, 2)

    found = write_model(torch.nn.DataParallel(Head()), f"memory://{tiny.name}")
    assert found["pretrained.body"] == f"memory://{tiny.name}/pretrained/body"
    found = write_model(Head(), str(tiny / "out"))
    assert found["pretrained.body"] == str(tiny / "out" / "pretrained" / "body")
    again = GPT2LMHeadModel.from_pretrained(found["pretrained.body"])
    assert isinstance(again, GPT2LMHeadModel)


def test_a_model_that_its_library_cannot_save_is_left_out(tiny: Path):
    class Broken(GPT2LMHeadModel):
        def save_pretrained(self, *_: object, **__: object) -> None:
            raise ValueError("quantized")

    broken = Broken.from_pretrained(tiny / "tiny")
    assert list(write_model(broken, str(tiny / "out"))) == ["safetensors", "state_dict"]
    assert sorted(path.name for path in (tiny / "out").iterdir()) == ["model.pt", "model.safetensors"]


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ('"nobody/nothing", local_files_only=True', "are not in the cache of this host"),
        ('HERE / "missing"', "no folder that this host has"),
    ],
)
def test_files_that_are_nowhere_are_one_sentence_with_the_line_that_asks(tiny: Path, asked: str, told: str):
    line = f"return GPT2LMHeadModel.from_pretrained({asked})"
    script = script_in(
        tiny, PRETRAINED.replace('return GPT2LMHeadModel.from_pretrained(HERE / "tiny")', line)
    )
    with pytest.raises(UserCodeError) as raised:
        load(script).call("model")
    number = script.read_text().splitlines().index(f"    {line}") + 1
    assert f"`{line}` (line {number} of script_hugging.py)" in raised.value.message
    assert told in raised.value.message
    assert raised.value.details["traceback"] == ""


def test_arguments_of_trainer_have_their_places(tiny: Path, monkeypatch: pytest.MonkeyPatch):
    forget_accelerators(monkeypatch)
    script = script_in(tiny, AS_ARGUMENTS)
    ours = run(load(script), spec_of(script, **load(script).config))
    ids = torch.from_numpy(np.load(tiny / "ids.npy"))
    theirs = Trainer(
        GPT2LMHeadModel.from_pretrained(tiny / "tiny"),
        TrainingArguments(output_dir=str(tiny / "trainer"), **ARGUMENTS),
        train_dataset=[{"input_ids": row, "labels": row} for row in ids],
        data_collator=lambda rows: {name: torch.stack([row[name] for row in rows]) for name in rows[0]},
    )
    theirs.model_accepts_loss_kwargs = False
    theirs.train()
    state = theirs.model.state_dict()
    for name, value in ours.model.state_dict().items():
        torch.testing.assert_close(value, state[name], rtol=1e-5, atol=1e-6)
    with pytest.raises(InvalidArgument, match=r"makes an accelerate.Accelerator\(\)"):  # Trainer has made one
        load(script)


def test_each_row_names_arguments_and_settings_that_are_there():
    table = PAGE.partition("| `TrainingArguments` | here |\n|---|---|\n")[2].partition("\n\n")[0]
    theirs = {field.name for field in dataclasses.fields(TrainingArguments)}
    for row in table.splitlines():
        left, right = row.strip("| ").split(" | ")
        for name in re.findall(r"`(\w+)`", left):
            assert name in theirs or name in NEITHER or hasattr(transformers, name), row
        for name in re.findall(r"`(\w+)(?:=[^`(]*)?`", right):
            assert name in SETTINGS or name in ("bf16", "GradScaler", "loss"), row
