"""A server of blocks without HTTP: a minibatch is applied to a block exactly once; a pull is one version of
every block.

    push: fence -> admit -> apply block after block (inline, < 1 ms each)
    pull: blocks that are there, then those that arrive

Parameter servers (pserver.py) and trainers of collective jobs are such servers. There are no locks: a block
changes between two awaits, and a pull that sends its values retains their buffer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from trireme_shared.blocks.buffers import Buffer, BufferPool, ReceivedMemory
from trireme_shared.platform.membership.directory import Directory
from trireme_shared.platform.runtime import clock, telemetry
from trireme_shared.platform.runtime.clock import event_within
from trireme_shared.protocol.errors import (
    BadFrame,
    LayoutMismatch,
    NotReady,
    StaleGeneration,
    StepTorn,
    WrongOwner,
)
from trireme_shared.protocol.records.job import Torn
from trireme_shared.protocol.records.layout import ELEMENT_BYTES, ROWS, Layout
from trireme_shared.protocol.wire.messages import (
    PROTOCOL_VERSION,
    MessageHeader,
    PserverInfo,
    PulledBlock,
    PullEnd,
    PullRequest,
    PushAnswer,
    PushBlock,
    PushHeader,
    TableEnd,
    TableRequest,
    Verdict,
)
from trireme_shared.serving.core.calls import Counters, OpenPull, OpenPush, Payload
from trireme_shared.serving.core.store import Store, check_pull
from trireme_shared.serving.core.table.stepping import ArrivedRows, RowSteps
from trireme_shared.serving.ports import OwnPlace, ServerPorts
from trireme_shared.serving.transport.shared_memory import NOTHING
from trireme_shared.serving.transport.stream import BURST_BYTES

if TYPE_CHECKING:
    from trireme_shared.serving.core.table.rows import TableRows  # loads numba

# From a push's end until its blocks are copied, which may wait for their siblings in the memory of their
# sender. Trainers that are about equally fast need no copies; a faster one has to know that its lanes are
# acknowledged before it computes those of others.
LENT_S = 0.02

log = telemetry.logger("pserver")


class BlockServer:
    """Takes pushes to its blocks and answers pulls of them, before and after its process becomes a member of
    the job (`join`)."""

    pull_kind = OpenPull

    def __init__(self, job: str, incarnation: str, index: int = -1, ports: ServerPorts | None = None) -> None:
        self._ports = ports or ServerPorts()
        self.job = job
        self.incarnation = incarnation
        #: its place among the servers of the job; -1: none yet
        self.index = index
        #: the highest term of a master that it has seen
        self.term = 0
        #: the highest generation that it has seen; pushes of a lower one are stale
        self.generation = 0
        #: of the parameters (see JobState)
        self.timeline = 0
        #: the blocks; None: no parameters yet
        self.store: Store | None = None
        #: the job as etcd has it: who may push, and how far fence and term may rise; None: not a member yet
        self.directory: Directory | None = None
        #: the key of this process in etcd; None: not a member yet
        self.own_place: OwnPlace | None = None
        #: whether a checkpoint is being read
        self.loading = False
        self.counters = Counters()
        self.pulls: list[OpenPull] = []
        #: called when rows have a new version, or are gone
        self.lookups: list[Callable[[], None]] = []
        #: memory in which rows that are pushed are received
        self.payloads = ReceivedMemory()
        #: set when a block has a new version; whoever waits for that clears it
        self.block_stepped = asyncio.Event()
        #: set when `store.take_snapshot()` has a snapshot
        self.snapshot_ready = asyncio.Event()
        #: when a push was first refused because its block is being moved, in seconds of the clock; whoever
        #: moves blocks sets it back to None
        self.refused_at: float | None = None
        #: steps the rows of embedding tables
        self.row_steps: RowSteps = self._ports.row_steps(self)
        self._stores = 0  # served so far

    def join(self, directory: Directory, own_place: OwnPlace) -> None:
        """The process is a member of the job from now on."""
        self.directory, self.own_place = directory, own_place

    @property
    def in_doubt(self) -> bool:
        """Whether its index may belong to another process by now; no call is answered then."""
        return self.own_place is not None and self.own_place.in_doubt

    def now(self) -> float:
        return self._ports.now()

    def is_live(self, trainer: str) -> bool:
        return self.directory is None or trainer in self.directory.trainers

    def is_stale(self, generation: int) -> bool:
        return generation < self.generation

    @property
    def rows_in_memory(self) -> TableRows | None:
        """The rows of embedding tables, for metrics; None: there are none."""
        return self.store.rows if self.store is not None else None

    @property
    def snapshot_bytes(self) -> int | None:
        spec = self.directory.spec if self.directory is not None else None
        return spec.snapshot_bytes if spec is not None else None

    async def prepare_tables(self, layout: Layout) -> None:
        """Get ready for rows of tables of that layout: await this before they are made here."""
        await self._ports.prepare_tables(layout)

    # ------------------------------------------------------------ what it serves

    def new_pool(self) -> BufferPool:
        """Memory for the blocks of a new store."""
        return BufferPool(self._ports.allocate() if self._ports.allocate is not None else None)

    def drop(self, generation: int) -> None:
        """Forget the parameters: calls get NOT_READY until `restore`. Pushes of lower generations are stale
        from now on."""
        self.generation = max(self.generation, generation)
        if self.store is not None:
            self.store.pool.let_go()
            if self.store.rows is not None:
                self.store.rows.give_up_copies("the rows were dropped: the job goes back to a checkpoint")
        self.store = None
        for wake in (*(pull.wake for pull in self.pulls), *self.lookups):
            wake()

    def serve_store(self, store: Store, timeline: int) -> None:
        if self.store is not None and self.store is not store:
            self.store.pool.let_go()
        self._stores += 1
        store.name = f"{self.incarnation}/{self._stores}"
        self.store, self.timeline = store, timeline

    def tear(self, cause: str) -> None:
        """A step here can never be whole, so the parameters are lost: the own key in etcd tells the master,
        and the job goes back to a checkpoint."""
        log.error("step_torn", server=self.name, timeline=self.timeline, cause=cause)
        if self.own_place is not None:
            self.own_place.set(torn=Torn(timeline=self.timeline, cause=f"{self.name}: {cause}"))

    @property
    def name(self) -> str:
        return f"pserver-{self.index}"

    # ------------------------------------------------------------ what open calls tell it

    def stepped(self, number: int, version: int) -> None:
        """A block has reached a version: serve the pulls that wait for it; it may be the last block of a
        snapshot."""
        for pull in tuple(self.pulls):
            pull.stepped(number, version)
        self.look_for_snapshot()
        self.block_stepped.set()

    def held(self, number: int) -> None:
        """All data of a block is there, which waits for the norm of the whole gradient."""
        for pull in tuple(self.pulls):
            pull.held(number)

    def forgotten(self, numbers: Collection[int]) -> None:
        """Other parameter servers have these blocks now: the pulls that wait for them end."""
        for pull in tuple(self.pulls):
            pull.forgotten(numbers)

    def push_ended(self, store: Store, trainer: str, *, keeps: bool) -> None:
        """Serve the pulls that wait for the trainer, unless it keeps its parameters."""
        if store.pushed(trainer, self.now(), keeps=keeps):
            self.within_bounds()

    def within_bounds(self) -> None:
        """A trainer with old parameters computes no more: serve the pulls that wait for it."""
        for pull in tuple(self.pulls):
            pull.look_at_bound()

    def rows_stepped(self, store: Store, before: int) -> None:
        """`before`: the version they had; it is still theirs if some of them are late."""
        rows = store.rows
        assert rows is not None
        if rows.version > before:
            store.settle_rows()
        for wake in tuple(self.lookups):
            wake()
        if rows.version > before:
            self.stepped(ROWS, rows.version)

    def rows_taken(self, arrived: ArrivedRows, found: Verdict | Exception) -> None:
        """What became of rows of an asynchronous push."""
        for wake in tuple(self.lookups):
            wake()
        if found is Verdict.APPLIED:
            self.stepped(ROWS, arrived.rows.version)
        arrived.settled(found)

    def look_for_snapshot(self) -> None:
        if self.store is not None and self.store.snapshot_waits:
            self.snapshot_ready.set()

    # ------------------------------------------------------------ calls

    async def push(self, header: PushHeader, blocks: AsyncIterator[tuple[PushBlock, Payload]]) -> PushAnswer:
        """Apply block after block. If the stream breaks, the blocks before stay applied.

        A writable payload is used until the next block comes, and may be overwritten; one that may only be
        read, until this returns. Raises NotReady, StaleGeneration, LayoutMismatch, BadFrame (nothing of the
        push was used).
        """
        changed = asyncio.Event()
        pushing = self.begin_push(header, changed.set)
        try:
            async for item, payload in blocks:
                # the memory of rows that wait is somebody else's from the next block on
                pushing.apply(item, memoryview(payload).toreadonly() if item.block == ROWS else payload)
                await asyncio.sleep(0)
            if not await settled(pushing, changed, self._ports.max_wait_s):
                msg = (
                    f"rows of a push have waited for {self._ports.max_wait_s:g} s at "
                    f"pserver-{self.index}: push again"
                )
                raise NotReady(msg)
        finally:
            pushing.close()
        return pushing.answer()

    async def pull(
        self, request: PullRequest
    ) -> AsyncGenerator[tuple[PulledBlock, memoryview] | PullEnd, None]:
        """Each block as soon as it has the version (its payload is valid until the next block is asked for),
        then a PullEnd.

        Waits at most `request.wait_s`. Raises WrongOwner, InvalidArgument, LayoutMismatch before the first
        block. Use `aclosing` if it may not be read to its end.
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
                        yield (
                            PulledBlock(block=number, version=version, dtype=pulling.narrow(number)),
                            buffer.view,
                        )
                    finally:
                        buffer.release()
        finally:
            pulling.close()

    # ------------------------------------------------------------ the same calls, for streams

    def begin_push(self, header: PushHeader, on_settled: Callable[[], None] | None = None) -> OpenPush:
        """`on_settled` is called when less of the push waits. Raises as `push`."""
        store = self._ready(header)
        self._check_pusher(header)
        if header.claim:
            self.check_claim(store, header)
        self.fence(header)
        try:
            push = self.open_push(store, header, on_settled)
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
            return PullEnd(code="NOT_READY", message=self.not_ready().message)
        if request.generation < self.timeline:
            return PullEnd(
                code="GONE", message=f"the job was rolled back in generation {self.timeline}: join again"
            )
        check_pull(store, request, self.index)
        store.learn_norm(request.norm, self.timeline)
        self.counters.pulls += 1
        deadline = clock.monotonic() + min(max(request.wait_s, 0.0), self._ports.max_wait_s)
        return self.pull_kind(self, store, request, deadline, arrived)

    def memory_for(self, header: PushHeader) -> tuple[Buffer, int]:
        """Memory to receive one block of a push in, which the caller releases, and how many blocks the push
        may have at most. Raises NotReady, LayoutMismatch."""
        store = self._ready(header)
        elements = store.layout.block_bytes // ELEMENT_BYTES["float32"]
        return store.pool.take("float32", elements), 2 * store.lanes * store.parts

    def open_push(self, store: Store, header: PushHeader, on_settled: Callable[[], None] | None) -> OpenPush:
        return OpenPush(self, store, header, on_settled)

    # ------------------------------------------------------------ what kinds of servers answer differently

    def table_portion(self, request: TableRequest) -> tuple[TableEnd, memoryview] | None:  # noqa: ARG002
        """What it answers to a request for rows of a whole table; None: the rows of its store."""
        return None

    async def info(self) -> PserverInfo:
        """What it is, and how far its blocks are."""
        return PserverInfo(**self.common_info(), ready=self.store is not None)

    def common_info(self) -> dict[str, Any]:
        """The fields of PserverInfo that do not depend on the blocks."""
        found: dict[str, Any] = {"job": self.job, "index": self.index, "incarnation": self.incarnation}
        return found | {"generation": self.generation, "term": self.term, "timeline": self.timeline}

    # ------------------------------------------------------------ checks

    def fence(self, header: MessageHeader) -> None:
        if self.is_stale(header.generation):
            msg = (
                f"generation {header.generation} is stale: pserver-{self.index} has seen "
                f"{self.generation}; read the lanes again"
            )
            raise StaleGeneration(msg, generation=self.generation)
        known = header.generation if self.directory is None else self.directory.known_state.generation
        self.generation = max(self.generation, min(header.generation, known))

    def _check_pusher(self, header: PushHeader) -> None:
        """Only members push, and only in generations that etcd has: one frame of anybody else could fence
        them all."""
        if self.directory is None:
            return
        state = self.directory.known_state
        if header.generation > state.generation:
            msg = (
                f"generation {header.generation} of trainer {header.trainer[:80]!r} is ahead of "
                f"{state.generation}, the newest that "
                f"pserver-{self.index} has read from etcd: push again"
            )
            raise NotReady(msg)
        if header.trainer not in self.directory.trainers:
            msg = (
                f"trainer {header.trainer[:80]!r} is no member in generation {state.generation}: "
                "register, and read the lanes again"
            )
            raise StaleGeneration(msg, generation=state.generation)

    def check(self, header: MessageHeader) -> None:
        """Raises BadFrame, LayoutMismatch: the message is not for it; NotReady: its index is in doubt."""
        if header.protocol != PROTOCOL_VERSION:
            msg = (
                f"protocol {header.protocol}: this pserver speaks {PROTOCOL_VERSION}; run the same "
                "version everywhere"
            )
            raise BadFrame(msg)
        if header.job != self.job:
            msg = f"message of job {header.job!r} at a pserver of job {self.job!r}: check TRIREME_JOB"
            raise LayoutMismatch(msg)
        if self.in_doubt:
            msg = (
                f"the lease of pserver-{self.index} ({self.incarnation}) may have run out: it waits "
                "until etcd says whether the index is still its own; ask again"
            )
            raise NotReady(msg)
        self.term = max(
            self.term, header.term if self.directory is None else min(header.term, self.directory.term)
        )

    def _ready(self, header: MessageHeader) -> Store:
        self.check(header)
        return self.loaded()

    def loaded(self) -> Store:
        """Raises NotReady."""
        if self.store is None:
            raise self.not_ready()
        return self.store

    def not_ready(self) -> NotReady:
        return NotReady(
            f"pserver-{self.index} ({self.incarnation}) has no parameters yet: wait for init_ps/done"
        )

    def check_claim(self, store: Store, header: PushHeader) -> None:
        """Raises NotReady, WrongOwner: what the push claims would not reach all owners of the step's
        blocks."""
        self.check_map(store, header.slots)

    def check_map(self, store: Store, version: int) -> None:
        """What concerns all owners of blocks has to reach all of them. 0: the asker does not say which map it
        goes by. Raises NotReady, WrongOwner."""
        if version and store.slots is not None:
            self.check_map_version(store.slots.version, version)

    def check_map_version(self, mine: int, version: int) -> None:
        if mine < version:
            msg = f"pserver-{self.index} has slot map {mine}, not {version} yet: ask again"
            raise NotReady(msg)
        if mine > version:
            msg = f"slot map {version} is old: pserver-{self.index} has {mine}; read the slot map again"
            raise WrongOwner(msg, slots=mine)


async def settled(pushing: OpenPush, changed: asyncio.Event, limit_s: float) -> bool:
    """Wait until nothing of the push is `waiting`. Return False if something did not move for `limit_s`.
    `changed` is set when less of it waits."""
    with suppress(TimeoutError):
        async with asyncio.timeout(LENT_S):
            while pushing.waiting:
                changed.clear()
                await changed.wait()
    while pushing.keep_some(BURST_BYTES):  # noqa: ASYNC110  other tasks have their turns
        await asyncio.sleep(0)
    while pushing.waiting:
        changed.clear()
        if not await event_within(changed, limit_s):
            return False
    return True
