"""The state of one server of blocks: blocks, rows, records of steps. It decides about one block at a time and
never waits (stores.py has both kinds).

init --> Store;  admit(header) --> Push;  apply(push, block, payload) --> Verdict
                 ^ raises: the whole push is refused    ^ an error in one block refuses that block only
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from trireme_shared.blocks.buffers import Buffer, BufferPool, tensor_over
from trireme_shared.blocks.gradient_norm import Clipping
from trireme_shared.blocks.snapshot import Snapshot
from trireme_shared.protocol.errors import BadFrame, InvalidArgument, LayoutMismatch
from trireme_shared.protocol.lanes import Interval
from trireme_shared.protocol.records import Mode, SlotMap
from trireme_shared.protocol.records.layout import ROWS, Layout
from trireme_shared.protocol.wire.messages import EpochLedger, InitHeader, PushBlock, PushHeader, StepNorm, Verdict
from trireme_shared.serving.core.admission import Push, Pushes, fits
from trireme_shared.serving.core.asynchronous import ParametersInUse
from trireme_shared.serving.core.blocks import BlockState
from trireme_shared.serving.core.geometry import Geometry
from trireme_shared.serving.core.history import History
from trireme_shared.serving.core.ledger import SavedLedger
from trireme_shared.serving.core.optimizers import Options, arguments, block_optimizer, options_of

if TYPE_CHECKING:
    from trireme_shared.serving.core.table.rows import TableRows


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
            optimizer = block_optimizer(self.layout.optimizer.name, chosen, values.tensor, self.geometry.parts(place))
            optimizer.load(dict(state))
        holds, first = self.clipping.holds, self._first_version
        block = BlockState(place, values, self.pool, self.lanes, optimizer, first, holds=holds)
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
        """Check a push as a whole. Raises LayoutMismatch, BadFrame, InvalidArgument: no block of it can be
        used; StepTorn: its claim comes too late."""
        if header.mode is not self.mode:
            msg = f"push in {header.mode} mode: this job was initialised in {self.mode} mode"
            raise LayoutMismatch(msg)
        options = None
        if header.lane_zero is not None:
            if len(header.lane_zero.options) != len(self.layout.optimizer.groups):
                msg = f"options of {len(header.lane_zero.options)} groups: the optimizer has {len(self.layout.optimizer.groups)}"
                raise LayoutMismatch(msg)
            options = tuple(options_of(group) for group in header.lane_zero.options)
        return self.pushes.admit(header, options)

    def judge(self, push: Push, lanes: Interval) -> Verdict | None:
        """Why no data of these lanes is taken; None: it may be."""
        return self.pushes.judge(push, lanes)

    def apply(self, push: Push, item: PushBlock, payload: memoryview, memory: Buffer | None = None) -> Verdict:
        """Apply one block's gradient. `payload` is used during the call only; if it is writable, it may be
        overwritten. `memory`: the buffer that starts with it; it is retained if the gradient has to wait
        for others and has the block's kind."""
        state = self.blocks.get(item.block)
        if state is None:
            return Verdict.LAYOUT_MISMATCH if self.geometry.block(item.block) is None else Verdict.WRONG_OWNER
        place = state.place
        if item.count < 0 or not fits(state, item, payload.nbytes):
            return Verdict.LAYOUT_MISMATCH
        if item.count and not payload.nbytes:  # a buffer that forward left as it was
            unchanged = state.current.tensor if self.pushes.keeps_unchanged else None
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

    # ------------------------------------------------------------ what waits for the norm of a step's whole gradient

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

    # ------------------------------------------------------------ trainers whose parameters may be old, and the ledger: see AsyncStore

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
