"""A script's own training loop, in turns with the code that hands it minibatches: only one of the two runs at
a time.

    trainer, or plain.py       the script, in a thread of its own
    start        ─────────────► … model, optimizer, batches = trireme.prepare(model, optimizer, dataset)
    next_pass    ─────────────► what follows optimizer.step(), up to `for batch in batches`
    forward      ──batch──────► loss = …                          ──trireme.backward(loss)──► the loss
    (backward, in the trainer)
    end_pass     ─────────────► what follows, up to optimizer.step()
    end          ─────────────► the loop ends; what follows it

So MinibatchRunner calls the body of a loop as it calls `loss(model, batch)`. What the script does wrong, also
what it gives to `trireme.prepare` and `trireme.backward`, is raised where it does it, and ends the script:
nobody can go on in the middle of a loop.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from enum import Enum
from queue import SimpleQueue
from types import MethodType
from typing import Any

import torch
from torch import nn

from trainer_agent.own_loop.accelerator import check_no_accelerator
from trainer_agent.own_loop.changes import check_none_is_left, forget_those_of_others, marks, noted, put_back
from trainer_agent.own_loop.mixed_precision import Scaling, autocast_here, unscale_for_kernel
from trireme_shared.protocol.errors import InvalidArgument, UserCodeError
from trireme_shared.protocol.metrics import Logged, collect_in, collector, loss_in
from trireme_shared.serving.optimizers.own_step import check_step
from trireme_shared.serving.optimizers.several import (
    IN_TURNS,
    Several,
    given,
    joined,
    losses_of,
    named_in,
    parts_of,
)

FUNCTIONS = "collate", "ids", "evaluate", "evaluation_metrics", "metrics"
CLOSE_S = 5.0
_running: ContextVar[OwnLoop | None] = ContextVar("own_loop", default=None)
OVERRULED = (
    "the script calls torch.set_num_threads({asked}), and it is trained with {threads}, the "
    "setting threads_per_trainer, because the number of threads "
    "changes the bits of results: set threads_per_trainer = {asked} instead"
)


AT_ONCE = (
    "; of several optimizers give the loss of each at once, by its name or in their order, and call their "
    "step() behind it" + IN_TURNS
)
NOT_DUE = (
    "optimizer.step() was called a second time for one batch, or for an optimizer that has no loss in it: "
    "trireme.backward got the losses of others alone"
)
SCALED = (
    "a GradScaler leaves the step of one optimizer out and makes that of another, and a batch of a job is "
    "trained or left out as a whole: train several optimizers without it (precision = bf16 needs none), or "
    "make one optimizer with a group for each"
)


@dataclass(frozen=True, slots=True)
class Prepared:
    """What the script gave to `trireme.prepare`. `hooks`: collate, ids, scheduler, evaluation_dataset,
    evaluate, evaluation_metrics and metrics, as far as given. `config`: settings of the job. `buffers`:
    policies by pattern (see trainer_agent.model.buffer_policies)."""

    model: nn.Module
    optimizer: Any
    dataset: Any
    hooks: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    buffers: Mapping[str, Any] = field(default_factory=dict)


def check_prepared(parts: Prepared) -> None:
    """Raises TypeError, ValueError, InvalidArgument."""
    check_no_accelerator("the script")
    model: object = parts.model
    optimizer: object = parts.optimizer
    if not isinstance(model, nn.Module):
        msg = f"trireme.prepare got {type(parts.model).__name__} as the model; give a torch.nn.Module"
        raise TypeError(msg)
    if not isinstance(optimizer, torch.optim.Optimizer):
        msg = (
            f"trireme.prepare got {type(parts.optimizer).__name__} as the optimizer; give a "
            "torch.optim optimizer"
        )
        raise TypeError(msg)
    for part in parts_of(optimizer):
        check_step(part)  # here the script's own `step` is still there
    for name in FUNCTIONS:
        if name in parts.hooks and not callable(parts.hooks[name]):
            msg = f"trireme.prepare got {type(parts.hooks[name]).__name__} as {name}; give a function"
            raise TypeError(msg)
    wants = next((name for name in ("evaluation_dataset", "evaluation_metrics") if name in parts.hooks), None)
    if wants is not None and "evaluate" not in parts.hooks:
        msg = f"trireme.prepare got {wants} and no evaluate; give evaluate(model, batch) -> dict of sums"
        raise ValueError(msg)
    if "scheduler" not in parts.hooks and any(
        "initial_lr" in group for group in parts.optimizer.param_groups
    ):
        msg = (
            "the optimizer has a scheduler; give it to Trireme, which steps it: trireme.prepare(..., "
            "scheduler=scheduler)"
        )
        raise ValueError(msg)


def is_function(scheduler: Any) -> bool:
    """Whether it makes the scheduler of an optimizer, and is none itself."""
    return callable(scheduler) and not hasattr(scheduler, "step")


def _check_loss(loss: Any) -> None:
    """Raises TypeError."""
    if not isinstance(loss, torch.Tensor):
        msg = (
            f"trireme.backward got {type(loss).__name__}; give it the minibatch's mean loss, a scalar tensor"
        )
        raise TypeError(msg)
    if loss.numel() != 1:
        msg = (
            f"trireme.backward got a tensor of shape {tuple(loss.shape)}; give it the minibatch's mean "
            "loss, a scalar"
        )
        raise TypeError(msg)
    if not loss.requires_grad:
        msg = "trireme.backward got a scalar that does not depend on the parameters"
        raise TypeError(msg)


class Place(Enum):
    """Where a script with a loop of its own is, or waits, as error messages call it."""

    START = "before trireme.prepare"
    PREPARED = "in trireme.prepare"
    ASKS = "at the top of its loop"
    COMPUTES = "in the body of its loop"
    LOSS = "in trireme.backward"
    HAS_GRADIENTS = "between trireme.backward and optimizer.step"
    STEPPED = "in optimizer.step"
    AFTER = "after its loop"
    OVER = "at its end"


GOES_ON = {Place.PREPARED: Place.PREPARED, Place.ASKS: Place.COMPUTES, Place.LOSS: Place.HAS_GRADIENTS}


@dataclass(frozen=True, slots=True)
class _Turn:
    """For the script: `value` is what it waits for; or `error` is raised there. `logged`: see
    logged_metrics."""

    value: Any = None
    error: BaseException | None = None
    logged: dict[str, Logged] | None = None


class _End:
    """Instead of a batch: there is no more."""


class _NoStep(dict[str, Logged]):
    """Where no step is computed, nothing can be logged: nobody would know of which step it is."""

    def __setitem__(self, name: str, value: Logged) -> None:
        msg = f"{name} is logged outside of a step; log it in the loop, before optimizer.step()"
        raise InvalidArgument(msg)


def running() -> OwnLoop | None:
    """The loop of the script that runs in this thread."""
    return _running.get()


class Batches(Iterator[Any]):
    """The minibatches of all epochs that this process computes; it ends when training is over."""

    def __init__(self, loop: OwnLoop) -> None:
        self._loop = loop

    def __iter__(self) -> Batches:
        self._loop.check_not_over()
        return self

    def __next__(self) -> Any:
        return self._loop.next_batch()


class OwnLoop:
    """`error_of` makes a UserCodeError of what the script raised. Of the methods the first half is the
    trainer's, the rest is the script's. What `close` and `fail_here` raise in the script is raised again
    wherever it waits then."""

    def __init__(self, error_of: Callable[[BaseException], UserCodeError]) -> None:
        self._error_of = error_of
        self._to_script: SimpleQueue[_Turn] = SimpleQueue()
        self._to_trainer: SimpleQueue[BaseException | None] = SimpleQueue()
        self._prepared: Prepared | None = None
        self._place, self._ends = Place.START, False
        self._loss: Any = None
        self._left_out = False  # in this pass, by the script's GradScaler
        self._due: list[torch.optim.Optimizer] = []  # those that the script has to step in this pass
        self.changes_gradients = False  # the first pass did, between trireme.backward and optimizer.step
        self.undone_buffer = ""  # the name of one that the script changed behind optimizer.step()
        self.scaling = Scaling(self._scaler_stepped)
        self.true_loss: torch.Tensor | None = None  # of this pass, before a GradScaler scaled it
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._acting = threading.local()
        self._logged: dict[str, Logged] | None = None
        self._autocast: list[torch.autocast] = []
        self._passes = 0
        self._threads = 1  # of torch, in the trainer's thread
        self.threads_notice = ""  # a sentence, if the script has asked torch for another number

    def __repr__(self) -> str:
        return f"<OwnLoop after {self._passes} passes, the script is {self._place.value}>"

    # ------------------------------------------------------------ for the trainer

    @property
    def prepared(self) -> Prepared:
        assert self._prepared is not None
        return self._prepared

    @property
    def is_prepared(self) -> bool:
        return self._prepared is not None

    @property
    def has_begun(self) -> bool:
        """Whether the script was asked for a batch."""
        return self._passes > 0

    @property
    def is_over(self) -> bool:
        return self._place in (Place.AFTER, Place.OVER)

    def start(self, script: Callable[[], object]) -> None:
        """Run the script in a thread of its own up to trireme.prepare. Raises UserCodeError,
        InvalidArgument."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, args=(script,), name="script", daemon=True)
            self._thread.start()
            self._resume()
        self._raise_failure()
        if self._prepared is None:
            raise InvalidArgument(
                "the script ended without calling trireme.prepare",
                hint="call it at the top level, or in a function that runs under "
                '`if __name__ == "__main__":`',
            )

    def next_pass(self) -> None:
        """Up to where the script asks for a batch. Raises UserCodeError."""
        self._go_to_top()
        self._passes += 1

    def forward(self, batch: Any) -> Any:
        """The batch's loss, as the script gave it to trireme.backward. Raises UserCodeError."""
        assert self._place is Place.ASKS, self
        self._logged = collector()
        self._autocast = autocast_here()
        self._resume(batch)
        loss, self._loss = self._loss, None
        return loss

    def end_pass(self) -> bool:
        """Up to optimizer.step(): then the parameters have the gradients that the batch shall be trained
        with. False: the script's GradScaler has left the step out. Raises UserCodeError."""
        looks = self._passes == 1
        before = marks(self._held()) if looks else []
        self._resume()
        if looks:
            self.changes_gradients = marks(self._held()) != before
        return not self._left_out

    def end(self) -> None:
        """Training is over: the loop ends, and the script runs to its end. Raises UserCodeError."""
        if self._place is Place.OVER and self._ends:
            return
        self._go_to_top()
        self._ends = True
        self._resume(_End)

    def wait_here(self) -> None:
        """Until a script in the main thread has called trireme.prepare."""
        self._to_trainer.get()

    def finish_here(self) -> None:
        """As `end`, for a script that runs in the main thread: does not wait for its end."""
        self._go_to_top()
        self._to_script.put(_Turn(_End, logged=self._logged))

    def fail_here(self, error: BaseException) -> None:
        """Raise `error` where the script in the main thread waits."""
        self._to_script.put(_Turn(error=error))

    def close(self) -> None:
        """The script ends where it waits, as by sys.exit()."""
        thread = self._thread
        if thread is None or not thread.is_alive():
            return
        self._to_script.put(_Turn(error=SystemExit()))
        thread.join(CLOSE_S)
        self._place = Place.OVER

    @contextmanager
    def acting(self) -> Iterator[None]:
        """In this block optimizer.step and scheduler.step do what torch does."""
        self._acting.now = True
        try:
            yield
        finally:
            self._acting.now = False

    def _resume(self, value: Any = None) -> None:
        """The script's turn, until it waits again. Raises UserCodeError, also if the script has ended while
        it should not."""
        self._check_there()
        self._threads = torch.get_num_threads()
        self._to_script.put(_Turn(value, logged=self._logged))
        self._failure = self._to_trainer.get()
        self._check_there()

    def _go_to_top(self) -> None:
        """To where the script asks for a batch. What it does on its way to the model's buffers is undone, and
        told: the next batch may be that of another lane. Raises UserCodeError."""
        before = noted(self.prepared.model)
        while self._place is not Place.ASKS:
            self._resume()
        changed = put_back(self.prepared.model, before)
        if not self.undone_buffer:
            self.undone_buffer = changed

    def _check_there(self) -> None:
        """Raises UserCodeError if the script has ended, and should not."""
        self._raise_failure()
        if self._place is Place.OVER and not self._ends and self._prepared is not None:
            self._fail(
                f"the script has left its loop after {self._passes} batches, before training was "
                "over; let `batches` end the loop "
                "(the setting epochs says when)"
            )

    def _fail(self, message: str) -> None:
        self._failure = RuntimeError(message)
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._error_of(self._failure) from self._failure

    def _held(self) -> Iterator[torch.Tensor]:
        """The parameters that the optimizer holds."""
        return (parameter for group in self.prepared.optimizer.param_groups for parameter in group["params"])

    def _run(self, script: Callable[[], object]) -> None:
        """In the script's thread."""
        self.begin_here()
        self._take(self._to_script.get())
        error: BaseException | None = None
        try:
            script()
        except SystemExit as exit_:
            error = exit_ if exit_.code else None
        except BaseException as raised:  # noqa: BLE001  the trainer raises it
            error = raised
        self._place = Place.OVER
        self._to_trainer.put(error)

    # ------------------------------------------------------------ for the script

    def begin_here(self) -> None:
        """The script runs in this thread."""
        _running.set(self)
        self.scaling.use()

    def prepare(self, parts: Prepared) -> tuple[nn.Module, Any, Batches]:
        """See trireme.prepare. Raises RuntimeError, TypeError, ValueError."""
        if self._prepared is not None:
            raise RuntimeError("trireme.prepare was called twice; a script trains one model")
        parts = replace(parts, optimizer=joined(parts.optimizer, "trireme.prepare got"))
        check_prepared(parts)
        self._prepared = parts
        for part in parts_of(parts.optimizer):
            self._take_over(part)
        scheduler = parts.hooks.get("scheduler")
        if scheduler is not None and not is_function(scheduler):
            for each in (named_in(scheduler) or {"": scheduler}).values():
                if each is not None:
                    self._take_over_scheduler(each)
        self._hand_over(Place.PREPARED)
        self.threads_notice = use_threads(self._threads)
        for device in {parameter.device for parameter in parts.model.parameters() if parameter.is_cuda}:
            torch.cuda.set_device(device)  # of this thread, so that the script's `.cuda()` means the same
        return parts.model, given(parts.optimizer), Batches(self)

    def check_not_over(self) -> None:
        """Raises RuntimeError."""
        if self.is_over:
            raise RuntimeError(
                "batches has ended: it gives the minibatches of all epochs, so there is one loop "
                "over it, in no other loop; "
                "the setting epochs says how many there are"
            )

    def next_batch(self) -> Any:
        """Raises StopIteration, RuntimeError."""
        self.check_not_over()
        if self._place in (Place.COMPUTES, Place.HAS_GRADIENTS):
            left_out = "trireme.backward" if self._place is Place.COMPUTES else "optimizer.step"
            raise RuntimeError(
                f"the loop asks for the next batch, and {left_out} was not called for this one; "
                "call trireme.backward(loss) and "
                "optimizer.step() for each batch (to leave one out, multiply its loss by 0)"
            )
        batch = self._hand_over(Place.ASKS)
        if batch is _End:
            self._place = Place.AFTER
            raise StopIteration
        self.scaling.begin()
        self._left_out = False
        forget_those_of_others(self.prepared.model, self._held())
        for context in self._autocast:
            context.__enter__()  # type: ignore[no-untyped-call]
        return batch

    def backward(self, loss: Any) -> None:
        """See trireme.backward. Raises RuntimeError, TypeError."""
        if self._place is Place.HAS_GRADIENTS:
            raise RuntimeError(
                "trireme.backward was called twice for one batch; add the losses and call it once "
                "(to accumulate gradients over "
                "several minibatches, set lanes)"
                + (AT_ONCE if isinstance(self.prepared.optimizer, Several) else "")
            )
        if self._place is not Place.COMPUTES:
            raise RuntimeError(
                f"trireme.backward was called without a batch: the script is {self._place.value}"
            )
        self._take_losses(loss)
        check_none_is_left(self._held())
        for context in self._autocast:
            context.__exit__(None, None, None)
        self._loss = loss
        self._hand_over(Place.LOSS)

    def _take_losses(self, loss: Any) -> None:
        """Raises TypeError, InvalidArgument."""
        optimizer = self.prepared.optimizer
        several = losses_of(optimizer, loss) if isinstance(optimizer, Several) else None
        self._due, self.true_loss = list(parts_of(optimizer)), None
        if isinstance(optimizer, Several) and self.scaling.is_used:
            raise TypeError(SCALED)
        if several is None:
            _check_loss(loss_in(loss))
            self.true_loss = self.scaling.unscaled(loss_in(loss))
            return
        for each in several.values():
            if each is not None:
                _check_loss(each)
        both = zip(self._due, several.values(), strict=True)
        self._due = [part for part, each in both if each is not None]

    def _step(self, part: torch.optim.Optimizer, closure: Any = None) -> None:
        if closure is not None:
            raise TypeError("optimizer.step() takes no closure here: trireme.backward computes the gradients")
        if self._place is not Place.HAS_GRADIENTS:
            raise RuntimeError(
                "optimizer.step() was called without trireme.backward(loss): the script is "
                f"{self._place.value}"
            )
        if not any(part is due for due in self._due):
            raise RuntimeError(NOT_DUE)
        self._due = [due for due in self._due if due is not part]
        self._left_out = not unscale_for_kernel(part)
        if not self._due:
            self._end_pass()

    def _scaler_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """`scaler.step(optimizer)` is over. If it called no `optimizer.step()`, this batch is left out."""
        if self._place is Place.HAS_GRADIENTS and optimizer is self.prepared.optimizer:
            self._left_out = True
            self._end_pass()

    def _end_pass(self) -> None:
        self._logged = _NoStep()
        self._hand_over(Place.STEPPED)

    def _zero_grad(self, real: Callable[..., None], set_to_none: bool = True) -> None:
        if self._place is Place.HAS_GRADIENTS:
            raise RuntimeError(
                "optimizer.zero_grad() was called between trireme.backward and optimizer.step; "
                "call it before trireme.backward"
            )
        real(set_to_none=set_to_none)

    def _take_over(self, optimizer: torch.optim.Optimizer) -> None:
        """The script's calls of step and zero_grad come here. What schedulers expect of `step` stays: it is a
        bound method."""
        real_step, real_zero = type(optimizer).step, type(optimizer).zero_grad

        def step(bound: Any, closure: Any = None) -> Any:
            return real_step(bound, closure) if self._is_acting else self._step(bound, closure)

        def zero_grad(bound: Any, set_to_none: bool = True) -> None:
            self._zero_grad(MethodType(real_zero, bound), set_to_none)

        vars(step)["_wrapped_by_lr_sched"] = True  # else schedulers warn that theirs was replaced
        vars(optimizer)["step"] = MethodType(step, optimizer)
        vars(optimizer)["zero_grad"] = MethodType(zero_grad, optimizer)

    def _take_over_scheduler(self, scheduler: Any) -> None:
        """The script's calls of its step do nothing."""
        kind = type(scheduler)

        def schedule(bound: Any, *arguments: Any, **named: Any) -> Any:
            return kind.step(bound, *arguments, **named) if self._is_acting else None

        # no attribute of its own: those are part of a scheduler's state
        scheduler.__class__ = type(kind.__name__, (kind,), {"step": schedule, "__module__": kind.__module__})

    @property
    def _is_acting(self) -> bool:
        return getattr(self._acting, "now", False)

    def _hand_over(self, place: Place) -> Any:
        """Wait at this place for the trainer."""
        self._place = place
        self._to_trainer.put(None)
        turn = self._to_script.get()
        self._place = GOES_ON.get(place, place)
        return self._take(turn)

    def _take(self, turn: _Turn) -> Any:
        if turn.error is not None:
            self._to_script.put(turn)  # for the next place where a script waits that goes on all the same
            raise turn.error
        collect_in(turn.logged)
        return turn.value


def use_threads(threads: int) -> str:
    """Let the calling thread compute with `threads` threads: as many as the setting threads_per_trainer says,
    since results have other bits with another number. torch keeps the number for each thread of a process, so
    it is set in the thread that computes, and in that of a script's own loop. Returns a sentence for the user
    if the script has asked torch for another number here, else "". A number that torch chooses by itself on
    this machine may be one that nobody has asked for: it is not told."""
    asked = torch.get_num_threads()
    torch.set_num_threads(threads)
    return "" if asked in (threads, *_chosen_by_torch()) else OVERRULED.format(asked=asked, threads=threads)


def _chosen_by_torch() -> set[int]:
    """The processors of this machine or process, or their cores with two processors each, or what the
    environment says."""
    processors = {
        os.cpu_count() or 1,
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1,
    }
    named = (os.environ.get(name, "") for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"))
    return (
        processors
        | {number // 2 for number in processors}
        | {int(text) for text in named if text.isdecimal()}
    )
