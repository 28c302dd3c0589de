"""Asynchronous: states of the learning-rate scheduler, so that a trainer that joins does not begin it at the first push.

a trainer's push, every STATE_EVERY pushes of the job ─► kept here, in checkpoints too ─► PserverInfo ─► the newest one that is not after its own push

A state follows from its number alone, so it stays right in a rollback.
"""

from __future__ import annotations

from collections.abc import Iterable

from trireme_shared.protocol.records.step import LaneZero, StepRecord

STATE_EVERY = 1000  # pushes; as many steps of a scheduler take milliseconds


class ScheduleStates:
    """`kept`: ascending, fewer the older they are: about one in each power of two of the distance to the newest. Tasks are trained in any order, so the
    newest is after the push of many a trainer."""

    def __init__(self, kept: Iterable[LaneZero] = ()) -> None:
        self.kept: tuple[LaneZero, ...] = ()
        for state in kept:
            self.take(state)

    def __repr__(self) -> str:
        return f"<ScheduleStates of pushes {[state.number for state in self.kept]}>"

    def take(self, state: LaneZero | None) -> None:
        """Of a push. Most have none."""
        if state is None or not state.scheduler:
            return
        known = {each.number: each for each in (*self.kept, state)}
        newest = max(known)
        oldest_at = {((newest - number) // STATE_EVERY).bit_length(): number for number in sorted(known, reverse=True)}
        self.kept = tuple(known[number] for number in sorted({newest, *oldest_at.values()}))

    def saved(self, record: StepRecord) -> StepRecord:
        """With these states, as a checkpoint has it."""
        return record.with_fields(schedules=self.kept)


def newest_at(states: Iterable[LaneZero], number: int) -> LaneZero | None:
    """The newest state that is not after that push."""
    return max((state for state in states if state.number <= number), key=lambda state: state.number, default=None)
