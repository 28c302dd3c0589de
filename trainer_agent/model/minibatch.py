"""One minibatch: the user's loss forward and backward, or the user's evaluation.

records ──collate──► batch ──loss(model, batch)──► loss ──backward──► gradients in a flat vector, block by block

While backward runs, a hook at each parameter tells which blocks of the flat vector have all their gradients.
"""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from shared.errors import InvalidArgument, UserCodeError
from shared.logged_metrics import Logged, add, collected, loss_in, metrics_beside
from shared.metric_names import LOSS
from shared.records.job_spec import Precision
from shared.tables.grouping import Grouped
from trainer_agent.data.collate import default_collate
from trainer_agent.data.ready_batch import ReadyBatch, seed_everything, undisturbed
from trainer_agent.model.buffers import LiveBuffers
from trainer_agent.model.compute import Ready, Records
from trainer_agent.model.devices import autocast
from trainer_agent.model.finite import check_gradients, check_loss
from trainer_agent.model.flat import Plan, Vector
from trainer_agent.model.unshared_state import UnsharedState
from trainer_agent.own_loop.turns import OwnLoop


class UserCode(Protocol):
    """The functions of the user's script; see trainer_agent.script.user_module.UserModule. What they raise arrives as
    UserCodeError. `loop`: of a script with a loop of its own, whose body is called as `loss`."""

    @property
    def loop(self) -> OwnLoop | None: ...

    def has(self, hook: str) -> bool: ...

    def call(self, hook: str, *arguments: Any) -> Any: ...

    def guard(self, code: Callable[..., Any], *arguments: Any) -> Any: ...

    def error_of(self, error: BaseException, *, fatal: bool = False) -> UserCodeError: ...


OWN_BACKWARD = (
    "the script calls backward() itself; {instead} (for gradients that the loss needs, use torch.autograd.grad)"
)


class BackwardGuard:
    """Only `run` may make gradients of parameters. Those of a backward() in the user's code would be taken for the minibatch's:
    half gradients would be pushed, or some counted twice. The parameters' hooks call `permit`."""

    def __init__(self, user: UserCode) -> None:
        self._user = user
        self._running = self._refused = False
        instead = (
            "return the loss, and Trireme calls backward() on it"
            if user.loop is None
            else "call trireme.backward(loss)"
        )
        self._message = OWN_BACKWARD.format(instead=instead)

    def begin(self) -> None:
        """Before anything of a minibatch: a script's own loop runs to its next batch."""
        if self._user.loop is not None:
            self._user.loop.next_pass()

    def permit(self, _: torch.Tensor | None = None) -> None:
        """Raises RuntimeError in a backward() that is not `run`'s."""
        if not self._running:
            self._refused = True
            raise RuntimeError(self._message)

    def call(self, hook: str, *arguments: Any) -> Any:
        """Call the user's function. Raises UserCodeError if it called backward(), even if it caught what that raised."""
        self._refused = False
        found = self._user.call(hook, *arguments)
        if self._refused:
            raise self._user.error_of(RuntimeError(self._message))
        return found

    def run(self, loss: torch.Tensor) -> None:
        """A script's own loop then runs to its optimizer.step()."""
        self._running = True
        try:
            self._user.guard(loss.backward)
        finally:
            self._running = False
        if self._user.loop is not None:
            self._user.loop.end_pass()


