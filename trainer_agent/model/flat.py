"""Parameters and buffers laid end to end: the place of each in the flat vector of its segment, and the
vectors.

    segment (dtype x optimizer group)   | weight ....... | pad | bias .. | pad | weight ...
    blocks                              |------ 0 ------|------ 1 ------|---- 2 ----|

Each parameter starts on 64 bytes. A parameter may span blocks, a block may hold many parameters.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from trainer_agent.model.averages import Ema
from trainer_agent.model.buffer_policies import Policy, kind_of
from trainer_agent.model.devices import HOST, is_host
from trainer_agent.model.optimizer import check_has_not_begun, spec_of
from trireme_shared.blocks.buffers import DTYPES
from trireme_shared.protocol.errors import InvalidArgument
from trireme_shared.protocol.lanes import intervals
from trireme_shared.protocol.records.job_choices import Transported
from trireme_shared.protocol.records.layout import (
    ALIGNMENT_BYTES,
    ELEMENT_BYTES,
    Block,
    Layout,
    OptimizerSpec,
    Segment,
)
from trireme_shared.serving.core.geometry import rounds_by_parameter
from trireme_shared.serving.transport.shared_memory import new_region

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_HINTS = {
    "parameter": "to train both as one, give the module the parameter itself (b.weight = a.weight); else "
    "clone() its values",
    "buffer": "give the buffer memory of its own: register_buffer(name, parameter.detach().clone())",
    "attribute": "compute it in forward from the parameter, or clone() it",
}


@dataclass(frozen=True, slots=True)
class Place:
    """One parameter or buffer: `elements` of segment `segment` from `first`. `number`: of a parameter, in the
    layout (see Layout.sizes)."""

    name: str
    segment: int
    first: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    elements: int
    number: int = -1


@dataclass(frozen=True)
class Plan:
    """Where everything lies. `parameters` and `buffers` are in the order of the model. `policies`: of the
    buffers that the script names (see trainer_agent.model.buffer_policies)."""

    layout: Layout
    parameters: tuple[Place, ...]
    buffers: tuple[Place, ...]
    policies: Mapping[str, Policy] = field(default_factory=dict)

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        return tuple(self.layout.blocks())

    def blocks_of(self, place: Place) -> range:
        """Numbers of the blocks that `place` touches."""
        if not place.elements:
            return range(0)
        start = self._first_blocks[place.segment]
        size = self.layout.block_bytes // ELEMENT_BYTES[self.layout.segments[place.segment].dtype]
        return range(start + place.first // size, start + (place.first + place.elements - 1) // size + 1)

    @cached_property
    def _first_blocks(self) -> dict[int, int]:
        """Segment -> number of its first block."""
        return {block.segment: block.number for block in reversed(self.blocks)}


class Vector:
    """One flat vector of the whole layout: a zeroed tensor per segment, in the dtype in which the segment is
    sent as `dtype`. They lie end to end in `flat` (uint8). `shared`: in memory that parameter servers on this
    host may read, if the host has such memory."""

    def __init__(
        self,
        plan: Plan,
        device: torch.device,
        *,
        pinned: bool = False,
        dtype: Transported = "float32",
        shared: bool = False,
    ) -> None:
        self._plan = plan
        dtypes = [DTYPES[s.travels_as(dtype) or s.dtype] for s in plan.layout.segments]
        sizes = [s.elements * dtype.itemsize for s, dtype in zip(plan.layout.segments, dtypes, strict=True)]
        aligned = (-(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for size in sizes)
        offsets = list(accumulate(aligned, initial=0))[:-1]
        end = offsets[-1] + sizes[-1]
        self._region = new_region(end) if shared else None
        self.flat = (
            torch.zeros(end, dtype=torch.uint8, device=device, pin_memory=pinned)
            if self._region is None
            else torch.frombuffer(self._region, dtype=torch.uint8, count=end)
        )
        self.segments = [
            _typed(self.flat, offset, size, dtype)
            for offset, size, dtype in zip(offsets, sizes, dtypes, strict=True)
        ]
        self.blocks = [self.segments[b.segment][b.first : b.first + b.elements] for b in plan.blocks]

    def view(self, place: Place) -> torch.Tensor:
        elements = self.segments[place.segment][place.first : place.first + place.elements]
        return elements.as_strided(place.shape, place.stride)

    def views(self, places: tuple[Place, ...]) -> list[torch.Tensor]:
        return [self.view(place) for place in places]

    def parts(self, place: Place, values: torch.Tensor) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """For each block of `place`: its number, the place's elements there, and those of `values`, which
        have the place's shape and strides; 1-d views."""
        flat, done = values.as_strided((place.elements,), (1,)), 0
        for number in self._plan.blocks_of(place):
            block = self._plan.blocks[number]
            first = max(place.first, block.first)
            count = min(place.first + place.elements, block.first + block.elements) - first
            yield number, self.segments[place.segment][first : first + count], flat[done : done + count]
            done += count

    def memory(self) -> list[memoryview]:
        """Bytes of each block (of a vector in host memory)."""
        if self._region is None:
            return [bytes_of(block) for block in self.blocks]
        whole, start = memoryview(self._region), self.segments[0].data_ptr()
        return [whole[block.data_ptr() - start :][: block.nbytes] for block in self.blocks]

    @property
    def lost(self) -> bool:
        """Whether a parameter server may still read its present content: then it must not be written any
        more."""
        return self._region is not None and self._region.lost


