"""Blocks to and from all parameter servers: one stream a pserver and direction, retried until it is done or no longer needed.

push: blocks from the outbox of a pserver, as backward finishes them ──► ACKNOWLEDGED, STALE, ...
pull: blocks of one version, as pservers have them ──► staging vector; the version's StepRecord, or Gone

A trainer whose lease may have run out asks nothing until etcd says that it is still a member.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from shared.errors import (
    BadFrame,
    DeadlineExceeded,
    Gone,
    InvalidArgument,
    NotReady,
    PeerError,
    StaleGeneration,
    TriremeError,
)
from shared.membership.directory import Directory
from shared.records import PserverMember
from shared.records.job_spec import Narrow, Transported
from shared.records.layout import ELEMENT_BYTES
from shared.records.step import StepRecord
from shared.runtime import telemetry
from shared.wire.lending import NOTHING
from shared.wire.messages import LedgerAnswer, LedgerQuery, PserverInfo, PulledBlock, PullRequest, PushBlock, PushHeader
from trainer_agent.data_plane.http import PserverPort
from trainer_agent.data_plane.outbox import Outbox
from trainer_agent.data_plane.routing import Routes, route
from trainer_agent.data_plane.silence import ASK_S, Silence
from trainer_agent.data_plane.verdicts import Verdict, verdict
from trainer_agent.model.compute import Compute
from trainer_agent.waiting.retry import Backoff
from trainer_agent.waiting.single_error import SingleErrorGroup

PULL_WAIT_S = 10.0
REFRESH_S = 0.5
OWN_LEASE = "etcd did not say whether this trainer is still a member"

T = TypeVar("T")
Connect = Callable[[PserverMember], PserverPort]
Suspect = Callable[[str, str], None]
log = telemetry.logger("transfer")


class _Unanswered(Exception):
    """A pserver gave no answer for too long."""


async def _at_once() -> bool:
    """Nothing to wait for."""
    return False


class Transfer:
    """All parameter servers of the job, as one. `certain` is awaited before each call: until this trainer is surely a member."""

    def __init__(
        self,
        directory: Directory,
        connect: Connect,
        vectors: Compute,
        suspect: Suspect,
        parameter_dtype: Transported = "float32",
        certain: Callable[[], Awaitable[bool]] = _at_once,
    ) -> None:
        self._directory, self._connect, self._vectors, self._suspect = directory, connect, vectors, suspect
        self._certain = certain
        self._routes: Routes | None = None
        self._silence = Silence()
        self._narrow: Narrow | None = None if parameter_dtype == "float32" else parameter_dtype
        self._narrowed = vectors.layout.payloads(parameter_dtype)
        # by (slot map version, pserver index): PullEnd.known of the values in use, and of those in the staging vector
        self._known: dict[tuple[int, int], str] = {}
        self._staged: dict[tuple[int, int], str] = {}
        # by pserver index: a block in its narrow dtype, before it is widened
        self._narrow_block: dict[int, memoryview] = {}

    @property
    def routes(self) -> Routes:
        slots = self._directory.slots
        if self._routes is None or (slots is not None and slots.version != self._routes.version):
            if slots is None:
                raise NotReady("the master has not placed the blocks yet")
            self._routes = route(self._vectors.layout, slots)
        return self._routes

    @property
    def generation(self) -> int:
        return self._directory.state.generation if self._directory.state else 0

    def envelope(self) -> dict[str, Any]:
        """The fields every message starts with, as known now."""
        master = self._directory.master
        return {"job": self._directory.keys.job, "term": master.term if master else 0, "generation": self.generation}

    # ------------------------------------------------------------ pull

    async def pull(
        self, version: int | None, skip_after_s: float | None = None, *, exact: bool = False
    ) -> StepRecord | None:
        """Every block at `version` (None: at the version it has) into the staging vector. Returns the version's record.

        Waits until the pservers have the version. The blocks of a pserver that gives no answer for `skip_after_s` keep their
        current values. `exact`: in full precision, whatever the job's parameter_dtype. Raises Gone if the version is no
        longer kept, InvalidArgument if parameters do not fit the dtype.
        """
        narrow = None if exact else self._narrow
        self._staged = {}
        records = await self._ask_all(lambda index: self._pull_from(index, version, skip_after_s, narrow))
        return next(iter(records), None)

    def swap(self) -> None:
        """What the last pull brought becomes the parameters in use; buffers that stay as they are come only once."""
        self._vectors.swap()
        self._known, self._staged = self._staged, {}

    async def _pull_from(
        self, index: int, version: int | None, skip_after_s: float | None, narrow: Narrow | None
    ) -> StepRecord | None:
        missing = dict.fromkeys(self.routes.blocks[index])
        place_known = self.routes.version, index
        known = self._known.get(place_known, "")
        named: set[str] = set()  # what the ends of this pull's requests say
        record: StepRecord | None = None
        backoff = Backoff(f"pulling {'parameters' if version is None else f'version {version}'} from pserver-{index}")

        def place(item: PulledBlock) -> memoryview:
            if item.same:
                if not known:
                    raise BadFrame(
                        f"block {item.block} came from pserver-{index} as unchanged, but no values were named"
                    )
                return NOTHING
            expected = self._narrowed[item.block] if narrow is not None else None
            if item.dtype != expected:
                raise BadFrame(
                    f"block {item.block} came from pserver-{index} as {item.dtype or 'it is'}, {expected or 'as it is'} was asked "
                    "for; run the same version everywhere"
                )
            whole = self._vectors.staging(item.block)
            if item.dtype is None:
                return whole
            if index not in self._narrow_block:
                self._narrow_block[index] = memoryview(bytearray(self._vectors.layout.block_bytes))
            return self._narrow_block[index][: whole.nbytes * ELEMENT_BYTES[item.dtype] // ELEMENT_BYTES["float32"]]

        def placed(item: PulledBlock) -> None:
            if item.same:
                self._vectors.keep(item.block)
            elif item.dtype is not None:
                self._vectors.widen(item.block, item.dtype, place(item))
            missing.pop(item.block, None)

        while missing:
            before = len(missing)
            wanted = {
                "version": version,
                "blocks": tuple(missing),
                "wait_s": PULL_WAIT_S,
                "dtype": narrow,
                "known": known,
            }
            if await self._certain():
                backoff.waited(OWN_LEASE)
            if await self._is_silent(index, skip_after_s):
                self._keep_current(missing)
                return record
            try:
                end = await self._port(index).pull(PullRequest(**self.envelope(), **wanted), place, placed)
            except (PeerError, StaleGeneration) as error:
                if isinstance(error, PeerError) and self._silence.failed(index, error, skip_after_s):
                    self._keep_current(missing)
                    return record
                named.add("")  # blocks that came belong to no end
                await self._suspect_peer(index, error)
                await backoff.failed(error)
                continue
            self._silence.answered(index)
            named.add(end.known or "")
            record = end.record or record
            if len(missing) < before:
                backoff.reset()
            match end.code:
                case "GONE":
                    raise Gone(end.message)
                case "OVERFLOW":
                    raise InvalidArgument(end.message, hint=f"parameter_dtype is {narrow}; start the job with another")
                case "TOO_EARLY":
                    backoff.waited(end.message)
                case "NOT_READY" | "OK" if missing:
                    await backoff.failed(end.message or f"{len(missing)} blocks did not come")
        if len(named) == 1:
            self._staged[place_known] = named.pop()
        return record

    def _keep_current(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._vectors.keep(block)

    # ------------------------------------------------------------ push

    @asynccontextmanager
    async def pushing(
        self, header: PushHeader, outboxes: Mapping[int, Outbox], skip_after_s: float | None = None
    ) -> AsyncIterator[dict[int, Verdict]]:
        """Push to all parameter servers while the block of code fills the outboxes. After it, the dict has the verdict of each."""
        verdicts: dict[int, Verdict] = {}
        async with SingleErrorGroup() as group:
            pushes = {i: group.create_task(self.push(i, header, box, skip_after_s)) for i, box in outboxes.items()}
            yield verdicts
        verdicts.update({index: push.result() for index, push in pushes.items()})

    async def push(self, index: int, header: PushHeader, outbox: Outbox, skip_after_s: float | None = None) -> Verdict:
        """ACKNOWLEDGED: every block. STALE, FENCED: the header's generation or attempt is over.

        In asynchronous mode also BEHIND: the pserver came back from a checkpoint; SKIPPED: it gave no answer for
        `skip_after_s`.
        """
        if not await outbox.started():
            return Verdict.ACKNOWLEDGED
        backoff = Backoff(f"pushing step {header.step} to pserver-{index}")
        while True:
            if await self._certain():
                backoff.waited(OWN_LEASE)
            if await self._is_silent(index, skip_after_s):
                return Verdict.SKIPPED
            try:
                answer = await self._port(index).push(header, outbox.stream())
            except StaleGeneration:
                return Verdict.STALE
            except PeerError as error:
                if self._silence.failed(index, error, skip_after_s):
                    return Verdict.SKIPPED
                await self._suspect_peer(index, error)
                problem: object = error
            else:
                self._silence.answered(index)
                found, problem = verdict(answer, header.mode)
                if found is Verdict.BROKEN:
                    raise TriremeError(f"pserver-{index} refused a push of step {header.step}: {problem}")
                if found is not Verdict.AGAIN:
                    return found
            if self.generation > header.generation:
                return Verdict.STALE
            if not outbox.is_closed:
                backoff.waited(problem)  # the gradients of a large model may take longer than any time limit
            await backoff.failed(problem)

    async def claim(self, header: PushHeader) -> None:
        """From now on the parameter servers refuse other data of the header's lanes in its step. Raises StepTorn if one has
        such data already (the job will go back to a checkpoint), StaleGeneration."""
        await self._ask_all(lambda index: self._ask(index, lambda port: port.push(header, _nothing())))

    # ------------------------------------------------------------ questions

    async def infos(self, timeline: int = 0) -> list[PserverInfo]:
        """From all parameter servers that hold blocks, once they have the parameters of that timeline."""

        async def ready(port: PserverPort) -> PserverInfo:
            info = await port.info()
            if not info.ready:
                raise NotReady(f"pserver-{info.index} has no parameters yet")
            if info.timeline != timeline:
                raise NotReady(f"pserver-{info.index} has parameters of timeline {info.timeline}, not of {timeline}")
            return info

        return await self._ask_all(lambda index: self._ask(index, ready))

    async def ledgers(self, query: LedgerQuery, skip_after_s: float | None = None) -> dict[int, LedgerAnswer]:
        """By pserver index, without pservers that gave no answer for `skip_after_s`."""

        async def ask(index: int) -> tuple[int, LedgerAnswer | None]:
            try:
                return index, await self._ask(index, lambda port: port.ledger(query), skip_after_s)
            except _Unanswered:
                return index, None

        return {index: answer for index, answer in await self._ask_all(ask) if answer is not None}

    async def _ask(
        self,
        index: int,
        question: Callable[[PserverPort], Coroutine[Any, Any, T]],
        skip_after_s: float | None = None,
    ) -> T:
        backoff = Backoff(f"an answer from pserver-{index}")
        while True:
            if await self._certain():
                backoff.waited(OWN_LEASE)
            if await self._is_silent(index, skip_after_s):
                raise _Unanswered
            try:
                answer = await question(self._port(index))
            except PeerError as error:
                if self._silence.failed(index, error, skip_after_s):
                    raise _Unanswered from error
                await self._suspect_peer(index, error)
                await backoff.failed(error)
            else:
                self._silence.answered(index)
                return answer

    # ------------------------------------------------------------ peers

    async def _is_silent(self, index: int, skip_after_s: float | None) -> bool:
        """Whether that pserver is left out. Now and then it is asked whether it has parameters and answers again."""
        if skip_after_s is None or not self._silence.holds(index):
            return False
        if not self._silence.is_due(index):
            return True
        try:
            async with asyncio.timeout(ASK_S):
                if not (await self._port(index).info()).ready:
                    raise NotReady(f"pserver-{index} has no parameters yet")
        except (PeerError, TimeoutError) as error:
            known = error if isinstance(error, PeerError) else DeadlineExceeded(f"no answer within {ASK_S:g} s")
            return self._silence.failed(index, known, skip_after_s)
        self._silence.answered(index)
        return False

    async def _ask_all(self, ask: Callable[[int], Coroutine[Any, Any, T]]) -> list[T]:
        async with SingleErrorGroup() as group:
            tasks = [group.create_task(ask(index)) for index in self.routes.blocks]
        return [task.result() for task in tasks]

    def _port(self, index: int) -> PserverPort:
        member = self._directory.pservers.get(index)
        if member is None:
            raise NotReady(f"pserver-{index} is not registered")
        return self._connect(member)

    async def _suspect_peer(self, index: int, error: TriremeError) -> None:
        """After a failed call: report the pserver to the master, and wait a moment for news in the directory."""
        member = self._directory.pservers.get(index)
        if member is not None and not isinstance(error, NotReady | StaleGeneration):
            self._suspect(member.incarnation, str(error))
            await self._directory.changed(self._directory.revision, REFRESH_S)


async def _nothing() -> AsyncGenerator[tuple[PushBlock, memoryview], None]:
    return
    yield
