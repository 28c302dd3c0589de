"""Tensors by name from a file: safetensors, or what torch.save wrote of a state_dict. No code in the file is run."""

from __future__ import annotations

import io

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from shared.errors import InvalidArgument
from shared.storage import files

NESTED = ("state_dict", "model_state_dict", "model")  # where trainers of other frameworks put it


def read_tensors(url: str) -> dict[str, torch.Tensor]:
    """In host memory. Raises InvalidArgument: there is no such file, or it holds something else."""
    try:
        content = files.read_bytes(url)
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError) as error:
        raise InvalidArgument(
            f"init_from: {url} cannot be read: {error.strerror or error}", hint="every member must see the file"
        ) from error
    if url.endswith(".safetensors"):
        try:
            return load(content)
        except SafetensorError as error:
            raise InvalidArgument(f"init_from: {url} is no safetensors file: {error}") from error
    return _state_dict(url, content)


def _state_dict(url: str, content: bytes) -> dict[str, torch.Tensor]:
    try:
        found = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file may raise anything
        raise InvalidArgument(
            f"init_from: {url} cannot be read as a state_dict: {str(error).splitlines()[0] if str(error) else type(error).__name__}",
            hint="save it with torch.save(model.state_dict(), path), or as safetensors; objects that need code are not loaded",
        ) from error
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