def _typed(flat: torch.Tensor, offset: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """These bytes as a tensor. In plain host memory it has a storage of its own: torch.save refuses one
    storage in several dtypes, which a model with float32 and bfloat16 parameters would have."""
    if size and is_host(flat.device) and not flat.is_pinned():
        return torch.frombuffer(bytes_of(flat), dtype=dtype, count=size // dtype.itemsize, offset=offset)
    return flat[offset : offset + size].view(dtype)


class PinnedVector:
    """A second set of values, in host memory, that is read on `device`. Takes no memory before the first
    `memory`."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self._plan, self._device = plan, device
        self._vector: Vector | None = None
        self._there: Vector | None = None
        self._memory: list[memoryview] = []

    def memory(self, block: int) -> memoryview:
        """Writable bytes of a block."""
        if self._vector is None:
            self._vector = Vector(self._plan, HOST)
            self._memory = self._vector.memory()
        self._there = None
        return self._memory[block]

    def vector(self) -> Vector:
        """What was written, on the device; read only."""
        assert self._vector is not None
        if self._there is None and is_host(self._device):
            self._there = self._vector
        elif self._there is None:
            self._there = Vector(self._plan, self._device)
            self._there.flat.copy_(self._vector.flat)
        return self._there

    def forget(self) -> None:
        """Free the memory."""
        self._vector = self._there = None
        self._memory = []


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor in host memory, of any dtype."""
    array: npt.NDArray[np.uint8] = tensor.view(torch.uint8).numpy()
    return array.data


def plan(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    block_bytes: int,
    slot_count: int,
    device: str = "",
    policies: Mapping[str, Policy] | None = None,
    *,
    numbered: bool = True,
    thaws: bool = True,
) -> Plan:
    """The layout of `model` under `optimizer`. `policies`: of buffers by name. Raises InvalidArgument for
    what cannot be laid out.

    Constants stay in the trainer: parameters without optimizer group, and buffers that are neither
    floating-point nor int64. `numbered`: steps may leave parameters alone, see Layout.sizes. `thaws`:
    parameters may begin and cease to require a gradient while the model is trained, so those that are frozen
    at first have a place, too (unless they share memory with another tensor); else they are constants.
    """
    spec, policies = spec_of(optimizer), policies or {}
    group_of = groups_of(optimizer)
    named = dict(model.named_parameters())
    check_has_not_begun(optimizer, {id(parameter): name for name, parameter in named.items()})
    foreign = set(group_of) - {id(p) for p in named.values()}
    if foreign:
        raise InvalidArgument(
            f"the optimizer holds {len(foreign)} parameters that are not the model's",
            hint="optimizer(model) must use model.parameters()",
        )
    trained = trained_parameters(model, optimizer, thaws=thaws)
    check_storage(model, {name: each for name, each in trained.items() if each.requires_grad})
    for name in {name for name, _, _ in _shared_storage(model, trained)}:
        del trained[name]  # it is frozen, and stays a constant
    if not any(parameter.requires_grad for parameter in trained.values()):
        raise InvalidArgument(
            "the model has no parameter to train", hint="give the optimizer parameters that require gradients"
        )
    buffers = {
        name: b for name, b in model.named_buffers() if b.is_floating_point() or b.dtype == torch.int64
    }
    builder = _Builder()
    parameter_places = [
        builder.place(
            name, p, Segment(kind="param", dtype=_dtype(name, p), elements=0, group=group_of[id(p)])
        )
        for name, p in trained.items()
    ]
    buffer_places = [
        builder.place(
            name, b, Segment(kind=kind_of(b, policies.get(name)), dtype=_dtype(name, b), elements=0)
        )
        for name, b in buffers.items()
    ]
    tensors = tensors_of(model, group_of, policies)
    segments = builder.segments(spec)
    sizes = builder.sizes if numbered else ()
    parameter_places = _numbered(parameter_places, sizes)
    frozen = {place.number for place in parameter_places if not trained[place.name].requires_grad}
    layout = Layout(
        segments=segments,
        block_bytes=block_bytes,
        digest=digest(tensors),
        unordered=digest(sorted(tensors, key=str)),
        optimizer=spec,
        slot_count=slot_count,
        device=device,
        sizes=sizes,
        frozen=tuple(intervals(sorted(frozen))),
    )
    return Plan(layout, tuple(parameter_places), tuple(buffer_places), policies)


def _numbered(places: list[Place], sizes: Sequence[Sequence[int]]) -> list[Place]:
    """With the numbers that they have in the layout, through all segments."""
    following = list(accumulate((len(each) for each in sizes), initial=0))
    found = []
    for place in places if sizes else ():
        found.append(replace(place, number=following[place.segment]))
        following[place.segment] += 1
    return found or places


def digest(tensors: list[list[Any]]) -> str:
    """SHA-256 over what `tensors_of` tells."""
    return hashlib.sha256(json.dumps(tensors).encode()).hexdigest()


def tensors_of(model: nn.Module, group_of: dict[int, int], policies: Mapping[str, Policy]) -> list[list[Any]]:
    """[kind, name, shape, dtype, optimizer group] of each parameter and buffer, in the model's order; JSON.
    Kinds are those of segments. Tensors that are not contiguous have their strides as a sixth entry."""
    return [
        [
            kind if kind == "param" else kind_of(tensor, policies.get(name)),
            name,
            list(tensor.shape),
            str(tensor.dtype),
            group_of.get(id(tensor), -1),
            *_order_in_memory(tensor),
        ]
        for kind, tensors in (("param", model.named_parameters()), ("buffer", model.named_buffers()))
        for name, tensor in tensors
    ]


def _order_in_memory(tensor: torch.Tensor) -> list[list[int]]:
    """The strides in the flat vector, 0 for dimensions of one element, which have none. [] if contiguous."""
    if nn.parameter.is_lazy(tensor) or tensor.layout != torch.strided:
        return []
    stride = dense_stride(tensor)
    if torch.empty_strided(tensor.shape, stride, device="meta").is_contiguous():
        return []
    return [[step if size > 1 else 0 for size, step in zip(tensor.shape, stride, strict=True)]]


def dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides of `tensor` in the order that it has, without gaps and overlaps."""
    return tuple(torch.empty_like(tensor, device="meta").stride())


def groups_of(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    """id of a parameter -> number of its group."""
    return {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}


def trained_parameters(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, thaws: bool = True
) -> dict[str, nn.Parameter]:
    """The parameters that the optimizer steps, by name, in the model's order. `thaws`: with those that
    require no gradient yet."""
    group_of = groups_of(optimizer)
    return {
        name: p
        for name, p in model.named_parameters()
        if id(p) in group_of and (p.requires_grad or (thaws and _may_thaw(p)))
    }


def _may_thaw(parameter: nn.Parameter) -> bool:
    """Whether it can require a gradient, and be laid out."""
    is_known = not nn.parameter.is_lazy(parameter) and parameter.dtype in _NAMES
    return is_known and parameter.is_floating_point()


class _Builder:
    """Segments in the order of their first member, and how far each is filled."""

    def __init__(self) -> None:
        self._filled: dict[Segment, int] = {}
        self._sizes: dict[Segment, list[int]] = {}

    def place(self, name: str, tensor: torch.Tensor, kind: Segment) -> Place:
        grain = ALIGNMENT_BYTES // ELEMENT_BYTES[kind.dtype]
        first = -(-self._filled.get(kind, 0) // grain) * grain
        self._filled[kind] = first + tensor.numel()
        self._sizes.setdefault(kind, []).append(tensor.numel())
        number = list(self._filled).index(kind)
        return Place(name, number, first, tuple(tensor.shape), dense_stride(tensor), tensor.numel())

    @property
    def sizes(self) -> tuple[tuple[int, ...], ...]:
        """See Layout.sizes."""
        return tuple(tuple(self._sizes[kind]) if kind.kind == "param" else () for kind in self._filled)

    def segments(self, optimizer: OptimizerSpec) -> tuple[Segment, ...]:
        return tuple(
            kind.with_fields(
                elements=filled,
                parameters=tuple(self._sizes[kind]) if rounds_by_parameter(optimizer, kind) else (),
            )
            for kind, filled in self._filled.items()
        )


def _dtype(name: str, tensor: torch.Tensor) -> str:
    if nn.parameter.is_lazy(tensor):
        raise InvalidArgument(
            f"{name} is not initialised", hint="model() must return a module without lazy parameters"
        )
    if tensor.dtype not in _NAMES or (isinstance(tensor, nn.Parameter) and not tensor.is_floating_point()):
        raise InvalidArgument(
            f"{name} has dtype {tensor.dtype}",
            hint="use float32, bfloat16 or float16 (model.float() converts)",
        )
    return _NAMES[tensor.dtype]


def checked_model(model: Any) -> nn.Module:
    """In place: a buffer that holds one number at several places (`torch.ones(1).expand(8)`) gets a place for
    each, since such memory cannot be written. Raises InvalidArgument for what is no model."""
    if isinstance(model, nn.Module):
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if 0 in (step for step, size in zip(buffer.stride(), buffer.shape, strict=True) if size > 1):
                    setattr(module, name, buffer.clone())
        return model
    raise InvalidArgument(f"model() returned {type(model).__name__}", hint="return a torch.nn.Module")


class LiveBuffers:
    """The module's buffers that are in the plan (BatchNorm statistics …): every lane starts a step from the
    same values, and its changed values are pushed. Asynchronous jobs push what was added to integer buffers.
    Other buffers (bool, int32, …) are constants of the model.

    current vector ──load──► the module's buffers ──forward changes them──► store
        ──► buffer segments of the gradient slot

    A module may replace a buffer by a new tensor at any time. `counts`: integer
    ones are stored as what was added to them."""

    def __init__(self, model: nn.Module, plan: Plan, *, counts: bool = False) -> None:
        self._counts = counts
        split = [(place, *place.name.rpartition(".")) for place in plan.buffers]
        self._homes = [(place, model.get_submodule(path), name) for place, path, _, name in split]
        self._averages = [part for part in model.modules() if isinstance(part, Ema)]

    def load(self, vector: Vector) -> None:
        """Buffers of `vector` into the modules. Averages follow the parameters, which are those of its
        version."""
        with torch.no_grad():
            for place, module, name in self._homes:
                module.get_buffer(name).copy_(vector.view(place))
        for average in self._averages:
            average.follow()

    def store(self, vector: Vector, loaded: Vector) -> None:
        """The modules' buffers into `vector`; they were loaded from `loaded`."""
        with torch.no_grad():
            for place, module, name in self._homes:
                view = vector.view(place).copy_(module.get_buffer(name))
                if self._counts and not view.is_floating_point():
                    view.sub_(loaded.view(place))


def check_storage(model: nn.Module, trained: Mapping[str, nn.Parameter]) -> None:
    """Raises InvalidArgument if a parameter of `trained` shares memory with another tensor of the model, or
    has elements in the same place: laying parameters out end to end would take them apart, so each would be
    trained by itself.

        b.weight = a.weight                  one parameter, which two modules have: trained once
        b.weight.data = a.weight.data        two parameters in one memory: refused"""
    for _, problem, hint in _shared_storage(model, trained):
        raise InvalidArgument(problem, hint=hint)


def _shared_storage(
    model: nn.Module, parameters: Mapping[str, nn.Parameter]
) -> Iterator[tuple[str, str, str]]:
    """(name, problem, what to do) of each of `parameters` that shares memory."""
    for name, parameter in parameters.items():
        if not nn.parameter.is_lazy(parameter) and _overlaps_itself(parameter):
            problem = (
                f"elements of the parameter {name} share memory (shape {tuple(parameter.shape)}, "
                f"strides {parameter.stride()})"
            )
            yield name, problem, "make it of a tensor with memory of its own: nn.Parameter(values.clone())"
    places: dict[int, list[tuple[str, str, torch.Tensor]]] = defaultdict(list)
    for kind, name, tensor in _tensors(model):
        if tensor.layout == torch.strided and not tensor.is_meta and tensor.numel():
            places[tensor.untyped_storage().data_ptr()].append((kind, name, tensor))
    for members in places.values():
        for number, (_, name, tensor) in enumerate(members):
            if name not in parameters or tensor is not parameters[name]:
                continue
            others = (member for k, member in enumerate(members) if k != number and _share(tensor, member[2]))
            for kind, other, _ in others:
                yield name, f"the parameter {name} shares memory with the {kind} {other}", _HINTS[kind]


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
            found = (
                value
                if isinstance(value, list | tuple)
                else value.values()
                if type(value) is dict
                else [value]
            )
            if not name.startswith("_"):
                yield from (
                    ("attribute", f"{path}.{name}".lstrip("."), each) for each in _plain(found, known)
                )


def _plain(values: Iterable[object], known: set[int]) -> Iterator[torch.Tensor]:
    return (each for each in values if isinstance(each, torch.Tensor) and id(each) not in known)


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    dimensions = sorted(
        (step, size) for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1
    )
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
