"""The operations of a communicator, as objects that can be begun again: each says what it is, does it in one
group, and reads its result.

    describe (equal in all members, or nobody begins) ─► run in a group
        ─► Result (kept for those who lack it) ─► value for the caller

The caller's tensors are read only: after an error the operation begins again with the same contribution. They
travel as few one-dimensional buffers:

    nested value ──take_apart──► skeleton (JSON) + leaves ──pack──► one flat buffer for each dtype
        ──unpack──► leaves ──put_together──► value
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch

from trireme_shared.collective.group import Broken, Group
from trireme_shared.collective.records import CANONICAL, Done
from trireme_shared.collective.session import STATE, Buffers, Result
from trireme_shared.protocol.errors import InvalidArgument
from trireme_shared.protocol.lanes import combine

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
    """`plain`: numbers, texts and None travel in the skeleton; without it numbers are leaves and the rest is
    refused. Dictionaries are in the order of their keys, however they were filled. Raises InvalidArgument."""
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
        return [
            "d",
            [[key, _apart(item, f"{path}[{key!r}]", leaves, plain, depth + 1)] for key, item in items],
        ]
    if isinstance(value, list | tuple):
        kind = "l" if isinstance(value, list) else "t"
        return [
            kind,
            [_apart(item, f"{path}[{i}]", leaves, plain, depth + 1) for i, item in enumerate(value)],
        ]
    if plain and isinstance(value, PLAIN):
        return ["p", value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        if isinstance(value, int) and not INT64.min <= value <= INT64.max:
            shown = repr(value) if value.bit_length() <= 256 else f"of {value.bit_length()} bits"
            raise InvalidArgument(
                f"{path or 'the value'} is {shown}, which does not fit 64 bits; give a float"
            )
        dtype = torch.int64 if isinstance(value, int) else torch.float64
        leaves.append(Leaf(torch.tensor(value, dtype=dtype), "number", path or "the value"))
        return ["x", len(leaves) - 1]
    msg = (
        f"{path or 'the value'} is {value if value is None else type(value).__name__}, which is "
        "neither a tensor, an array nor a number"
    )
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
            raise InvalidArgument(
                f"{path} is a quantized tensor; give it as a plain one: tensor.dequantize()"
            )
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
    """Where each leaf lies in the flat buffers. `transport`: the dtype that wider floating point values
    travel in. `padding`: buffers are a multiple of so many elements long."""

    def __init__(
        self,
        specs: Sequence[tuple[torch.dtype, Sequence[int]]],
        transport: torch.dtype | None,
        padding: int = 1,
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


MEAN, SUM = "MEAN", "SUM"
CPU = torch.device("cpu")
REDUCED = frozenset(  # by Gloo and by NCCL
    getattr(torch, name)
    for name in ("uint8", "int8", "int32", "int64", "float16", "bfloat16", "float32", "float64")
)


class Moment:
    """How long an operation may take still, and whom to tell of its phases."""

    def __init__(self, left: Callable[[], float], begun: Callable[[], None]) -> None:
        self.left, self.begun = left, begun


class Operation(Protocol):
    kind: str
    lines: list[str]  # equal in all members
    weight: float
    root: int | None  # of a broadcast, if the caller named it

    def run(
        self, group: Group | None, done: Done, weights: Sequence[float], root: int, moment: Moment
    ) -> Result:
        """`weights`: of all members by rank; `root`: who has the group's state. Raises Broken."""
        ...

    def read(self, result: Result) -> Any:
        """The caller's value."""
        ...


