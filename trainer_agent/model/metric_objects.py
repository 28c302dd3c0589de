"""Metric objects in a script's evaluation: torchmetrics', those of trireme.metrics, and the script's own.

    evaluation_metrics() ─► objects, made once in a process
    minibatch:  begin (reset) ─► evaluate(model, batch, objects) ─► beside: sums, and a MetricState of each
    all tasks:  merged MetricState ─► computed: an object of any trainer, with these states, computes

An object is recognised by what it has, so no library is imported: `update`, `compute`, `reset`; `_defaults`,
which has the value of each state before any record; `_reductions`, which says how two values of a state
become one.
"""

from __future__ import annotations

import base64
import math
import warnings
import zlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from trainer_agent.model.watch.minibatch_rules import UserCode
from trireme_shared.datasets.random_state import START_SEED, seeded
from trireme_shared.protocol.errors import UserCodeError
from trireme_shared.protocol.records.metric_states import Elements, MetricState, Reduction, Sum

HOOK = "evaluation_metrics"
KEEPS = "keeps every value"
CAT = "dim_zero_cat", "cat"
REDUCTIONS: Mapping[str | None, Reduction | str] = MappingProxyType(
    {
        "dim_zero_sum": Reduction.SUM,
        "sum": Reduction.SUM,
        "dim_zero_max": Reduction.MAX,
        "max": Reduction.MAX,
        "dim_zero_min": Reduction.MIN,
        "min": Reduction.MIN,
        **dict.fromkeys(CAT, KEEPS),
        None: KEEPS,
    }
)
"""By the name of the function, as torchmetrics calls it, or by a name of ours; None: values are listed."""
MOST_ELEMENTS = 1 << 16  # of a state, far more than a report takes
MOST_BYTES = 1 << 30  # of a tensor that is read
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    )
}


