"""The two kinds of stores: synchronous jobs step by versions, asynchronous ones when a push comes.

                takes pushes by   what holds a push once   copies for checkpoints
                StepPushes        the tree of lanes        a version, block after block, as each reaches it
                ArrivalPushes     the ledger               all blocks, rows and the ledger of one instant

In jobs that clip, a SyncStore holds what waits for the norm of the step's whole gradient:

    blocks: all data is there -> held, not stepped ──norm──> stepped, the version's record is made
    rows of tables, which nothing clips: stepped ──norm──> the version's record is made

So whoever tells a version, commits it or hands it over knows the norm that made it. A pull that finds
anything waiting ends with HELD, and comes again with the norm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from trireme_shared.blocks.buffers import Buffer, BufferPool
from trireme_shared.blocks.gradient_norm import Clipping
from trireme_shared.blocks.snapshot import Snapshot
from trireme_shared.checkpoints.schedule import EVALUATED_RANK, Schedule
from trireme_shared.protocol.errors import BadFrame, StepTorn
from trireme_shared.protocol.lanes import Interval, is_aligned
from trireme_shared.protocol.records import Mode
from trireme_shared.protocol.records.layout import Block, Layout
from trireme_shared.protocol.records.step import StepRecord, is_among
from trireme_shared.protocol.wire.messages import (
    EpochLedger,
    InitHeader,
    PushBlock,
    PushHeader,
    StepNorm,
    Verdict,
)
from trireme_shared.serving.core.asynchronous import ScheduleStates, slowed
from trireme_shared.serving.core.blocks import BlockState
from trireme_shared.serving.core.freezing import Freezing
from trireme_shared.serving.core.geometry import ParameterParts
from trireme_shared.serving.core.history import History
from trireme_shared.serving.core.ledger import AsyncSnapshot, Ledger, SavedLedger
from trireme_shared.serving.core.optimizers import Options, options_of
from trireme_shared.serving.core.store import Push, Store
from trireme_shared.serving.core.table.stepping import every_slot

if TYPE_CHECKING:
    from trireme_shared.serving.core.table.rows import TableRows

MAX_TASKS = 1 << 40


class StepPushes:
    """Synchronous: each lane's data of a step counts once, and a block steps when the data of all lanes is
    there. `held_step`: the last step in which a block was held for the norm."""

    keeps_unchanged = True

    def __init__(self, layout: Layout, lanes: int, history: History, clipping: Clipping) -> None:
        self._layout, self._lanes, self._history, self._clipping = layout, lanes, history, clipping
        self._parts = ParameterParts(layout)
        self._freezing = Freezing(self._parts)
        self.held_step = -1
        self._no_options: Options = {}
        self._options_of_step: tuple[int, tuple[Options, ...]] = (-1, ())

    def admit(self, header: PushHeader, options: tuple[Options, ...] | None) -> Push:
        positions = {position.lane: position for position in header.positions}
        if 0 in positions and options is None:
            msg = "a push of lane 0 without lane_zero: it carries the optimizer's options for everybody"
            raise BadFrame(msg)
        if header.claim and (obstacle := self._history.claim(header.step, positions)):
            raise StepTorn(obstacle, hint="the job goes back to a checkpoint", step=header.step)
        return Push(header, options=options, positions=positions, claims=self._history.claims)

    def judge(self, push: Push, lanes: Interval) -> Verdict | None:
        """None if `lanes` is a node of the tree and the step's other blocks have data of the same records;
        else the refusal."""
        if push.claims != self._history.claims:
            push.claims = self._history.claims
            push.judged.clear()
        if lanes in push.judged:
            return push.judged[lanes]
        first, last = lanes
        verdict: Verdict | None = None
        fits = 0 <= first < last <= self._lanes and is_aligned(first, last)
        if not fits or not push.positions.keys() >= set(range(first, last)):
            verdict = Verdict.LAYOUT_MISMATCH
        elif not self._history.agrees(push.header.step, push.positions, range(first, last)):
            verdict = Verdict.STALE_ATTEMPT
        push.judged[lanes] = verdict
        return verdict

    def take(
        self,
        push: Push,
        state: BlockState,
        item: PushBlock,
        value: torch.Tensor | None,
        memory: Buffer | None,
        *,
        lent: bool,
    ) -> Verdict:
        step = push.header.step
        if not state.takes(step):
            return Verdict.MOVING
        if (refusal := self.judge(push, item.lanes)) is not None:
            return refusal
        before = state.version
        if before == step and item.lanes not in push.noted:
            push.noted.add(item.lanes)
            self._history.note(push.header, push.positions, item.lanes, push.results.get(item.lanes))
        content = value, item.count, self.options(step, state.place), memory, item.dtype
        verdict = state.push(step, item.lanes, *content, lent=lent, measured=self._clipping.measures(step))
        if state.version == before and state.held:
            self.held_step = before
        return verdict

    def leaves_alone(self, push: Push, place: Block, lanes: Interval) -> bool:
        result, numbers = push.results.get(lanes), self._parts.numbers_in(place)
        if result is None or not numbers or not self._layout.sizes:
            return False
        left = (*(result.frozen or ()), *result.resting)
        return all(is_among(number, left) for number in numbers)

    def settle(self, state: BlockState) -> bool:
        norm = self._history.norm(state.version) if state.held else None
        if norm is None:
            return False
        state.settle(self._clipping.factor(norm), self.options(state.version, state.place))
        return True

    def options(self, step: int, place: Block) -> Options:
        """The options of the block's group in `step`, and which of its parameters it leaves alone. Lane
        0's push brings the options, and each one what is left alone, so both are known when the tree is
        complete. Raises InvalidArgument: see Freezing.options."""
        group = self._layout.segments[place.segment].group
        if group < 0:
            return self._no_options
        if self._options_of_step[0] != step:
            lane_zero = self._history.lane_zero(step)
            if lane_zero is None:
                return self._no_options
            self._options_of_step = (step, tuple(options_of(given) for given in lane_zero.options))
        # a job of an earlier version steps what no lane uses
        left = self._history.left_alone(step) if self._layout.sizes else self._history.frozen(step)
        return self._freezing.options(place, self._options_of_step[1][group], left)


class ArrivalPushes:
    """Asynchronous: each push steps its blocks when it comes, and the `ledger` says which minibatches each
    block has."""

    keeps_unchanged = False

    def __init__(
        self,
        layout: Layout,
        schedules: ScheduleStates,
        positions: Mapping[int, int],
        arguments: Sequence[Options | None],
    ) -> None:
        self._layout, self._schedules = layout, schedules
        self._positions = positions  # of blocks in the ledger, as they are now
        self._arguments = arguments  # of the optimizer, by segment
        self.ledger = Ledger(0)
        #: how often a buffer got other bits
        self.changes = 0
        self._no_options: Options = {}

    def admit(self, header: PushHeader, options: tuple[Options, ...] | None) -> Push:
        self._schedules.take(header.lane_zero)
        return Push(header, _task_number(header), options or ({},) * len(self._layout.optimizer.groups))

    def judge(self, push: Push, lanes: Interval) -> Verdict | None:  # noqa: ARG002
        return None

    def take(
        self,
        push: Push,
        state: BlockState,
        item: PushBlock,
        value: torch.Tensor | None,
        memory: Buffer | None,  # noqa: ARG002
        *,
        lent: bool,
    ) -> Verdict:
        if not state.takes(None):
            return Verdict.MOVING
        ledger, index = self.ledger, self._positions[item.block]
        verdict = ledger.judge(push.header, push.task, index)
        if verdict is not Verdict.APPLIED:
            return verdict
        assert push.options is not None
        segment = state.place.segment
        group = self._layout.segments[segment].group
        own, values = state.copied(value) if value is not None and lent else None, state.current
        options = push.options[group] if group >= 0 else self._no_options
        if item.version is not None and not state.is_buffer:
            options = slowed(options, self._arguments[segment], state.ahead_of(item.version))
        state.update(own.tensor if own else value, options)
        if state.is_buffer and state.current is not values:
            self.changes += 1
            state.changed = self.changes
        if own is not None:
            own.release()
        ledger.enter(push.header, push.task, index)
        return verdict

    def leaves_alone(self, push: Push, place: Block, lanes: Interval) -> bool:  # noqa: ARG002
        return False  # each push has a gradient

    def settle(self, state: BlockState) -> bool:  # noqa: ARG002
        return False


def _task_number(header: PushHeader) -> int:
    task = int(header.task_id) if header.task_id.isascii() and header.task_id.isdigit() else -1
    if not 0 <= task < MAX_TASKS or not 0 <= header.start < header.end <= header.minibatches:
        msg = (
            f"push of task {header.task_id[:40]!r}, minibatches [{header.start}, {header.end}) of "
            f"{header.minibatches}: "
            "expected a task number and 0 <= start < end <= minibatches"
        )
        raise BadFrame(msg)
    return task


def rows_of(header: InitHeader) -> TableRows | None:
    """Rows of the model's tables; None: it has none, and numba is not loaded. Raises InvalidArgument."""
    if not header.layout.tables:
        return None
    from trireme_shared.serving.core.table.rows import TableRows  # noqa: PLC0415

    # the version of an asynchronous checkpoint is its number
    return TableRows(header.layout, header.lanes, header.record.version if header.mode is Mode.SYNC else 0)


