"""Blocks to and from all parameter servers: one stream a pserver and direction, retried until it is done or no longer needed.

push: blocks from the outbox of a pserver, as backward finishes them ──► ACKNOWLEDGED, STALE, ...
pull: in pulls.py

A trainer whose lease may have run out asks nothing until etcd says that it is still a member.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cached_property

from shared.errors import (
    Gone,
    NotReady,
    PeerError,
    StaleGeneration,
    TriremeError,
    WrongOwner,
)
from shared.lanes import Interval
from shared.records.layout import ROWS
from shared.records.operations import CheckpointRequest
from shared.records.step import StepRecord
from shared.runtime import telemetry
from shared.wire.messages import (
    LedgerAnswer,
    LedgerQuery,
    PserverInfo,
    PushBlock,
    PushHeader,
)
from trainer_agent.data_plane.fleet_client import OWN_LEASE, Unanswered
from trainer_agent.data_plane.http import PserverPort
from trainer_agent.data_plane.outbox import Outbox, Outboxes
from trainer_agent.data_plane.pulls import Pulls
from trainer_agent.data_plane.routing import Routes
from trainer_agent.data_plane.verdicts import Verdict, is_moving, moved_blocks, verdict, worst
from trainer_agent.waiting import Backoff, SingleErrorGroup

log = telemetry.logger("transfer")


class Transfer(Pulls):
    """All parameter servers of the job, as one. `certain` is awaited before each call: until this trainer is surely a member.

    `makes_steps_again`: in another generation a step begins again from nothing; else what was acknowledged stays so."""

    makes_steps_again = False

    @cached_property
    def swapping(self) -> asyncio.Lock:
        """Held while somebody evaluates, or while a spare takes another version into use."""
        return asyncio.Lock()

    @asynccontextmanager
    async def using(self, timeline: int) -> AsyncIterator[None]:  # noqa: ARG002
        """Around steps: nobody else changes the parameters in use."""
        yield

    async def join(self, timeline: int, known: StepRecord | None) -> StepRecord:
        """The version in use: `known` (None: there is none), or all blocks at the lowest version in force. Raises Gone if that is overtaken."""
        if known is not None:
            return known
        version = min(info.lowest for info in await self.infos(timeline))
        record = found(await self.pull(version), version)
        self.swap()
        return record

    @asynccontextmanager
    async def other_values(self) -> AsyncIterator[None]:
        """While parameters of elsewhere are in use. Those that were pulled have to be pulled again then."""
        self.forget()
        yield

    async def settled(self, version: int) -> None:
        """Until `version` cannot be lost any more."""

    async def beginning(self, step: int) -> None:
        """This trainer begins a step, maybe once more: the memory of its gradients is written anew."""

    async def reached(self) -> None:
        """Another version is in use, or the one that this trainer begins with."""

    async def stays(self) -> None:
        """The version in use stays in use for a while: the members may be others than when it was `reached`."""

    def checkpoint_again(self) -> CheckpointRequest | None:
        """A checkpoint that the owner of lane 0 asks for by itself."""
        return None

    # ------------------------------------------------------------ push

    @asynccontextmanager
    async def pushing(
        self, header: PushHeader, outboxes: Mapping[int, Outbox], skip_after_s: float | None = None
    ) -> AsyncIterator[dict[int, Verdict]]:
        """Push to all parameter servers while the block of code fills the outboxes. After it, the dict has the verdict of each."""
        verdicts: dict[int, Verdict] = {}
        routes = outboxes.routes if isinstance(outboxes, Outboxes) else None
        async with SingleErrorGroup() as group:
            pushes = [
                group.create_task(self._push(index, header, box, skip_after_s, routes))
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
        routes: Routes | None = None,
    ) -> dict[int, Verdict]:
        """The verdict of each parameter server that got some of the blocks. `routes`: the slot map that put them together."""
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
                # without a look for news: the failure is what followed from the last ones
                if self.makes_steps_again and self.generation > header.generation:
                    return {index: Verdict.STALE}
                await self._suspect_peer(index, error)
                if routes is not None and self.routes.version != routes.version:
                    return await self._push_again(index, header, outbox, await outbox.items(), routes, skip_after_s)
                problem: object = error
            else:
                self._silence.answered(index)
                outbox.first = answer.first
                found, problem = verdict(answer, header.mode)
                if found is Verdict.BROKEN:
                    raise TriremeError(f"pserver-{index} refused a push of step {header.step}: {problem}")
                if found is Verdict.MOVED:
                    moved = moved_blocks(answer)
                    everything = await outbox.items()
                    rest = [item for item in everything if item[0].block in moved]
                    refusals += 1
                    before = self.routes if routes is None else routes
                    await self._rerouted(before.version, refusals, moving=is_moving(answer))
                    if self.generation > header.generation:
                        return {index: Verdict.STALE}
                    rows_moved = ROWS in moved and self.routes.version != before.version
                    if rows_moved or self.routes.split(moved - {ROWS}).keys() - {index}:
                        more = await self._push_again(index, header, outbox, rest, before, skip_after_s, everything)
                        return _join({index: Verdict.ACKNOWLEDGED}, more)
                    outbox, routes = Outbox.part(rest, everything, outbox.rows), self.routes
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
        self,
        asked: int,
        header: PushHeader,
        outbox: Outbox,
        items: Sequence[tuple[PushBlock, memoryview]],
        before: Routes,
        skip_after_s: float | None,
        everything: Sequence[tuple[PushBlock, memoryview]] = (),
    ) -> dict[int, Verdict]:
        """Blocks of an outbox to their owners by the newest slot map. `everything`: if they are a part of it. `before`: the map that put them together.
        Rows go to all that have other slots now, and to the one that was asked, whole lanes: each takes those that it lacks."""
        routes, boxes = self.routes, dict[int, list[tuple[PushBlock, memoryview]]]()
        for item in items:
            if item[0].block != ROWS:
                boxes.setdefault(routes.owners[item[0].block], []).append(item)
        lacking = {asked, *routes.changed_since(before)}
        for lane in [item.lanes[0] for item, _ in items if item.block == ROWS]:
            pushed = outbox.rows[lane]
            for index, part in self.row_parts(routes, pushed.rows).items():
                if index in lacking:
                    boxes.setdefault(index, []).append((pushed.head(lane, index, part, routes.version), part.payload))
        async with SingleErrorGroup() as group:
            pushes = [
                group.create_task(
                    self._push(index, header, Outbox.part(box, everything or items, outbox.rows), skip_after_s, routes)
                )
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


def found(record: StepRecord | None, version: int) -> StepRecord:
    """What a pull of `version` brought. Raises Gone if no parameter server had the version's record."""
    if record is None:
        raise Gone(f"no parameter server keeps the reader positions of version {version}")
    return record
