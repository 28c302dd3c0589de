"""One minibatch: the user's loss forward and backward, or the user's evaluation.

records ──collate──► batch ──loss(model, batch)──► loss
    ──backward──► gradients in a flat vector, block by block

While backward runs, a hook at each parameter tells which blocks of the flat vector have all their gradients.
In a script's own loop the gradients stay the script's until it calls optimizer.step(): what it does to them
until then counts, so they are copied to the flat vector after that.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as module_hooks

from trainer_agent.data.collate import ReadyBatch, default_collate
from trainer_agent.data.shard import Minibatch
from trainer_agent.model.averages import averages_of, begin_apart
from trainer_agent.model.compute import BlockSink, Ready, Records
from trainer_agent.model.devices import autocast, on_device
from trainer_agent.model.flat import LiveBuffers, Plan, Vector
from trainer_agent.model.gradient_tree import LeftOutError, check_gradients, check_loss
from trainer_agent.model.losses import Losses, LossReader, means_of
from trainer_agent.model.metric_objects import MetricObjects
from trainer_agent.model.watch.freezing import FrozenParameters, on_gradient, thaws
from trainer_agent.model.watch.minibatch_rules import MissingGradients, Modes, UserCode, evaluating
from trainer_agent.model.watch.own_state import Watch
from trainer_agent.model.watch.unshared_state import AveragedBuffers, UnsharedState, digest
from trainer_agent.own_loop.changes import notices
from trainer_agent.own_loop.job_steps import training_at
from trireme_shared.datasets.random_state import START_SEED, seed_everything, seeded
from trireme_shared.protocol.errors import InvalidArgument, TooLarge, UserCodeError
from trireme_shared.protocol.metrics import Logged, add, collected
from trireme_shared.protocol.records import JobSpec, Mode, Strategy
from trireme_shared.protocol.records.metric_states import Sum
from trireme_shared.protocol.records.queue import check_size, refused_sums
from trireme_shared.serving.optimizers.several import IN_TURNS, Several
from trireme_shared.tables.grouping import Grouped

CHANGED_LATE = (
    "a hook changed the gradient of {name} after backward had computed it, when it was on its way "
    "already; change it in a hook of the parameter "
    "(register_hook, register_post_accumulate_grad_hook) or of a module "
    "(register_full_backward_hook): those are waited for"
)
DOUBLE = (
    "torch.set_default_dtype(torch.float64) is in force; the optimizer of a collective job steps "
    "in this process and would keep its counters in float64, "
    "which no checkpoint has: set it back to torch.float32, and give dtype=torch.float64 where it "
    "is needed; or use strategy = parameter_server"
)
WENT_ON = "backward went on with a gradient that was finished; use checkpoint(..., use_reentrant=False)"
OWN_BACKWARD = (
    "the script calls backward() itself; {instead} (for gradients that the loss needs, use "
    "torch.autograd.grad)"
)


class MinibatchRunner:
    """Runs in one thread. `parameters`: those of `plan`, in its order. `notice`: what the user should hear of
    with the first minibatch."""

    def __init__(
        self,
        user: UserCode,
        model: nn.Module,
        plan: Plan,
        parameters: list[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        spec: JobSpec,
        notice: str = "",
    ) -> None:
        self._user, self._model, self._plan, self._parameters = user, model, plan, parameters
        self._device, self._clip_norm = parameters[0].device, spec.clip_lane_norm
        self._finite = spec.on_nonfinite != "ignore"
        self._forward = partial(autocast, spec.precision, self._device)
        self._unshared, self._without = UnsharedState(model, plan, optimizer, user), MissingGradients(plan)
        #: which parameters the step leaves as they are
        self.freezing = FrozenParameters(plan, parameters, thaws=thaws(plan, user))
        named = zip((place.name for place in plan.parameters), parameters, strict=True)
        self._losses = LossReader(
            user, optimizer, dict(named), may_rest=bool(plan.layout.sizes), tables=bool(plan.layout.tables)
        )
        self._steps_here = spec.strategy is Strategy.COLLECTIVE
        self._lanes = spec.lanes if spec.mode is Mode.SYNC else spec.push_every
        self.averaged = AveragedBuffers(model, plan, self._lanes)
        self.buffers = LiveBuffers(model, plan, counts=spec.mode is Mode.ASYNC)
        self._views: weakref.WeakKeyDictionary[Vector, list[torch.Tensor]] = weakref.WeakKeyDictionary()
        self.gradient_views: list[torch.Tensor] = []  # by parameter: where this backward's gradients belong
        # loss x records, and what was logged, once the loss is known: before any block is finished
        self.loss_sum = 0.0
        self.logged: dict[str, Logged] = {}  # by the script, in this backward's collate and forward
        self.step_and_epoch: tuple[int, int] | None = None  # see BeforeStep
        self._gradients: Vector
        self._sink: BlockSink | None = None  # of this backward
        # by block: gradients not made yet; None: not counted in this backward
        self._missing: list[int] | None = None
        self._may_overlap = False
        self._guard = BackwardGuard(user, several=isinstance(optimizer, Several))
        self._objects = MetricObjects(user, self._device)
        self._notice, self._told, self._own_state = notice, set[str](), Watch(user.path, model)
        self._averages = begin_apart(averages_of(model))
        self.modes = Modes(model, own_loop=user.loop is not None)
        self._sums: dict[int, torch.Tensor] = {}  # by parameter: digests of views, where it is looked
        self._takes_at_end = False  # in this backward, gradients are copied to their views when it is over
        self._blocks_of = [plan.blocks_of(place) for place in plan.parameters]
        self._members = [0] * len(plan.blocks)
        for blocks in self._blocks_of:
            for block in blocks:
                self._members[block] += 1
        self._made = [0] * len(parameters)
        self._hooks = [
            on_gradient(parameter, partial(self._on_gradient, index))
            for index, parameter in enumerate(parameters)
        ]
        # hooks that the script may add later are in the same dicts
        self._hooks_of_gradients = [parameter._post_accumulate_grad_hooks for parameter in parameters]  # noqa: SLF001
        self._hooks_of_modules = [
            module_hooks._global_backward_hooks,  # noqa: SLF001
            module_hooks._global_backward_pre_hooks,  # noqa: SLF001
        ]
        for module in model.modules():
            self._hooks_of_modules += (module._backward_hooks, module._backward_pre_hooks)  # noqa: SLF001

    def prepare(self, records: Records, seed: int, named: Callable[[object], Sequence[Grouped]]) -> Ready:
        """The minibatch for a later `backward`, and the ids that are `named` by what the script's `ids`
        returns. Random generators stay as they are."""
        with seeded(seed):
            made = ReadyBatch.made(partial(self._batch, records))
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
        sink: BlockSink | None,
        ready: Ready | None = None,
        idle: set[int] | None = None,
    ) -> float:
        """Forward and backward from the parameters and buffers in `current`. The gradients and the changed
        buffers are written to `gradients`; the result is loss x records. `ready`: of these records and this
        seed. `idle`: in place, the blocks of which no parameter requires a gradient; known when the first
        block is done.

        `sink.done(block)` is called while backward runs, for each block whose gradients are all there, if
        that can be known: right after the block was written. Raises NonFiniteError; LeftOutError if the
        script's GradScaler leaves the minibatch out.
        """
        overlaps = sink is not None and self._may_overlap and not self._unshared.looks_next
        self._sink, self._missing = sink, list(self._members) if overlaps else None
        if self._user.loop is not None:
            # what the script does before its first batch is the same at every trainer, whichever lane and
            # step that is for
            seed_everything(seed if self._user.loop.has_begun else START_SEED)
            self._between_passes(current)
        self._bind(gradients)
        self.buffers.load(current)
        self.freezing.begin()
        seed_everything(seed)
        self.modes.set_training()
        with collected() as self.logged:
            batch = self._batch(records) if ready is None else ready.batch.begin(self.logged)
            if self._user.loop is None:  # else it has begun before the script went on to this batch
                self._unshared.begin(current if self._device.type == "cpu" else None)
            with self._forward(), training_at(self.step_and_epoch):
                found = self._guard.call("loss", self._model, batch)
        losses = self._losses.read(found)
        self._unshared.check(self._user)
        self.modes.check(self._user)
        if self._steps_here and torch.get_default_dtype() is torch.float64:
            raise self._user.error_of(RuntimeError(DOUBLE), fatal=True)
        loss_to_report = self._guard.reported(losses).detach()
        # on a GPU it would wait for forward; in a loop of one's own the script goes on to its step whatever
        # the loss is
        early = self._device.type == "cpu" and self._user.loop is None
        value = self._value(loss_to_report, losses, len(records)) if early else None
        self._made = [0] * len(self._parameters)
        if self._user.loop is not None:
            loss_to_report = loss_to_report.clone()
        self._takes_at_end = self._user.loop is not None or self._has_later_hooks()
        if self.freezing.forward_over(losses):
            self._missing = None  # only after backward it is known which of the parameters had a gradient
        if idle is not None:
            idle.clear()
            idle.update(self.freezing.idle)
        self._leave_alone()
        stepped = self._guard.run(losses)
        self._unshared.check(self._user)  # hooks run in backward, and a loop goes on to its step
        if not stepped:
            raise LeftOutError
        if self._takes_at_end:
            self._take_gradients()
        else:
            self._check_kept()
        self._check_made()
        if self.freezing.backward_over(self._user, self._made) and self._missing is not None:
            raise self._user.error_of(RuntimeError(WENT_ON), fatal=True)
        self._without.minibatch(self._made, self.freezing.indices)
        self._missing = None
        for view, made in zip(self.gradient_views, self._made, strict=True):
            if not made:
                view.zero_()
        value = self._value(loss_to_report, losses, len(records)) if value is None else value
        if self._clip_norm is not None:
            self._clip(self._clip_norm)
        self.buffers.store(gradients, current)
        self.averaged.lane(gradients, current)
        return value * len(records)

    def evaluate(self, records: Records, seed: int, current: Vector) -> dict[str, Sum]:
        """Sums over the minibatch, and states of metric objects, in evaluation mode. Buffers are loaded and
        the mode is set for each minibatch, here and in `backward`, so neither changes what the other
        computes."""
        self.buffers.load(current)
        objects = self._objects.begin()
        seed_everything(seed)
        with evaluating(self._model), torch.no_grad():
            batch = self._batch(records)
            with self._forward():
                found = self._guard.call(
                    "evaluate" if self._user.has("evaluate") else "loss", self._model, batch, *objects
                )
            if not self._user.has("evaluate"):
                found = self._losses.sums(found, len(records))
            elif objects and found is None:
                found = {}
            return self._objects.beside(numbers_of(self._user, "evaluate(model, batch)", found))

    def metrics(self, sums: Mapping[str, Sum]) -> dict[str, float]:
        """See metrics_of."""
        return metrics_of(self._user, self._objects, sums)

    def permit(self, _: torch.Tensor | None = None) -> None:
        """See BackwardGuard."""
        self._guard.permit()

    @property
    def row_factor(self) -> float:
        """See BackwardGuard."""
        return self._guard.row_factor

    def warnings(self) -> tuple[str, ...]:
        """What the user should hear of the minibatches since the last call."""
        loop = self._user.loop
        found = [self._notice, self.modes.notice, self.modes.left]
        if loop is not None:
            found = notices(
                scales=loop.scaling.is_used,
                changes=loop.changes_gradients,
                buffer=loop.undone_buffer,
                lanes=self._lanes,
                tables=bool(self._plan.layout.tables),
            )
            found.append(loop.threads_notice)
        found = [*found, self._averages, self._own_state.after_minibatch()]
        new = [text for text in found if text and text not in self._told]
        self._told.update(new)
        return (*new, *self._without.told(), *self.averaged.told())

    def check_gradients(self) -> None:
        """Of the last backward. Raises NonFiniteError, which names a parameter."""
        names = (place.name for place in self._plan.parameters)
        check_gradients(dict(zip(names, self.gradient_views, strict=True)))

    def check_at_end(self) -> None:
        """The model is as it was laid out. Raises UserCodeError."""
        self._unshared.check_at_end(self._user)

    def release(self) -> None:
        """The script may use its model as any other."""
        for hook in self._hooks:
            hook.remove()

    # ------------------------------------------------------------ the batch and the loss

    def _between_passes(self, current: Vector) -> None:
        """What the script does between two batches sees buffers and parameters of `current`."""
        self.buffers.load(current)
        self._unshared.begin(current if self._device.type == "cpu" else None)
        self._guard.begin()
        self._unshared.check(self._user)

    def _batch(self, records: Records) -> Any:
        ready = records.ready if isinstance(records, Minibatch) else None
        if ready is not None:
            batch = self._user.guard(ready)
        elif self._user.has("collate"):
            batch = self._user.call("collate", records)
        else:
            # columns of the user's own kinds run the user's code
            batch = self._user.guard(default_collate, records)
        return batch if self._device.type == "cpu" else on_device(batch, self._device)

    def _value(self, loss: torch.Tensor, losses: Losses, records: int) -> float:
        """Of the loss. The metrics that came with it are logged."""
        value = float(loss.item())
        if self._finite:
            check_loss(value)
        self._user.guard(add, self.logged, losses.metrics, float(records))
        self.loss_sum = value * records
        return value

    def _clip(self, limit: float) -> None:
        """As nn.utils.clip_grad_norm_, for the views."""
        gradients = [view for view, made in zip(self.gradient_views, self._made, strict=True) if made]
        norm = nn.utils.get_total_norm(gradients)
        if self._finite and not torch.isfinite(norm):
            self.check_gradients()
        torch._foreach_mul_(gradients, torch.clamp(limit / (norm + 1e-6), max=1.0))

    # ------------------------------------------------------------ gradients that backward has made

    def _bind(self, gradients: Vector) -> None:
        if gradients not in self._views:
            self._views[gradients] = gradients.views(self._plan.parameters)
        self._gradients = gradients
        self.gradient_views = self._views[gradients]
        if self._user.loop is None:
            for parameter in self._parameters:
                parameter.grad = None

    def _on_gradient(self, index: int, parameter: torch.Tensor) -> None:
        """The first gradient that autograd makes is copied to its view; later parts are added there. If
        `grad` were the view from the start, autograd would add to zeros, which had to be written before."""
        self._guard.permit()
        made = parameter.grad
        if made is None:  # an earlier hook of the script took it
            made = torch.zeros_like(parameter)
        if self._takes_at_end:
            parameter.grad = made.to_dense() if parameter.grad is not None else None
            return
        self._made[index] += 1
        view, blocks = self.gradient_views[index], self._blocks_of[index]
        if made is view:
            self._count(blocks)
        else:
            parameter.grad = view
            made = made if made.layout is torch.strided else made.to_dense()
            if len(blocks) == 1:  # most: as _write, without a call of it
                view.copy_(made)
                self._count(blocks)
            else:
                self._write(index, made)
        if self._missing is None and self._unshared.looks:
            self._sums[index] = digest(self.gradient_views[index])

    def _check_kept(self) -> None:
        """Gradients are as `_on_gradient` has left them. What hooks of the script that are not known changed
        later may be on its way already."""
        if not self._sums and all(map(is_, [each.grad for each in self._parameters], self.gradient_views)):
            return
        for index, (parameter, view) in enumerate(zip(self._parameters, self.gradient_views, strict=True)):
            written = self._sums.get(index)
            if self._made[index] and (
                parameter.grad is not view or (written is not None and bool(digest(view) != written))
            ):
                message = CHANGED_LATE.format(name=self._plan.parameters[index].name)
                raise self._user.error_of(RuntimeError(message), fatal=True)
        self._sums.clear()

    def _has_later_hooks(self) -> bool:
        """Whether hooks of the script may change gradients after `_on_gradient` has seen them."""
        if max(map(len, self._hooks_of_gradients)) > 1:
            handles = zip(self._hooks, self._hooks_of_gradients, strict=True)
            if any(next(reversed(hooks)) != hook.id for hook, hooks in handles):
                return True
        return any(self._hooks_of_modules)

    def _take_gradients(self) -> None:
        """What backward, and the script after it, have left in `grad` is the minibatch's gradient."""
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is not None:
                self._made[index] = 1
                self._write(index, parameter.grad)

    def _write(self, index: int, gradient: torch.Tensor) -> None:
        """Copy a gradient to its view. One of several blocks is copied and finished block by block, while
        each is in the processor's cache."""
        view, blocks = self.gradient_views[index], self._blocks_of[index]
        if self._missing is None or len(blocks) == 1 or gradient.stride() != view.stride():
            view.copy_(gradient)
            self._count(blocks)
            return
        for block, target, source in self._gradients.parts(self._plan.parameters[index], gradient):
            target.copy_(source)
            self._count((block,))

    def _leave_alone(self) -> None:
        """Nobody waits for gradients of such parameters: blocks that have no others are done."""
        for index in self.freezing.indices if self._missing is not None else ():
            self.gradient_views[index].zero_()
            self._count(self._blocks_of[index])

    def _count(self, blocks: Sequence[int]) -> None:
        """A gradient in each of the blocks is there."""
        if self._missing is None or self._sink is None:
            return
        for block in blocks:
            self._missing[block] -= 1
            if self._missing[block] == 0:
                self._sink.done(block)

    def _check_made(self) -> None:
        """Reentrant checkpointing makes a gradient in parts: then no block is finished before backward ends.
        The first backward finds out, and finishes nothing early."""
        in_parts = max(self._made) > 1
        if in_parts and self._missing is not None:
            raise self._user.error_of(RuntimeError(WENT_ON))
        if self._missing is None:
            self._may_overlap = self._clip_norm is None and not in_parts


