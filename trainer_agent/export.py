"""The trained model as files that plain PyTorch loads: `model.safetensors` and `model.pt`, whole or not there.

state_dict ──copy──► bytes ──write──► name.partial ──fsync, rename──► name
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, BinaryIO

import fsspec
import torch
from fsspec.implementations.local import LocalFileSystem
from safetensors.torch import save
from torch import nn


def write_model(model: nn.Module, directory: str) -> dict[str, str]:
    """Names and values of `model.state_dict()`; kind -> URL. A retry overwrites with the same bytes."""
    state = {
        name: value.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, value in model.state_dict().items()
        if isinstance(value, torch.Tensor)
    }
    return {
        "safetensors": _write(directory, "model.safetensors", lambda file: file.write(save(state))),
        "state_dict": _write(directory, "model.pt", lambda file: torch.save(state, file)),
    }


def _write(directory: str, name: str, fill: Callable[[BinaryIO], Any]) -> str:
    filesystem, path = fsspec.core.url_to_fs(directory)
    filesystem.makedirs(path, exist_ok=True)
    final = f"{path.rstrip('/')}/{name}"
    if not isinstance(filesystem, LocalFileSystem):
        with filesystem.open(final, "wb") as file:  # object stores show a file when it is closed, whole
            fill(file)
        return str(filesystem.unstrip_protocol(final))
    partial = f"{final}.partial-{os.getpid()}"
    with open(partial, "wb") as local:  # noqa: PTH123  fsspec's local path
        fill(local)
        local.flush()
        os.fsync(local.fileno())
    os.replace(partial, final)  # noqa: PTH105
    return final