class MinibatchRunner:
    """Runs in one thread. `parameters`: those of `plan`, in its order. `finite`: losses and norms that are not are refused.
    `counts`: see LiveBuffers."""

    def __init__(
        self,
        user: UserCode,
        model: nn.Module,
        plan: Plan,
        parameters: list[nn.Parameter],
        clip_lane_norm: float | None,
        *,
        finite: bool = True,
        counts: bool = False,
        precision: Precision = "fp32",
    ) -> None:
        self._user, self._model, self._plan, self._parameters = user, model, plan, parameters
        self._device, self._clip_norm, self._finite = parameters[0].device, clip_lane_norm, finite
        self._forward = partial(autocast, precision, self._device)
        self._unshared = UnsharedState(model, plan)
        self.buffers = LiveBuffers(model, plan, counts=counts)
        self._views: weakref.WeakKeyDictionary[Vector, list[torch.Tensor]] = weakref.WeakKeyDictionary()
        self.gradient_views: list[torch.Tensor] = []  # by parameter: where this backward's gradients belong
        self.loss_sum = 0.0  # loss x records, and what was logged, once the loss is known: before any block is finished
        self.logged: dict[str, Logged] = {}  # by the script, in this backward's collate and forward
        self._gradients: Vector
        self._finish: Callable[[int], object] = bool
        self._missing: list[int] | None = None  # by block: gradients not made yet; None: not counted in this backward
        self._may_overlap = False
        self._guard = BackwardGuard(user)
        self._blocks_of = [plan.blocks_of(place) for place in plan.parameters]
        self._members = [0] * len(plan.blocks)
        for blocks in self._blocks_of:
            for block in blocks:
                self._members[block] += 1
        self._made = [0] * len(parameters)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                partial(self._on_gradient, index)
            )
            for index, parameter in enumerate(parameters)
        ]

    def prepare(self, records: Records, seed: int, named: Callable[[object], Sequence[Grouped]]) -> Ready:
        """The minibatch for a later `backward`, and the ids that are `named` by what the script's `ids` returns. Random generators stay as
        they are."""
        with undisturbed(self._device):
            seed_everything(seed)
            made = ReadyBatch.made(partial(self._batch, records), self._device)
            said = self._user.call("ids", made.batch)
        try:
            return Ready(named(said), made)
        except InvalidArgument as error:  # no record is at fault
            raise self._user.error_of(error, fatal=True) from error

    def backward(
        self,
        records: Records,
        seed: int,
        current: Vector,
        gradients: Vector,
        finish: Callable[[int], object] | None,
        ready: Ready | None = None,
    ) -> float:
        """Forward and backward from the parameters and buffers in `current`. The gradients and the changed buffers are
        written to `gradients`; the result is loss x records. `ready`: of these records and this seed.

        `finish(block)` is called while backward runs, for each block whose gradients are all there, if that can be known: right after
        the block was written.
        Raises NonFiniteError.
        """
        overlaps = finish is not None and self._may_overlap
        self._finish, self._missing = finish or bool, list(self._members) if overlaps else None
        if self._user.loop is not None:
            self._between_passes(current)
        self._bind(gradients)
        self.buffers.load(current)
        seed_everything(seed)
        self._model.train()
        with collected() as self.logged:
            batch = self._batch(records) if ready is None else ready.batch.begin(self.logged, self._device)
            self._unshared.begin()
            with self._forward():
                found = self._guard.call("loss", self._model, batch)
        loss = self._checked(self._user.guard(loss_in, found))
        self._check_unshared("loss(model, batch)" if self._user.loop is None else "the script's loop")
        on_cpu = self._device.type == "cpu"
        value = self._value(loss, found, len(records)) if on_cpu else None  # on a GPU it would wait for forward
        self._made = [0] * len(self._parameters)
        self._guard.run(loss)
        if self._user.loop is not None:
            self._check_unshared("the script's loop")
        self._check_made()
        self._missing = None
        for view, made in zip(self.gradient_views, self._made, strict=True):
            if not made:
                view.zero_()
        value = self._value(loss, found, len(records)) if value is None else value
        if self._clip_norm is not None:
            self._clip(self._clip_norm)
        self.buffers.store(gradients, current)
        return value * len(records)

    def evaluate(self, records: Records, seed: int, current: Vector) -> dict[str, float]:
        """Sums over the minibatch, in evaluation mode. Buffers are loaded and the mode is set for each minibatch, here and in
        `backward`, so neither changes what the other computes."""
        self.buffers.load(current)
        seed_everything(seed)
        self._model.eval()
        with torch.no_grad():
            batch = self._batch(records)
            with self._forward():
                found = self._guard.call("evaluate" if self._user.has("evaluate") else "loss", self._model, batch)
        sums = found if self._user.has("evaluate") else sums_of(found, len(records), self._user.guard)
        return self._numbers("evaluate(model, batch)", sums)

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Metrics out of the sums of all minibatches."""
        if self._user.has("metrics"):
            return self._numbers("metrics(sums)", self._user.call("metrics", dict(sums)))
        return dict(sums) if self._user.has("evaluate") else means_of(sums)

    def permit(self, _: torch.Tensor | None = None) -> None:
        """See BackwardGuard."""
        self._guard.permit()

    def check_gradients(self) -> None:
        """Of the last backward. Raises NonFiniteError, which names a parameter."""
        names = (place.name for place in self._plan.parameters)
        check_gradients(dict(zip(names, self.gradient_views, strict=True)))

    def release(self) -> None:
        """The script may use its model as any other."""
        for hook in self._hooks:
            hook.remove()

    # ------------------------------------------------------------ the batch and the loss

    def _between_passes(self, current: Vector) -> None:
        """What the script does between two batches sees buffers and parameters of `current`."""
        self.buffers.load(current)
        self._unshared.begin()
        self._guard.begin()
        self._check_unshared("the script's loop")

    def _check_unshared(self, who: str) -> None:
        if problem := self._unshared.change():
            raise self._user.error_of(RuntimeError(f"{who} {problem}"), fatal=True)

    def _batch(self, records: Records) -> Any:
        if self._user.has("collate"):
            batch = self._user.call("collate", records)
        else:
            batch = self._user.guard(default_collate, records)  # columns of the user's own kinds run the user's code
        return batch if self._device.type == "cpu" else on_device(batch, self._device)

    def _checked(self, loss: Any) -> torch.Tensor:
        if isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.requires_grad:
            return loss
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            found = "a scalar that does not depend on the parameters"
        message = f"loss(model, batch) returned {found}; return the minibatch's mean loss, a scalar with a gradient"
        raise self._user.error_of(TypeError(message))

    def _value(self, loss: torch.Tensor, found: Any, records: int) -> float:
        """Of the loss. The metrics that came with it are logged."""
        value = float(loss.item())
        if self._finite:
            check_loss(value)
        self._user.guard(add, self.logged, metrics_beside(found), float(records))
        self.loss_sum = value * records
        return value

    def _clip(self, limit: float) -> None:
        """As nn.utils.clip_grad_norm_."""
        norm = nn.utils.get_total_norm([p.grad for p in self._parameters if p.grad is not None])
        if self._finite and not torch.isfinite(norm):
            self.check_gradients()
        nn.utils.clip_grads_with_norm_(self._parameters, limit, norm)

    def _numbers(self, what: str, found: Any) -> dict[str, float]:
        if not isinstance(found, Mapping):
            raise self._user.error_of(TypeError(f"{what} returned {type(found).__name__}; return a dict of numbers"))
        try:
            return {str(name): float(value) for name, value in found.items()}
        except (TypeError, ValueError) as error:
            raise self._user.error_of(TypeError(f"{what} returned {found!r:.200}; return a dict of numbers")) from error

    # ------------------------------------------------------------ gradients that backward has made

    def _bind(self, gradients: Vector) -> None:
        if gradients not in self._views:
            self._views[gradients] = gradients.views(self._plan.parameters)
        self._gradients = gradients
        self.gradient_views = self._views[gradients]
        for parameter in self._parameters:
            parameter.grad = None

    def _on_gradient(self, index: int, parameter: torch.Tensor) -> None:
        """The first gradient that autograd makes is copied to its view; later parts are added there. If `grad` were the view
        from the start, autograd would add to zeros, which had to be written before. A gradient of several blocks is copied and
        finished block by block, while each is in the processor's cache."""
        self._guard.permit()
        view, made, blocks = self.gradient_views[index], parameter.grad, self._blocks_of[index]
        assert made is not None
        self._made[index] += 1
        if made is not view:
            made = made.to_dense()
            parameter.grad = view
            if self._missing is not None and len(blocks) > 1 and made.stride() == view.stride():
                place = self._plan.parameters[index]
                for block, target, source in self._gradients.parts(place, made):
                    target.copy_(source)
                    self._count(block)
                return
            view.copy_(made)
        for block in blocks:
            self._count(block)

    def _count(self, block: int) -> None:
        """A gradient in the block is there."""
        if self._missing is not None:
            self._missing[block] -= 1
            if self._missing[block] == 0:
                self._finish(block)

    def _check_made(self) -> None:
        """Reentrant checkpointing makes a gradient in parts: then no block is finished before backward ends. The first
        backward finds out, and finishes nothing early."""
        in_parts = max(self._made) > 1
        if in_parts and self._missing is not None:
            message = "backward went on with a gradient that was finished; use checkpoint(..., use_reentrant=False)"
            raise self._user.error_of(RuntimeError(message))
        if self._missing is None:
            self._may_overlap = self._clip_norm is None and not in_parts


