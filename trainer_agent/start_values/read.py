"""Tensors by name from a file: safetensors, or what torch.save wrote of a state_dict. No code in the file is run."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from trireme_shared.platform.storage import files
from trireme_shared.protocol.errors import InvalidArgument

NESTED = ("state_dict", "model_state_dict", "model")  # where trainers of other frameworks put it
OPTIMIZER = ("optimizer", "optimizer_state_dict", "optimizer_states")
SCHEDULER = ("scheduler", "scheduler_state_dict", "lr_scheduler", "lr_schedulers")


@dataclass(frozen=True, slots=True)
class TrainingState:
    """What optimizer.state_dict() and scheduler.state_dict() gave; an empty `scheduler`: the file has none."""

    optimizer: Any
    scheduler: dict[str, Any]


def read_tensors(url: str) -> dict[str, torch.Tensor]:
    """In host memory. Raises InvalidArgument: there is no such file, or it holds something else."""
    content = _content(url)
    if url.endswith(".safetensors"):
        try:
            return load(content)
        except SafetensorError as error:
            raise InvalidArgument(f"init_from: {url} is no safetensors file: {error}") from error
    return _state_dict(url, content)


def _content(url: str) -> bytes:
    try:
        return files.read_bytes(url)
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError) as error:
        raise InvalidArgument(
            f"init_from: {url} cannot be read: {error.strerror or error}", hint="every member must see the file"
        ) from error


def read_training_state(url: str) -> TrainingState:
    """Beside the model's values, in host memory. Raises InvalidArgument."""
    found = {} if url.endswith(".safetensors") else _loaded(url, _content(url))
    optimizer = _one(found, OPTIMIZER) if isinstance(found, Mapping) else None
    if optimizer is None:
        raise InvalidArgument(
            f"init_optimizer: {url} has no state of an optimizer",
            hint='give a job (--init-from JOB[@STEP]), or a file of torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)',
        )
    return TrainingState(optimizer, dict(_one(found, SCHEDULER) or {}))


def _one(found: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    """Lightning has lists of them."""
    for name in names:
        if value := found.get(name):
            return value[0] if isinstance(value, list) and len(value) == 1 else value
    return None


def _state_dict(url: str, content: bytes) -> dict[str, torch.Tensor]:
    found = _loaded(url, content)
    for key in NESTED:
        if isinstance(found, dict) and isinstance(found.get(key), dict):
            found = found[key]
            break
    if not isinstance(found, dict):
        raise InvalidArgument(f"init_from: {url} holds a {type(found).__name__}", hint="a state_dict is needed")
    tensors = {str(name): value for name, value in found.items() if isinstance(value, torch.Tensor)}
    if not tensors:
        raise InvalidArgument(f"init_from: {url} holds no tensors", hint="a state_dict is needed")
    return tensors


def _loaded(url: str, content: bytes) -> Any:
    try:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file may raise anything
        raise InvalidArgument(
            f"init_from: {url} cannot be read as a state_dict: {str(error).splitlines()[0] if str(error) else type(error).__name__}",
            hint="save it with torch.save(model.state_dict(), path), or as safetensors; objects that need code are not loaded",
        ) from error