class AllReduce:
    """Raises InvalidArgument for what cannot be reduced."""

    def __init__(
        self,
        value: Any,
        op: str,
        weight: float,
        *,
        reduction: str,
        transport: torch.dtype | None,
        buffers: Buffers,
    ) -> None:
        self.kind, self.weight = "allreduce", weight
        self.root: int | None = None
        self._op, self._canonical, self._transport, self._buffers = (
            op,
            reduction == CANONICAL,
            transport,
            buffers,
        )
        self._skeleton, self._leaves = take_apart(value, plain=False)
        for leaf in self._leaves:
            dtype = leaf.tensor.dtype
            if dtype is torch.bool or dtype.is_complex:
                raise InvalidArgument(
                    f"{leaf.path} is {name_of(dtype)}, which is not reduced; give real numbers"
                )
            if dtype not in REDUCED:
                wide = _wider(dtype, op)
                raise InvalidArgument(
                    f"{leaf.path} is {name_of(dtype)}, which is not reduced; cast it, to {wide} for example"
                )
            if op == MEAN and not dtype.is_floating_point and leaf.form != "number":
                raise InvalidArgument(
                    f'{leaf.path} is {name_of(dtype)}, which has no mean; use op="SUM", or floating point'
                )
        if op == MEAN:  # numbers have a mean, whatever they are
            self._leaves = [
                leaf
                if leaf.tensor.is_floating_point()
                else type(leaf)(leaf.tensor.double(), leaf.form, leaf.path)
                for leaf in self._leaves
            ]
        self._specs = [(leaf.tensor.dtype, tuple(leaf.tensor.shape)) for leaf in self._leaves]
        self.lines = [
            f"allreduce {op} of {len(self._leaves)} tensors",
            *(leaf.described() for leaf in self._leaves),
        ]

    def run(
        self,
        group: Group | None,
        done: Done,
        weights: Sequence[float],
        root: int,  # noqa: ARG002
        moment: Moment,
    ) -> Result:
        size = len(weights)
        plan = Plan(self._specs, self._transport, size if self._canonical else 1)
        device = group.data_device if group is not None else CPU
        flats = [
            self._buffers.take(dtype, count, device)
            for dtype, count in zip(plan.dtypes, plan.sizes, strict=True)
        ]
        total, largest = sum(weights), max(weights)
        factor = 1.0
        if self._op == SUM:
            scale = 1.0
        elif self._canonical:
            scale = 1.0 if self.weight else 0.0
        elif torch.float16 in plan.dtypes:
            # a sum beyond 65504 would be infinite: each is divided first, as DDP does
            scale = self.weight / total if total else 0.0
        else:  # equal weights add up unscaled, and no weight makes a sum overflow
            scale = self.weight / largest if largest else 0.0
            factor = largest / total if total else 1.0
        plan.pack([leaf.tensor for leaf in self._leaves], flats, scale)
        if group is None:
            moment.begun()
        elif self._canonical:
            counts = list(weights) if self._op == MEAN else None
            for number, flat in enumerate(flats):
                begun = moment.begun if number == 0 else _nothing
                flats[number] = self._reduced(group, flat, counts, moment, begun)
        else:
            group.allreduce(flats, moment.left(), moment.begun)
        return Result(done, self.kind, digest(self.lines), json.dumps(plan.sizes), factor, total, flats)

    def _reduced(
        self,
        group: Group,
        flat: torch.Tensor,
        counts: list[float] | None,
        moment: Moment,
        begun: Callable[[], None],
    ) -> torch.Tensor:
        """Each member reduces its share of all contributions over the canonical tree, then all get all
        shares."""
        taken = self._buffers.take(flat.dtype, flat.numel(), flat.device)
        group.scatter_all(flat, taken, moment.left(), begun)
        share = tree(list(taken.view(group.size, -1)), counts).to(flat.dtype)
        group.gather_all(share.contiguous(), flat, moment.left())
        self._buffers.give([taken])
        return flat

    def read(self, result: Result) -> Any:
        plan = Plan(self._specs, self._transport)
        if result.flats is None:
            raise Broken("the result is not kept")
        outs = [torch.empty_like(leaf.tensor, memory_format=torch.contiguous_format) for leaf in self._leaves]
        plan.unpack(result.flats, outs, result.factor)
        values = [as_given(leaf.form, out) for leaf, out in zip(self._leaves, outs, strict=True)]
        return put_together(self._skeleton, values)


def tree(parts: Sequence[torch.Tensor], counts: Sequence[float] | None) -> torch.Tensor:
    """The sum of `parts`, or with `counts` their weighted mean, over the canonical tree of
    trireme_shared.protocol.lanes with one lane for each member. 16-bit values are added in float32. `parts`
    are overwritten."""
    wide = [part.float() if part.element_size() == 2 and part.is_floating_point() else part for part in parts]
    nodes: list[tuple[torch.Tensor, float]] = list(zip(wide, counts or [1.0] * len(wide), strict=True))
    join: Callable[..., tuple[torch.Tensor, float]] = combine if counts is not None else _added
    while len(nodes) > 1:
        pairs = [nodes[first : first + 2] for first in range(0, len(nodes), 2)]
        nodes = [join(*pair[0], *pair[1]) if len(pair) > 1 else pair[0] for pair in pairs]
    value, count = nodes[0]
    return value if count else value.zero_()


