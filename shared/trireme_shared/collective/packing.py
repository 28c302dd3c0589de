"""Users' tensors and arrays as few one-dimensional buffers, and back.

nested value ──take_apart──► skeleton (JSON) + leaves ──pack──► one flat buffer for each dtype ──unpack──► leaves ──put_together──► value
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from trireme_shared.protocol.errors import InvalidArgument

Skeleton = list[Any]  # ["x", leaf] | ["p", plain value] | ["l" | "t", [...]] | ["d", [[key, skeleton], ...]]
Form = Literal["torch", "numpy", "number"]
PLAIN = (type(None), bool, int, float, str)
MAX_DEPTH = 50
INT64 = torch.iinfo(torch.int64)


@dataclass(frozen=True, slots=True)
class Leaf:
    """One tensor. `form`: what the caller gave. `path`: its place in the caller's value, for messages."""

    tensor: torch.Tensor
    form: Form
    path: str

    def described(self) -> str:
        """`['weight']: float32 [10, 64]`."""
        return f"{self.path}: {name_of(self.tensor.dtype)} {list(self.tensor.shape)}"


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def take_apart(value: Any, *, plain: bool) -> tuple[Skeleton, list[Leaf]]:
    """`plain`: numbers, texts and None travel in the skeleton; without it numbers are leaves and the rest is refused. Dictionaries are
    in the order of their keys, however they were filled. Raises InvalidArgument."""
    leaves: list[Leaf] = []
    return _apart(value, "", leaves, plain, 0), leaves


def _apart(value: Any, path: str, leaves: list[Leaf], plain: bool, depth: int) -> Skeleton:
    if depth > MAX_DEPTH:
        raise InvalidArgument(f"the value is nested more than {MAX_DEPTH} deep at {path}")
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        leaves.append(_leaf(value, path))
        return ["x", len(leaves) - 1]
    if isinstance(value, Mapping):
        keys = list(value)
        if bad := next((key for key in keys if not isinstance(key, str | int)), None):
            raise InvalidArgument(
                f"the key {bad!r} at {path or 'the top'} is a {type(bad).__name__}; use text or numbers"
            )
        items = sorted(value.items(), key=lambda item: (isinstance(item[0], str), item[0]))
        return ["d", [[key, _apart(item, f"{path}[{key!r}]", leaves, plain, depth + 1)] for key, item in items]]
    if isinstance(value, list | tuple):
        kind = "l" if isinstance(value, list) else "t"
        return [kind, [_apart(item, f"{path}[{i}]", leaves, plain, depth + 1) for i, item in enumerate(value)]]
    if plain and isinstance(value, PLAIN):
        return ["p", value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        if isinstance(value, int) and not INT64.min <= value <= INT64.max:
            shown = repr(value) if value.bit_length() <= 256 else f"of {value.bit_length()} bits"
            raise InvalidArgument(f"{path or 'the value'} is {shown}, which does not fit 64 bits; give a float")
        dtype = torch.int64 if isinstance(value, int) else torch.float64
        leaves.append(Leaf(torch.tensor(value, dtype=dtype), "number", path or "the value"))
        return ["x", len(leaves) - 1]
    msg = f"{path or 'the value'} is {value if value is None else type(value).__name__}, which is neither a tensor, an array nor a number"
    raise InvalidArgument(msg, hint="give torch.zeros_like(parameter) for a gradient that is None")


def _leaf(value: torch.Tensor | np.ndarray[Any, Any] | np.generic[Any], path: str) -> Leaf:
    path = path or "the value"
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            raise InvalidArgument(f"{path} is a sparse tensor; give it as a dense one: tensor.to_dense()")
        if value.is_meta:
            raise InvalidArgument(
                f"{path} is on the meta device and has no values; give it values first, with to_empty()"
            )
        if value.is_quantized:
            raise InvalidArgument(f"{path} is a quantized tensor; give it as a plain one: tensor.dequantize()")
        return Leaf(value.detach(), "torch", path)
    array = np.ascontiguousarray(value).reshape(np.shape(value))
    try:
        return Leaf(torch.from_numpy(array if array.flags.writeable else array.copy()), "numpy", path)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"{path} is an array of {value.dtype}, which cannot be sent: {error}") from None