class MetricObjects:
    """Those of one script, on the device of its model. Errors of the script are raised as UserCodeError."""

    def __init__(self, user: UserCode, device: torch.device) -> None:
        self._user, self._device = user, device
        self._objects: Mapping[str, Any] = MappingProxyType({})
        self._is_checked = False

    def begin(self) -> tuple[Mapping[str, Any], ...]:
        """What `evaluate` gets behind the minibatch: the objects, which have seen no record. Empty for a
        script without objects."""
        if not self._user.has(HOOK):
            return ()
        self._objects = self._objects or MappingProxyType(self._made())
        for metric in self._objects.values():
            self._user.guard(metric.reset)
        return (self._objects,)

    def beside(self, sums: Mapping[str, float]) -> dict[str, Sum]:
        """`sums` of the minibatch, and what each object has seen of it."""
        found: dict[str, Sum] = dict(sums)
        for name, metric in self._objects.items():
            if name in found:
                raise self._refused(f"evaluate returned {name}, and evaluation_metrics() has a metric {name}")
            found[name] = self._state_of(name, metric)
        if self._objects and not self._is_checked:
            self._check_states(found)
            self._is_checked = True
        return found

    def computed(self, sums: Mapping[str, Sum]) -> dict[str, Any]:
        """The numbers in `sums`, and what the objects compute from the states in it."""
        states = {name: value for name, value in sums.items() if isinstance(value, MetricState)}
        if states:
            self.begin()
        for name, state in states.items():
            has = sorted({*state.elements, *state.tensors})
            wanted = sorted(getattr(self._objects.get(name), "_reductions", ()))
            if has != wanted:
                raise self._refused(
                    f"the metric {name} was evaluated with the states {', '.join(has)}, and has now "
                    f"{', '.join(wanted) or 'none'}: evaluation_metrics() gives others than before"
                )
        return {
            name: self._computed(self._objects[name], value) if isinstance(value, MetricState) else value
            for name, value in sums.items()
        }

    def numbers(self, found: Mapping[str, Any]) -> dict[str, float]:
        """For a script without `metrics`: entries of a dict as `name.key`, of a vector as `name.0`."""
        numbers: dict[str, float] = {}
        for name, value in found.items():
            parts = _flat(value)
            if parts is None:
                raise self._refused(
                    f"compute() of the metric {name} gives {_told(value)}, which is no number; make numbers "
                    "of it in metrics(sums), which gets it by that name"
                )
            numbers |= {name + place: number for place, number in parts.items()}
        return numbers

    # ------------------------------------------------------------ parts

    def _made(self) -> dict[str, Any]:
        with seeded(START_SEED):
            found = self._user.call(HOOK)
        if not isinstance(found, Mapping) or not found:
            raise self._refused(f"{HOOK}() returned {_told(found)}; return a dict of metrics by name")
        made: dict[str, Any] = {}
        for name, metric in found.items():
            self._check(str(name), metric)
            if isinstance(metric, torch.nn.Module):
                metric.to(self._device)
            if hasattr(metric, "sync_on_compute"):
                # else torchmetrics would wait for all processes of torch.distributed, and one computes
                metric.sync_on_compute = metric._to_sync = False  # noqa: SLF001
            made[str(name)] = metric
        return made

    def _check(self, name: str, metric: Any) -> None:
        what = f"{HOOK}() gives {type(metric).__name__} as {name}"
        needs = ("update", "compute", "reset", "_defaults", "_reductions")
        if lacks := [each for each in needs if not hasattr(metric, each)]:
            raise self._refused(
                f"{what}, which has no {', '.join(lacks)}; it takes metrics of torchmetrics and of "
                "trireme.metrics, and those of a MetricCollection one by one"
            )
        if not metric._reductions:  # noqa: SLF001
            raise self._refused(
                f"{what}, which has no states of its own; give the metrics in it one by one, and put them "
                "together in metrics(sums)"
            )
        for state, reduction in metric._reductions.items():  # noqa: SLF001
            kind, default = REDUCTIONS.get(_name_of(reduction)), metric._defaults[state]  # noqa: SLF001
            if kind is None:
                raise self._refused(
                    f"{what}, whose state {state} is reduced by {_name_of(reduction)}; sum, max, min, cat "
                    "and None are the same in whatever parts the records are evaluated"
                )
            fixed = isinstance(default, torch.Tensor)
            if kind is not KEEPS and not fixed:
                raise self._refused(f"{what}, whose state {state} is a list and reduced by {kind}; use cat")
            if kind is Reduction.SUM and fixed and bool(default.any()):
                raise self._refused(
                    f"{what}, whose state {state} starts at {default.tolist()}; a sum over minibatches has "
                    "to start at 0"
                )

    def _state_of(self, name: str, metric: Any) -> MetricState:
        elements: dict[str, Elements] = {}
        tensors: dict[str, dict[int, tuple[str, ...]]] = {}
        for state, reduction in metric._reductions.items():  # noqa: SLF001
            kind, value = REDUCTIONS[_name_of(reduction)], getattr(metric, state)
            held = value if isinstance(value, list) else [value]
            for each in held:
                dtype = str(each.dtype).removeprefix("torch.") if isinstance(each, torch.Tensor) else ""
                if dtype not in DTYPES:
                    told = f"{dtype or type(each).__name__} in its state {state}"
                    raise self._refused(f"the metric {name} has {told}; tensors of numbers can be gathered")
            if isinstance(kind, Reduction):
                if value.numel() > MOST_ELEMENTS:
                    raise self._refused(
                        f"the metric {name} has {value.numel()} elements in its state {state}, at most "
                        f"{MOST_ELEMENTS} are taken; give it fewer classes, bins or thresholds"
                    )
                elements[state] = _elements(kind, value)
                continue
            if _name_of(reduction) in CAT and len(held) > 1:
                held = [torch.cat([each.reshape(1) if each.ndim == 0 else each for each in held])]
            tensors[state] = {0: tuple(map(_text_of, held))}
        return MetricState(elements=elements, tensors=tensors)

    def _computed(self, metric: Any, state: MetricState) -> Any:
        self._user.guard(metric.reset)
        for name, reduction in metric._reductions.items():  # noqa: SLF001
            if name in state.elements:
                value: Any = _tensor_of(state.elements[name]).to(self._device)
            else:
                held = state.tensors[name]
                value = [_read(text).to(self._device) for task in sorted(held) for text in held[task]]
                if isinstance(metric._defaults[name], torch.Tensor):  # noqa: SLF001
                    value = torch.cat(value) if _name_of(reduction) in CAT else torch.stack(value)
            setattr(metric, name, value)
        if hasattr(metric, "_update_count"):
            metric._update_count = 1  # noqa: SLF001  else torchmetrics warns that it has seen nothing
        with torch.no_grad():
            return self._user.guard(metric.compute)

    def _check_states(self, found: Mapping[str, Sum]) -> None:
        """After the first minibatch: another object with the same states computes the same. Else whoever
        computes the metric of the whole dataset would lack something."""
        others = self._made()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name, metric in self._objects.items():
                try:
                    here = self._user.guard(metric.compute)
                except UserCodeError:
                    continue  # one minibatch may have too little for it
                state = found[name]
                assert isinstance(state, MetricState)
                there = self._computed(others[name], state)
                if not _same(here, there):
                    raise self._refused(
                        f"the metric {name} computes {_told(here)} in the object that saw a minibatch, and "
                        f"{_told(there)} in another one with the same states ("
                        f"{', '.join(metric._reductions)}): it keeps something beside "  # noqa: SLF001
                        "them; keep it in a state (add_state)"
                    )

    def _refused(self, message: str) -> UserCodeError:
        return self._user.error_of(TypeError(message), fatal=True)