def _added(
    left: torch.Tensor, _left: float, right: torch.Tensor, _right: float
) -> tuple[torch.Tensor, float]:
    return left.add_(right), 1.0


class Broadcast:
    """`root` None: whoever has the group's state. What the root gives, all get: others need not have values
    of the same shape."""

    def __init__(self, value: Any, root: int | None) -> None:
        self.kind, self.weight, self.root = "broadcast" if root is not None else STATE, 0.0, root
        self._skeleton, self._leaves = take_apart(value, plain=True)
        self.lines = [f"broadcast from {'the oldest member' if root is None else f'rank {root}'}"]

    def run(
        self,
        group: Group | None,
        done: Done,
        weights: Sequence[float],  # noqa: ARG002
        root: int,
        moment: Moment,
    ) -> Result:
        source = root if self.root is None else self.root
        mine = group is None or group.rank == source
        text = None
        if mine:
            forms = [
                [leaf.form, name_of(leaf.tensor.dtype), list(leaf.tensor.shape), leaf.tensor.is_cuda]
                for leaf in self._leaves
            ]
            text = json.dumps([self._skeleton, forms])
        if group is not None:
            text = group.tell(text.encode() if text is not None else None, source, moment.left()).decode()
        assert text is not None
        _, forms = json.loads(text)
        device = group.data_device if group is not None else CPU
        plan = Plan([(getattr(torch, name), shape) for _, name, shape, _ in forms], None)
        flats = [
            torch.empty(size, dtype=dtype, device=device)
            for dtype, size in zip(plan.dtypes, plan.sizes, strict=True)
        ]
        if mine:
            plan.pack([leaf.tensor for leaf in self._leaves], flats, 1.0)
        if group is not None:
            group.broadcast(flats, source, moment.left(), moment.begun)
        else:
            moment.begun()
        return Result(done, self.kind, digest(self.lines), text, flats=flats)

    def read(self, result: Result) -> Any:
        skeleton, forms = json.loads(result.text)
        plan = Plan([(getattr(torch, name), shape) for _, name, shape, _ in forms], None)
        outs = [
            torch.empty(
                shape,
                dtype=getattr(torch, name),
                device="cuda" if cuda and torch.cuda.is_available() else "cpu",
            )
            for _, name, shape, cuda in forms
        ]
        plan.unpack(result.flats or [], outs, 1.0)
        values = [as_given(form, out) for (form, *_), out in zip(forms, outs, strict=True)]
        return put_together(skeleton, values)


class Barrier:
    def __init__(self) -> None:
        self.kind, self.weight, self.lines = "barrier", 0.0, ["barrier"]
        self.root: int | None = None

    def run(
        self,
        group: Group | None,  # noqa: ARG002
        done: Done,
        weights: Sequence[float],  # noqa: ARG002
        root: int,  # noqa: ARG002
        moment: Moment,
    ) -> Result:
        moment.begun()  # what all members said before it began was the barrier
        return Result(done, self.kind, digest(self.lines), flats=[])

    def read(self, result: Result) -> None:
        """Nothing."""


def digest(lines: Sequence[str]) -> int:
    """63 bits."""
    return int.from_bytes(hashlib.blake2b("\n".join(lines).encode(), digest_size=8).digest()) >> 1


def bits_of(number: float) -> int:
    """Of a float64, as int64."""
    bits: int = struct.unpack("<q", struct.pack("<d", number))[0]
    return bits


def number_of(bits: int) -> float:
    number: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return number


def difference(manifests: Sequence[Sequence[str]]) -> str:
    """Of what the members called, by rank: the first line in which one differs from rank 0."""
    first = manifests[0]
    for rank, other in enumerate(manifests):
        for number in range(max(len(first), len(other))):
            mine = first[number] if number < len(first) else "nothing"
            theirs = other[number] if number < len(other) else "nothing"
            if mine != theirs:
                return f"rank 0 has {mine}, and rank {rank} has {theirs}"
    return "the members said different things"


def _wider(dtype: torch.dtype, op: str) -> str:
    """A dtype that is reduced, for values of one that is not."""
    if dtype.is_floating_point or op == MEAN:
        return "float32" if dtype.itemsize <= 2 else "float64"
    return "int32" if dtype.itemsize <= 2 else "int64"


def _nothing() -> None:
    """No phase."""
