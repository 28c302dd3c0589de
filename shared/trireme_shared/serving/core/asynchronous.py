"""What asynchronous jobs know beside the ledger: how old the parameters are that trainers compute with, and
states of the scheduler.

trainer pulls version v ─► computes ─► its push finds version w: w - v versions are ahead
    ─► it steps with lr / max(1, w - v)

A version is one push that was applied. The trainer's own pushes since its pull count as well: they changed
the parameters, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from trireme_shared.protocol.records.step import LaneZero, StepRecord
from trireme_shared.protocol.wire.messages import StalenessBound
from trireme_shared.serving.core.optimizers import Options

PATIENCE = 2.0  # times the longest time from a pull to its push
STATE_EVERY = 1000  # pushes; as many steps of a scheduler take milliseconds


class ScheduleStates:
    """States of the learning-rate scheduler, so that a trainer that joins does not begin it at the first
    push: every STATE_EVERY pushes of the job a push brings one. They are kept here and in checkpoints, and a
    trainer begins with the newest one that is not after its own push. A state follows from its number alone,
    so it stays right in a rollback. `kept`: ascending, fewer the older they are: about one in each power of
    two of the distance to the newest. Tasks are trained in any order, so the newest is after the push of many
    a trainer."""

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
        oldest_at = {
            ((newest - number) // STATE_EVERY).bit_length(): number for number in sorted(known, reverse=True)
        }
        self.kept = tuple(known[number] for number in sorted({newest, *oldest_at.values()}))

    def saved(self, record: StepRecord) -> StepRecord:
        """With these states, as a checkpoint has it."""
        return record.with_fields(schedules=self.kept)


def newest_at(states: Iterable[LaneZero], number: int) -> LaneZero | None:
    """The newest state that is not after that push."""
    return max(
        (state for state in states if state.number <= number), key=lambda state: state.number, default=None
    )


@dataclass(slots=True)
class _Held:
    """`pushes`: that had been applied when it pulled. `since`: its pull, or its last push since then; seconds
    of the clock."""

    pushes: int
    since: float


class ParametersInUse:
    """Which trainers compute with parameters that they pulled here, and how many pushes ago that was; for
    jobs with `max_staleness`:

    pull within a bound ──► oldest parameters that a live trainer computes with:
                            more than `versions` pushes old? ─ yes ─► waits
                                                             `─ no ─► answered: the trainer computes with the
                                                                      newest ones
    push ──► it computes no more with them, unless it says that it keeps them

    Only one parameter server is asked (the lowest index with blocks), so nobody waits at one while it is
    waited for at another. Who is dead, or takes much longer than any push before, is not waited for. A
    parameter server that came back, or a new one, knows of nobody yet. `pushes`: that were applied here."""

    def __init__(self) -> None:
        self.pushes = 0
        self._held: dict[str, _Held] = {}  # by trainer; the oldest parameters first
        self._longest_s = 0.0

    def __repr__(self) -> str:
        return f"<ParametersInUse after {self.pushes} pushes: {len(self._held)} trainers compute>"

    def slowest(
        self, bound: StalenessBound, is_live: Callable[[str], bool], now: float
    ) -> tuple[str, int] | None:
        """The trainer that computes with the oldest parameters, and how many pushes old they are. Forgets
        those that are not waited for."""
        limit_s = bound.ceiling_s
        if self._longest_s:
            limit_s = min(limit_s, max(bound.floor_s, PATIENCE * self._longest_s))
        while self._held:
            name, held = next(iter(self._held.items()))
            if is_live(name) and now - held.since <= limit_s:
                return name, self.pushes - held.pushes
            del self._held[name]
        return None

    def age_of(self, trainer: str) -> int | None:
        """Of the parameters that it computes with, in pushes; None: it computes with none, as far as is known
        here."""
        held = self._held.get(trainer)
        return None if held is None else self.pushes - held.pushes

    def pulled(self, trainer: str, now: float) -> None:
        """It computes with the newest parameters from now on."""
        self._held.pop(trainer, None)
        self._held[trainer] = _Held(self.pushes, now)

    def pushed(self, trainer: str, now: float, *, keeps: bool) -> bool:
        """Its push has ended. `keeps`: it goes on with the same parameters. Whether the oldest parameters may
        be other ones now."""
        held = self._held.get(trainer)
        if held is None:
            return False
        self._longest_s, held.since = max(self._longest_s, now - held.since), now
        return False if keeps else self.let_go(trainer)

    def let_go(self, trainer: str) -> bool:
        """It computes with none. Whether the oldest parameters may be other ones now."""
        was_oldest = next(iter(self._held), None) == trainer
        self._held.pop(trainer, None)
        return was_oldest


def divisor(ahead: int) -> int:
    """Of the learning rate. `ahead`: versions since the parameters were pulled; less than 0 if a parameter
    server came back from a checkpoint."""
    return max(1, ahead)


def slowed(options: Options, arguments: Options | None, ahead: int) -> Options:
    """The options of a step, with the learning rate divided. `arguments`: the optimizer was made with them;
    they have the rate if `options` do not."""
    by = divisor(ahead)
    rate = options.get("lr", (arguments or {}).get("lr"))
    return options if rate is None else {**options, "lr": rate / by}
