"""A trainer gives blocks with their optimizers' state to others that join, while it trains, and how the
others ask for them.

    asked ─► nothing is being stepped ─► a portion is copied at the version in use, in one go ─► sent
        ─► a pause, so that it costs little of its time
    POST /v1/state      StateRequest map  ->  StateHead, each part as StatePart + payload, end

One portion is copied in a few milliseconds (longer, if it is one large parameter of a rule that needs whole
ones), and one at a time. What is copied and sent takes SHARE of the time, more only if who joins says that
the versions pass too fast.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any

import aiohttp
import torch
from aiohttp import web
from xxhash import xxh3_128

from trainer_agent.collective.replica import Replica
from trainer_agent.collective.state.messages import Portion, StateHead, StatePart, StateRequest
from trainer_agent.model.compute import Compute
from trireme_shared.blocks.buffers import bytes_of
from trireme_shared.platform.runtime import clock, http
from trireme_shared.protocol.errors import (
    BadFrame,
    DeadlineExceeded,
    InvalidArgument,
    NotReady,
    PeerError,
    StaleGeneration,
    from_map,
)
from trireme_shared.protocol.records import PserverMember
from trireme_shared.protocol.records.step import StepRecord
from trireme_shared.protocol.wire import codec
from trireme_shared.serving.core.geometry import MAX_BLOCK_BYTES
from trireme_shared.serving.data_plane.http import write_block
from trireme_shared.serving.transport.stream import MemberSession

if TYPE_CHECKING:
    from trainer_agent.collective.state.rows import RowsGiver  # loads numba
    from trireme_shared.serving.core.table.rows import TableRows

StepIn = Callable[..., Awaitable[Any]]
PORTION_BYTES = 4 << 20  # of values and state
SHARE, MOST_SHARE = 0.04, 0.5
SENDING = 2.0  # times what copying took: digests are part of that
WAIT_S = 2.0  # for a version, or until nothing is being stepped
LOOK_S = 0.002
MOST_ASKERS = 8
PATH = "/v1/state"
REQUEST_BYTES = 16 << 20
ERROR_BYTES = 1 << 20
MOST_STATES = 16  # tensors of one block's optimizer
MOST_ROW_PARTS = 1 << 16  # of one portion: a slot is never divided
STALL_S = 30.0
READ_BUFFER_BYTES = 1 << 20
GIVER: web.AppKey[Callable[[], StateGiver | None]] = web.AppKey("giver")


async def at_once(work: Callable[..., Any], *arguments: Any) -> Any:
    """Where there are no threads."""
    return work(*arguments)


class StateGiver:
    """Of one trainer; `job`: its name. `saved(record)`: with the results of steps before it that may not be
    stored yet: who joins may be the one that saves or reports them. `step_in`: where blocks are stepped: a
    thread."""

    def __init__(
        self,
        job: str,
        compute: Compute,
        replica: Replica,
        saved: Callable[[StepRecord], StepRecord] = lambda record: record,
        step_in: StepIn = at_once,
    ) -> None:
        self._job, self._compute, self._replica, self._saved = job, compute, replica, saved
        self._blocks = tuple(compute.layout.blocks())
        self._step_in = step_in
        self._rows: RowsGiver | None = None
        self._turn = asyncio.Lock()
        self._askers = 0
        self._free_at = 0.0
        self.given_bytes = 0

    def __repr__(self) -> str:
        return f"<StateGiver of {self._replica!r}: {self.given_bytes} bytes given>"

    @property
    def rows(self) -> TableRows | None:
        """The trainer's rows of all embedding tables; None: the model has none, or none are there yet."""
        return self._replica.rows

    async def give(self, request: StateRequest) -> Portion:
        """Raises InvalidArgument; NotReady: ask again, or another; StaleGeneration: the job went back, or is
        in another timeline here."""
        if request.job != self._job:
            raise InvalidArgument(f"this trainer is of job {self._job!r}, {request.job[:80]!r} was asked for")
        foreign = [number for number in request.blocks if not 0 <= number < len(self._blocks)]
        if foreign:
            raise InvalidArgument(
                f"blocks {foreign[:4]} were asked for: the layout has 0 to {len(self._blocks) - 1}"
            )
        if request.rows:
            return await self._give_rows(request)
        if not request.blocks:
            self._check_timeline(request)
            assert self._replica.record is not None
            return Portion(StateHead(record=self._saved(self._replica.record)), ())
        if self._askers >= MOST_ASKERS:
            raise NotReady(f"{self._askers} trainers are asking for blocks already: ask another, or again")
        self._askers += 1
        try:
            async with self._turn:
                return await self._in_turn(request)
        finally:
            self._askers -= 1

    async def _give_rows(self, request: StateRequest) -> Portion:
        self._check_timeline(request)
        if self._rows is None:
            from trainer_agent.collective.state.rows import RowsGiver  # noqa: PLC0415  loads numba

            self._rows = RowsGiver(self._replica, self._step_in)
        if not request.portion:
            await self._until_rest(request)
        return await self._rows.give(request)

    async def _in_turn(self, request: StateRequest) -> Portion:
        await self._until_free(request.hurry)
        await self._until_rest(request)
        began = clock.monotonic()
        portion = self._portion(request)
        spent = (clock.monotonic() - began) * (1.0 + SENDING)
        pause_s = spent / SHARE - spent
        self._free_at = clock.monotonic() + pause_s
        return portion.with_pause(pause_s)

    async def _until_rest(self, request: StateRequest) -> None:
        """Until the version is there, and nothing is being stepped. Raises NotReady, StaleGeneration."""
        deadline = clock.monotonic() + WAIT_S
        while not self._may_copy(request):
            if clock.monotonic() > deadline:
                version = self._replica.version
                raise NotReady(
                    f"version {request.at_least} was asked for; this trainer has {version} after {WAIT_S:g} s"
                )
            await asyncio.sleep(LOOK_S)

    async def _until_free(self, hurry: int) -> None:
        """The pause behind the portion before, the shorter the more `hurry`."""
        factor = SHARE / min(SHARE * 2**hurry, MOST_SHARE)
        left = self._free_at - clock.monotonic()
        if left > 0:
            await asyncio.sleep(left * factor)

    def _may_copy(self, request: StateRequest) -> bool:
        """Raises StaleGeneration."""
        self._check_timeline(request)
        version = self._replica.version
        return self._replica.at_rest and version is not None and version >= request.at_least

    def _check_timeline(self, request: StateRequest) -> None:
        """Raises StaleGeneration."""
        replica = self._replica
        if replica.record is None or replica.timeline != request.timeline:
            msg = f"parameters of timeline {request.timeline} were asked for: this trainer has {replica!r}"
            raise StaleGeneration(msg)

    def _portion(self, request: StateRequest) -> Portion:
        """The first of the blocks, in one go: nothing else of this process runs meanwhile, and nothing is
        being stepped."""
        record = self._replica.record
        assert record is not None
        parts: list[tuple[StatePart, memoryview]] = []
        given: list[int] = []
        size = 0
        for number in request.blocks:
            if len(given) >= request.together and size >= PORTION_BYTES:
                break
            values = bytearray(memoryview(self._compute.current(number)).cast("B"))
            copies = [("", self._blocks[number].dtype, False, memoryview(values))]
            copies += _copied(self._replica.state(number).items())
            for name, dtype, scalar, payload in copies:
                digest = xxh3_128(payload).hexdigest()
                parts.append(
                    (StatePart(block=number, name=name, dtype=dtype, scalar=scalar, digest=digest), payload)
                )
                size += payload.nbytes
            given.append(number)
        self.given_bytes += size
        return Portion(StateHead(record=record, given=tuple(given)), parts)