def store_of(
    header: InitHeader,
    schedule: Schedule | None = None,
    pool: BufferPool | None = None,
    clipping: Clipping | None = None,
    rows: TableRows | None = None,
) -> SyncStore | AsyncStore:
    """The kind of the job's mode. `schedule`, `clipping`: of synchronous jobs. `rows`: of tables, if there
    are some already. Raises InvalidArgument."""
    if header.mode is Mode.SYNC:
        return SyncStore(header, schedule, pool, clipping, rows)
    return AsyncStore(header, pool, rows)


class SyncStore(Store):
    """`schedule` says which versions are copied for checkpoints (None: none). If the copy before still waits
    to be taken, the one of the higher rank is kept, and `skipped` counts the other."""

    mode = Mode.SYNC

    def __init__(
        self,
        header: InitHeader,
        schedule: Schedule | None = None,
        pool: BufferPool | None = None,
        clipping: Clipping | None = None,
        rows: TableRows | None = None,
    ) -> None:
        super().__init__(header, header.lanes, pool, rows or rows_of(header), clipping)
        self.pushes = self._steps = StepPushes(self.layout, self.lanes, self.history, self.clipping)
        self._schedule = schedule
        self._before: Snapshot | None = None  # a complete one that waits, too: neither may be left out
        self._considered = self._first_version

    def stepped(self, part: BlockState | TableRows) -> None:
        self.history.fix(part.version)
        self._save(part)

    def learn_norm(self, told: StepNorm | None, timeline: int) -> None:
        if told is None or told.timeline != timeline or not self.clipping.holds:
            return
        if told.step == self._steps.held_step or self.do_rows_wait(told.step + 1):
            self.clipping.check(told.step, told.norm)
            self.history.learn_norm(told.step, told.norm)

    # ------------------------------------------------------------ snapshots

    def save_first(self) -> None:
        if (record := self.history.record(self._first_version)) is not None and self.numbers:
            self._begin(record)

    @property
    def snapshot_waits(self) -> bool:
        return self._before is not None or super().snapshot_waits

    def take_snapshot(self) -> Snapshot | None:
        taken, self._before = self._before, None
        return taken if taken is not None else super().take_snapshot()

    def _save(self, state: BlockState | TableRows) -> None:
        """`state` has just reached its version."""
        if self._schedule is None:
            return
        if state.version > self._considered:
            self._considered = state.version
            record = self.history.record(state.version)
            if record is not None and self._begin(record):
                return
        self._enter(state)

    def _begin(self, record: StepRecord) -> bool:
        """Begin a copy with all blocks that have that version: blocks that came from others may have it
        already."""
        rank = self._schedule.rank(record) if self._schedule is not None else None
        if rank is None:
            return False
        if self.snapshot is not None:
            both = (
                self.snapshot.whole
                and self._before is None
                and min(rank, self.snapshot.rank) >= EVALUATED_RANK
            )
            self.skipped += not both
            if rank < self.snapshot.rank:
                return False
            self._before = self.snapshot if both else self._before
            if not both:
                self.snapshot.release()
        self.snapshot = Snapshot(self.history.saved(record), rank, self.numbers, self.slots)
        for part in self._parts:
            self._enter(part)
        return True

    def _enter(self, part: BlockState | TableRows) -> None:
        if self.snapshot is None or self.snapshot.version != part.version or self.snapshot.whole:
            return
        if isinstance(part, BlockState):
            self.snapshot.add(part.place.number, part.current, part.optimizer_state(), self.pool)
        else:
            self.snapshot.add_tables(part.copies())


