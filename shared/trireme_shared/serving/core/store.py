"""The state of one server of blocks: blocks, rows, records of steps. It decides about one block at a time and
never waits (stores.py has both kinds, and how each takes pushes). Functions at the end say what a pull may
ask for, what the puller has already, and which lanes the step under way lacks.

init --> Store;  admit(header) --> Push;  apply(push, block, payload) --> Verdict
                 ^ raises: the whole push is refused    ^ an error in one block refuses that block only
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch

from trireme_shared.blocks.buffer_mean import mean_of
from trireme_shared.blocks.buffers import Buffer, BufferPool, tensor_over
from trireme_shared.blocks.gradient_norm import Clipping
from trireme_shared.blocks.snapshot import Snapshot
from trireme_shared.protocol.errors import BadFrame, InvalidArgument, LayoutMismatch, WrongOwner
from trireme_shared.protocol.lanes import Interval, gaps, intervals
from trireme_shared.protocol.records import Mode, SlotMap
from trireme_shared.protocol.records.layout import ELEMENT_BYTES, ROWS, Block, Layout
from trireme_shared.protocol.records.step import LanePosition, NodeResult
from trireme_shared.protocol.wire.messages import (
    EpochLedger,
    InitHeader,
    PullRequest,
    PushBlock,
    PushHeader,
    StepNorm,
    Verdict,
)
from trireme_shared.serving.core.asynchronous import ParametersInUse
from trireme_shared.serving.core.blocks import BlockState
from trireme_shared.serving.core.freezing import block_optimizer
from trireme_shared.serving.core.geometry import Geometry
from trireme_shared.serving.core.history import History
from trireme_shared.serving.core.ledger import SavedLedger
from trireme_shared.serving.core.optimizers import Options, arguments, options_of

if TYPE_CHECKING:
    from trireme_shared.serving.core.table.rows import TableRows


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


def _fits(state: BlockState, item: PushBlock, size: int) -> bool:
    """Whether a payload of `size` bytes is the whole block, in its own dtype or in one that it may be sent
    in; or nothing, because there is no data, or no change in a buffer, or no gradient of any parameter."""
    if not size and (not item.count or item.dtype is None):
        return True
    if item.dtype is None:
        return size == state.place.bytes
    return state.narrows and size == state.place.elements * ELEMENT_BYTES[item.dtype]


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

    def leaves_alone(self, push: Push, place: Block, lanes: Interval) -> bool:
        """Whether these lanes say that the step leaves all parameters of a block as they are."""
        ...

    def settle(self, state: BlockState) -> bool:
        """Step a block that is held for the norm of the whole gradient, if the norm is known; answers whether
        it was stepped."""
        ...


class Store:
    """Blocks are added by `add_block` (or `place_block`) once, before the first push; then `seal`. A resize
    moves blocks later (core/moving.py)."""

    mode: ClassVar[Mode]
    #: how pushes are taken; a subclass sets it
    pushes: Pushes

    def __init__(
        self,
        header: InitHeader,
        lanes: int,
        pool: BufferPool | None,
        rows: TableRows | None,
        clipping: Clipping | None = None,
    ) -> None:
        if header.lanes < 1 or header.lanes & (header.lanes - 1):
            msg = f"lanes is {header.lanes}: expected a power of two"
            raise InvalidArgument(msg)
        self.lanes = lanes
        self.layout, self.geometry = header.layout, Geometry(header.layout)
        #: rows of embedding tables; None: the model has no tables
        self.rows = rows
        self.pool = pool or BufferPool()
        self.blocks: dict[int, BlockState] = {}
        self.history = History(header.record, lanes)
        #: which parameters trainers compute with; of asynchronous jobs
        self.parameters_in_use = ParametersInUse()
        #: blocks hold their gradients until the norm of all of them is known, if it says so
        self.clipping = clipping or Clipping(None)
        #: how many copies for checkpoints were left out, because the one before still waited
        self.skipped = 0
        #: tells its values from those of all other stores; set by the server that has it
        self.name = ""
        #: the map by which it has these blocks; None: not known
        self.slots: SlotMap | None = None
        #: the copy for a checkpoint that is being made, or waits to be taken
        self.snapshot: Snapshot | None = None
        self._first_version = header.record.version
        self._positions: dict[int, int] = {}
        self._arguments: Sequence[Options | None] = self._arguments_of(header.layout)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {len(self.blocks)} blocks, versions {self.lowest} to {self.highest}>"

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
        """Copy the initial values of a block. Raises BadFrame if they do not fit the layout or the block was
        added before."""
        place = self.geometry.block(number)
        if place is None or payload.nbytes != place.bytes or number in self.blocks:
            expected = "no such block" if place is None else f"{place.bytes} bytes, once"
            msg = f"initial block {number} of {payload.nbytes} bytes: the layout has {expected}"
            raise BadFrame(msg)
        values = self.pool.take(place.dtype, place.elements)
        values.view[:] = payload.cast("B")
        self.place_block(number, values, {})

    def place_block(self, number: int, values: Buffer, state: Mapping[str, torch.Tensor]) -> None:
        """Add a block with its optimizer's state; both belong to the store from now on. `values` have the
        block's size."""
        place = self.geometry.block(number)
        assert place is not None
        assert number not in self.blocks
        chosen = self._arguments[place.segment]
        optimizer = None
        if chosen is not None:
            name = self.layout.optimizer.class_of(self.layout.segments[place.segment].group)
            optimizer = block_optimizer(name, chosen, values.tensor, self.geometry.parts(place))
            optimizer.load(dict(state))
        holds, first = self.clipping.holds, self._first_version
        mean = mean_of(self.layout.segments[place.segment].kind)
        block = BlockState(place, values, self.pool, self.lanes, optimizer, first, holds=holds, mean=mean)
        self._positions[number] = len(self.blocks)
        self.blocks[number] = block

    def seal(self) -> None:
        """All blocks were added."""

    def renumber(self) -> None:
        """Blocks came or went. The copy of a version that is not complete would lack some of them, or have
        them twice."""
        self._positions.clear()
        self._positions.update((number, position) for position, number in enumerate(self.blocks))
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
    def parts(self) -> int:
        # that a push may name for each lane: by a newer slot map, there may be more than are here
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
        return {
            state.current.home[0]: None for state in self.blocks.values() if state.current.home is not None
        }

    # ------------------------------------------------------------ pushes

    def admit(self, header: PushHeader) -> Push:
        """Check a push as a whole. Raises LayoutMismatch, BadFrame, InvalidArgument: no block of it can be
        used; StepTorn: its claim comes too late."""
        if header.mode is not self.mode:
            msg = f"push in {header.mode} mode: this job was initialised in {self.mode} mode"
            raise LayoutMismatch(msg)
        options = None
        if header.lane_zero is not None:
            if len(header.lane_zero.options) != len(self.layout.optimizer.groups):
                msg = (
                    f"options of {len(header.lane_zero.options)} groups: the optimizer has "
                    f"{len(self.layout.optimizer.groups)}"
                )
                raise LayoutMismatch(msg)
            options = tuple(options_of(group) for group in header.lane_zero.options)
        return self.pushes.admit(header, options)

    def judge(self, push: Push, lanes: Interval) -> Verdict | None:
        """Why no data of these lanes is taken; None: it may be."""
        return self.pushes.judge(push, lanes)

    def apply(
        self, push: Push, item: PushBlock, payload: memoryview, memory: Buffer | None = None
    ) -> Verdict:
        """Apply one block's gradient. `payload` is used during the call only; if it is writable, it may be
        overwritten. `memory`: the buffer that starts with it; it is retained if the gradient has to wait
        for others and has the block's kind."""
        state = self.blocks.get(item.block)
        if state is None:
            return Verdict.LAYOUT_MISMATCH if self.geometry.block(item.block) is None else Verdict.WRONG_OWNER
        place = state.place
        if item.count < 0 or not _fits(state, item, payload.nbytes):
            return Verdict.LAYOUT_MISMATCH
        if item.count and not payload.nbytes:  # a buffer that forward left as it was, or frozen parameters
            if not state.is_buffer and not self.pushes.leaves_alone(push, place, item.lanes):
                return Verdict.LAYOUT_MISMATCH
            unchanged = state.current.tensor if self.pushes.keeps_unchanged and state.is_buffer else None
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
        if item.count < 0 or not _fits(state, item, size):
            also = " or, cast, bfloat16 or float16" if state.narrows else ""
            return (
                f"{size} bytes of {item.dtype or place.dtype}: expected {place.elements} elements of "
                f"{place.dtype}{also}"
            )
        if item.count and not size and not state.is_buffer:
            return (
                f"no gradient from lanes {item.lanes}, which do not say that they leave all parameters of "
                f"the block alone: expected {place.elements} elements of {place.dtype}"
            )
        return (
            f"{item.dtype or place.dtype} in lanes {item.lanes} of {self.lanes}: expected a node of "
            "the tree, and one dtype in a step"
        )

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
        before = state.version
        verdict = self.pushes.take(push, state, item, value, memory, lent=lent)
        if state.version != before:
            self.stepped(state)
        return verdict

    def stepped(self, part: BlockState | TableRows) -> None:
        """It has just reached its version."""

    def pull(self, number: int, version: int | None) -> Buffer | Verdict:
        """A block's values at `version` (None: the current one); the caller retains them to keep them across
        an await."""
        if (state := self.blocks.get(number)) is None:
            return Verdict.WRONG_OWNER
        return state.current if version is None else state.pull(version)

    def moment(self, version: int | None) -> int | None:
        """Names the values that a pull of `version` brings if it begins now; None: they may be of several
        versions."""
        return version

    def newest_moment(self, state: BlockState, version: int | None) -> int:
        """Of the values that a pull of `version` brings of a block."""
        return state.version if version is None else version

    # ----------------------------------------------------- what waits for the norm of a step's whole gradient

    def learn_norm(self, told: StepNorm | None, timeline: int) -> None:
        """For what is held in that step of `timeline`, the job's. Raises InvalidArgument."""

    def settle(self, number: int) -> bool:
        """Step a block that is held, if the norm is known; answers whether it was stepped."""
        state = self.blocks[number]
        if not self.pushes.settle(state):
            return False
        self.stepped(state)
        return True

    def do_rows_wait(self, version: int | None) -> bool:
        """Whether the rows have made this version, and it has no record yet: nothing clips rows, but their
        step's norm is not known."""
        rows = self.rows
        made = rows is not None and self.clipping.holds and rows.version == version
        return made and version is not None and self.history.record(version) is None

    def settle_rows(self) -> bool:
        """Make the record of the version that the rows have made, unless that waits for the norm; answers
        whether it was made."""
        rows = self.rows
        if rows is None or (self.clipping.holds and self.history.norm(rows.version - 1) is None):
            return False
        self.stepped(rows)
        return True

    # ----------------------------------- trainers whose parameters may be old, and the ledger: see AsyncStore

    def pushed(self, trainer: str, now: float, *, keeps: bool) -> bool:  # noqa: ARG002
        """A trainer's push is over; answers whether others may have waited for that. `keeps`: it goes on with
        the parameters that it has."""
        return False

    def ledger_part(self, positions: Sequence[int], slots: int, *, stays: bool = False) -> SavedLedger:  # noqa: ARG002
        """What the ledger says of the blocks at these positions, and of rows of these slots (bits)."""
        return SavedLedger({})

    def join_ledgers(self, parts: Sequence[tuple[SavedLedger, int]]) -> None:
        """Each with its number of blocks."""

    def ledger_counts(self) -> tuple[EpochLedger, ...]:
        """How many pushes counted, by epoch."""
        return ()

    # ------------------------------------------------------------ snapshots

    def save_first(self) -> None:
        """Copy the version of the initial values, if it is due."""

    @property
    def snapshot_waits(self) -> bool:
        """Whether a complete copy waits to be taken."""
        return self.snapshot is not None and self.snapshot.whole

    def take_snapshot(self) -> Snapshot | None:
        """The complete snapshot that waits, or None; the caller releases it."""
        if not self.snapshot_waits:
            return None
        taken, self.snapshot = self.snapshot, None
        return taken