def _name_of(reduction: Any) -> str | None:
    return None if reduction is None else str(getattr(reduction, "__name__", reduction))


def _elements(kind: Reduction, value: torch.Tensor) -> Elements:
    whole = value.long() if value.dtype is torch.bool else value.detach()
    dtype = str(whole.dtype).removeprefix("torch.")
    numbers = tuple(whole.reshape(-1).tolist())
    return Elements.model_construct(reduction=kind, dtype=dtype, shape=tuple(whole.shape), numbers=numbers)


def _tensor_of(elements: Elements) -> torch.Tensor:
    return torch.tensor(elements.numbers, dtype=DTYPES[elements.dtype]).reshape(elements.shape)


def _text_of(value: torch.Tensor) -> str:
    """`float32 2,3 <compressed bytes>`."""
    there = value.detach().cpu().contiguous()
    packed = base64.b64encode(zlib.compress(there.reshape(-1).view(torch.uint8).numpy().tobytes()))
    dtype = str(there.dtype).removeprefix("torch.")
    return f"{dtype} {','.join(map(str, there.shape))} {packed.decode()}"


def _read(text: str) -> torch.Tensor:
    """Raises ValueError."""
    name, sizes, packed = text.split(" ")
    shape = [int(size) for size in sizes.split(",") if size]
    dtype, elements = DTYPES[name], math.prod(shape)
    if not 0 <= elements * dtype.itemsize <= MOST_BYTES or min(shape, default=0) < 0:
        msg = f"a tensor of shape {shape} of {name} in a metric's state"
        raise ValueError(msg)
    raw = zlib.decompressobj().decompress(base64.b64decode(packed), elements * dtype.itemsize or 1)
    if len(raw) != elements * dtype.itemsize:
        msg = f"a tensor of shape {shape} of {name} in a metric's state has {len(raw)} bytes"
        raise ValueError(msg)
    return (
        torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape)
        if raw
        else torch.empty(shape, dtype=dtype)
    )


def _flat(value: Any, place: str = "") -> dict[str, float] | None:
    """By what is added to the metric's name; None: that is no number."""
    if isinstance(value, Mapping):
        found: dict[str, float] = {}
        for key, each in value.items():
            inner = _flat(each, f"{place}.{key}")
            if inner is None:
                return None
            found |= inner
        return found
    numbers = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(numbers, list) and len(numbers) == 1:
        (numbers,) = numbers
    try:
        if isinstance(numbers, list):
            return {f"{place}.{number}": float(each) for number, each in enumerate(numbers)}
        return {place: float(numbers)}
    except (TypeError, ValueError):
        return None


def _same(one: Any, other: Any) -> bool:
    """Whether two values of `compute` are the same numbers."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if one is None or other is None:
        return one is other
    try:
        left, right = (torch.as_tensor(each).cpu().reshape(-1) for each in (one, other))
    except (TypeError, ValueError, RuntimeError):
        return bool(one == other)
    return left.shape == right.shape and torch.allclose(left.double(), right.double(), equal_nan=True)


def _told(value: Any) -> str:
    return f"{value!r:.80}" if isinstance(value, float | int | torch.Tensor) else type(value).__name__
