"""State that forward changes and trainers do not share: noticed, so that it can be refused.

    parameters                                        only the optimizer, at the parameter servers, changes them
    buffers that are neither floating-point nor int64  constants of the model
    the optimizer: groups, options, state              see optimizer/watched.py

If forward changed them, the result would depend on which trainer computed which minibatch. Most changes show in torch's counter of
in-place operations or in the address. Those through `.data` show in a digest, which is computed for some minibatches only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import compress
from operator import ne

import torch
from torch import nn

from trainer_agent.model.flat import Plan, Vector, dense_stride
from trainer_agent.model.optimizer.watched import OptimizerWatch
from trainer_agent.model.watch.backward_guard import UserCode
from trainer_agent.model.watch.kept_model import KeptModel
from trainer_agent.model.watch.samples import Sampled, Samples
from trireme_shared.blocks.buffer_mean import bits_of
from trireme_shared.protocol.records.layout import MOST_CONSTANTS, Constant

FIRST_LOOKS, LOOK_EVERY = 3, 64  # minibatches whose digests are compared

PARAMETER = (
    "changed the parameter {name}; only the optimizer may change parameters, because trainers do not share "
    "other changes (nn.Embedding does it with max_norm: leave that out)"
)
FROZEN = (
    "changed the parameter {name}, which the optimizer does not hold; trainers do not share such changes: "
    "make it a floating-point buffer (register_buffer), which they share"
)
RESHAPED = (
    "changed the buffer {name}: it was {before}, and now it is {after}; trainers share the values of a buffer, so it keeps its shape and "
    "dtype: make it as large as it can become in model(), and keep a counter beside it"
)
BUFFER = (
    "changed the buffer {name} of {dtype}; trainers share floating-point and int64 buffers only: use one of "
    "these, or a plain attribute if it only keeps what can be computed again"
)


class UnsharedState:
    """`begin` before a forward pass; `change` after it says what was changed. `looks`: this minibatch is one whose digests are compared.

    Marks, numbers and options of everything are compared as whole lists first: a minibatch of small parameters takes a few milliseconds."""

    def __init__(
        self, model: nn.Module, plan: Plan, optimizer: torch.optim.Optimizer, *, steps_elsewhere: bool = True
    ) -> None:
        self._optimizer = OptimizerWatch(optimizer, elsewhere=steps_elsewhere)
        self._trained = {place.name for place in plan.parameters}
        named = dict(model.named_parameters())
        self._names, self._parameters = list(named), list(named.values())
        shared = {place.name for place in plan.buffers}
        self._shared = [(place.name, *_home(model, place.name)) for place in plan.buffers]
        self._kinds = [_kind(module.get_buffer(name)) for _, module, name in self._shared]
        self._constants = [
            (name, *_home(model, name), buffer.clone()) for name, buffer in model.named_buffers() if name not in shared
        ]
        self._seen = [(-1, -1)] * len(self._constants)
        self._minibatches, self.looks = 0, False
        self._samples = Samples(plan, named)
        self._sampled: Sampled = []
        self._vector: Vector | None = None
        self._frozen: dict[str, int] = {}  # digests of those that nobody steps, at the first look
        self._kept = KeptModel(model)
        self._writes: list[int] = []
        self._addresses: list[int] = []
        self._words: list[torch.Tensor] = []  # of each parameter, if this minibatch is looked at
        self._digests: list[int] = []

    def begin(self, vector: Vector | None = None, *, again: bool = False) -> None:
        """`vector`: the parameters in use, in host memory; None: they lie anywhere. `again`: of the minibatch that has begun already."""
        self._optimizer.begin()
        if not again:
            self.looks = self._minibatches < FIRST_LOOKS or self.looks_next
            self._minibatches += 1
        self._writes, self._addresses = _writes(self._parameters), _addresses(self._parameters)
        self._words = list(map(words_of, self._parameters)) if self.looks else []
        self._digests = self._expected(self._look()) if self.looks else []
        self._vector, self._sampled = vector, self._sample(vector)

    @property
    def looks_next(self) -> bool:
        """Whether the next minibatch is one of those that are looked at while the job trains."""
        return self._minibatches % LOOK_EVERY == 0

    def change(self) -> str:
        """What was done, or "" if nothing was changed."""
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
        """Raises UserCodeError if the script has changed the model since the last minibatch that was looked at."""
        if problem := self._kept.change(fully=True):
            raise user.error_of(RuntimeError(f"the script {problem}"), fatal=True)

    def _of_buffers(self) -> str:
        """What was done to a buffer, or ""."""
        for (full_name, module, name), kind in zip(self._shared, self._kinds, strict=True):
            buffer = _buffer(module, name)
            if not isinstance(buffer, torch.Tensor) or (buffer.dtype, buffer.shape) != kind:
                found = _told(*_kind(buffer)) if isinstance(buffer, torch.Tensor) else "no tensor"
                return RESHAPED.format(name=full_name, before=_told(*kind), after=found)
            if buffer.is_inference():  # made in torch.inference_mode: nobody could load the step's value into it
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
        return self._samples.of_parameters(self._addresses) if vector is None else self._samples.of_vector(vector)

    def _of_parameter(self, name: str) -> str:
        return (PARAMETER if name in self._trained else FROZEN).format(name=name)


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
    """Digests of the values that each trainer's `model()` makes and that no trainer gets from another: parameters that are not trained, and
    buffers that trainers do not share. Consecutive tensors have one digest if there are more than MOST_CONSTANTS."""
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
    """The same memory as integers, of 64 bits if they fit: torch takes 25 times as long to sum narrower ones."""
    bits = bits_of(values.detach())
    words = 8 // bits.itemsize
    fits = bits.numel() % words == 0 and bits.storage_offset() % words == 0
    if fits and (bits.is_contiguous() or bits.stride() == dense_stride(bits)):
        bits = bits.as_strided((bits.numel(),), (1,)).view(torch.int64)
    return bits
