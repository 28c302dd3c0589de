"""One parameter server without HTTP: a minibatch is applied to a block exactly once; a pull is one version of every block.

    push: fence -> admit -> apply block after block (inline, < 1 ms each)      pull: blocks that are there, then those that arrive

There are no locks: a block changes between two awaits, and a pull that sends its values retains their buffer.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from shared.blocks.buffers import Allocate, Buffer, BufferPool
from shared.checkpoints.schedule import Schedule
from shared.errors import BadFrame, InvalidArgument, LayoutMismatch, NotReady, StaleGeneration, StepTorn, WrongOwner
from shared.membership.directory import Directory
from shared.records import JobState, Mode
from shared.records.layout import ELEMENT_BYTES, ROWS
from shared.records.pauses import Torn
from shared.runtime import clock, telemetry
from shared.runtime.waiting import event_within
from shared.serving.core.admission import check_same_model
from shared.serving.core.blocks import add_state
from shared.serving.core.calls import BlockServer, OpenPull, Payload
from shared.serving.core.clipping import Clipping
from shared.serving.core.held import learn_norm
from shared.serving.core.progress import check_pull, progress_of
from shared.serving.core.pushes import OpenPush
from shared.serving.core.store import Store
from shared.serving.settling import settled
from shared.serving.table_loops import PrepareTables, StartRows, compile_when_used, no_rows_yet
from shared.wire.lending import NOTHING
from shared.wire.messages import (
    PROTOCOL_VERSION,
    HandoffAnswer,
    HandoffHeader,
    HandoffPart,
    InitBlock,
    InitHeader,
    LedgerAnswer,
    LedgerQuery,
    MessageHeader,
    PserverInfo,
    PulledBlock,
    PullEnd,
    PullRequest,
    PushAnswer,
    PushBlock,
    PushHeader,
)

TakeHandoff = Callable[[HandoffHeader, AsyncIterator[tuple[HandoffPart, Payload]]], Awaitable[HandoffAnswer]]
log = telemetry.logger("pserver")


class Pserver(BlockServer):
    """`index`, `schedule` (of checkpoints; None: none) and `clipping` are set once the index is claimed. `max_wait_s`: how long a pull may wait. `in_doubt`: whether
    the index may belong to another process by now; no call is answered then. `snapshot_ready` is set when `store.take_snapshot()` has one. `timeline`
    and `checkpoint`: of the parameters, see JobState. `directory`: the job as etcd has it, set with the index; it says who may push, and how far fence and
    term may rise. `allocate`: where the memory of blocks comes from. `on_torn` is called when the parameters are lost. `take_handoff`: takes blocks of other
    parameter servers. `hands_over`: blocks and what it promised about them are on their way to another one. `on_restored` is called when `restore` has loaded
    parameters: the slot map may be newer. `loading`: a checkpoint is being read. `prepare_tables` is awaited before rows are made here; `start_rows` gives the first ones."""

    pull_kind = OpenPull

    def __init__(
        self,
        job: str,
        incarnation: str,
        index: int = -1,
        max_wait_s: float = 60.0,
        allocate: Callable[[], Allocate] | None = None,
    ) -> None:
        self.snapshot_ready = asyncio.Event()
        super().__init__(self.snapshot_ready.set)
        self.job = job
        self.incarnation = incarnation
        self.index = index
        self.term = 0
        self.schedule: Schedule | None = None
        self.clipping: Clipping | None = None
        self.checkpoint = self.checkpoint_error = ""
        self.loading = self.hands_over = False
        self.on_torn: Callable[[Torn], None] = lambda _: None
        self.in_doubt: Callable[[], bool] = lambda: False
        self.take_handoff: TakeHandoff = _no_handoffs
        self.on_restored: Callable[[], None] = lambda: None
        self.prepare_tables: PrepareTables = compile_when_used
        self.start_rows: StartRows = no_rows_yet
        self.directory: Directory | None = None
        self.is_live = lambda trainer: self.directory is None or trainer in self.directory.trainers
        self.now = clock.monotonic
        self._max_wait_s = max_wait_s
        self._allocate = allocate
        self._stores = 0  # served so far

    def __repr__(self) -> str:
        return f"<Pserver {self.index} of {self.job}, generation {self.generation}: {self.store!r}, {len(self.pulls)} pulls wait>"

    @property
    def name(self) -> str:
        return f"pserver-{self.index}"

    # ------------------------------------------------------------ calls

    async def init(self, header: InitHeader, blocks: AsyncIterator[tuple[InitBlock, Payload]]) -> None:
        """Take the initial blocks, all or none. A repetition with the same layout changes nothing. They are of the timeline and the slot map that
        this process sees in etcd.

        Raises LayoutMismatch (another model is loaded), WrongOwner, StaleGeneration, BadFrame, InvalidArgument, NotReady.
        """
        self.check(header)
        if header.pserver != self.index:
            msg = f"initial blocks for pserver-{header.pserver} came to pserver-{self.index}: read the addresses again"
            raise WrongOwner(msg)
        self._check_beginning(header)
        if self._is_same(header):
            return
        await self.prepare_tables(header.layout)
        rows = await self.start_rows(header)
        self._fence(header)
        store = Store(header, self.schedule, self.new_pool(), self.clipping, rows)
        async for item, payload in blocks:
            if item.state:
                add_state(store.blocks, item.block, item.state, memoryview(payload))
            else:
                store.add_block(item.block, memoryview(payload))
            await asyncio.sleep(0)
        store.seal()
        self._fence(header)
        self._check_beginning(header)
        if not self._is_same(header):
            store.slots = self.directory.slots if self.directory is not None else None
            store.save_first()
            if self.store is not None:
                self.drop(header.generation)
            self._serve(store, header.timeline)
            self.look_for_snapshot()
            log.info("initialised", index=self.index, store=repr(store), bytes=store.bytes)

    def new_pool(self) -> BufferPool:
        """Memory for the blocks of a new store."""
        return BufferPool(self._allocate() if self._allocate is not None else None)

    def drop(self, generation: int) -> None:
        """Forget the parameters: calls get NOT_READY until `restore`. Pushes of lower generations are stale from now on."""
        self.generation = max(self.generation, generation)
        if self.store is not None:
            self.store.pool.let_go()
        self.store = None
        for wake in (*(pull.wake for pull in self.pulls), *self.lookups):
            wake()

    def tear(self, cause: str) -> None:
        """A step here can never be whole, so the parameters are lost: `on_torn` tells the master."""
        log.error("step_torn", index=self.index, timeline=self.timeline, cause=cause)
        self.on_torn(Torn(timeline=self.timeline, cause=f"pserver-{self.index}: {cause}"))

    def restore(self, store: Store, timeline: int, checkpoint: str) -> None:
        """Serve what was loaded."""
        self._serve(store, timeline)
        self.checkpoint = checkpoint
        self.on_restored()
        log.info("restored", index=self.index, timeline=timeline, checkpoint=checkpoint, store=repr(store))

    def _serve(self, store: Store, timeline: int) -> None:
        if self.store is not None and self.store is not store:
            self.store.pool.let_go()
        self._stores += 1
        store.name = f"{self.incarnation}/{self._stores}"
        self.store, self.timeline = store, timeline

    def fits(self, state: JobState) -> bool:
        """Whether it holds parameters of the state's timeline, or none."""
        return self.store is None or self.timeline == state.timeline

    async def push(self, header: PushHeader, blocks: AsyncIterator[tuple[PushBlock, Payload]]) -> PushAnswer:
        """Apply block after block. If the stream breaks, the blocks before stay applied.

        A writable payload is used until the next block comes, and may be overwritten; one that may only be read, until this returns. Raises NotReady,
        StaleGeneration, LayoutMismatch, BadFrame (nothing of the push was used).
        """
        pushing = self.begin_push(header)
        try:
            async for item, payload in blocks:
                # the memory of rows that wait is somebody else's from the next block on
                pushing.apply(item, memoryview(payload).toreadonly() if item.block == ROWS else payload)
                await asyncio.sleep(0)
            if not await settled(pushing, self._max_wait_s):
                msg = f"rows of a push have waited for {self._max_wait_s:g} s at pserver-{self.index}: push again"
                raise NotReady(msg)
        finally:
            pushing.keep_some(sys.maxsize)
        return pushing.answer()

    async def pull(self, request: PullRequest) -> AsyncGenerator[tuple[PulledBlock, memoryview] | PullEnd, None]:
        """Each block as soon as it has the version (its payload is valid until the next block is asked for), then a PullEnd.

        Waits at most `request.wait_s`. Raises WrongOwner, InvalidArgument, LayoutMismatch before the first block. Use
        `aclosing` if it may not be read to its end.
        """
        arrived = asyncio.Event()
        pulling = self.begin_pull(request, arrived.set)
        if isinstance(pulling, PullEnd):
            yield pulling
            return
        try:
            while True:
                arrived.clear()
                found = pulling.next()
                if found is None and clock.monotonic() >= pulling.deadline:
                    found = pulling.too_early()
                if found is None:
                    await event_within(arrived, pulling.deadline - clock.monotonic())
                elif isinstance(found, PullEnd):
                    yield found
                    return
                else:
                    number, version, buffer = found
                    if buffer is None:
                        yield PulledBlock(block=number, version=version, same=True), NOTHING
                        continue
                    try:
                        yield PulledBlock(block=number, version=version, dtype=pulling.narrow(number)), buffer.view
                    finally:
                        buffer.release()
        finally:
            pulling.close()

    async def info(self) -> PserverInfo:
        common: dict[str, Any] = {"job": self.job, "index": self.index, "incarnation": self.incarnation}
        common |= {"generation": self.generation, "term": self.term, "timeline": self.timeline}
        common |= {"checkpoint_error": self.checkpoint_error, "ready": self.store is not None}
        store = self.store
        if store is None:
            return PserverInfo(**common)
        return PserverInfo(
            **common,
            mode=store.mode,
            digest=store.layout.digest,
            blocks=len(store.blocks),
            bytes=store.bytes,
            **progress_of(store),
            slots=store.slots.version if store.slots is not None else 0,
            ledger=store.ledger.counts() if store.mode is Mode.ASYNC else (),
        )

    async def ledger(self, query: LedgerQuery) -> LedgerAnswer:
        """Raises NotReady, InvalidArgument; WrongOwner: the asker goes by another slot map, so blocks might be left out."""
        if self.store is None:
            raise self._not_ready()
        self.check_map(self.store, query.slots)
        if not (query.task_id.isascii() and query.task_id.isdigit()):
            msg = f"task {query.task_id[:40]!r} is not in the ledger: only training tasks (numbers) are"
            raise InvalidArgument(msg)
        return self.store.ledger.next_of(query.epoch, int(query.task_id))

    # ------------------------------------------------------------ the same calls, for streams

    def begin_push(self, header: PushHeader) -> OpenPush:
        """Raises as `push`."""
        store = self._ready(header)
        self._check_pusher(header)
        if header.claim:
            if self.hands_over:
                msg = f"pserver-{self.index} hands blocks over, and what it promised with them: claim again"
                raise NotReady(msg)
            self.check_map(store, header.slots)
        self._fence(header)
        try:
            push = self.open_push(store, header)
        except StepTorn as error:
            self.tear(error.message)
            raise
        self.counters.pushes += 1
        return push

    def begin_pull(self, request: PullRequest, arrived: Callable[[], None]) -> OpenPull | PullEnd:
        """Raises as `pull`."""
        self.check(request)
        store = self.store
        if store is None:
            return PullEnd(code="NOT_READY", message=self._not_ready().message)
        if request.generation < self.timeline:
            return PullEnd(code="GONE", message=f"the job was rolled back in generation {self.timeline}: join again")
        check_pull(store, request, self.index)
        learn_norm(store, request.norm, self.timeline)
        self.counters.pulls += 1
        deadline = clock.monotonic() + min(max(request.wait_s, 0.0), self._max_wait_s)
        return self.pull_kind(self, store, request, deadline, arrived)

    @contextmanager
    def receiving(self, header: PushHeader) -> Iterator[tuple[memoryview, int]]:
        """Memory to receive one block of a push in, and how many blocks it may have at most. Raises NotReady, LayoutMismatch."""
        buffer, blocks = self.memory_for(header)
        try:
            yield buffer.view, blocks
        finally:
            buffer.release()

    def memory_for(self, header: PushHeader) -> tuple[Buffer, int]:
        """The same; the caller releases the buffer."""
        store = self._ready(header)
        elements = store.layout.block_bytes // ELEMENT_BYTES["float32"]
        return store.pool.take("float32", elements), 2 * store.lanes * store.parts

    def open_push(self, store: Store, header: PushHeader) -> OpenPush:
        return OpenPush(self, store, header)

    # ------------------------------------------------------------ checks

    def _fence(self, header: MessageHeader) -> None:
        if self.is_stale(header.generation):
            msg = f"generation {header.generation} is stale: pserver-{self.index} has seen {self.generation}; read the lanes again"
            raise StaleGeneration(msg, generation=self.generation)
        known = header.generation if self.directory is None else self.directory.known_state.generation
        self.generation = max(self.generation, min(header.generation, known))

    def _check_pusher(self, header: PushHeader) -> None:
        """Only members push, and only in generations that etcd has: one frame of anybody else could fence them all."""
        if self.directory is None:
            return
        state = self.directory.known_state
        if header.generation > state.generation:
            msg = (
                f"generation {header.generation} of trainer {header.trainer[:80]!r} is ahead of {state.generation}, the newest that "
                f"pserver-{self.index} has read from etcd: push again"
            )
            raise NotReady(msg)
        if header.trainer not in self.directory.trainers:
            msg = f"trainer {header.trainer[:80]!r} is no member in generation {state.generation}: register, and read the lanes again"
            raise StaleGeneration(msg, generation=state.generation)

    def check(self, header: MessageHeader) -> None:
        """Raises BadFrame, LayoutMismatch: the message is not for it; NotReady: its index is in doubt."""
        if header.protocol != PROTOCOL_VERSION:
            msg = f"protocol {header.protocol}: this pserver speaks {PROTOCOL_VERSION}; run the same version everywhere"
            raise BadFrame(msg)
        if header.job != self.job:
            msg = f"message of job {header.job!r} at a pserver of job {self.job!r}: check TRIREME_JOB"
            raise LayoutMismatch(msg)
        if self.in_doubt():
            msg = f"the lease of pserver-{self.index} ({self.incarnation}) may have run out: it waits until etcd says whether the index is still its own; ask again"
            raise NotReady(msg)
        self.term = max(self.term, header.term if self.directory is None else min(header.term, self.directory.term))

    def _ready(self, header: MessageHeader) -> Store:
        self.check(header)
        return self.loaded()

    def loaded(self) -> Store:
        """Raises NotReady."""
        if self.store is None:
            raise self._not_ready()
        return self.store

    def _not_ready(self) -> NotReady:
        return NotReady(f"pserver-{self.index} ({self.incarnation}) has no parameters yet: wait for init_ps/done")

    def check_map(self, store: Store, version: int) -> None:
        """What concerns all owners of blocks has to reach all of them. 0: the asker does not say which map it goes by. Raises NotReady, WrongOwner."""
        if version and store.slots is not None:
            self._check_map_version(store.slots.version, version)

    def _check_beginning(self, header: InitHeader) -> None:
        """Raises NotReady: this view of the job is late; StaleGeneration, WrongOwner: the sender's is. `slots` 0: it does not say."""
        if self.directory is None:
            return
        timeline = self.directory.known_state.timeline
        if header.timeline > timeline:
            raise NotReady(f"pserver-{self.index} sees timeline {timeline}, not {header.timeline} yet: ask again")
        if header.timeline < timeline:
            msg = f"initial values of timeline {header.timeline}: the job is in {timeline}; read the job's state again"
            raise StaleGeneration(msg, timeline=timeline)
        if header.slots:
            self._check_map_version(
                self.directory.slots.version if self.directory.slots is not None else 0, header.slots
            )

    def _check_map_version(self, mine: int, version: int) -> None:
        if mine < version:
            msg = f"pserver-{self.index} has slot map {mine}, not {version} yet: ask again"
            raise NotReady(msg)
        if mine > version:
            msg = f"slot map {version} is old: pserver-{self.index} has {mine}; read the slot map again"
            raise WrongOwner(msg, slots=mine)

    def _is_same(self, header: InitHeader) -> bool:
        """Whether these parameters are loaded already. Those of another timeline are not the job's any more."""
        if self.store is None or self.timeline != header.timeline:
            return False
        check_same_model(self.store.layout, self.store.mode, header)
        return True


async def _no_handoffs(header: HandoffHeader, _: AsyncIterator[tuple[HandoffPart, Payload]]) -> HandoffAnswer:
    raise NotReady(f"no index is claimed here yet: send group {header.group} again")
