"""The state of one pserver: blocks, step records, ledger. It decides about one block at a time and never waits.

init --> Store;  admit(header) --> Push;  apply(push, block, payload) --> Verdict
                 ^ raises: the whole push is refused    ^ an error in one block refuses that block only
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from shared.blocks.buffers import Buffer, BufferPool, tensor_over
from shared.blocks.snapshot import Snapshot
from shared.checkpoints.schedule import EVALUATED_RANK, Schedule
from shared.errors import BadFrame, InvalidArgument, LayoutMismatch, StepTorn
from shared.lanes import Interval, is_aligned
from shared.records import Mode, SlotMap
from shared.records.layout import ROWS, Block, Layout
from shared.records.step import StepRecord
from shared.serving.core.admission import Push, fits, task_number
from shared.serving.core.asynchronous.in_use import ParametersInUse
from shared.serving.core.asynchronous.ledger import Ledger
from shared.serving.core.asynchronous.saved_ledger import AsyncSnapshot
from shared.serving.core.asynchronous.schedules import ScheduleStates
from shared.serving.core.asynchronous.staleness import slowed
from shared.serving.core.blocks import BlockState
from shared.serving.core.by_parameter import block_optimizer
from shared.serving.core.clipping import Clipping
from shared.serving.core.geometry import Geometry
from shared.serving.core.history import History
from shared.serving.core.optimizers import Options, arguments, options_of
from shared.serving.core.table.arrivals import every_slot
from shared.serving.core.table.of_model import rows_of
from shared.wire.messages import InitHeader, PushBlock, PushHeader
from shared.wire.verdict import Verdict

if TYPE_CHECKING:
    from shared.serving.core.table.rows import TableRows


class Store:
    """Blocks are added by `add_block` (or `place_block`) once, before the first push; then `seal`. A resize moves blocks later
    (core/moving.py). `slots`: the map by which it has these blocks (None: not known).

    `schedule` says which versions are copied for checkpoints (None: none). If the copy before still waits to be taken, the one of the higher
    rank is kept, and `skipped` counts the other. `rows`: of tables, if there are some already. `clipping`: blocks hold their gradients until the norm of all of them is known. `name`:
    tells its values from those of all other stores; set by who serves it. `changes`: how often a buffer got other bits (asynchronous)."""

    def __init__(
        self,
        header: InitHeader,
        schedule: Schedule | None = None,
        pool: BufferPool | None = None,
        clipping: Clipping | None = None,
        rows: TableRows | None = None,
    ) -> None:
        if header.lanes < 1 or header.lanes & (header.lanes - 1):
            msg = f"lanes is {header.lanes}: expected a power of two"
            raise InvalidArgument(msg)
        self.mode = header.mode
        self.lanes = header.lanes if header.mode is Mode.SYNC else 1
        self.layout, self.geometry = header.layout, Geometry(header.layout)
        self.rows = rows or rows_of(header)
        self.pool = pool or BufferPool()
        self.blocks: dict[int, BlockState] = {}
        self.history = History(header.record, self.lanes)
        self.ledger, self.schedules = Ledger(0), ScheduleStates(header.record.schedules)
        self.parameters_in_use = ParametersInUse()
        self.skipped, self.changes, self.name = 0, 0, ""
        self.slots: SlotMap | None = None
        self._schedule = schedule if self.mode is Mode.SYNC else None
        self.clipping = (clipping if self.mode is Mode.SYNC else None) or Clipping(None)
        self.held_step = -1  # the last one that a block was held in
        self.snapshot: Snapshot | None = None
        self._before: Snapshot | None = None  # a complete one that waits, too: neither may be left out
        self._first_version = self._considered = header.record.version
        self._positions: dict[int, int] = {}
        self._no_options: Options = {}
        self._arguments = self._arguments_of(header.layout)
        self._options_of_step: tuple[int, tuple[Options, ...]] = (-1, ())

    def __repr__(self) -> str:
        return f"<Store {self.mode}: {len(self.blocks)} blocks, versions {self.lowest} to {self.highest}>"

    def _arguments_of(self, layout: Layout) -> list[Options | None]:
        """The optimizer's for each segment; None: its blocks are not stepped. Raises InvalidArgument."""
        spec, segments = layout.optimizer, layout.segments
        return [arguments(spec, s.group, s.dtype) if s.kind == "param" else None for s in segments]

    # ------------------------------------------------------------ blocks

    @property
    def collected(self) -> Iterable[BlockState]:
        """The blocks that it takes pushes of."""
        return self.blocks.values()

    def add_block(self, number: int, payload: memoryview) -> None:
        """Copy the initial values of a block. Raises BadFrame if they do not fit the layout or the block was added before."""
        place = self.geometry.block(number)
        if place is None or payload.nbytes != place.bytes or number in self.blocks:
            expected = "no such block" if place is None else f"{place.bytes} bytes, once"
            msg = f"initial block {number} of {payload.nbytes} bytes: the layout has {expected}"
            raise BadFrame(msg)
        values = self.pool.take(place.dtype, place.elements)
        values.view[:] = payload.cast("B")
        self.place_block(number, values, {})

    def place_block(self, number: int, values: Buffer, state: Mapping[str, torch.Tensor]) -> None:
        """Add a block with its optimizer's state; both belong to the store from now on. `values` have the block's size."""
        place = self.geometry.block(number)
        assert place is not None
        assert number not in self.blocks
        chosen = self._arguments[place.segment]
        optimizer = None
        if chosen is not None:
            optimizer = block_optimizer(self.layout.optimizer.name, chosen, values.tensor, self.geometry.parts(place))
            optimizer.load(dict(state))
        holds, first = self.clipping.holds, self._first_version
        block = BlockState(place, values, self.pool, self.lanes, optimizer, first, holds=holds)
        self._positions[number] = len(self.blocks)
        self.blocks[number] = block

    def seal(self) -> None:
        """All blocks were added."""
        self.ledger = Ledger(len(self.blocks), [every_slot(self.layout.slot_count)] * (self.rows is not None))

    def renumber(self) -> None:
        """Blocks came or went. The copy of a version that is not complete would lack some of them, or have them twice."""
        self._positions = {number: position for position, number in enumerate(self.blocks)}
        if self.snapshot is not None and not self.snapshot.whole:
            self.snapshot.release()
            self.snapshot = None
            self.skipped += 1

    @property
    def _parts(self) -> Iterable[BlockState | TableRows]:
        return chain(self.blocks.values(), filter(None, (self.rows,)))

    @property
    def numbers(self) -> list[int]:  # of what it has: blocks, and ROWS
        return [*self.blocks, *[ROWS] * (self.rows is not None)]

    @property
    def parts(self) -> int:  # that a push may name for each lane: by a newer slot map, there may be more than are here
        return self.geometry.blocks + (self.rows is not None)

    @property
    def lowest(self) -> int:
        return min((part.version for part in self._parts), default=self._first_version)

    @property
    def highest(self) -> int:
        return max((part.version for part in self._parts), default=self._first_version)

    @property
    def updates(self) -> int:
        return sum(block.updates for block in self.blocks.values())

    @property
    def bytes(self) -> int:
        return sum(block.place.bytes for block in self.blocks.values())

    def homes(self) -> dict[Any, None]:
        """The memories of the blocks' values that other processes can reach."""
        return {state.current.home[0]: None for state in self.blocks.values() if state.current.home is not None}

    # ------------------------------------------------------------ pushes

    def admit(self, header: PushHeader) -> Push:
        """Check a push as a whole. Raises LayoutMismatch, BadFrame, InvalidArgument: no block of it can be used; StepTorn: its
        claim comes too late."""
        if header.mode is not self.mode:
            msg = f"push in {header.mode} mode: this job was initialised in {self.mode} mode"
            raise LayoutMismatch(msg)
        options = None
        if header.lane_zero is not None:
            if len(header.lane_zero.options) != len(self.layout.optimizer.groups):
                msg = f"options of {len(header.lane_zero.options)} groups: the optimizer has {len(self.layout.optimizer.groups)}"
                raise LayoutMismatch(msg)
            options = tuple(options_of(group) for group in header.lane_zero.options)
        if self.mode is Mode.ASYNC:
            self.schedules.take(header.lane_zero)
            return Push(header, task_number(header), options or ({},) * len(self.layout.optimizer.groups))
        positions = {position.lane: position for position in header.positions}
        if 0 in positions and options is None:
            msg = "a push of lane 0 without lane_zero: it carries the optimizer's options for everybody"
            raise BadFrame(msg)
        if header.claim and (obstacle := self.history.claim(header.step, positions)):
            raise StepTorn(obstacle, hint="the job goes back to a checkpoint", step=header.step)
        return Push(header, options=options, positions=positions, claims=self.history.claims)

    def apply(self, push: Push, item: PushBlock, payload: memoryview, memory: Buffer | None = None) -> Verdict:
        """Apply one block's gradient. `payload` is used during the call only; if it is writable, it may be overwritten.
        `memory`: the buffer that starts with it; it is retained if the gradient has to wait for others and has the block's
        kind."""
        state = self.blocks.get(item.block)
        if state is None:
            return Verdict.LAYOUT_MISMATCH if self.geometry.block(item.block) is None else Verdict.WRONG_OWNER
        place = state.place
        if item.count < 0 or not fits(state, item, payload.nbytes):
            return Verdict.LAYOUT_MISMATCH
        if item.count and not payload.nbytes:  # a buffer that forward left as it was
            unchanged = state.current.tensor if self.mode is Mode.SYNC else None
            return self._taken(push, state, item, unchanged, None, lent=True)
        if item.dtype is not None and item.count:
            widened = self.pool.take(place.dtype, place.elements)
            widened.tensor.copy_(tensor_over(payload, item.dtype))
            verdict = self._taken(push, state, item, widened.tensor, widened)
            widened.release()
            return verdict
        if memory is not None and memory.kind != (place.dtype, place.elements):
            memory = None
        value = None
        if item.count:
            value = tensor_over(payload, place.dtype) if memory is None else memory.tensor
        return self._taken(push, state, item, value, memory, lent=payload.readonly)

    def misfit(self, item: PushBlock, size: int) -> str:
        """Why a payload of `size` bytes is a LAYOUT_MISMATCH."""
        state = self.blocks.get(item.block)
        if state is None:
            return "the layout has no such block"
        place = state.place
        if item.count < 0 or not fits(state, item, size):
            also = " or, cast, bfloat16 or float16" if state.narrows else ""
            return f"{size} bytes of {item.dtype or place.dtype}: expected {place.elements} elements of {place.dtype}{also}"
        return f"{item.dtype or place.dtype} in lanes {item.lanes} of {self.lanes}: expected a node of the tree, and one dtype in a step"

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
        """`lent`: the value may only be read; it is copied if the optimizer would write into it."""
        if not state.takes(push.header.step if self.mode is Mode.SYNC else None):
            return Verdict.MOVING
        if self.mode is Mode.SYNC:
            if (refusal := self.judge(push, item.lanes)) is not None:
                return refusal
            before = state.version
            if before == push.header.step and item.lanes not in push.noted:
                push.noted.add(item.lanes)
                self.history.note(push.header, push.positions, item.lanes, push.results.get(item.lanes))
            step, options = push.header.step, self.options(push.header.step, state.place)
            measured, content = self.clipping.measures(step), (value, item.count, options, memory, item.dtype)
            verdict = state.push(step, item.lanes, *content, lent=lent, measured=measured)
            if state.version != before:
                self.stepped(state)
            elif state.held:
                self.held_step = state.version
            return verdict
        index = self._positions[item.block]
        verdict = self.ledger.judge(push.header, push.task, index)
        if verdict is Verdict.APPLIED:
            assert push.options is not None
            group = self.layout.segments[state.place.segment].group
            own, values = state.copied(value) if value is not None and lent else None, state.current
            options = push.options[group] if group >= 0 else self._no_options
            if item.version is not None and not state.is_buffer:
                options = slowed(options, self._arguments[state.place.segment], state.ahead_of(item.version))
            state.update(own.tensor if own else value, options)
            if state.is_buffer and state.current is not values:
                self.changes += 1
                state.changed = self.changes
            if own is not None:
                own.release()
            self.ledger.enter(push.header, push.task, index)
        return verdict

    def stepped(self, part: BlockState | TableRows) -> None:
        """It has just reached its version."""
        self.history.fix(part.version)
        self._save(part)

    def pull(self, number: int, version: int | None) -> Buffer | Verdict:
        """A block's values at `version` (None: the current one); the caller retains them to keep them across an await."""
        if (state := self.blocks.get(number)) is None:
            return Verdict.WRONG_OWNER
        return state.current if version is None else state.pull(version)

    # ------------------------------------------------------------ snapshots

    def save_first(self) -> None:
        """Copy the version of the initial values, if it is due."""
        if (record := self.history.record(self._first_version)) is not None and self.numbers:
            self._begin(record)

    def begin_copy(self, record: StepRecord) -> AsyncSnapshot:
        """Asynchronous: copy rows and the ledger at this instant; then `copy_block` of each block, with its optimizer's state, and `keep_copy`. The caller
        releases a copy that is not kept. `record.version`: number of the checkpoint."""
        copying = AsyncSnapshot(
            self.schedules.saved(record), self.numbers, self.ledger.saved(), self._versions, self.slots
        )
        if self.rows is not None:
            copying.add_tables(self.rows.copies())
        return copying

    def copy_block(self, copying: AsyncSnapshot, number: int) -> None:
        state = self.blocks[number]
        copying.add(number, state.current, state.optimizer_state(), self.pool)

    def keep_copy(self, copied: AsyncSnapshot) -> bool:
        """To be taken, instead of one that waits. False if an update came in between: then the copy is of no single instant, and not kept."""
        if copied.updates != self._versions or copied.slots != self.slots:
            return False
        if self.snapshot is not None:
            self.skipped += 1
            self.snapshot.release()
        self.snapshot = copied
        return True

    @property
    def _versions(self) -> int:
        """Asynchronous: how many updates all together have had, with those of buffers."""
        return sum(part.version for part in self._parts)

    @property
    def snapshot_waits(self) -> bool:
        return self._before is not None or (self.snapshot is not None and self.snapshot.whole)

    def take_snapshot(self) -> Snapshot | None:
        """The complete snapshot that waits, or None; the caller releases it."""
        taken, self._before = self._before, None
        if taken is None and self.snapshot_waits:
            taken, self.snapshot = self.snapshot, None
        return taken

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
        """Begin a copy with all blocks that have that version: blocks that came from others may have it already."""
        rank = self._schedule.rank(record) if self._schedule is not None else None
        if rank is None:
            return False
        if self.snapshot is not None:
            both = self.snapshot.whole and self._before is None and min(rank, self.snapshot.rank) >= EVALUATED_RANK
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

    def judge(self, push: Push, lanes: Interval) -> Verdict | None:
        """None if `lanes` is a node of the tree and the step's other blocks have data of the same records; else the refusal."""
        if push.claims != self.history.claims:
            push.claims = self.history.claims
            push.judged.clear()
        if lanes in push.judged:
            return push.judged[lanes]
        first, last = lanes
        verdict: Verdict | None = None
        fits = 0 <= first < last <= self.lanes and is_aligned(first, last)
        if not fits or not push.positions.keys() >= set(range(first, last)):
            verdict = Verdict.LAYOUT_MISMATCH
        elif not self.history.agrees(push.header.step, push.positions, range(first, last)):
            verdict = Verdict.STALE_ATTEMPT
        push.judged[lanes] = verdict
        return verdict

    def options(self, step: int, place: Block) -> Options:
        """The options of the block's group in `step`. Lane 0's push brings them, so they are known when the tree is complete."""
        group = self.layout.segments[place.segment].group
        if group < 0:
            return self._no_options
        if self._options_of_step[0] != step:
            lane_zero = self.history.lane_zero(step)
            if lane_zero is None:
                return self._no_options
            self._options_of_step = (step, tuple(options_of(given) for given in lane_zero.options))
        return self._options_of_step[1][group]