def put_together(skeleton: Skeleton, values: Sequence[Any]) -> Any:
    """The value with `values` for its leaves. Raises ValueError if it is no skeleton."""
    match skeleton:
        case ["x", int(index)] if 0 <= index < len(values):
            return values[index]
        case ["p", plain]:
            return plain
        case ["l", list(items)]:
            return [put_together(item, values) for item in items]
        case ["t", list(items)]:
            return tuple(put_together(item, values) for item in items)
        case ["d", list(items)]:
            return {key: put_together(item, values) for key, item in items}
    raise ValueError(f"{str(skeleton)[:100]} does not describe a value")


class Plan:
    """Where each leaf lies in the flat buffers. `transport`: the dtype that wider floating point values travel in. `padding`: buffers
    are a multiple of so many elements long."""

    def __init__(
        self, specs: Sequence[tuple[torch.dtype, Sequence[int]]], transport: torch.dtype | None, padding: int = 1
    ) -> None:
        self.places: list[tuple[int, int, int]] = []  # (buffer, first, last)
        self.dtypes: list[torch.dtype] = []
        self.sizes: list[int] = []
        numbers: dict[torch.dtype, int] = {}
        for dtype, shape in specs:
            wire = sent_as(dtype, transport)
            if wire not in numbers:
                numbers[wire] = len(self.dtypes)
                self.dtypes.append(wire)
                self.sizes.append(0)
            number, count = numbers[wire], int(np.prod(shape, dtype=np.int64))
            self.places.append((number, self.sizes[number], self.sizes[number] + count))
            self.sizes[number] += count
        self._used = self.sizes
        self.sizes = [-(-size // padding) * padding for size in self._used]

    def pack(self, tensors: Sequence[torch.Tensor], flats: Sequence[torch.Tensor], scale: float) -> None:
        """`scale` 0 gives zeros, whatever the values are."""
        for flat, used in zip(flats, self._used, strict=True):
            flat[0 if scale == 0 else used :].zero_()
        if scale == 0:
            return
        for tensor, (number, first, last) in zip(tensors, self.places, strict=True):
            part = flats[number][first:last].view(tensor.shape)
            if scale != 1 and tensor.is_floating_point() and part.dtype != tensor.dtype:
                part.copy_(tensor * scale)  # scaled before it is rounded
            else:
                part.copy_(tensor)
                if scale != 1 and part.is_floating_point():
                    part.mul_(scale)

    def unpack(self, flats: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], factor: float) -> None:
        for out, (number, first, last) in zip(outs, self.places, strict=True):
            out.copy_(flats[number][first:last].view(out.shape))
            if factor != 1 and out.is_floating_point():
                out.mul_(factor)


def sent_as(dtype: torch.dtype, transport: torch.dtype | None) -> torch.dtype:
    wide = dtype in (torch.float32, torch.float64)
    return transport if wide and transport is not None else dtype


def as_given(form: str, tensor: torch.Tensor) -> Any:
    """The tensor in the form in which the caller gave its own."""
    if form == "numpy":
        return tensor.cpu().numpy()
    return tensor.item() if form == "number" else tensor


class Buffers:
    """Flat buffers that are used again, so that the kernel need not give memory each time. Used by one thread at a time."""

    def __init__(self, kept: int = 2) -> None:
        self._free: dict[tuple[torch.dtype, int, str], list[torch.Tensor]] = {}
        self._kept = kept

    def take(self, dtype: torch.dtype, size: int, device: torch.device) -> torch.Tensor:
        free = self._free.get((dtype, size, str(device)))
        return free.pop() if free else torch.empty(size, dtype=dtype, device=device)

    def give(self, flats: Sequence[torch.Tensor]) -> None:
        """Sizes that were not used lately are forgotten."""
        for flat in flats:
            key = (flat.dtype, flat.numel(), str(flat.device))
            free = self._free.pop(key, [])
            if len(free) < self._kept:
                free.append(flat)
            self._free[key] = free
        while len(self._free) > 8:
            self._free.pop(next(iter(self._free)))
