"""What a library of Hugging Face saves of its models, beside our own files of a model: what `save_pretrained`
writes, so that `from_pretrained` and PEFT find it.

    transformers.PreTrainedModel  ─►  pretrained/   config.json, model.safetensors, ...
    peft.PeftModel                ─►  adapter/      adapter_config.json, adapter_model.safetensors

A model that has such a model as a part (a LightningModule, a head of one's own around it) gets a folder with
the part's name below. Neither library is imported here: whoever has such a model has loaded it.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer_agent.start_values import place_of, without_wrappers
from trireme_shared.platform.runtime import telemetry
from trireme_shared.platform.storage import files

ADAPTER = "adapter"  # small beside its base, which is not copied
#: Module and class of the models, and the folder of what they save. A PeftModel has a PreTrainedModel within.
LIBRARIES = (
    ("peft.peft_model", "PeftModel", ADAPTER),
    ("transformers.modeling_utils", "PreTrainedModel", "pretrained"),
)
BEGUN = ".pretrained-"  # what a folder of a write under way begins with
log = telemetry.logger("pretrained")


def write_pretrained(model: nn.Module, directory: str) -> dict[str, str]:
    """Write what the models in `model` save below `directory` (path or fsspec URL); kind -> URL of the
    folder. A retry overwrites with the same bytes. One that its library cannot save is left out, and logged.
    Raises OSError."""
    urls = {}
    for path, part, kind in _models_in(model):
        names = (kind, *filter(None, path.split(".")))
        url = files.join(directory, *names)
        if _write(part, kind, url, directory):
            urls[".".join(names)] = url
    return urls


def _models_in(model: nn.Module) -> Iterator[tuple[str, Any, str]]:
    """Name, model and kind of those that are in no other one. Wrappers of torch are not in the name."""
    known = [
        (getattr(sys.modules[module], name), kind)
        for module, name, kind in LIBRARIES
        if module in sys.modules
    ]
    if not known:
        return
    found: list[str] = []
    for path, part in model.named_modules():
        if any(not outer or path.startswith(f"{outer}.") for outer in found):
            continue
        kind = next((kind for library, kind in known if isinstance(part, library)), None)
        if kind is not None:
            found.append(path)
            (name,) = without_wrappers(model, {f"{path}.{kind}".lstrip("."): None})
            yield name.removesuffix(kind).rstrip("."), part, kind


def _write(part: Any, kind: str, url: str, directory: str) -> bool:
    local = files.local_path(directory)
    if local is not None:  # a trainer that died here has left one
        for left in local.glob(f"{BEGUN}*"):
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=BEGUN, dir=local) as made:
        folder = Path(made)
        try:
            part.save_pretrained(folder, **({} if kind == ADAPTER else {"state_dict": _state_of(part)}))
        except Exception as error:  # noqa: BLE001  the library, or code of the model, may raise anything
            log.warning("pretrained_not_exported", folder=url, cause=f"{type(error).__name__}: {error}")
            return False
        for file in sorted(each for each in folder.rglob("*") if each.is_file()):
            name = files.join(url, *file.relative_to(folder).parts)
            with files.write_atomic(name) as copy, file.open("rb") as source:
                shutil.copyfileobj(source, copy)
    return True


def _state_of(part: nn.Module) -> dict[str, torch.Tensor]:
    """Copies in host memory, each with memory of its own; tied names share it, as they do in the model."""
    copies: dict[tuple[Any, ...], torch.Tensor] = {}
    state = {}
    for name, value in part.state_dict().items():
        if isinstance(value, torch.Tensor):
            key = place_of(value)
            if key not in copies or not value.numel():
                copies[key] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
            state[name] = copies[key]
    return state
