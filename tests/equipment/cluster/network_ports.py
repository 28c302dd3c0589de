"""The trainer's ports over the simulated network, and the etcd of one process.

They do what the HTTP adapters do (trainer_agent/tasks/source.py, trainer_agent/data_plane/http.py,
shared/trireme_shared/serving/data_plane/http.py), down to memory: a payload lies in the receiver's one buffer
only until the next is asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any, Self

from pserver_service.handoff_client import Parts
from tests.equipment.cluster.lookups import lookup
from tests.equipment.cluster.network import Network, Pipe, replay
from trainer_agent.data_plane.stream import waits_s
from trireme_shared.platform.membership.directory import Directory
from trireme_shared.protocol.errors import DeadlineExceeded, NotLeader, PeerError
from trireme_shared.protocol.records import (
    AcquireTask,
    Completed,
    CompleteTask,
    FailTask,
    MetricBatch,
    MetricsTaken,
    PserverMember,
    TaskAnswer,
    TaskProgress,
    UserFailure,
)
from trireme_shared.protocol.wire.messages import (
    HandoffAnswer,
    HandoffHeader,
    HandoffPart,
    InitBlock,
    InitHeader,
    LedgerAnswer,
    LedgerQuery,
    LookupEnd,
    LookupRequest,
    PserverInfo,
    PulledBlock,
    PullEnd,
    PullRequest,
    PushAnswer,
    PushBlock,
    PushHeader,
    TableEnd,
    TableRequest,
)
from trireme_shared.serving.data_plane.lookups import found_end, portion

MASTER_TIMEOUT_S = 10.0
STALL_S = 30.0
HANDOFF_STALL_S = 5.0
GARBAGE = 0xA5


class SimulatedMaster:
    """trainer_agent.tasks.master.MasterPort"""

    def __init__(self, network: Network, directory: Directory) -> None:
        self._network, self._directory = network, directory

    async def acquire_task(self, ask: AcquireTask) -> TaskAnswer:
        answer: TaskAnswer = await self.call(lambda master: master.acquire_task(ask), ask.wait_s)
        return answer

    async def report_progress(self, task_id: str, progress: TaskProgress) -> None:
        await self.call(lambda master: master.report_progress(task_id, progress))

    async def complete_task(self, task_id: str, done: CompleteTask) -> Completed:
        completed: Completed = await self.call(lambda master: master.complete_task(task_id, done))
        return completed

    async def fail_task(self, task_id: str, failed: FailTask) -> None:
        await self.call(lambda master: master.fail_task(task_id, failed))

    async def report_metrics(self, batch: MetricBatch) -> MetricsTaken:
        taken: MetricsTaken = await self.call(lambda master: master.report_metrics(batch))
        return taken

    async def report_suspect(self, member_id: str) -> None:
        await self.call(lambda master: master.report_suspect(member_id))

    async def report_failure(self, member_id: str, failure: UserFailure) -> None:
        await self.call(lambda master: master.report_failure(member_id, failure))

    async def call(self, invoke: Callable[[Any], Awaitable[Any]], wait_s: float = 0.0) -> Any:
        master = self._directory.master
        if master is None:
            raise NotLeader("no master has published its address")
        try:
            return await self._ask(master.url, invoke, wait_s)
        except NotLeader as error:
            leader = error.details.get("leader")
            if not isinstance(leader, str) or not leader or leader == master.url:
                raise
            return await self._ask(leader, invoke, wait_s)

    async def _ask(self, url: str, invoke: Callable[[Any], Awaitable[Any]], wait_s: float) -> Any:
        limit_s = MASTER_TIMEOUT_S + wait_s
        return await self._network.call(url, invoke, timeout_s=limit_s, hang_up_cancels=wait_s > 0)


class SimulatedPserver:
    """trainer_agent.data_plane.http.PserverPort"""

    def __init__(
        self,
        network: Network,
        member: PserverMember,
        after_block: Callable[[], None],
        stall_s: float = STALL_S,
    ) -> None:
        self.member, self._stall_s = member, stall_s
        self._network, self._after_block = network, after_block

    def __repr__(self) -> str:
        return f"<SimulatedPserver {self.member.index} at {self.member.url}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        pass

    async def init(self, header: InitHeader, blocks: AsyncIterator[tuple[InitBlock, memoryview]]) -> None:
        await self._upload(blocks, lambda service, items: service.init(header, items))

    async def push(
        self, header: PushHeader, blocks: AsyncIterator[tuple[PushBlock, memoryview]]
    ) -> PushAnswer:
        async def receive(service: Any, items: AsyncIterator[Any]) -> PushAnswer:
            buffer, _ = service.memory_for(header)
            try:
                answer: PushAnswer = await service.push(
                    header, _in_one_buffer(items, buffer.view, self._after_block)
                )
                return answer
            finally:
                buffer.release()

        answer: PushAnswer = await self._upload(blocks, receive)
        return answer

    async def _upload(
        self,
        blocks: AsyncIterator[tuple[Any, memoryview]],
        receive: Callable[[Any, AsyncIterator[Any]], Awaitable[Any]],
    ) -> Any:
        pipe = self._pipe()

        async def again(service: Any) -> Any:
            return await receive(service, replay(pipe))

        async with self._calling(lambda s: receive(s, _stalling(pipe)), again, pipe) as reply:
            feeding = asyncio.ensure_future(_feed(pipe, blocks, self._stall_s))
            try:
                await asyncio.wait({reply, feeding}, return_when=asyncio.FIRST_COMPLETED)
                if (
                    not reply.done()
                    and (error := feeding.exception()) is not None
                    and not isinstance(error, PeerError)
                ):
                    raise error
                async with _stall_limit(self, self._stall_s):
                    return await reply
            finally:
                await _settle(feeding)

    async def pull(
        self,
        request: PullRequest,
        sink: Callable[[PulledBlock], memoryview],
        placed: Callable[[PulledBlock], None] | None = None,
    ) -> PullEnd:
        pipe = self._pipe()

        async def send(service: Any) -> PullEnd:
            async with aclosing(service.pull(request)) as items:
                async for item in items:
                    self._after_block()
                    if isinstance(item, PullEnd):
                        pipe.close()
                        return item
                    await pipe.put(item)
            raise AssertionError("a pull ended without PullEnd")

        async def unheard(service: Any) -> None:
            async with aclosing(service.pull(request)) as items:
                async for _ in items:
                    await asyncio.sleep(self._network.delay())

        async with self._calling(send, unheard, pipe) as reply, aclosing(pipe.__aiter__()) as arriving:
            while True:
                async with _stall_limit(self, self._stall_s + waits_s(request)):
                    item = await anext(arriving, None)
                if item is None:
                    async with _stall_limit(self, self._stall_s + waits_s(request)):
                        end: PullEnd = await reply
                        return end
                block, payload = item
                memory = sink(block).cast("B")
                assert memory.nbytes == len(payload), (
                    f"{block} has {len(payload)} bytes, its place {memory.nbytes}"
                )
                memory[:] = payload
                if placed is not None:
                    placed(block)

    async def lookup(self, request: LookupRequest, ids: memoryview) -> tuple[LookupEnd, memoryview]:
        payload = bytes(ids)

        async def ask(service: Any) -> tuple[LookupEnd, bytes]:
            found = await lookup(service, request, memoryview(payload))
            return (found, b"") if isinstance(found, LookupEnd) else (found_end(service), bytes(found))

        end, rows = await self._network.call(self.member.url, ask, timeout_s=self._stall_s + request.wait_s)
        return end, memoryview(rows)

    async def table(self, request: TableRequest) -> tuple[TableEnd, memoryview]:
        async def ask(service: Any) -> tuple[TableEnd, bytes]:
            end, rows = portion(service, request)
            return end, bytes(rows)

        end, rows = await self._network.call(self.member.url, ask, timeout_s=self._stall_s)
        return end, memoryview(rows)

    def _pipe(self) -> Pipe:
        return Pipe(self._network, lambda item: (item[0], bytes(item[1])))

    @asynccontextmanager
    async def _calling(self, invoke: Any, again: Any, pipe: Pipe) -> AsyncIterator[asyncio.Task[Any]]:
        """The call in a task of its own; leaving early hangs up."""
        call = self._network.call(
            self.member.url, invoke, timeout_s=None, pipes=(pipe,), again=again, hang_up_cancels=True
        )
        reply = asyncio.ensure_future(call)
        try:
            yield reply
        except PeerError:
            if reply.done() and not reply.cancelled() and (error := reply.exception()) is not None:
                raise error from None  # what the peer said explains why the stream broke
            raise
        finally:
            await _settle(reply)

    async def info(self) -> PserverInfo:
        answer: PserverInfo = await self._network.call(
            self.member.url, lambda s: s.info(), timeout_s=self._stall_s
        )
        return answer

    async def ledger(self, query: LedgerQuery) -> LedgerAnswer:
        asked = self._network.call(self.member.url, lambda s: s.ledger(query), timeout_s=self._stall_s)
        answer: LedgerAnswer = await asked
        return answer


class SimulatedHandoff:
    """pserver_service.handoff_client.HandoffPort"""

    def __init__(self, network: Network, member: PserverMember) -> None:
        self._network, self._member = network, member

    async def close(self) -> None:
        pass

    async def hand_over(self, header: HandoffHeader, parts: Parts) -> HandoffAnswer:
        pipe = Pipe(self._network, lambda item: (item[0], bytes(item[1])))

        async def each() -> AsyncIterator[tuple[HandoffPart, memoryview]]:
            for item in parts:
                yield item

        call = self._network.call(
            self._member.url,
            lambda service: service.take_handoff(header, _stalling(pipe)),
            timeout_s=HANDOFF_STALL_S,
            pipes=(pipe,),
            again=lambda service: service.take_handoff(header, replay(pipe)),
            hang_up_cancels=True,
        )
        reply = asyncio.ensure_future(call)
        feeding = asyncio.ensure_future(_feed(pipe, each(), HANDOFF_STALL_S))
        try:
            answer: HandoffAnswer = await reply
            return answer
        finally:
            await _settle(feeding)
            await _settle(reply)


@asynccontextmanager
async def _stall_limit(peer: object, limit_s: float = STALL_S) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError as error:
        raise DeadlineExceeded(f"{peer!r}: nothing moved for {limit_s:g} s", silent_s=limit_s) from error


async def _feed(pipe: Pipe, blocks: AsyncIterator[tuple[Any, memoryview]], limit_s: float) -> None:
    """The caller's blocks may take as long as its backward pass; the peer may not."""
    async for item in blocks:
        async with _stall_limit(pipe, limit_s):
            await pipe.put(item)
    pipe.close()


async def _stalling(pipe: Pipe) -> AsyncIterator[Any]:
    """The receiving side gives up on a silent sender."""
    async with aclosing(pipe.__aiter__()) as items:
        while True:
            async with _stall_limit(pipe):
                item = await anext(items, None)
            if item is None:
                return
            yield item


async def _settle(task: asyncio.Future[Any]) -> None:
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()


async def _in_one_buffer(
    items: AsyncIterator[tuple[Any, bytes]], memory: memoryview, after_block: Callable[[], None]
) -> AsyncIterator[Any]:
    async for item, payload in items:
        # rows of embedding tables have memory of their own
        place = memory[: len(payload)] if len(payload) <= len(memory) else memoryview(bytearray(payload))
        place[:] = payload
        yield item, place
        place[:] = bytes([GARBAGE]) * len(payload)
        after_block()
