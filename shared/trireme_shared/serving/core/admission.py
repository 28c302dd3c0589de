"""What a push may be, and how its blocks are taken: synchronous pushes by the tree of lanes, asynchronous
ones by the ledger.

admit(header) --> Push        take(push, block, value) --> Verdict
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from trireme_shared.blocks.buffers import Buffer
from trireme_shared.blocks.gradient_norm import Clipping
from trireme_shared.protocol.errors import BadFrame, LayoutMismatch, StepTorn
from trireme_shared.protocol.lanes import Interval, is_aligned
from trireme_shared.protocol.records import Mode
from trireme_shared.protocol.records.layout import ELEMENT_BYTES, Block, Layout
from trireme_shared.protocol.records.step import LanePosition, NodeResult
from trireme_shared.protocol.wire.messages import InitHeader, PushBlock, PushHeader, Verdict
from trireme_shared.serving.core.asynchronous import ScheduleStates, slowed
from trireme_shared.serving.core.blocks import BlockState
from trireme_shared.serving.core.history import History
from trireme_shared.serving.core.ledger import Ledger
from trireme_shared.serving.core.optimizers import Options, options_of

MAX_TASKS = 1 << 40


@dataclass(slots=True)
class Push:
    """One admitted push. `options[g]`: of optimizer group g in this step, if the header has them. `judged`:
    by lanes. `results`: of nodes of the tree, as they came with their first blocks."""

    header: PushHeader
    task: int = -1
    options: tuple[Options, ...] | None = None
    positions: dict[int, LanePosition] = field(default_factory=dict)
    judged: dict[Interval, Verdict | None] = field(default_factory=dict)
    claims: int = 0
    noted: set[Interval] = field(default_factory=set)
    results: dict[Interval, NodeResult] = field(default_factory=dict)


def fits(state: BlockState, item: PushBlock, size: int) -> bool:
    """Whether a payload of `size` bytes is the whole block, in its own dtype or in one that it may be sent
    in; or nothing, because there is no data or, in a buffer, no change."""
    if not size and (not item.count or (state.is_buffer and item.dtype is None)):
        return True
    if item.dtype is None:
        return size == state.place.bytes
    return state.narrows and size == state.place.elements * ELEMENT_BYTES[item.dtype]


def task_number(header: PushHeader) -> int:
    task = int(header.task_id) if header.task_id.isascii() and header.task_id.isdigit() else -1
    if not 0 <= task < MAX_TASKS or not 0 <= header.start < header.end <= header.minibatches:
        msg = (
            f"push of task {header.task_id[:40]!r}, minibatches [{header.start}, {header.end}) of {header.minibatches}: "
            "expected a task number and 0 <= start < end <= minibatches"
        )
        raise BadFrame(msg)
    return task


def check_same_model(layout: Layout, mode: Mode, header: InitHeader) -> None:
    """Raises LayoutMismatch unless the header is of the model with this layout."""
    mine = (layout.digest, layout.segments, layout.block_bytes, layout.tables, mode)
    theirs = (
        header.layout.digest,
        header.layout.segments,
        header.layout.block_bytes,
        header.layout.tables,
        header.mode,
    )
    if mine != theirs:
        msg = (
            f"model {header.layout.digest[:12]} ({header.mode}, {len(header.layout.segments)} segments) does not fit the loaded "
            f"{layout.digest[:12]} ({mode}, {len(layout.segments)} segments): all trainers must run the same script"
        )
        raise LayoutMismatch(msg)


class Pushes(Protocol):
    """How a store takes pushes, by the mode of its job."""

    #: whether an empty payload with data means that the block stays as it is: a buffer that forward left
    #: unchanged
    keeps_unchanged: bool

    def admit(self, header: PushHeader, options: tuple[Options, ...] | None) -> Push:
        """Check a push as a whole. `options`: of each optimizer group, if the header has them. Raises
        BadFrame, StepTorn: see Store.admit."""
        ...

    def judge(self, push: Push, lanes: Interval) -> Verdict | None:
        """Why no data of these lanes is taken; None: it may be."""
        ...

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
        """Apply one block's gradient. `lent`: `value` may only be read; it is copied if the optimizer would
        write into it."""
        ...

    def settle(self, state: BlockState) -> bool:
        """Step a block that is held for the norm of the whole gradient, if the norm is known; answers whether
        it was stepped."""
        ...


class StepPushes:
    """Synchronous: each lane's data of a step counts once, and a block steps when the data of all lanes is
    there. `held_step`: the last step in which a block was held for the norm."""

    keeps_unchanged = True

    def __init__(self, layout: Layout, lanes: int, history: History, clipping: Clipping) -> None:
        self._layout, self._lanes, self._history, self._clipping = layout, lanes, history, clipping
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

    def settle(self, state: BlockState) -> bool:
        norm = self._history.norm(state.version) if state.held else None
        if norm is None:
            return False
        state.settle(self._clipping.factor(norm), self.options(state.version, state.place))
        return True

    def options(self, step: int, place: Block) -> Options:
        """The options of the block's group in `step`. Lane 0's push brings them, so they are known when the
        tree is complete."""
        group = self._layout.segments[place.segment].group
        if group < 0:
            return self._no_options
        if self._options_of_step[0] != step:
            lane_zero = self._history.lane_zero(step)
            if lane_zero is None:
                return self._no_options
            self._options_of_step = (step, tuple(options_of(given) for given in lane_zero.options))
        return self._options_of_step[1][group]


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
        return Push(header, task_number(header), options or ({},) * len(self._layout.optimizer.groups))

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

    def settle(self, state: BlockState) -> bool:  # noqa: ARG002
        return False
