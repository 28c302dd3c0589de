"""The trained model as files that plain PyTorch loads: `model.safetensors` and `model.pt`, whole or not there."""

from __future__ import annotations

import torch
from safetensors.torch import save
from torch import nn

from trireme_shared.platform.storage import files


def write_model(model: nn.Module, directory: str) -> dict[str, str]:
    """Names and values of `model.state_dict()`; kind -> URL. A retry overwrites with the same bytes."""
    state = {
        name: value.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, value in model.state_dict().items()
        if isinstance(value, torch.Tensor)
    }
    urls = {
        "safetensors": files.join(directory, "model.safetensors"),
        "state_dict": files.join(directory, "model.pt"),
    }
    files.write_bytes(urls["safetensors"], save(state))
    with files.write_atomic(urls["state_dict"]) as file:
        torch.save(state, file)
    return urls