def sums_of(found: Any, records: int, guard: Callable[..., Any]) -> dict[str, Any]:
    """Of a script without `evaluate`: what `loss` returned for one minibatch, times its records. `guard` calls what may refuse it."""
    values = {LOSS: guard(loss_in, found), **metrics_beside(found)}
    return {**{name: value * records for name, value in values.items()}, "records": records}


def means_of(sums: Mapping[str, float]) -> dict[str, float]:
    """Of the sums that `sums_of` gave for all minibatches."""
    records = sums.get("records")
    return {name: total / records for name, total in sums.items() if name != "records"} if records else dict(sums)


def on_device(batch: Any, device: torch.device) -> Any:
    """`batch` with its tensors on `device`, in containers of the same kinds: lists, tuples, named tuples, dataclasses, mappings,
    and objects that have their own `to(device)`. Other objects are left alone."""
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
                object.__setattr__(moved, field.name, on_device(getattr(batch, field.name), device))  # also if frozen
            return moved
    return batch


def _like(batch: Mapping[Any, Any], values: dict[Any, Any]) -> Mapping[Any, Any]:
    """`values`, which have the keys of `batch`, in a mapping of its kind. A mapping that cannot be written becomes a dict."""
    if type(batch) is dict or not isinstance(batch, MutableMapping):
        return values
    moved = copy.copy(batch)
    for name, value in values.items():
        moved[name] = value
    return moved
