"""What a version consists of beside its blocks: each lane's reader position and lane 0's state, for the last
few versions.

notes of step s (from push headers) --the first block completes step s--> StepRecord of version s + 1, fixed

A lane's position says which records its data in the step comes from. All blocks must get data of the same
records: `agrees` compares. A task may be discarded after some blocks got its data; the trainer that goes on
with the next task claims the lane first, at all parameter servers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from trireme_shared.protocol.errors import FrozenDiffer
from trireme_shared.protocol.lanes import Interval
from trireme_shared.protocol.records.step import (
    LanePosition,
    LaneZero,
    NodeResult,
    ParameterNumbers,
    StepRecord,
    StepResult,
    numbers_in,
    result_of,
    step_result,
    unused_in,
)
from trireme_shared.protocol.wire.messages import HandedHistory, HandedNotes, PushHeader

KEPT = 4
# steps whose results are kept until they are stored, and numbers in them
MOST_RESULTS, MOST_VALUES = 1024, 16_384
RESULTS_AT_ONCE, VALUES_AT_ONCE = 256, 512  # of an answer

Positions = Mapping[int, LanePosition]
UNKNOWN: tuple[int, int, ParameterNumbers] = (-1, 0, ())


def check_alike(step: int, one: NodeResult, other: NodeResult) -> None:
    """Raises FrozenDiffer: lanes of a step must say the same of what is frozen and of what rests."""
    for kind, mine, theirs, what in (
        ("frozen", one.frozen or (), other.frozen or (), "requires a gradient"),
        ("resting", one.resting, other.resting, "belongs to an optimizer with a loss"),
    ):
        if mine != theirs:
            first = min(set(numbers_in(mine)) ^ set(numbers_in(theirs)))
            raise FrozenDiffer(
                f"lanes differ in whether parameter number {first} {what} in step {step}",
                parameter=first,
                step=step,
                kind=kind,
            )


def resting_in(told: NodeResult | None) -> ParameterNumbers:
    return told.resting if told is not None else ()


@dataclass(slots=True)
class Notes:
    """By lane. `positions`: of the data that blocks have. `first`: the trainer that it came from first.
    `claimed`: of the only data that blocks may get from now on. `grad_norm`: of the step's whole gradient,
    once it is known (jobs that clip). `results`: by node of the tree."""

    positions: dict[int, LanePosition] = field(default_factory=dict)
    first: dict[int, str] = field(default_factory=dict)
    claimed: dict[int, LanePosition] = field(default_factory=dict)
    lane_zero: LaneZero | None = None
    grad_norm: float | None = None
    results: dict[Interval, NodeResult] = field(default_factory=dict)


class Results:
    """Results of the last steps, until the master has stored them; bounded."""

    def __init__(self, found: Iterable[StepResult] = ()) -> None:
        self._by_step: dict[int, StepResult] = {}
        self._values = 0
        for result in found:
            self.add(result)

    def __len__(self) -> int:
        return len(self._by_step)

    def add(self, result: StepResult) -> None:
        """In the order of steps. The oldest ones are dropped if there are too many."""
        if result.step in self._by_step:
            return
        self._by_step[result.step] = result
        self._values += len(result.metrics)
        while len(self._by_step) > MOST_RESULTS or self._values > MOST_VALUES:
            self._drop(next(iter(self._by_step)))

    def put(self, result: StepResult) -> None:
        """As `add`; it replaces what is known of its step."""
        if (known := self._by_step.get(result.step)) is None:
            self.add(result)
            return
        self._values += len(result.metrics) - len(known.metrics)
        self._by_step[result.step] = result

    def forget(self, step: int) -> None:
        """Those of steps before `step`."""
        while self._by_step and (first := next(iter(self._by_step))) < step:
            self._drop(first)

    def _drop(self, step: int) -> None:
        self._values -= len(self._by_step.pop(step).metrics)

    def undo(self, step: int) -> None:
        """Those of steps from `step` on: they are made again."""
        for undone in [each for each in self._by_step if each >= step]:
            self._drop(undone)

    def of(self, first: int, last: int | None = None) -> tuple[StepResult, ...]:
        """From step `first` on, before `last`."""
        found = (
            result
            for step, result in self._by_step.items()
            if step >= first and (last is None or step < last)
        )
        return tuple(sorted(found, key=lambda result: result.step))

    def portion(self, first: int) -> tuple[StepResult, ...]:
        """From step `first` on, as many as an answer takes."""
        taken: list[StepResult] = []
        values = 0
        for result in self.of(first):
            values += len(result.metrics)
            if len(taken) == RESULTS_AT_ONCE or (taken and values > VALUES_AT_ONCE):
                break
            taken.append(result)
        return tuple(taken)


class History:
    """The step records of the last versions, `kept` at most, and the notes of steps under way. `lanes`: of a
    step."""

    def __init__(self, first: StepRecord, lanes: int = 1) -> None:
        self.results = Results([*first.results, *((first.result,) if first.result is not None else ())])
        self._lanes, self.kept = lanes, KEPT
        self._records = {first.version: first.with_fields(results=())}
        self._notes: dict[int, Notes] = {}
        self._first: dict[int, dict[int, str]] = {}  # by step, of the steps of `_records`
        self.claims = 0
        #: of a step, by how many results it is known (-1: by its record): what it leaves alone
        self._left_alone = UNKNOWN

    def __repr__(self) -> str:
        return f"<History of versions {sorted(self._records)}, notes of steps {sorted(self._notes)}>"

    def note(
        self, header: PushHeader, positions: Positions, lanes: Interval, result: NodeResult | None = None
    ) -> None:
        """A block takes data of these lanes: the header's positions and lane 0's state hold for step
        `header.step` from now on, and so does the lanes' result. Raises FrozenDiffer."""
        known = self._told(header.step)
        if result is not None and result.frozen is not None and known is not None:
            check_alike(header.step, result, known)
        if header.step + 1 in self._records:
            return
        notes = self._notes.setdefault(header.step, Notes())
        if result is not None:
            notes.results.setdefault(lanes, result)
        for lane in range(*lanes):
            notes.positions[lane] = positions[lane]
            notes.first.setdefault(lane, header.trainer)
        notes.lane_zero = header.lane_zero or notes.lane_zero

    def first_from(self, trainer: str, step: int) -> tuple[int, ...]:
        """The lanes of a step under way, or of one of the last few, whose data came from that trainer
        first."""
        first = self._notes[step].first if step in self._notes else self._first.get(step, {})
        return tuple(sorted(lane for lane, name in first.items() if name == trainer))

    def agrees(self, step: int, positions: Positions, lanes: Iterable[int]) -> bool:
        """Whether blocks have, or may get, data of `lanes` with these positions in that step."""
        held = self._held(step)
        claimed = self._notes[step].claimed if step in self._notes else {}
        return all(positions[lane] == held.get(lane, claimed.get(lane, positions[lane])) for lane in lanes)

    def claim(self, step: int, positions: Positions) -> str:
        """Refuse other data of these lanes in that step from now on. Returns why that is too late, or ""."""
        held = self._held(step)
        for lane, position in positions.items():
            if (other := held.get(lane, position)) != position:
                return (
                    f"blocks have data of lane {lane} in step {step} up to task {other.index} of "
                    f"its stream, record {other.offset}, "
                    "which was discarded since: it cannot be replaced by that up to task "
                    f"{position.index}, record {position.offset}"
                )
        if step + 1 not in self._records:
            self._notes.setdefault(step, Notes()).claimed.update(positions)
            self.claims += 1
        return ""

    def _held(self, step: int) -> dict[int, LanePosition]:
        """Positions of the data that blocks have in that step; nothing is known of old steps."""
        if (record := self._records.get(step + 1)) is not None:
            return {position.lane: position for position in record.positions}
        return self._notes[step].positions if step in self._notes else {}

    def lane_zero(self, step: int) -> LaneZero | None:
        """Lane 0's state after `step`, if it is known."""
        notes = self._notes.get(step)
        if notes is not None:
            return notes.lane_zero
        record = self._records.get(step + 1)
        return record.lane_zero if record else None

    def frozen(self, step: int) -> ParameterNumbers:
        """The parameters that require no gradient in `step`, as far as that is known: once the data of a lane
        is there."""
        told = self._told(step)
        return told.frozen or () if told is not None else ()

    def left_alone(self, step: int) -> ParameterNumbers:
        """The parameters that `step` leaves as they are: known once the data of all lanes is there."""
        if (record := self._records.get(step + 1)) is not None:
            told = -1
        else:
            results = self._notes[step].results if step in self._notes else {}
            told = len(results)
        if self._left_alone[:2] != (step, told):
            if record is None:
                record = StepRecord(
                    version=step + 1,
                    positions=(),
                    frozen=self.frozen(step),
                    unused=unused_in(results.values()),
                    resting=resting_in(self._told(step)),
                )
            self._left_alone = step, told, record.left_alone
        return self._left_alone[2]

    def _told(self, step: int) -> NodeResult | None:
        """What the lanes say of what is frozen and of what rests; None: not known."""
        if (record := self._records.get(step + 1)) is not None:
            known = NodeResult(frozen=record.frozen, resting=record.resting)
            return known if known.frozen is not None else None
        results = self._notes[step].results.values() if step in self._notes else ()
        return next((result for result in results if result.frozen is not None), None)

    def learn_norm(self, step: int, norm: float) -> None:
        """Of a step under way; the first one counts."""
        if step + 1 not in self._records:
            notes = self._notes.setdefault(step, Notes())
            notes.grad_norm = norm if notes.grad_norm is None else notes.grad_norm

    def norm(self, step: int) -> float | None:
        """The norm of the step's whole gradient, if it is known."""
        if step in self._notes:
            return self._notes[step].grad_norm
        record = self._records.get(step + 1)
        return record.grad_norm if record else None

    def fix(self, version: int) -> None:
        """A block has reached `version`, so the notes of its step are complete."""
        if version in self._records:
            return
        told, before = self._told(version - 1), self._records.get(version - 1)
        frozen = told.frozen if told is not None else None
        notes = self._notes.pop(version - 1, Notes())
        positions = tuple(notes.positions[lane] for lane in sorted(notes.positions))
        result = self._result(version - 1, positions, notes)
        unused = unused_in(notes.results.values())
        if frozen is None and before is not None:  # no lane had records
            frozen, unused = before.frozen, before.unused
        self._records[version] = StepRecord(
            version=version,
            positions=positions,
            lane_zero=notes.lane_zero,
            grad_norm=notes.grad_norm,
            result=result,
            frozen=frozen,
            unused=unused,
            resting=resting_in(told),
        )
        if result is not None:
            self.results.add(result)
        self._first[version - 1] = notes.first
        while len(self._records) > self.kept:
            self._forget_oldest()

    def take_record(self, record: StepRecord) -> None:
        """Know a version that was made elsewhere; it replaces what is known of it."""
        self._records[record.version] = record.with_fields(results=())
        self._notes.pop(record.version - 1, None)
        self._left_alone = UNKNOWN
        if record.result is not None:
            self.results.put(record.result)
        while len(self._records) > self.kept:
            self._forget_oldest()

    def forget_before(self, version: int) -> None:
        """The records of versions before that one."""
        while self._records and min(self._records) < version:
            self._forget_oldest()

    def start_again(self, version: int) -> None:
        """Forget the versions after `version`, and all data of their steps: they are made again, maybe of
        other records."""
        self._records = {number: record for number, record in self._records.items() if number <= version}
        self._first = {step: first for step, first in self._first.items() if step < version}
        self._notes.clear()
        self._left_alone = UNKNOWN
        self.results.undo(version)
        self.claims += 1

    def _forget_oldest(self) -> None:
        oldest = min(self._records)
        del self._records[oldest]
        self._first.pop(oldest - 1, None)

    def _result(self, step: int, positions: Sequence[LanePosition], notes: Notes) -> StepResult | None:
        """None if a part of it did not come."""
        found = result_of((0, self._lanes), notes.results)
        if found is None or not positions:
            return None
        rates = notes.lane_zero.learning_rates() if notes.lane_zero is not None else ()
        return step_result(found, step, positions[0].epoch, rates, notes.grad_norm)

    def saved(self, record: StepRecord) -> StepRecord:
        """With the results before it that may not be stored yet, as a checkpoint holds it."""
        return record.with_fields(results=self.results.of(0, record.version - 1))

    def handed(self) -> HandedHistory:
        """What another parameter server needs to know as well when it gets blocks of this one."""
        notes = [
            HandedNotes(
                step=step,
                positions=tuple(notes.positions.values()),
                claimed=tuple(notes.claimed.values()),
                lane_zero=notes.lane_zero,
                grad_norm=notes.grad_norm,
                results=tuple(notes.results.items()),
            )
            for step, notes in sorted(self._notes.items())
        ]
        records = tuple(self._records[v] for v in sorted(self._records))
        return HandedHistory(records=records, notes=tuple(notes), results=self.results.of(0))

    def take(self, handed: HandedHistory) -> None:
        """Know what another parameter server knows, whose blocks come here."""
        self._left_alone = UNKNOWN
        own = {result.step: result for result in (*handed.results, *self.results.of(0))}
        self.results = Results(own[step] for step in sorted(own))
        for record in handed.records:
            self._records.setdefault(record.version, record)
            self._notes.pop(record.version - 1, None)
        for each in handed.notes:
            if each.step + 1 in self._records:
                continue
            notes = self._notes.setdefault(each.step, Notes())
            for lane in each.positions:
                notes.positions.setdefault(lane.lane, lane)
            for lane in each.claimed:
                notes.claimed.setdefault(lane.lane, lane)
            for lanes, result in each.results:
                notes.results.setdefault(lanes, result)
            notes.lane_zero = notes.lane_zero or each.lane_zero
            notes.grad_norm = each.grad_norm if notes.grad_norm is None else notes.grad_norm
        self.claims += 1
        while len(self._records) > self.kept:
            self._forget_oldest()

    def record(self, version: int) -> StepRecord | None:
        return self._records.get(version)
