"""The device that a trainer computes on: the CPU, or one GPU for each trainer of a host.

    trainer-0, trainer-1, trainer-2 on a host with two GPUs ─► cuda:0, cuda:1, cuda:0

GPUs are those that CUDA_VISIBLE_DEVICES leaves, in its order. `precision = "bf16"`: forward, loss and
evaluation run under torch.autocast; parameters, gradients and optimizer stay float32.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import sys
from collections.abc import Mapping, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from trireme_shared.protocol.errors import InvalidArgument
from trireme_shared.protocol.records.job_choices import Precision

HOST = torch.device("cpu")


def device_of(name: str, *, deterministic: bool, number: int = 0) -> torch.device:
    """The device of the trainer with this number on its host, for `device = name`. It becomes the calling
    thread's current one, so that the user's `.cuda()` means the same. Raises InvalidArgument for `cuda` on a
    machine without a GPU. `deterministic`: see `use_deterministic_kernels`."""
    if name == "cuda" and not torch.cuda.is_available():
        raise InvalidArgument(
            "device is cuda, but torch finds no GPU",
            hint="use device auto or cpu; a job that was initialised on a GPU needs one in every trainer",
        )
    if name == "cpu" or not torch.cuda.is_available():
        return HOST
    if deterministic:
        use_deterministic_kernels()
    device = torch.device("cuda", number % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def number_of(member: str) -> int:
    """The number at the end of a trainer's name, as the launcher gives it: `trainer-3` -> 3. Others: 0."""
    number = member.rpartition("-")[2]
    return int(number) if number.isascii() and number.isdigit() else 0


def is_host(device: torch.device) -> bool:
    """Whether pushes and pulls can use its memory. That of a GPU is copied, a whole vector at a time."""
    return device.type == "cpu"


def use_deterministic_kernels() -> None:
    """In this process, for CUDA: cuDNN, cuBLAS, and the scatters and index backwards that otherwise add in
    any order. What has no such kernel raises RuntimeError. Call it before the GPU is first used."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    torch.use_deterministic_algorithms(True)
    settings: Any = torch.utils.deterministic
    settings.fill_uninitialized_memory = False  # only a help to find errors, and it costs time


def compile_each_shape_alone() -> None:
    """In this process, for torch.compile, which by itself makes one kernel for all shapes of batches when it
    has met a second one, and stops compiling when it has met many: the kernel of a batch, and with it the
    last bits, would depend on which batches this process has met before. Here each shape has a kernel of its
    own, and too many raise FailOnRecompileLimitHit. Call it when the model is made: that loads the
    compiler, as a rule."""
    os.environ["TORCH_DYNAMO_AUTOMATIC_DYNAMIC_SHAPES"] = "0"  # is read when it is loaded
    config: Any = sys.modules.get("torch._dynamo.config")
    if config is not None:
        config.automatic_dynamic_shapes, config.fail_on_recompile_limit_hit = False, True


def check_precision(precision: Precision, model: nn.Module, device: torch.device) -> None:
    """Raises InvalidArgument: the model or the device can do nothing with it."""
    if precision == "fp32":
        return
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    if torch.float32 not in dtypes:
        found = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise InvalidArgument(
            "precision is bf16, which computes with float32 parameters in bfloat16, and those of "
            f"the model are {found}",
            hint="leave precision out, or build the model in float32",
        )
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise InvalidArgument(
            f"precision is bf16, and {torch.cuda.get_device_name(device)} has no bfloat16",
            hint="use precision fp32, or a GPU from Ampere (compute capability 8.0) on",
        )


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[Any]:
    """Around one forward pass with its loss. Weights are cast once in it; what it leaves is backward's, in
    the same dtypes."""
    return torch.autocast(device.type, dtype=torch.bfloat16) if precision == "bf16" else nullcontext()


def on_device(batch: Any, device: torch.device) -> Any:
    """`batch` with its tensors on `device`, in containers of the same kinds: lists, tuples, named tuples,
    dataclasses, mappings, and objects that have their own `to(device)`. Other objects are left alone."""
    match batch:
        case torch.Tensor():
            return batch.to(device, non_blocking=True)
        case _ if callable(getattr(batch, "to", None)) and not isinstance(batch, type):
            return batch.to(device)
        case Mapping():
            return _like(batch, {name: on_device(value, device) for name, value in batch.items()})
        case tuple() if hasattr(batch, "_make"):
            return batch._make(on_device(value, device) for value in batch)
        case tuple() | list():
            return type(batch)(on_device(value, device) for value in batch)
        case _ if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
            moved = copy.copy(batch)
            for field in dataclasses.fields(batch):
                # also if frozen
                object.__setattr__(moved, field.name, on_device(getattr(batch, field.name), device))
            return moved
    return batch


def _like(batch: Mapping[Any, Any], values: dict[Any, Any]) -> Mapping[Any, Any]:
    """`values`, which have the keys of `batch`, in a mapping of its kind. A mapping that cannot be written
    becomes a dict."""
    if type(batch) is dict or not isinstance(batch, MutableMapping):
        return values
    moved = copy.copy(batch)
    for name, value in values.items():
        moved[name] = value
    return moved