def missing_lanes(store: Store) -> tuple[Interval, ...]:
    """The lanes [first, last) that some block of the lowest version has no data of in its step."""
    if store.mode is not Mode.SYNC:
        return ()
    lowest = store.lowest
    waiting = {frozenset(state.tree.nodes) for state in store.collected if state.version == lowest}
    if store.rows is not None and store.rows.version == lowest:
        waiting.add(store.rows.lanes_there)
    lacking = {
        lane for nodes in waiting for first, last in gaps(nodes, store.lanes) for lane in range(first, last)
    }
    return tuple(intervals(sorted(lacking)))


def squares_at(
    blocks: Mapping[int, BlockState], numbers: Iterable[int], version: int
) -> tuple[tuple[int, float], ...]:
    """The sums of squares of the gradients that are held at `version`, or that made it."""
    found = ((number, blocks[number]) for number in numbers)
    return tuple(
        (n, state.squares) for n, state in found if state.version == version and state.squares is not None
    )


def check_pull(store: Store, request: PullRequest, index: int) -> None:
    """Raises WrongOwner, InvalidArgument."""
    if store.rows is not None and 0 < request.slots < store.rows.since:
        msg = (
            f"slot map {request.slots} is old: the rows at pserver-{index} moved by "
            f"{store.rows.since}; read the slot map again"
        )
        raise WrongOwner(msg, slots=store.rows.since)
    if request.version is not None and store.mode is Mode.ASYNC:
        msg = (
            f"version {request.version} was asked for in async mode, where blocks have no common "
            "version: ask for None"
        )
        raise InvalidArgument(msg)
    wanted = set(request.blocks)
    if foreign := wanted - store.blocks.keys():
        block = min(foreign)
        msg = f"block {block} is not at pserver-{index}: read the slot map again"
        raise WrongOwner(msg, block=block)
    if len(wanted) < len(request.blocks):
        twice = min(block for block, times in Counter(request.blocks).items() if times > 1)
        msg = f"block {twice} is named twice in one pull: name each block once"
        raise InvalidArgument(msg, block=twice)


def known_of(store: Store, version: int | None) -> str:
    """A name for the values that a pull of `version` brings if it begins now; "" if blocks may be of several
    versions."""
    moment = store.moment(version)
    return "" if moment is None else f"{store.name}@{moment}"


def moment_of(store: Store, known: str | None) -> int | None:
    """The moment in a name that `known_of` of this store made, else None."""
    name, _, moment = (known or "").rpartition("@")
    return int(moment) if name and name == store.name and moment.isascii() and moment.isdecimal() else None


def is_same(store: Store, number: int, version: int | None, moment: int | None) -> bool:
    """Whether it is certain that a pull of `version` finds a block with the bits that a whole pull had at
    `moment` (None: there was none). Only blocks of buffers are watched, and in synchronous jobs those of
    parameters, which may be frozen; who has a newer version than it asks for gets everything. A block without
    any values is left out as well."""
    state = store.blocks[number]
    if state.is_empty_at(version):
        return True
    if moment is None:
        return False
    is_watched = state.is_buffer or (state.is_stepped and store.mode is Mode.SYNC)
    return is_watched and state.changed <= moment <= store.newest_moment(state, version)