def numbers_of(user: UserCode, what: str, found: Any) -> dict[str, float]:
    """What `what` in the script returned, as numbers by name. Raises UserCodeError."""
    if not isinstance(found, Mapping):
        raise user.error_of(TypeError(f"{what} returned {type(found).__name__}; return a dict of numbers"))
    try:
        return {str(name): float(value) for name, value in found.items()}
    except (TypeError, ValueError) as error:
        msg = f"{what} returned {found!r:.200}; return a dict of numbers"
        raise user.error_of(TypeError(msg)) from error


def metrics_of(user: UserCode, objects: MetricObjects, sums: Mapping[str, Sum]) -> dict[str, float]:
    """The metrics of an evaluation, out of the sums and states of all its minibatches. Raises UserCodeError,
    a fatal one for more of them than a job keeps."""
    found = objects.computed(sums)
    if user.has("metrics"):
        with seeded(START_SEED):
            metrics = numbers_of(user, "metrics(sums)", user.call("metrics", found))
    else:
        metrics = objects.numbers(found) if user.has("evaluate") else means_of(found)
    try:
        check_size(metrics)
    except TooLarge as error:
        raise refused_sums(error) from error
    return metrics


class BackwardGuard:
    """Only `run` may make gradients of parameters. Those of a backward() in the user's code would be taken
    for the minibatch's: half gradients would be pushed, or some counted twice. The parameters' hooks call
    `permit`."""

    def __init__(self, user: UserCode, *, several: bool = False) -> None:
        """`several`: the script has several optimizers."""
        self._user = user
        self._running = self._refused = False
        instead = (
            "return the loss, and Trireme calls backward() on it"
            if user.loop is None
            else "call trireme.backward(loss)"
        )
        self._message = OWN_BACKWARD.format(instead=instead) + (IN_TURNS if several else "")

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
        """Call the user's function. Raises UserCodeError if it called backward(), even if it caught what that
        raised. It is fatal: no record is at fault, and another attempt at the same records might not do it
        again."""
        self._refused = False
        try:
            found = self._user.call(hook, *arguments)
        except UserCodeError as error:
            if (
                self._refused
                and isinstance(error.__cause__, RuntimeError)
                and str(error.__cause__) == self._message
            ):
                raise self._user.error_of(error.__cause__, fatal=True) from error.__cause__
            raise
        if self._refused:
            raise self._user.error_of(RuntimeError(self._message), fatal=True)
        return found

    def run(self, losses: Losses) -> bool:
        """Backward; a script's own loop then runs to its optimizer.step(). False: its GradScaler has left
        that step out."""
        self._running = True
        try:
            self._user.guard(losses.backward)
        finally:
            self._running = False
        return self._user.loop is None or self._user.loop.end_pass()

    def reported(self, losses: Losses) -> torch.Tensor:
        """The loss to report: as it was before the script's GradScaler scaled it."""
        if self._user.loop is None or self._user.loop.true_loss is None:
            return losses.total
        return self._user.loop.true_loss

    @property
    def row_factor(self) -> float:
        """Factor for the gradients of embedding tables' rows: the script's GradScaler does not see them."""
        return 1.0 if self._user.loop is None else self._user.loop.scaling.row_factor