class AsyncStore(Store):
    """Its `ledger` says which minibatches each block, and the rows of each slot, have."""

    mode = Mode.ASYNC

    def __init__(
        self, header: InitHeader, pool: BufferPool | None = None, rows: TableRows | None = None
    ) -> None:
        super().__init__(header, 1, pool, rows or rows_of(header))
        self.schedules = ScheduleStates(header.record.schedules)
        self.pushes = self._arrivals = ArrivalPushes(
            self.layout, self.schedules, self._positions, self._arguments
        )
        self._copying: AsyncSnapshot | None = None  # a copy that is made while pushes come

    @property
    def ledger(self) -> Ledger:
        """Which minibatches each block, and the rows of each slot, have."""
        return self._arrivals.ledger

    @ledger.setter
    def ledger(self, ledger: Ledger) -> None:
        self._arrivals.ledger = ledger

    @property
    def changes(self) -> int:
        """How often a buffer got other bits."""
        return self._arrivals.changes

    def seal(self) -> None:
        self.ledger = Ledger(len(self.blocks), [every_slot(self.layout.slot_count)] * (self.rows is not None))

    def moment(self, version: int | None) -> int | None:  # noqa: ARG002
        return self.changes

    def newest_moment(self, state: BlockState, version: int | None) -> int:  # noqa: ARG002
        return self.changes

    def pushed(self, trainer: str, now: float, *, keeps: bool) -> bool:
        return self.parameters_in_use.pushed(trainer, now, keeps=keeps)

    def ledger_part(self, positions: Sequence[int], slots: int, *, stays: bool = False) -> SavedLedger:
        return self.ledger.part(positions, slots, stays=stays)

    def join_ledgers(self, parts: Sequence[tuple[SavedLedger, int]]) -> None:
        self.ledger = Ledger.joined(parts)

    def ledger_counts(self) -> tuple[EpochLedger, ...]:
        return self.ledger.counts()

    # ------------------------------------------------------------ snapshots

    def begin_copy(self, record: StepRecord) -> AsyncSnapshot:
        """Copy rows and the ledger at this instant; then `copy_block` of each block, with its optimizer's
        state, and `keep_copy`. The caller releases a copy that is not kept. `record.version`: number of
        the checkpoint."""
        copying = AsyncSnapshot(
            self.schedules.saved(record), self.numbers, self.ledger.saved(), self._versions, self.slots
        )
        if self.rows is not None:
            copying.add_tables(self.rows.copies())
        return copying

    def copy_before_changes(self, copying: AsyncSnapshot | None) -> None:
        """Pushes may come while this copy is made: from now on they copy what it lacks of a block before they
        change it. None: the copy is whole, or was given up."""
        self._copying = copying

    def _taken(
        self,
        push: Push,
        state: BlockState,
        item: PushBlock,
        value: torch.Tensor | None,
        memory: Buffer | None,
        *,
        lent: bool = False,
    ) -> Verdict:
        if self._copying is not None and self._copying.lacks(item.block):
            self.copy_block(self._copying, item.block)
        return super()._taken(push, state, item, value, memory, lent=lent)

    def copy_block(self, copying: AsyncSnapshot, number: int) -> None:
        state = self.blocks[number]
        copying.add(number, state.current, state.optimizer_state(), self.pool)

    def keep_copy(self, copied: AsyncSnapshot) -> bool:
        """To be taken, instead of one that waits. False if an update came in between: then the copy is of no
        single instant, and not kept."""
        if copied.updates != self._versions or copied.slots != self.slots:
            return False
        if self.snapshot is not None:
            self.skipped += 1
            self.snapshot.release()
        self.snapshot = copied
        return True

    @property
    def _versions(self) -> int:
        """How many updates all together have had, with those of buffers."""
        return sum(part.version for part in self._parts)
