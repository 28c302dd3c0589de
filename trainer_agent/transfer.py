"""Blocks to and from all parameter servers: one stream a pserver and direction, retried until it is done or pointless.

Outbox[pserver] ◄── blocks as backward finishes them          push: ACKNOWLEDGED or STALE
staging vector ◄── blocks of one version as they are there    pull: the version's StepRecord, or Gone
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from shared import telemetry
from shared.directory import Directory
from shared.errors import Gone, NotReady, PeerError, StaleGeneration, TriremeError
from shared.messages import (
    LedgerAnswer,
    LedgerQuery,
    PserverInfo,
    PulledBlock,
    PullRequest,
    PushBlock,
    PushHeader,
    StepRecord,
)
from shared.records import PserverMember
from trainer_agent.compute import Compute
from trainer_agent.core.agent import Verdict, verdict
from trainer_agent.core.routing import Routes, route
from trainer_agent.pservers import PserverPort
from trainer_agent.retry import Patience

PULL_WAIT_S = 10.0
REFRESH_S = 0.5

T = TypeVar("T")
Connect = Callable[[PserverMember], PserverPort]
Suspect = Callable[[str, str], None]
log = telemetry.logger("transfer")


class Outbox:
    """The blocks of one push, in the order they were finished; may be read again from the start."""

    def __init__(self) -> None:
        self._items: list[tuple[PushBlock, memoryview]] = []
        self._closed = False
        self._more = asyncio.Event()

    def add(self, block: PushBlock, payload: memoryview) -> None:
        self._items.append((block, payload))
        self._more.set()

    def close(self) -> None:
        self._closed = True
        self._more.set()

    async def started(self) -> bool:
        """Wait for the first block; False if there will be none."""
        while not self._items and not self._closed:
            self._more.clear()
            await self._more.wait()
        return bool(self._items)

    async def stream(self) -> AsyncGenerator[tuple[PushBlock, memoryview], None]:
        sent = 0
        while True:
            while sent < len(self._items):
                yield self._items[sent]
                sent += 1
            if self._closed:
                return
            self._more.clear()
            await self._more.wait()


class Transfer:
    """All parameter servers of the job, as one."""

    def __init__(self, directory: Directory, connect: Connect, compute: Compute, suspect: Suspect) -> None:
        self._directory, self._connect, self._compute, self._suspect = directory, connect, compute, suspect
        self._routes: Routes | None = None

    @property
    def routes(self) -> Routes:
        slots = self._directory.slots
        if self._routes is None or (slots is not None and slots.version != self._routes.version):
            if slots is None:
                raise NotReady("the master has not placed the blocks yet")
            self._routes = route(self._compute.layout, slots)
        return self._routes

    @property
    def generation(self) -> int:
        return self._directory.state.generation if self._directory.state else 0

    def envelope(self) -> dict[str, Any]:
        """The fields every message starts with, as known now."""
        master = self._directory.master
        return {"job": self._directory.keys.job, "term": master.term if master else 0, "generation": self.generation}

    # ------------------------------------------------------------ pull

    async def pull(self, version: int | None) -> StepRecord | None:
        """Every block at `version` (None: whatever is current) into the staging vector; the version's record.

        Waits for blocks that are not there yet. Raises Gone if the version is no longer kept.
        """
        return next(iter(await self._everywhere(lambda index: self._pull_from(index, version))), None)

    async def _pull_from(self, index: int, version: int | None) -> StepRecord | None:
        missing = dict.fromkeys(self.routes.blocks[index])
        record: StepRecord | None = None
        patience = Patience(f"pulling {'parameters' if version is None else f'version {version}'} from pserver {index}")

        def placed(item: PulledBlock) -> None:
            missing.pop(item.block, None)

        while missing:
            before = len(missing)
            request = PullRequest(**self.envelope(), version=version, blocks=tuple(missing), wait_s=PULL_WAIT_S)
            try:
                end = await self._port(index).pull(request, self._place, placed)
            except (PeerError, StaleGeneration) as error:
                await self._look_again(index, error)
                await patience.failed(error)
                continue
            record = end.record or record
            if len(missing) < before:
                patience.reset()
            match end.code:
                case "GONE":
                    raise Gone(end.message)
                case "TOO_EARLY":
                    patience.waited(end.message)
                case "NOT_READY" | "OK" if missing:
                    await patience.failed(end.message or f"{len(missing)} blocks did not come")
        return record

    def _place(self, item: PulledBlock) -> memoryview:
        return self._compute.staging(item.block)

    # ------------------------------------------------------------ push

    async def push(self, index: int, header: PushHeader, outbox: Outbox) -> Verdict:
        """ACKNOWLEDGED (each block), or STALE, FENCED: the header's generation or attempt is over, nothing is lost."""
        if not await outbox.started():
            return Verdict.ACKNOWLEDGED
        patience = Patience(f"pushing step {header.step} to pserver {index}")
        while True:
            try:
                async with aclosing(outbox.stream()) as blocks:
                    answer = await self._port(index).push(header, blocks)
            except StaleGeneration:
                return Verdict.STALE
            except PeerError as error:
                await self._look_again(index, error)
                problem: object = error
            else:
                found, problem = verdict(answer)
                if found is Verdict.BROKEN:
                    raise TriremeError(f"pserver {index} refused a push of step {header.step}: {problem}")
                if found is not Verdict.AGAIN:
                    return found
            if self.generation > header.generation:
                return Verdict.STALE
            await patience.failed(problem)

    # ------------------------------------------------------------ questions

    async def infos(self) -> list[PserverInfo]:
        """Of all parameter servers that hold blocks; waits until they are initialised."""

        async def ready(port: PserverPort) -> PserverInfo:
            info = await port.info()
            if not info.ready:
                raise NotReady(f"pserver {info.index} has no parameters yet")
            return info

        return await self._everywhere(lambda index: self._ask(index, ready))

    async def ledgers(self, query: LedgerQuery) -> list[LedgerAnswer]:
        return await self._everywhere(lambda index: self._ask(index, lambda port: port.ledger(query)))

    async def _ask(self, index: int, question: Callable[[PserverPort], Coroutine[Any, Any, T]]) -> T:
        patience = Patience(f"an answer from pserver {index}")
        while True:
            try:
                return await question(self._port(index))
            except PeerError as error:
                await self._look_again(index, error)
                await patience.failed(error)

    # ------------------------------------------------------------ peers

    async def _everywhere(self, ask: Callable[[int], Coroutine[Any, Any, T]]) -> list[T]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(ask(index)) for index in self.routes.blocks]
        return [task.result() for task in tasks]

    def _port(self, index: int) -> PserverPort:
        member = self._directory.pservers.get(index)
        if member is None:
            raise NotReady(f"pserver {index} is not registered")
        return self._connect(member)

    async def _look_again(self, index: int, error: TriremeError) -> None:
        """After trouble with a peer: tell the master whom we suspect, and give the directory a moment to know better."""
        member = self._directory.pservers.get(index)
        if member is not None and not isinstance(error, NotReady | StaleGeneration):
            self._suspect(member.incarnation, str(error))
            await self._directory.changed(self._directory.revision, REFRESH_S)
