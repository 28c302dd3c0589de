"""One parameter server below HTTP: a minibatch is applied to a block exactly once; a pull is one version of every block.

    push: fence -> admit -> per block apply (inline, < 1 ms) -> let others run      pull: what is there, then what arrives

Nothing is locked: a block changes between two awaits, and whoever sends its values retains their buffer.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pserver_service.core.blocks import Verdict
from pserver_service.core.buffers import Buffer
from pserver_service.core.snapshot import Schedule
from pserver_service.core.store import Push, Store
from shared import clock, telemetry
from shared.errors import BadFrame, InvalidArgument, LayoutMismatch, NotReady, StaleGeneration, WrongOwner
from shared.messages import (
    PROTOCOL_VERSION,
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
    Refusal,
    StepRecord,
)
from shared.records import Mode
from shared.slots import ELEMENT_BYTES

Payload = bytes | bytearray | memoryview

log = telemetry.logger("pserver")


@dataclass(slots=True)
class Counters:
    """Since the process started, for /metrics."""

    pushes: int = 0
    pulls: int = 0
    blocks_applied: int = 0
    blocks_duplicate: int = 0
    blocks_refused: int = 0
    bytes_pushed: int = 0
    bytes_pulled: int = 0


@dataclass(eq=False, slots=True)
class _Waiting:
    """A pull that waits: blocks it still misses, and those of them that have arrived (or its store was dropped)."""

    version: int
    missing: set[int]
    arrived: deque[int] = field(default_factory=deque)
    event: asyncio.Event = field(default_factory=asyncio.Event)


class Pserver:
    """`index` and `schedule` (of checkpoints; None: none) are set once the index is claimed. `max_wait_s` caps how long a
    pull may wait for blocks. `snapshot_ready` is set when `store.take_snapshot()` has one. `timeline` and `checkpoint`: of
    the parameters, see JobState."""

    def __init__(self, job: str, incarnation: str, index: int = -1, max_wait_s: float = 60.0) -> None:
        self.job = job
        self.incarnation = incarnation
        self.index = index
        self.generation = 0
        self.term = 0
        self.store: Store | None = None
        self.schedule: Schedule | None = None
        self.timeline = 0
        self.checkpoint = ""
        self.checkpoint_error = ""
        self.snapshot_ready = asyncio.Event()
        self.counters = Counters()
        self._max_wait_s = max_wait_s
        self._waiting: list[_Waiting] = []

    def __repr__(self) -> str:
        return f"<Pserver {self.index} of {self.job}, generation {self.generation}: {self.store!r}, {len(self._waiting)} pulls wait>"

    # ------------------------------------------------------------ calls

    async def init(self, header: InitHeader, blocks: AsyncIterator[tuple[InitBlock, Payload]]) -> None:
        """Take the initial blocks, all or none; again with the same layout is fine and changes nothing.

        Raises LayoutMismatch (another model is loaded), WrongOwner, StaleGeneration, BadFrame, InvalidArgument.
        """
        self._check(header)
        if header.pserver != self.index:
            msg = f"initial blocks for pserver {header.pserver} came to pserver {self.index}: read the addresses again"
            raise WrongOwner(msg)
        if self._is_same(header):
            return
        self._fence(header)
        store = Store(header, self.schedule)
        async for item, payload in blocks:
            store.add_block(item.block, memoryview(payload))
            await asyncio.sleep(0)
        store.seal()
        self._fence(header)
        if not self._is_same(header):
            store.save_first()
            self.store, self.timeline = store, header.timeline
            self._look_for_snapshot()
            log.info(
                "initialised", index=self.index, mode=store.mode.value, blocks=len(store.blocks), bytes=store.bytes
            )

    def drop(self, generation: int) -> None:
        """Forget the parameters: NOT_READY until `restore`. Pushes below `generation` are stale from now on."""
        self.generation = max(self.generation, generation)
        self.store = None
        for waiting in self._waiting:
            waiting.event.set()

    def restore(self, store: Store, timeline: int, checkpoint: str) -> None:
        """Serve what was loaded."""
        self.store, self.timeline, self.checkpoint = store, timeline, checkpoint
        log.info("restored", index=self.index, timeline=timeline, checkpoint=checkpoint, store=repr(store))

    async def push(self, header: PushHeader, blocks: AsyncIterator[tuple[PushBlock, Payload]]) -> PushAnswer:
        """Apply block after block; blocks before a break of the stream stay applied.

        Writable payloads are borrowed until the next block and may be overwritten. Raises NotReady, StaleGeneration,
        LayoutMismatch, BadFrame (nothing of the push was used).
        """
        store = self._ready(header)
        self._fence(header)
        push = store.admit(header)
        self.counters.pushes += 1
        applied = duplicate = 0
        refused: list[Refusal] = []
        async for item, payload in blocks:
            verdict = (
                Verdict.STALE_GENERATION
                if self.is_stale(header.generation)
                else self._apply(store, push, item, payload)
            )
            if verdict is Verdict.APPLIED:
                applied += 1
            elif verdict is Verdict.DUPLICATE:
                duplicate += 1
            else:
                state = store.blocks.get(item.block)
                version = state.version if state else 0
                refused.append(Refusal(block=item.block, lanes=item.lanes, code=verdict, version=version))
            await asyncio.sleep(0)
        self.counters.blocks_applied += applied
        self.counters.blocks_duplicate += duplicate
        self.counters.blocks_refused += len(refused)
        return PushAnswer(applied=applied, duplicate=duplicate, refused=tuple(refused), generation=self.generation)

    async def pull(self, request: PullRequest) -> AsyncGenerator[tuple[PulledBlock, memoryview] | PullEnd, None]:
        """Blocks as they are there (a payload is valid until the next one is asked for), then a PullEnd.

        Waits at most `request.wait_s`. Raises WrongOwner, InvalidArgument, LayoutMismatch before the first block. Close
        it (`aclosing`) if it is not read to its end.
        """
        self._check(request)
        self.generation = max(self.generation, request.generation)
        store = self.store
        if store is None:
            yield PullEnd(code="NOT_READY", message=self._not_ready().message)
            return
        if request.generation < self.timeline:
            yield PullEnd(code="GONE", message=f"the job was rolled back in generation {self.timeline}: join again")
            return
        self._check_pull(store, request)
        self.counters.pulls += 1
        deadline = clock.monotonic() + min(max(request.wait_s, 0.0), self._max_wait_s)
        waiting = _Waiting(-1 if request.version is None else request.version, set())
        self._waiting.append(waiting)
        lowest = store.highest
        record: StepRecord | None = None
        try:
            due = deque(request.blocks)
            while due or waiting.missing:
                something = bool(due) or await self._arrivals(waiting, due, deadline)
                if self.store is not store:
                    yield PullEnd(code="NOT_READY", message="the job is being rolled back")
                    return
                if not something:
                    yield self._too_early(store, waiting)
                    return
                number = due.popleft()
                found = store.pull(number, request.version)
                if found is Verdict.TOO_EARLY:
                    waiting.missing.add(number)
                elif isinstance(found, Buffer):
                    version = store.blocks[number].version if request.version is None else request.version
                    lowest = min(lowest, version)
                    record = record or store.history.record(
                        version
                    )  # it may be forgotten while blocks are on their way
                    found.retain()
                    try:
                        self.counters.bytes_pulled += found.view.nbytes
                        yield PulledBlock(block=number, version=version), found.view
                    finally:
                        found.release()
                else:
                    held = store.blocks[number].version
                    yield PullEnd(
                        code="GONE",
                        message=f"block {number} is at version {held}, {request.version} was asked: join again",
                    )
                    return
            version = lowest if request.version is None else request.version
            if record is None or record.version != version:
                record = store.history.record(version)
            yield PullEnd(code="OK", record=record if store.mode is Mode.SYNC else None)
        finally:
            self._waiting.remove(waiting)

    async def info(self) -> PserverInfo:
        common: dict[str, Any] = {"job": self.job, "index": self.index, "incarnation": self.incarnation}
        common |= {"timeline": self.timeline, "checkpoint_error": self.checkpoint_error}
        store = self.store
        if store is None:
            return PserverInfo(**common, generation=self.generation, term=self.term, ready=False)
        return PserverInfo(
            **common,
            generation=self.generation,
            term=self.term,
            ready=True,
            mode=store.mode,
            digest=store.layout.digest,
            blocks=len(store.blocks),
            bytes=store.bytes,
            lowest=store.lowest,
            highest=store.highest,
            updates=store.updates,
            ledger=store.ledger.books() if store.mode is Mode.ASYNC else (),
        )

    async def ledger(self, query: LedgerQuery) -> LedgerAnswer:
        """Raises NotReady, InvalidArgument."""
        if self.store is None:
            raise self._not_ready()
        if not (query.task_id.isascii() and query.task_id.isdigit()):
            msg = f"task {query.task_id[:40]!r} is not in the ledger: only training tasks (numbers) are"
            raise InvalidArgument(msg)
        return self.store.ledger.next_of(query.epoch, int(query.task_id))

    @contextmanager
    def receiving(self, header: PushHeader) -> Iterator[tuple[memoryview, int]]:
        """Memory to receive one block of a push in, and how many blocks it may have at most. Raises NotReady, LayoutMismatch."""
        store = self._ready(header)
        elements = store.layout.block_bytes // ELEMENT_BYTES["float32"]
        buffer = store.pool.take("float32", elements)
        try:
            yield buffer.view, 2 * store.lanes * max(1, len(store.blocks))
        finally:
            buffer.release()

    # ------------------------------------------------------------ checks

    def is_stale(self, generation: int) -> bool:
        return generation < self.generation

    def _fence(self, header: MessageHeader) -> None:
        if self.is_stale(header.generation):
            msg = f"generation {header.generation} is stale: pserver {self.index} has seen {self.generation}; read the lanes again"
            raise StaleGeneration(msg, generation=self.generation)
        self.generation = header.generation

    def _check(self, header: MessageHeader) -> None:
        if header.protocol != PROTOCOL_VERSION:
            msg = f"protocol {header.protocol}: this pserver speaks {PROTOCOL_VERSION}; run the same version everywhere"
            raise BadFrame(msg)
        if header.job != self.job:
            msg = f"message of job {header.job!r} at a pserver of job {self.job!r}: check TRIREME_JOB"
            raise LayoutMismatch(msg)
        self.term = max(self.term, header.term)

    def _ready(self, header: MessageHeader) -> Store:
        self._check(header)
        if self.store is None:
            raise self._not_ready()
        return self.store

    def _not_ready(self) -> NotReady:
        return NotReady(f"pserver {self.index} ({self.incarnation}) has no parameters yet: wait for init_ps/done")

    def _is_same(self, header: InitHeader) -> bool:
        """Whether these parameters are loaded already."""
        store = self.store
        if store is None:
            return False
        mine = (store.layout.digest, store.layout.segments, store.layout.block_bytes, store.mode)
        theirs = (header.layout.digest, header.layout.segments, header.layout.block_bytes, header.mode)
        if mine != theirs:
            msg = (
                f"model {header.layout.digest[:12]} ({header.mode}, {len(header.layout.segments)} segments) does not fit the loaded "
                f"{store.layout.digest[:12]} ({store.mode}, {len(store.layout.segments)} segments): all trainers must run the same script"
            )
            raise LayoutMismatch(msg)
        return True

    def _check_pull(self, store: Store, request: PullRequest) -> None:
        if request.version is not None and store.mode is Mode.ASYNC:
            msg = (
                f"version {request.version} was asked in async mode, where blocks have no common versions: ask for None"
            )
            raise InvalidArgument(msg)
        foreign = next((number for number in request.blocks if number not in store.blocks), None)
        if foreign is not None:
            msg = f"block {foreign} is not at pserver {self.index}: read the slot map again"
            raise WrongOwner(msg, block=foreign)

    # ------------------------------------------------------------ parts

    def _apply(self, store: Store, push: Push, item: PushBlock, payload: Payload) -> Verdict:
        view = memoryview(payload).cast("B")
        state = store.blocks.get(item.block)
        self.counters.bytes_pushed += view.nbytes
        before = state.version if state else 0
        if view.readonly and state is not None and view.nbytes == state.place.bytes:
            scratch = store.pool.take(state.place.dtype, state.place.elements)
            scratch.view[:] = view
            verdict = store.apply(push, item, scratch.view)
            scratch.release()
        else:
            verdict = store.apply(push, item, view)
        if state is not None and state.version != before:
            self._announce(item.block, state.version)
            self._look_for_snapshot()
        return verdict

    def _look_for_snapshot(self) -> None:
        if self.store is not None and self.store.snapshot_waits:
            self.snapshot_ready.set()

    def _announce(self, number: int, version: int) -> None:
        for waiting in self._waiting:
            if waiting.version == version and number in waiting.missing:
                waiting.missing.remove(number)
                waiting.arrived.append(number)
                waiting.event.set()

    @staticmethod
    async def _arrivals(waiting: _Waiting, due: deque[int], deadline: float) -> bool:
        """Move what has arrived into `due`; False if nothing has by the deadline."""
        if not waiting.arrived:
            waiting.event.clear()
            try:
                async with asyncio.timeout_at(deadline):
                    await waiting.event.wait()
            except TimeoutError:
                pass  # what arrived at that very moment is taken
        due.extend(waiting.arrived)
        waiting.arrived.clear()
        return bool(due)

    def _too_early(self, store: Store, waiting: _Waiting) -> PullEnd:
        number = min(waiting.missing)
        held = store.blocks[number].version
        return PullEnd(
            code="TOO_EARLY",
            message=f"{len(waiting.missing)} blocks have not reached version {waiting.version} (block {number} is at {held}): ask again",
        )