def _copied(state: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[str, str, bool, memoryview]]:
    found = []
    for name, tensor in state:
        copy = tensor.detach().reshape(-1).clone()
        found.append((name, str(tensor.dtype).removeprefix("torch."), tensor.dim() == 0, bytes_of(copy)))
    return found


def add_route(app: web.Application, giver: Callable[[], StateGiver | None]) -> None:
    """To the application of a trainer's share; there may be a giver later only."""
    app[GIVER] = giver
    app.router.add_post(PATH, _state)


async def _state(request: web.Request) -> web.StreamResponse:
    async with asyncio.timeout(STALL_S):
        body = await request.content.read(REQUEST_BYTES)
    wanted = codec.read(StateRequest, codec.decode(body, REQUEST_BYTES))
    giver = request.app[GIVER]()
    if giver is None:
        raise NotReady("this trainer has no parameters yet")
    portion = await giver.give(wanted)
    response = web.StreamResponse(headers={"Content-Type": codec.CONTENT_TYPE})
    await response.prepare(request)
    async with asyncio.timeout(STALL_S):
        await response.write(codec.encode(portion.head))
    for part, payload in portion.parts:
        async with asyncio.timeout(STALL_S):
            await write_block(response, codec.encode_block(part, payload.nbytes), payload)
    async with asyncio.timeout(STALL_S):
        await response.write(codec.encode_end())
        await response.write_eof()
    return response


