"""Blocks to and from all parameter servers: one stream a pserver and direction, retried until it is done or no longer needed.

push: blocks from the outbox of a pserver, as backward finishes them ──► ACKNOWLEDGED, STALE, ...
pull: blocks of one version, as pservers have them ──► staging vector; the version's StepRecord, or Gone

A trainer whose lease may have run out asks nothing until etcd says that it is still a member.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager

from shared.errors import (
    BadFrame,
    Gone,
    InvalidArgument,
    NotReady,
    PeerError,
    StaleGeneration,
    TriremeError,
    WrongOwner,
)
from shared.lanes import Interval
from shared.membership.directory import Directory
from shared.records.job_spec import Narrow, Transported
from shared.records.layout import ELEMENT_BYTES
from shared.records.step import StepRecord
from shared.runtime import telemetry
from shared.wire.lending import NOTHING
from shared.wire.messages import (
    LedgerAnswer,
    LedgerQuery,
    PserverInfo,
    PulledBlock,
    PullEnd,
    PullRequest,
    PushBlock,
    PushHeader,
)
from trainer_agent.core.steps import agreed
from trainer_agent.data_plane.http import PserverPort
from trainer_agent.data_plane.outbox import Outbox, Outboxes
from trainer_agent.data_plane.peers import OWN_LEASE, Connect, Peers, Suspect, Unanswered
from trainer_agent.data_plane.routing import Routes
from trainer_agent.data_plane.verdicts import Verdict, is_moving, moved_blocks, verdict, worst
from trainer_agent.model.compute import Compute
from trainer_agent.waiting.retry import Backoff
from trainer_agent.waiting.single_error import SingleErrorGroup

PULL_WAIT_S = 10.0

log = telemetry.logger("transfer")


async def _at_once() -> bool:
    """Nothing to wait for."""
    return False


class Transfer(Peers):
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
        super().__init__(directory, connect, vectors.layout, suspect, certain)
        self._vectors = vectors
        self._narrow: Narrow | None = None if parameter_dtype == "float32" else parameter_dtype
        self._narrowed = vectors.layout.payloads(parameter_dtype)
        # by (slot map version, pserver index): PullEnd.known of the values in use, and of those in the staging vector
        self._known: dict[tuple[int, int], str] = {}
        self._staged: dict[tuple[int, int], str] = {}
        self._narrow_blocks: list[memoryview] = []  # memory for a block in its narrow dtype, before it is widened
        self._narrow_bytes = vectors.layout.block_bytes if self._narrow is not None else 0

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
        return await self._pull_parts(self.routes.blocks, version, skip_after_s, narrow)

    async def _pull_parts(
        self,
        parts: Mapping[int, Sequence[int]],
        version: int | None,
        skip_after_s: float | None,
        narrow: Narrow | None,
    ) -> StepRecord | None:
        async with SingleErrorGroup() as group:
            pulls = [
                group.create_task(self._pull_from(index, blocks, version, skip_after_s, narrow))
                for index, blocks in parts.items()
            ]
        return agreed(pull.result() for pull in pulls)

    def swap(self) -> None:
        """What the last pull brought becomes the parameters in use; buffers that stay as they are come only once."""
        self._vectors.swap()
        self._known, self._staged = self._staged, {}

    async def _pull_from(
        self,
        index: int,
        blocks: Sequence[int],
        version: int | None,
        skip_after_s: float | None,
        narrow: Narrow | None,
    ) -> StepRecord | None:
        memory = self._narrow_blocks.pop() if self._narrow_blocks else memoryview(bytearray(self._narrow_bytes))
        try:
            return await self._pull_into(memory, index, blocks, version, skip_after_s, narrow)
        finally:
            self._narrow_blocks.append(memory)

    async def _pull_into(
        self,
        narrowed: memoryview,
        index: int,
        blocks: Sequence[int],
        version: int | None,
        skip_after_s: float | None,
        narrow: Narrow | None,
    ) -> StepRecord | None:
        """`narrowed`: memory for one block in its narrow dtype."""
        missing, routes, refusals = dict.fromkeys(blocks), self.routes, 0
        # what comes from elsewhere than the slot map said at first is named by nobody
        place_known = routes.version, index
        everything = blocks is routes.blocks.get(index)
        known = self._known.get(place_known, "") if everything else ""
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
            return narrowed[: whole.nbytes * ELEMENT_BYTES[item.dtype] // ELEMENT_BYTES["float32"]]

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
            except WrongOwner as error:
                end = PullEnd(code="WRONG_OWNER", message=error.message)
            except (PeerError, StaleGeneration) as error:
                if self.routes.version != routes.version:
                    rest = await self._pull_parts(self.routes.split(missing), version, skip_after_s, narrow)
                    return agreed((rest, record))
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
                case "WRONG_OWNER":
                    refusals += 1
                    await self._rerouted(routes.version, refusals)
                    parts, routes = self.routes.split(missing), self.routes
                    if parts.keys() != {index}:
                        rest = await self._pull_parts(parts, version, skip_after_s, narrow)
                        return agreed((rest, record))
                    backoff.waited(end.message)
                case "NOT_READY" | "OK" if missing:
                    await backoff.failed(end.message or f"{len(missing)} blocks did not come")
        if len(named) == 1 and everything:
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
        version = outboxes.version if isinstance(outboxes, Outboxes) else None
        async with SingleErrorGroup() as group:
            pushes = [
                group.create_task(self._push(index, header, box, skip_after_s, version))
                for index, box in outboxes.items()
            ]
            yield verdicts
        for push in pushes:
            _join(verdicts, push.result())

    async def push(self, index: int, header: PushHeader, outbox: Outbox, skip_after_s: float | None = None) -> Verdict:
        """ACKNOWLEDGED: every block. STALE, FENCED: the header's generation or attempt is over.

        In asynchronous mode also BEHIND: the pserver came back from a checkpoint; SKIPPED: it gave no answer for
        `skip_after_s`. Blocks that moved meanwhile are pushed to their new owners.
        """
        return worst((await self._push(index, header, outbox, skip_after_s)).values())

    async def _push(
        self,
        index: int,
        header: PushHeader,
        outbox: Outbox,
        skip_after_s: float | None = None,
        version: int | None = None,
    ) -> dict[int, Verdict]:
        """The verdict of each parameter server that got some of the blocks. `version`: of the slot map that put them together."""
        if not await outbox.started():
            return {index: Verdict.ACKNOWLEDGED}
        backoff, refusals = Backoff(f"pushing step {header.step} to pserver-{index}"), 0
        while True:
            if await self._certain():
                backoff.waited(OWN_LEASE)
            if await self._is_silent(index, skip_after_s):
                return {index: Verdict.SKIPPED}
            try:
                answer = await self._port(index).push(header, outbox.stream())
            except StaleGeneration:
                return {index: Verdict.STALE}
            except PeerError as error:
                if self._silence.failed(index, error, skip_after_s):
                    return {index: Verdict.SKIPPED}
                await self._suspect_peer(index, error)
                if version is not None and self.routes.version != version:
                    return await self._push_again(header, await outbox.items(), skip_after_s)
                problem: object = error
            else:
                self._silence.answered(index)
                outbox.first = answer.first
                found, problem = verdict(answer, header.mode)
                if found is Verdict.BROKEN:
                    raise TriremeError(f"pserver-{index} refused a push of step {header.step}: {problem}")
                if found is Verdict.MOVED:
                    moved = moved_blocks(answer)
                    rest = [item for item in await outbox.items() if item[0].block in moved]
                    refusals += 1
                    asked_by = self.routes.version if version is None else version
                    await self._rerouted(asked_by, refusals, moving=is_moving(answer))
                    if self.generation > header.generation:
                        return {index: Verdict.STALE}
                    if self.routes.split(moved).keys() != {index}:
                        more = await self._push_again(header, rest, skip_after_s)
                        return _join({index: Verdict.ACKNOWLEDGED}, more)
                    outbox, version = Outbox.of(rest), self.routes.version
                    backoff.waited(problem)
                    continue
                if found is not Verdict.AGAIN:
                    return {index: found}
            if self.generation > header.generation:
                return {index: Verdict.STALE}
            if not outbox.is_closed:
                backoff.waited(problem)  # the gradients of a large model may take longer than any time limit
            await backoff.failed(problem)

    async def _push_again(
        self, header: PushHeader, items: Sequence[tuple[PushBlock, memoryview]], skip_after_s: float | None
    ) -> dict[int, Verdict]:
        """Blocks to their owners by the newest slot map."""
        routes, boxes = self.routes, dict[int, list[tuple[PushBlock, memoryview]]]()
        for item in items:
            boxes.setdefault(routes.owners[item[0].block], []).append(item)
        async with SingleErrorGroup() as group:
            pushes = [
                group.create_task(self._push(index, header, Outbox.of(box), skip_after_s, routes.version))
                for index, box in sorted(boxes.items())
            ]
        verdicts: dict[int, Verdict] = {}
        for push in pushes:
            _join(verdicts, push.result())
        return verdicts

    async def claim(self, header: PushHeader) -> None:
        """From now on the parameter servers refuse other data of the header's lanes in its step. Raises StepTorn if one has
        such data already (the job will go back to a checkpoint), StaleGeneration."""

        async def ask(routes: Routes, index: int) -> object:
            claim = header.model_copy(update={"slots": routes.version})
            return await self._ask(index, lambda port: port.push(claim, _nothing()), routes=routes)

        await self._ask_by_one_map(ask)

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

        async def ask(routes: Routes, index: int) -> PserverInfo:
            info = await self._ask(index, ready, routes=routes)
            if info.slots not in (0, routes.version):  # it may lack blocks, or some may be counted nowhere
                raise WrongOwner(f"pserver-{index} has slot map {info.slots}, this trainer {routes.version}")
            return info

        return await self._ask_by_one_map(ask)

    async def missing(self, number: int, step: int) -> tuple[Interval, ...]:
        """The lanes that blocks of one parameter server lack for `step`; `number` chooses it among all. One attempt. Raises
        PeerError."""
        indexes = sorted(self.routes.blocks)
        info = await self._port(indexes[number % len(indexes)]).info()
        return info.missing if info.ready and info.lowest == step else ()

    async def ledgers(self, query: LedgerQuery, skip_after_s: float | None = None) -> dict[int, LedgerAnswer]:
        """By pserver index, without pservers that gave no answer for `skip_after_s`."""

        async def ask(routes: Routes, index: int) -> tuple[int, LedgerAnswer | None]:
            question = query.model_copy(update={"slots": routes.version})
            try:
                return index, await self._ask(index, lambda port: port.ledger(question), skip_after_s, routes)
            except Unanswered:
                return index, None

        return {index: answer for index, answer in await self._ask_by_one_map(ask) if answer is not None}


async def _nothing() -> AsyncGenerator[tuple[PushBlock, memoryview], None]:
    return
    yield


def _join(verdicts: dict[int, Verdict], more: Mapping[int, Verdict]) -> dict[int, Verdict]:
    """In place: the worst of each parameter server."""
    for index, found in more.items():
        verdicts[index] = worst((verdicts.get(index, Verdict.ACKNOWLEDGED), found))
    return verdicts
