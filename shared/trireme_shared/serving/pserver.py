"""One parameter server without HTTP: the server of blocks that takes initial values, checkpoints and blocks
of other parameter servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from trireme_shared.blocks.gradient_norm import Clipping
from trireme_shared.checkpoints.schedule import Schedule
from trireme_shared.checkpoints.start_tables import mark_in
from trireme_shared.platform.membership.directory import Directory
from trireme_shared.platform.runtime import telemetry
from trireme_shared.protocol.errors import (
    InvalidArgument,
    LayoutMismatch,
    NotReady,
    StaleGeneration,
    WrongOwner,
)
from trireme_shared.protocol.records import JobState, Mode
from trireme_shared.protocol.records.layout import Layout
from trireme_shared.protocol.wire.messages import (
    HandoffAnswer,
    HandoffHeader,
    HandoffPart,
    InitBlock,
    InitHeader,
    LedgerAnswer,
    LedgerQuery,
    PserverInfo,
    PushHeader,
)
from trireme_shared.serving.block_server import BlockServer
from trireme_shared.serving.core.blocks import add_state
from trireme_shared.serving.core.calls import Payload
from trireme_shared.serving.core.store import Store, missing_lanes
from trireme_shared.serving.core.stores import AsyncStore, store_of
from trireme_shared.serving.ports import OwnPlace, ServerPorts, StartRows, TakesHandoffs

if TYPE_CHECKING:
    from trireme_shared.serving.core.table.rows import TableRows  # loads numba

log = telemetry.logger("pserver")


class Pserver(BlockServer):
    """Serves the blocks that the slot map gives to its index."""

    def __init__(self, job: str, incarnation: str, index: int = -1, ports: ServerPorts | None = None) -> None:
        super().__init__(job, incarnation, index, ports)
        #: which versions are copied for checkpoints; None: none
        self.schedule: Schedule | None = None
        #: None: gradients are not clipped
        self.clipping: Clipping | None = None
        #: the uuid of the checkpoint that the parameters come from (see JobState)
        self.checkpoint = ""
        #: why its last checkpoint could not be written
        self.checkpoint_error = ""
        #: whether blocks, and what it promised about them, are on their way to another parameter server
        self.hands_over = False
        #: reads the rows that the tables of the job begin with; None: no index is claimed
        self.start_rows: StartRows | None = None
        #: takes blocks of other parameter servers; None: no index is claimed
        self.handoffs: TakesHandoffs | None = None

    def __repr__(self) -> str:
        return (
            f"<Pserver {self.index} of {self.job}, generation {self.generation}: {self.store!r}, "
            f"{len(self.pulls)} pulls wait>"
        )

    def claimed(
        self,
        index: int,
        directory: Directory,
        own_place: OwnPlace,
        start_rows: StartRows,
        handoffs: TakesHandoffs,
    ) -> None:
        """The process has this index from now on. `directory` knows the job's spec."""
        assert directory.spec is not None
        self.index = index
        self.join(directory, own_place)
        self.start_rows, self.handoffs = start_rows, handoffs
        self.schedule, self.clipping = Schedule.of(directory.spec), Clipping.of(directory.spec)

    # ------------------------------------------------------------ calls

    async def init(self, header: InitHeader, blocks: AsyncIterator[tuple[InitBlock, Payload]]) -> None:
        """Take the initial blocks, all or none. A repetition with the same layout changes nothing. They are
        of the timeline and the slot map that this process sees in etcd.

        Raises LayoutMismatch (another model is loaded), WrongOwner, StaleGeneration, BadFrame,
        InvalidArgument, NotReady.
        """
        self.check(header)
        if header.pserver != self.index:
            msg = (
                f"initial blocks for pserver-{header.pserver} came to pserver-{self.index}: read the "
                "addresses again"
            )
            raise WrongOwner(msg)
        self._check_beginning(header)
        if self._is_same(header):
            return
        await self.prepare_tables(header.layout)
        rows = await self._first_rows(header)
        self.fence(header)
        store = store_of(header, self.schedule, self.new_pool(), self.clipping, rows)
        async for item, payload in blocks:
            if item.state:
                add_state(store.blocks, item.block, item.state, memoryview(payload))
            else:
                store.add_block(item.block, memoryview(payload))
            await asyncio.sleep(0)
        store.seal()
        self.fence(header)
        self._check_beginning(header)
        if not self._is_same(header):
            store.slots = self.directory.slots if self.directory is not None else None
            store.save_first()
            if self.store is not None:
                self.drop(header.generation)
            self.serve_store(store, header.timeline)
            self.look_for_snapshot()
            log.info("initialised", index=self.index, store=repr(store), bytes=store.bytes)

    def restore(self, store: Store, timeline: int, checkpoint: str) -> None:
        """Serve what was loaded."""
        self.serve_store(store, timeline)
        self.checkpoint = checkpoint
        log.info("restored", index=self.index, timeline=timeline, checkpoint=checkpoint, store=repr(store))

    def fits(self, state: JobState) -> bool:
        """Whether it holds parameters of the state's timeline, or none."""
        return self.store is None or self.timeline == state.timeline

    async def info(self) -> PserverInfo:
        common = self.common_info() | {
            "checkpoint_error": self.checkpoint_error,
            "ready": self.store is not None,
        }
        store = self.store
        if store is None:
            return PserverInfo(**common)
        return PserverInfo(
            **common,
            mode=store.mode,
            digest=store.layout.digest,
            blocks=len(store.blocks),
            bytes=store.bytes,
            lowest=store.lowest,
            highest=store.highest,
            missing=missing_lanes(store),
            updates=store.updates,
            schedules=store.schedules.kept if isinstance(store, AsyncStore) else (),
            slots=store.slots.version if store.slots is not None else 0,
            ledger=store.ledger_counts(),
        )

    async def ledger(self, query: LedgerQuery) -> LedgerAnswer:
        """Raises NotReady, InvalidArgument; WrongOwner: the asker goes by another slot map, so blocks might
        be left out."""
        if self.store is None:
            raise self.not_ready()
        self.check_map(self.store, query.slots)
        if not (query.task_id.isascii() and query.task_id.isdigit()):
            msg = f"task {query.task_id[:40]!r} is not in the ledger: only training tasks (numbers) are"
            raise InvalidArgument(msg)
        if not isinstance(self.store, AsyncStore):
            raise InvalidArgument(
                "a synchronous job has no ledger: each of its steps counts once by its lanes"
            )
        return self.store.ledger.next_of(query.epoch, int(query.task_id))

    async def take_handoff(
        self, header: HandoffHeader, parts: AsyncIterator[tuple[HandoffPart, Payload]]
    ) -> HandoffAnswer:
        """Take some parts of a group of blocks. Raises NotReady: send them again; BadFrame."""
        if self.handoffs is None:
            raise NotReady(f"no index is claimed here yet: send group {header.group} again")
        return await self.handoffs.take(header, parts)

    # ------------------------------------------------------------ checks

    def check_claim(self, store: Store, header: PushHeader) -> None:
        if self.hands_over:
            msg = f"pserver-{self.index} hands blocks over, and what it promised with them: claim again"
            raise NotReady(msg)
        super().check_claim(store, header)

    async def _first_rows(self, header: InitHeader) -> TableRows | None:
        """The rows with which the tables of the job begin; None: each row begins with its initial values.
        Raises InvalidArgument, NotReady."""
        if self.start_rows is not None:
            return await self.start_rows.rows(header)
        if mark_in(header.layout.initial):  # it is not known which rows are its own
            raise NotReady(f"pserver-{header.pserver} has no index yet: send the parameters again")
        return None

    def _check_beginning(self, header: InitHeader) -> None:
        """Raises NotReady: this view of the job is late; StaleGeneration, WrongOwner: the sender's is.
        `slots` 0: it does not say."""
        if self.directory is None:
            return
        timeline = self.directory.known_state.timeline
        if header.timeline > timeline:
            raise NotReady(
                f"pserver-{self.index} sees timeline {timeline}, not {header.timeline} yet: ask again"
            )
        if header.timeline < timeline:
            msg = (
                f"initial values of timeline {header.timeline}: the job is in {timeline}; read the "
                "job's state again"
            )
            raise StaleGeneration(msg, timeline=timeline)
        if header.slots:
            self.check_map_version(
                self.directory.slots.version if self.directory.slots is not None else 0, header.slots
            )

    def _is_same(self, header: InitHeader) -> bool:
        """Whether these parameters are loaded already. Those of another timeline are not the job's any
        more."""
        if self.store is None or self.timeline != header.timeline:
            return False
        _check_same_model(self.store.layout, self.store.mode, header)
        return True


def _check_same_model(layout: Layout, mode: Mode, header: InitHeader) -> None:
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
            f"model {header.layout.digest[:12]} ({header.mode}, {len(header.layout.segments)} "
            "segments) does not fit the loaded "
            f"{layout.digest[:12]} ({mode}, {len(layout.segments)} segments): all trainers must "
            "run the same script"
        )
        raise LayoutMismatch(msg)