class HttpDonor:
    """A Donor by plain requests, over its UNIX socket if that is on this host. Close it."""

    def __init__(
        self,
        member: PserverMember,
        token: http.Token = "",
        *,
        tls: ssl.SSLContext | None = None,
        stall_s: float = STALL_S,
    ) -> None:
        self._member, self._stall_s = member, stall_s
        self._session = MemberSession(member, token, tls)

    def __repr__(self) -> str:
        return f"<HttpDonor {self.name} at {self._member.url}>"

    @property
    def name(self) -> str:
        return self._member.incarnation

    async def close(self) -> None:
        await self._session.close()

    async def state(self, request: StateRequest) -> Portion:
        """Raises the error of the answer; DeadlineExceeded: nothing moved for `stall_s`; PeerError: the
        connection failed, or the answer breaks the protocol."""
        url, headers = self._member.url.rstrip("/") + PATH, {"Content-Type": codec.CONTENT_TYPE}
        try:
            async with (
                asyncio.timeout(self._stall_s) as limit,
                self._session().post(
                    url, data=codec.encode(request), headers=headers, read_bufsize=READ_BUFFER_BYTES
                ) as response,
            ):
                if response.status >= 400:
                    raise from_map(codec.decode(await response.content.read(ERROR_BYTES), ERROR_BYTES))
                return await self._read(response, request, limit)
        except TimeoutError as error:
            raise DeadlineExceeded(f"{self!r}: nothing moved for {self._stall_s:g} s") from error
        except BadFrame as error:
            raise PeerError(f"{self!r} gave no answer that can be read: {error.message}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise PeerError(f"{self!r} failed: {type(error).__name__}: {error}") from error

    async def _read(
        self, response: aiohttp.ClientResponse, request: StateRequest, limit: asyncio.Timeout
    ) -> Portion:
        parts: list[tuple[StatePart, memoryview]] = []

        def place(header: codec.Fields, size: int) -> memoryview:
            parts.append((codec.read(StatePart, header), memoryview(bytearray(size))))
            return parts[-1][1]

        blocks = MOST_ROW_PARTS if request.rows else len(request.blocks) * (1 + MOST_STATES)
        decoder = codec.Decoder(codec.Limits(payload_bytes=MAX_BLOCK_BYTES, blocks=blocks), place)
        head: StateHead | None = None
        async for chunk in response.content.iter_any():
            limit.reschedule(clock.monotonic() + self._stall_s)
            for event in decoder.feed(chunk):
                if isinstance(event, codec.Opened):
                    head = codec.read(StateHead, event.header)
        decoder.finish()
        if head is None:
            raise BadFrame("the answer is empty")
        return Portion(head, parts)
