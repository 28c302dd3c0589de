"""Tensors of a model that share memory: laying parameters out end to end would take them apart, so each would be trained by itself.

b.weight = a.weight                  one parameter, which two modules have: trained once
b.weight.data = a.weight.data        two parameters in one memory: refused
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from trireme_shared.protocol.errors import InvalidArgument


def check_storage(model: nn.Module, trained: Mapping[str, nn.Parameter]) -> None:
    """Raises InvalidArgument if a parameter of `trained` shares memory with another tensor of the model, or has elements in the same place."""
    for name, parameter in trained.items():
        if not nn.parameter.is_lazy(parameter) and _overlaps_itself(parameter):
            raise InvalidArgument(
                f"elements of the parameter {name} share memory (shape {tuple(parameter.shape)}, strides {parameter.stride()})",
                hint="make it of a tensor with memory of its own: nn.Parameter(values.clone())",
            )
    places: dict[int, list[tuple[str, str, torch.Tensor]]] = defaultdict(list)
    for kind, name, tensor in _tensors(model):
        if tensor.layout == torch.strided and not tensor.is_meta and tensor.numel():
            places[tensor.untyped_storage().data_ptr()].append((kind, name, tensor))
    for members in places.values():
        for number, (_, name, tensor) in enumerate(members):
            if name not in trained or tensor is not trained[name]:
                continue
            others = (member for k, member in enumerate(members) if k != number and _share(tensor, member[2]))
            for kind, other, _ in others:
                raise InvalidArgument(f"the parameter {name} shares memory with the {kind} {other}", hint=_HINTS[kind])


_HINTS = {
    "parameter": "to train both as one, give the module the parameter itself (b.weight = a.weight); else clone() its values",
    "buffer": "give the buffer memory of its own: register_buffer(name, parameter.detach().clone())",
    "attribute": "compute it in forward from the parameter, or clone() it",
}


def _tensors(model: nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    """(kind, name, tensor) of each parameter, buffer and plain attribute."""
    for name, parameter in model.named_parameters():
        if not nn.parameter.is_lazy(parameter):
            yield "parameter", name, parameter
    for name, buffer in model.named_buffers():
        yield "buffer", name, buffer
    known = {id(parameter) for parameter in model.parameters()}
    for path, module in model.named_modules():
        if module._forward_pre_hooks:  # noqa: SLF001  they compute such attributes (spectral_norm)
            continue
        for name, value in vars(module).items():
            found = value if isinstance(value, list | tuple) else value.values() if type(value) is dict else [value]
            if not name.startswith("_"):
                yield from (("attribute", f"{path}.{name}".lstrip("."), each) for each in _plain(found, known))


def _plain(values: Iterable[object], known: set[int]) -> Iterator[torch.Tensor]:
    return (each for each in values if isinstance(each, torch.Tensor) and id(each) not in known)


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    dimensions = sorted((step, size) for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    end = 0  # of the elements of the dimensions so far
    for step, size in dimensions:
        if step <= end:
            return len(np.unique(_offsets(tensor))) < tensor.numel()
        end += step * (size - 1)
    return False


def _share(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Of two tensors in one storage: whether an element of them lies in the same place."""
    (first, last), (others_first, others_last) = _range(one), _range(other)
    if last <= others_first or others_last <= first:
        return False
    if one.dtype != other.dtype or one.is_contiguous() or other.is_contiguous():
        return True
    return len(np.intersect1d(_offsets(one), _offsets(other))) > 0


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses of the first byte, and behind the last."""
    extent = sum(step * (size - 1) for step, size in zip(tensor.stride(), tensor.shape, strict=True)) + 1
    return tensor.data_ptr(), tensor.data_ptr() + extent * tensor.element_size()


def _offsets(tensor: torch.Tensor) -> npt.NDArray[np.int64]:
    """Of each element, in elements from the storage's first."""
    found = np.array([tensor.storage_offset()], np.int64)
    for step, size in zip(tensor.stride(), tensor.shape, strict=True):
        found = (found[:, None] + np.arange(size) * step).reshape(-1)
    return found
