"""The share of a collective job's blocks that one trainer serves: pushes and pulls as at a parameter server,
without optimizer.

    a generation is known: fenced ─► its trainers have said which versions they have
        ─► open: pushes of the step after the newest one

A trainer takes pushes of a step only while its own version is at most one behind: so whoever makes version v
knows that all trainers of the generation, whose blocks it needed for that, have version v - 2. The others
reach the share over connections, the trainer itself by OwnShare.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from trainer_agent.collective.mean_blocks import MeanStore
from trainer_agent.collective.state.giving import StateGiver
from trainer_agent.data_plane.http import Placed, Sink
from trireme_shared.blocks.buffers import Buffer
from trireme_shared.protocol.errors import InvalidArgument, NotReady, StaleGeneration, WrongOwner
from trireme_shared.protocol.records import Mode, SlotMap
from trireme_shared.protocol.wire.messages import (
    MessageHeader,
    PserverInfo,
    PullEnd,
    PullRequest,
    PushAnswer,
    PushBlock,
    PushHeader,
    TableEnd,
    TableRequest,
)
from trireme_shared.serving.block_server import BlockServer
from trireme_shared.serving.core.calls import CallServer, OpenPull, OpenPush
from trireme_shared.serving.core.store import Store, missing_lanes
from trireme_shared.serving.ports import ServerPorts

if TYPE_CHECKING:
    from trireme_shared.serving.core.table.rows import TableRows  # loads numba

AHEAD = 1  # how many versions the step of a push may be ahead of this trainer's own


class SharePull(OpenPull):
    """Ends with its generation."""

    def __init__(
        self,
        server: CallServer,
        store: Store,
        request: PullRequest,
        deadline: float,
        arrived: Callable[[], None],
    ) -> None:
        super().__init__(server, store, request, deadline, arrived)
        self._since = server.generation
        self._row_means = request.row_means

    def next(self) -> tuple[int, int, Buffer | None] | PullEnd | None:
        now = self._server.generation
        if now != self._since:
            return PullEnd(code="NOT_READY", message=f"generation {self._since} is over: ask in {now}")
        found, store, slots = super().next(), self._store, self._row_means
        if slots is None or not isinstance(found, PullEnd) or found.code != "OK" or found.record is None:
            return found
        assert isinstance(store, MeanStore)
        if store.rows is None:
            return found
        return found.with_fields(row_means=store.rows.small_means(found.record.version, slots))


class ShareServer(BlockServer):
    """Serves the mean gradients of one trainer's share of the blocks. `index` is the trainer's place in the
    generation's list, -1 without one. Rows are stepped in one go: a new generation may begin between two
    turns."""

    store: MeanStore | None
    pull_kind = SharePull

    def __init__(self, job: str, trainer: str, ports: ServerPorts | None = None) -> None:
        super().__init__(job, trainer, -1, ports)
        #: the name of the trainer
        self.trainer = trainer
        #: the generation in which pushes are taken
        self.opened = -1
        #: gives the trainer's parameters to others; None: there are none yet
        self.giver: StateGiver | None = None

    def __repr__(self) -> str:
        return (
            f"<ShareServer of {self.trainer}, generation {self.generation}, open in {self.opened}: "
            f"{self.store!r}>"
        )

    # ------------------------------------------------------------ generations

    def serve(self, store: MeanStore, timeline: int) -> None:
        """Its trainer has these blocks now."""
        self.serve_store(store, timeline)

    def regroup(self, generation: int, place: int, slots: SlotMap | None, own: Collection[int]) -> None:
        """The trainers are others from now on: whatever was pushed or asked before does not count any
        more."""
        self.generation, self.index = max(self.generation, generation), place
        if self.store is not None and slots is not None:
            self.store.regroup(slots, own)
        for wake in [pull.wake for pull in self.pulls]:
            wake()

    def open(self, generation: int) -> None:
        """All trainers of the generation have said which versions they have, and this one has the newest."""
        self.opened = generation

    @property
    def rows_in_memory(self) -> TableRows | None:
        return self.giver.rows if self.giver is not None else None

    @property
    def name(self) -> str:
        return self.trainer

    # ------------------------------------------------------------ calls

    def begin_push(self, header: PushHeader, on_settled: Callable[[], None] | None = None) -> OpenPush:
        self.check_generation(header)
        store = self.store
        if store is not None and header.generation == self.generation:
            if self.opened != self.generation:
                msg = (
                    f"{self.trainer} does not know yet which versions the trainers of generation "
                    f"{self.generation} have: push again"
                )
                raise NotReady(msg)
            if header.step > store.has + AHEAD:
                msg = (
                    f"{self.trainer} has version {store.has}, which is too old for pushes of step "
                    f"{header.step}: push again"
                )
                raise NotReady(msg)
        return super().begin_push(header, on_settled)

    def begin_pull(self, request: PullRequest, arrived: Callable[[], None]) -> OpenPull | PullEnd:
        self.check_generation(request)
        store = self.store
        version = -1 if request.version is None else request.version
        if store is not None and version > store.has and (foreign := set(request.blocks) - store.own):
            msg = (
                f"block {min(foreign)} is not in the share of {self.trainer} in generation {self.generation}"
            )
            raise WrongOwner(msg, block=min(foreign))
        return super().begin_pull(request, arrived)

    def table_portion(self, request: TableRequest) -> tuple[TableEnd, memoryview]:
        """Mean gradients of rows. Raises NotReady, StaleGeneration, Gone, InvalidArgument."""
        self.check_generation(request)
        store = self.store
        if store is None or store.rows is None:
            raise NotReady(f"{self.trainer} has no mean gradients of rows yet: ask again")
        return store.rows.portion_of_means(request)

    async def info(self) -> PserverInfo:
        store = self.store
        if store is None or self.in_doubt:
            return PserverInfo(**self.common_info(), ready=False)
        return self.stated(store)

    def stated(self, store: MeanStore) -> PserverInfo:
        """What it says to trainers of its generation that it has."""
        return PserverInfo(
            **self.common_info(),
            ready=True,
            mode=Mode.SYNC,
            digest=store.layout.digest,
            blocks=len(store.own),
            bytes=sum(store.blocks[number].place.bytes for number in store.own),
            lowest=store.has,
            highest=store.has,
            missing=missing_lanes(store),
            slots=store.slots.version if store.slots is not None else 0,
            kept=store.first_kept,
            made_of=store.made_of(),
        )

    def check_generation(self, header: MessageHeader) -> None:
        """Only calls of the generation that this trainer is in are answered. Raises StaleGeneration,
        NotReady."""
        if header.generation < self.generation:
            msg = (
                f"generation {header.generation} is over: {self.trainer} is in {self.generation}; read "
                "the lanes again"
            )
            raise StaleGeneration(msg, generation=self.generation)
        if header.generation > self.generation:
            msg = (
                f"generation {header.generation} is ahead of {self.generation}, the newest that "
                f"{self.trainer} has read from etcd: ask again"
            )
            raise NotReady(msg)


class OwnShare:
    """A PserverPort to the trainer's own share, without a connection. What is pushed is read where it lies,
    and only during the call."""

    def __init__(self, server: ShareServer) -> None:
        self._server = server

    def __repr__(self) -> str:
        return f"<OwnShare {self._server!r}>"

    async def push(
        self, header: PushHeader, blocks: AsyncIterator[tuple[PushBlock, memoryview]]
    ) -> PushAnswer:
        async def only_read() -> AsyncGenerator[tuple[PushBlock, memoryview], None]:
            async for item, payload in blocks:
                yield item, memoryview(payload).cast("B").toreadonly()

        return await self._server.push(header, only_read())

    async def pull(self, request: PullRequest, sink: Sink, placed: Placed | None = None) -> PullEnd:
        async with aclosing(self._server.pull(request)) as items:
            async for item in items:
                if isinstance(item, PullEnd):
                    return item
                block, payload = item
                sink(block).cast("B")[:] = payload
                if placed is not None:
                    placed(block)
        raise AssertionError("a pull ended without PullEnd")

    async def info(self) -> PserverInfo:
        return await self._server.info()

    async def init(self, *_: Any) -> None:
        raise _no_such_call("init")

    async def lookup(self, *_: Any) -> Any:
        raise _no_such_call("lookup")

    async def table(self, *_: Any) -> Any:
        raise _no_such_call("table")

    async def ledger(self, *_: Any) -> Any:
        raise _no_such_call("ledger")


def _no_such_call(name: str) -> InvalidArgument:
    return InvalidArgument(
        f"{name} was asked of a trainer's own share, which takes pushes and gives mean gradients alone"
    )
