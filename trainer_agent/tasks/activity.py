"""What a trainer is doing now: its loops and its evaluator write it, reports and the end of the process read
it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from trireme_shared.protocol.records import Task

PROGRESS_S, LEAST_PROGRESS_S = 5.0, 0.25


class Held(NamedTuple):
    """A task, how many of its minibatches are done, and `work`: see TaskProgress."""

    task: Task
    minibatches: int
    work: int = 0


class LanePace(NamedTuple):
    """Seconds that a lane takes here, and what one takes at least; None: not known."""

    lane_s: float | None = None
    least_lane_s: float | None = None


class Holder(Protocol):
    """A part of a trainer that works on tasks."""

    def held(self) -> Sequence[Held]: ...


class Loop(Holder, Protocol):
    """A part of a trainer that computes."""

    @property
    def busy(self) -> bool:
        """Whether something is being computed, or not acknowledged yet."""
        ...


class TrainingLoop(Loop, Protocol):
    @property
    def waits_for(self) -> str:
        """A sentence: what the loop waits for before its next minibatch; "" if it waits for nothing."""
        ...

    @property
    def lane_pace(self) -> LanePace: ...


@dataclass
class Activity:
    """A trainer has one Activity."""

    #: the training loop that was begun last
    training: TrainingLoop | None = None
    #: the loop that runs now: the one that trains, or the one that evaluates and exports after it
    active: Loop | None = None
    #: works on tasks of evaluations beside the loops
    evaluator: Holder | None = None
    #: tasks that this trainer works on, and that the master has given to others
    given_up: tuple[Task, ...] = ()

    def held(self) -> list[Held]:
        """The tasks that this trainer works on."""
        holders = [self.active, self.evaluator]
        return [held for holder in holders if holder is not None for held in holder.held()]

    @property
    def waits_for(self) -> str:
        return self.training.waits_for if self.training is not None else ""

    @property
    def lane_pace(self) -> LanePace:
        return self.training.lane_pace if self.training is not None else LanePace()

    @property
    def busy(self) -> bool:
        return self.active is not None and self.active.busy

    def give_up(self, refused: Sequence[Task]) -> None:
        """The master says that these tasks are not this trainer's any more."""
        known = [*self.given_up, *refused]
        self.given_up = tuple(held.task for held in self.held() if held.task in known)


def progress_every_s(task_timeout_floor_s: float) -> float:
    """Return how many seconds apart progress is reported: several reports come before a task may be late."""
    return max(LEAST_PROGRESS_S, min(PROGRESS_S, task_timeout_floor_s / 4))
