"""State that forward changes and trainers do not share: noticed, so that it can be refused, or that the user
hears of it.

    parameters                                        only the optimizer, at the parameter servers, changes
                                                      them
    buffers that are neither floating-point nor int64  constants of the model
    the optimizer: groups, options, state              see OptimizerWatch in model/optimizer.py
    the model: which parameters, buffers, modules      as it was laid out (KeptModel)
    torch's averages, beside the model or in it        nobody would share them (updates_by_torch)
    other buffers                                      shared; told if their mean over lanes may mean nothing
                                                       (AveragedBuffers)

If forward changed them, the result would depend on which trainer computed which minibatch. Most changes show
in torch's counter of in-place operations or in the address. Those through `.data` show in a digest, which is
computed for some minibatches only, or in three numbers of each parameter (Samples).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, compress
from operator import call, ne
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from trainer_agent.model.averages import updates_by_torch
from trainer_agent.model.flat import Plan, Vector, dense_stride
from trainer_agent.model.optimizer import OptimizerWatch
from trainer_agent.model.watch.freezing import thaws
from trainer_agent.model.watch.minibatch_rules import UserCode
from trireme_shared.blocks.buffer_mean import bits_of, is_statistic
from trireme_shared.protocol.records.layout import MOST_CONSTANTS, Constant

Bits = npt.NDArray[np.integer[Any]]
Sampled = tuple[Bits, ...] | list[int]
THAWED = (
    "changed requires_grad of the parameter {name}: it was {before} when training began, and now "
    "it is {now}; {why}, or train what thaws or freezes later in a second job that begins with this one's "
    "model (--init-from)"
)
OWN_LOOP_THAWS = (
    "a script with a loop of its own trains the same parameters from its first step to its last: set "
    "requires_grad before trireme.prepare, or write it as functions: loss(model, batch) may call "
    "requires_grad_"
)
ASYNC_THAWS = (
    "an asynchronous job trains the same parameters from its first step to its last: set requires_grad in "
    "model(), or use mode sync"
)
NOBODY_STEPS = (
    "nobody would step it, because the optimizer does not hold it (or it shares memory with another tensor): "
    "give it to the optimizer, which leaves it as it is as long as it requires no gradient"
)
MODEL_CHANGED = (
    "changed the model: {what} since training began; a job lays its parameters out once: change the "
    "model in model() (or before trireme.prepare)"
)
FIRST_LOOKS, LOOK_EVERY = 3, 64  # minibatches whose digests are compared
PARAMETER = (
    "changed the parameter {name}; only the optimizer may change parameters, because trainers do not share "
    "other changes (nn.Embedding does it with max_norm: leave that out; averages of parameters are "
    "trireme.nn.Ema(module, decay), docs/buffers.md; a second optimizer stands beside the first one in what "
    "optimizer(model) returns, and neither is stepped by the script, docs/habits.md)"
)
FROZEN = (
    "changed the parameter {name}, which is not trained; trainers do not share such changes: "
    "make it a floating-point buffer (register_buffer), which they share; averages of parameters are "
    "trireme.nn.Ema(module, decay) (docs/buffers.md); those of a second optimizer stand with it in what "
    "optimizer(model) returns (docs/habits.md)"
)
AVERAGES = (
    "called update_parameters of an AveragedModel; that would run once for each minibatch that this trainer "
    "computes, on averages that no other trainer gets and nobody saves: averages of parameters are "
    "trireme.nn.Ema(module, decay), a part of the model (docs/buffers.md#ema)"
)
RESHAPED = (
    "changed the buffer {name}: it was {before}, and now it is {after}; trainers share the values "
    "of a buffer, so it keeps its shape and "
    "dtype: make it as large as it can become in model(), and keep a counter beside it"
)
BUFFER = (
    "changed the buffer {name} of {dtype}; trainers share floating-point and int64 buffers only: use one of "
    "these, or a plain attribute if it only keeps what can be computed again"
)
AVERAGED = (
    "the buffer {name} differs between lanes, and a step takes its mean over the lanes, weighted "
    "by their records. If that is right (running means and sums), say so: buffers = "
    '{{"{name}": "mean"}} in the script, or trireme.prepare(..., buffers=...). If it holds rows or '
    "values that must stay as they are (a queue, a codebook, a hidden state), let it follow the first "
    'lane: buffers = {{"{name}": "first"}} (docs/buffers.md)'
)


class UnsharedState:
    """`begin` before a forward pass; `change` after it says what was changed. `looks`: this minibatch is one
    whose digests are compared.

    Marks, numbers and options of everything are compared as whole lists first: a minibatch of small
    parameters takes a few milliseconds."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        optimizer: torch.optim.Optimizer,
        user: UserCode,
        *,
        steps_elsewhere: bool = True,
    ) -> None:
        self._optimizer = OptimizerWatch(optimizer, elsewhere=steps_elsewhere)
        self._trained = {place.name for place in plan.parameters}
        named = dict(model.named_parameters())
        self._names, self._parameters = list(named), list(named.values())
        shared = {place.name for place in plan.buffers}
        self._shared = [(place.name, *_home(model, place.name)) for place in plan.buffers]
        self._kinds = [_kind(module.get_buffer(name)) for _, module, name in self._shared]
        self._constants = [
            (name, *_home(model, name), buffer.clone())
            for name, buffer in model.named_buffers()
            if name not in shared
        ]
        self._seen = [(-1, -1)] * len(self._constants)
        self._minibatches, self.looks = 0, False
        self._samples = Samples(plan, named)
        self._sampled: Sampled = []
        self._vector: Vector | None = None
        self._frozen: dict[str, int] = {}  # digests of those that nobody steps, at the first look
        self._kept = KeptModel(model, plan, user)
        self._writes: list[int] = []
        self._addresses: list[int] = []
        self._words: list[torch.Tensor] = []  # of each parameter, if this minibatch is looked at
        self._digests: list[int] = []
        self._updates = updates_by_torch()

    def begin(self, vector: Vector | None = None, *, again: bool = False) -> None:
        """`vector`: the parameters in use, in host memory; None: they lie anywhere. `again`: of the minibatch
        that has begun already."""
        self._optimizer.begin()
        if not again:
            self.looks = self._minibatches < FIRST_LOOKS or self.looks_next
            self._minibatches += 1
        self._writes, self._addresses = _writes(self._parameters), _addresses(self._parameters)
        self._words = list(map(words_of, self._parameters)) if self.looks else []
        self._digests = self._expected(self._look()) if self.looks else []
        self._vector, self._sampled = vector, self._sample(vector)
        self._updates = updates_by_torch()

    @property
    def looks_next(self) -> bool:
        """Whether the next minibatch is one of those that are looked at while the job trains."""
        return self._minibatches % LOOK_EVERY == 0

    def change(self) -> str:
        """What was done, or "" if nothing was changed."""
        if updates_by_torch() > self._updates:
            return AVERAGES
        for before, now in (
            (self._writes, _writes(self._parameters)),
            (self._addresses, _addresses(self._parameters)),
            (self._digests, self._look() if self._digests else []),
        ):
            if before != now:
                return self._of_parameter(next(compress(self._names, map(ne, before, now))))
        if name := self._samples.changed(self._sampled, self._sample(self._vector)):
            return self._of_parameter(name)
        return self._of_buffers() or self._optimizer.change() or self._kept.change(fully=self.looks)

    def check(self, user: UserCode) -> None:
        """Raises UserCodeError if anything was changed since `begin`."""
        if problem := self.change():
            who = "loss(model, batch)" if user.loop is None else "the script's loop"
            raise user.error_of(RuntimeError(f"{who} {problem}"), fatal=True)

    def check_at_end(self, user: UserCode) -> None:
        """Raises UserCodeError if the script has changed the model since the last minibatch that was looked
        at."""
        if problem := self._kept.change(fully=True):
            raise user.error_of(RuntimeError(f"the script {problem}"), fatal=True)

    def _of_buffers(self) -> str:
        """What was done to a buffer, or ""."""
        for (full_name, module, name), kind in zip(self._shared, self._kinds, strict=True):
            buffer = _buffer(module, name)
            if not isinstance(buffer, torch.Tensor) or (buffer.dtype, buffer.shape) != kind:
                found = _told(*_kind(buffer)) if isinstance(buffer, torch.Tensor) else "no tensor"
                return RESHAPED.format(name=full_name, before=_told(*kind), after=found)
            # made in torch.inference_mode: nobody could load the step's value into it
            if buffer.is_inference():
                setattr(module, name, buffer.clone())
        for number, (full_name, module, name, constant) in enumerate(self._constants):
            buffer = _buffer(module, name)
            if not isinstance(buffer, torch.Tensor):
                return BUFFER.format(name=full_name, dtype=constant.dtype)
            mark = id(buffer), buffer._version  # noqa: SLF001  torch has no public name for it
            if mark == self._seen[number] and not self.looks:
                continue
            if buffer.dtype != constant.dtype or not torch.equal(buffer, constant):
                return BUFFER.format(name=full_name, dtype=constant.dtype)
            self._seen[number] = mark
        return ""

    def _look(self) -> list[int]:
        found = [words.sum(dtype=torch.int64) for words in self._words]
        return [int(number) for number in torch.stack(found).tolist()] if found else []

    def _expected(self, digests: list[int]) -> list[int]:
        """Nobody steps frozen parameters, so theirs are those of the first look."""
        if not self._frozen:
            named = zip(self._names, digests, strict=True)
            self._frozen = {name: number for name, number in named if name not in self._trained}
        return [self._frozen.get(name, number) for name, number in zip(self._names, digests, strict=True)]

    def _sample(self, vector: Vector | None) -> Sampled:
        return (
            self._samples.of_parameters(self._addresses)
            if vector is None
            else self._samples.of_vector(vector)
        )

    def _of_parameter(self, name: str) -> str:
        required = self._parameters[self._names.index(name)].requires_grad
        return (PARAMETER if name in self._trained and required else FROZEN).format(name=name)


def _writes(parameters: list[nn.Parameter]) -> list[int]:
    """How often each was written in place."""
    return [parameter._version for parameter in parameters]  # noqa: SLF001  torch has no public name for it


def _addresses(parameters: list[nn.Parameter]) -> list[int]:
    return list(map(torch.Tensor.data_ptr, parameters))


def _buffer(module: nn.Module, name: str) -> object:
    """Return what the module has under that name: a buffer, or what the script has put in its place."""
    found = module._buffers.get(name)  # noqa: SLF001  a tenth of the time of getattr
    return getattr(module, name, None) if found is None else found


def _home(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that has this buffer, and what it calls it."""
    path, _, own = name.rpartition(".")
    return model.get_submodule(path), own


def _kind(buffer: torch.Tensor) -> tuple[torch.dtype, torch.Size]:
    return buffer.dtype, buffer.shape


def _told(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')} of shape {tuple(shape)}"


def constants_of(model: nn.Module, plan: Plan) -> tuple[Constant, ...]:
    """Digests of the values that each trainer's `model()` makes and that no trainer gets from another:
    parameters that are not trained, and buffers that trainers do not share. Consecutive tensors have one
    digest if there are more than MOST_CONSTANTS."""
    given = {place.name for place in (*plan.parameters, *plan.buffers)}
    own = [(name, tensor) for name, tensor in _tensors(model) if name not in given]
    run = -(-len(own) // MOST_CONSTANTS) or 1
    return tuple(_constant(own[first : first + run]) for first in range(0, len(own), run))


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Those whose bytes can be read; others (sparse, or on the meta device) are rare and not compared."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not nn.parameter.is_lazy(tensor) and tensor.layout == torch.strided and not tensor.is_meta:
            yield name, tensor


def _constant(tensors: list[tuple[str, torch.Tensor]]) -> Constant:
    found = hashlib.sha256()
    for name, tensor in tensors:
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        if flat.numel():
            found.update(flat.view(torch.uint8).numpy().data)
    first, last = tensors[0][0], tensors[-1][0]
    return Constant(name=first if len(tensors) == 1 else f"{first} to {last}", digest=found.hexdigest()[:16])


def digest(values: torch.Tensor) -> torch.Tensor:
    """The sum of the bits as integers modulo 2**64, an int64 scalar."""
    return words_of(values).sum(dtype=torch.int64)


def words_of(values: torch.Tensor) -> torch.Tensor:
    """The same memory as integers, of 64 bits if they fit: torch takes 25 times as long to sum narrower
    ones."""
    bits = bits_of(values.detach())
    words = 8 // bits.itemsize
    fits = bits.numel() % words == 0 and bits.storage_offset() % words == 0
    if fits and (bits.is_contiguous() or bits.stride() == dense_stride(bits)):
        bits = bits.as_strided((bits.numel(),), (1,)).view(torch.int64)
    return bits


class KeptModel:
    """The model as it was laid out: which parameters, buffers and modules it has, and which parameters are
    trained, as far as that must stay so (see FrozenParameters). A job lays parameters out once, before
    training; what the script changes of the model afterwards would be trained by nobody, or by one trainer.
    """

    def __init__(self, model: nn.Module, plan: Plan, user: UserCode) -> None:
        self._model = model
        free = {place.name for place in plan.parameters} if thaws(plan, user) else set()
        named = {name: each for name, each in model.named_parameters() if name not in free}
        self._names, self._tensors = list(named), list(named.values())
        self._why = OWN_LOOP_THAWS if user.loop is not None else NOBODY_STEPS if free else ASYNC_THAWS
        self._trained = _trained(self._tensors)
        self._parameters = _parameters(model)
        self._buffers = dict.fromkeys(name for name, _ in model.named_buffers())
        # after the first minibatch, which may make modules that it needs
        self._modules: dict[str, int] | None = None

    def change(self, *, fully: bool) -> str:
        """What was changed, or "". `fully`: names and modules too, which takes longer."""
        trained = _trained(self._tensors)
        if trained != self._trained:
            name = next(compress(self._names, map(ne, trained, self._trained)))
            before = self._trained[self._names.index(name)]
            return THAWED.format(name=name, before=before, now=not before, why=self._why)
        return self._structure() if fully else ""

    def _structure(self) -> str:
        modules = {name: id(module) for name, module in self._model.named_modules()}
        if self._modules is None:
            self._modules = modules
        for kind, before, now in (
            ("parameter", self._parameters, _parameters(self._model)),
            ("buffer", self._buffers, dict.fromkeys(name for name, _ in self._model.named_buffers())),
            ("module", self._modules, modules),
        ):
            if now != before:
                return MODEL_CHANGED.format(what=_difference(kind, before, now))
        return ""


def _trained(parameters: list[nn.Parameter]) -> list[bool]:
    return [parameter.requires_grad for parameter in parameters]


def _parameters(model: nn.Module) -> dict[str, object]:
    """A parameter is another one also if its shape is."""
    return {name: (id(parameter), parameter.shape) for name, parameter in model.named_parameters()}


def _difference(kind: str, before: Mapping[str, object], now: Mapping[str, object]) -> str:
    for name in before:
        if name not in now:
            return f"the {kind} {name} was taken away"
        if before[name] != now[name]:
            return f"the {kind} {name} was replaced"
    return f"the {kind} {next(name for name in now if name not in before)} was added"


class Samples:
    """Three numbers of each trained parameter: by them a change through `.data`, which neither torch's
    counters nor addresses show, is noticed in any minibatch, if it concerns the parameter as a whole. To
    compare all numbers takes as long as to read the model; UnsharedState does so now and then. It reads the
    bits as integers, from a vector with the parameters in use or from the parameters `named`, wherever they
    lie."""

    def __init__(self, plan: Plan, named: Mapping[str, torch.Tensor]) -> None:
        indices: dict[int, list[int]] = {}
        self._names: list[str] = []
        places = sorted((p for p in plan.parameters if p.elements), key=lambda place: place.segment)
        for place in places:
            numbers = [place.first + number for number in _three(place.elements)]
            indices.setdefault(place.segment, []).extend(numbers)
            self._names += [place.name] * len(numbers)
        self._gathered = {segment: np.array(numbers) for segment, numbers in indices.items()}
        self._bits: WeakKeyDictionary[Vector, list[tuple[Bits, Bits]]] = WeakKeyDictionary()
        self._parameters = [named[place.name] for place in places]
        self._addresses: list[int] = []
        self._readers: list[Callable[[], int]] = []

    def of_vector(self, vector: Vector) -> tuple[Bits, ...]:
        """In host memory. Of each segment. NumPy takes a few numbers in 2 us, torch in 20 and more: it gives
        up the interpreter's lock, which a thread that reads records may take."""
        if vector not in self._bits:
            self._bits[vector] = [
                (bits_of(vector.segments[segment]).numpy(), numbers)
                for segment, numbers in self._gathered.items()
            ]
        return tuple(bits[numbers] for bits, numbers in self._bits[vector])

    def of_parameters(self, addresses: list[int]) -> list[int]:
        """`addresses`: of all parameters, now. [] if some are not in host memory: a GPU would be waited
        for."""
        if self._addresses != addresses:  # seldom: an optimizer steps in place
            self._addresses = addresses
            on_host = all(parameter.is_cpu for parameter in self._parameters)
            self._readers = (
                [reader for each in self._parameters for reader in _readers(each)] if on_host else []
            )
        return list(map(call, self._readers))

    def changed(self, before: Sampled, after: Sampled) -> str:
        """The name of the first parameter that differs, or "". Both: of vectors, or of the parameters."""
        if isinstance(before, tuple) and isinstance(after, tuple):
            same = all(map(np.array_equal, before, after))
        else:
            same = before == after
        if same:
            return ""
        return next(compress(self._names, map(ne, _numbers(before), _numbers(after))))


def _numbers(sampled: Sampled) -> Iterable[int]:
    return chain.from_iterable(each.tolist() for each in sampled) if isinstance(sampled, tuple) else sampled


def _readers(parameter: torch.Tensor) -> list[Callable[[], int]]:
    """Each reads one of its three numbers where it lies: a tenth of the time that torch takes."""
    bits = bits_of(parameter.detach()).numpy()
    places: list[Any] = [(*np.unravel_index(number, bits.shape), ...) for number in _three(bits.size)]
    return [bits[place].item for place in places]


def _three(elements: int) -> tuple[int, ...]:
    return tuple(sorted({0, elements // 2, elements - 1}))


class AveragedBuffers:
    """Notices floating-point buffers of which a step takes the mean over lanes, although they hold no
    statistics.

        this lane's value after forward ─┐
        another lane's, or that of the  ─┴─► differ ─► one warning with the buffer's name
        next version: the lanes' mean

    The mean of running means and variances over lanes is what a larger minibatch would have given, or nearly.
    The mean of two queues, codebooks or hidden states is something else: rows of norm 1 become shorter.
    Values alone do not tell which of the two a buffer is: a running mean near 0 changes as much, relative to
    its size, as the row of a queue. So buffers of torch's normalisation layers, and those that are called
    like theirs, count as statistics, and all others that differ between lanes are told, unless the script has
    said what becomes of them. With one lane nothing differs.

    `lane` after each forward pass, `version` when the parameters in use are those of the next step.
    `warnings` are taken by `told`."""

    def __init__(self, model: nn.Module, plan: Plan, lanes: int) -> None:
        self._places = [
            place
            for place in plan.buffers
            if lanes > 1
            and place.name not in plan.policies
            and model.get_buffer(place.name).is_floating_point()
            and not _is_statistic(model, place.name)
        ]
        self._kept: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # before and after forward, of one lane
        self._minibatches = 0
        self._warnings: list[str] = []

    def lane(self, after: Vector, before: Vector) -> None:
        """The buffers of a lane are in `after`; they were loaded from `before`. Looks at some minibatches
        only."""
        looks = self._minibatches < FIRST_LOOKS or self._minibatches % LOOK_EVERY == 0
        self._minibatches += 1
        if not looks:
            return
        for place in self._places:
            value, loaded = after.view(place), before.view(place)
            if place.name in self._kept:
                self._compare(place.name, value)
            elif not _same(value, loaded):
                self._kept[place.name] = loaded.clone(), value.clone()

    def version(self, current: Vector) -> None:
        """The next step begins with the buffers in `current`: the mean over the lanes of this step, or what
        it was before, if the step was left out."""
        for place in [place for place in self._places if place.name in self._kept]:
            value = current.view(place)
            if not _same(value, self._kept[place.name][0]):
                self._compare(place.name, value)
        self.forget()

    def forget(self) -> None:
        """What comes next belongs to another history."""
        self._kept.clear()

    def told(self) -> tuple[str, ...]:
        """The warnings since the last call."""
        told, self._warnings = tuple(self._warnings), []
        return told

    def _compare(self, name: str, value: torch.Tensor) -> None:
        if not _same(value, self._kept[name][1]):
            self._warnings.append(AVERAGED.format(name=name))
            self._places = [place for place in self._places if place.name != name]


def _is_statistic(model: nn.Module, name: str) -> bool:
    path, _, own = name.rpartition(".")
    return is_statistic(model.get_submodule(path), own)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool((bits_of(one) == bits_of(other)).all())
