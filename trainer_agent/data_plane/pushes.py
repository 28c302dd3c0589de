"""Pushes to all processes that serve blocks: one stream a process, sent again until it is acknowledged or no longer needed.

blocks from the outbox of a process, as backward finishes them ──► PushAnswer ──verdict──►
    ACKNOWLEDGED │ MOVED, AGAIN: pushed again │ BEHIND, STALE generation, FENCED attempt │ BROKEN: an error
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from enum import Enum

from trainer_agent.data_plane.fleet_client import FleetClient
from trainer_agent.data_plane.outbox import Outbox, Outboxes
from trainer_agent.data_plane.routing import Routes
from trainer_agent.data_plane.row_lookups import RowRouter
from trainer_agent.waiting import Backoff, SingleErrorGroup
from trireme_shared.protocol.errors import (
    NotReady,
    PeerError,
    StaleAttempt,
    StaleGeneration,
    TooEarly,
    TriremeError,
    WrongOwner,
)
from trireme_shared.protocol.records import Mode
from trireme_shared.protocol.records.layout import ROWS
from trireme_shared.protocol.wire.messages import PushAnswer, PushBlock, PushHeader

MOVING = "MOVING"  # of a block that is on its way to another parameter server


class Verdict(Enum):
    """From good to bad. SKIPPED: given up, nobody answered. MOVED: another parameter server has some blocks, or will have them in a
    moment. BEHIND: the ledger expects an earlier minibatch."""

    ACKNOWLEDGED = "acknowledged"
    SKIPPED = "skipped"
    MOVED = "moved"
    AGAIN = "again"
    BEHIND = "behind"
    STALE = "stale"
    FENCED = "fenced"
    BROKEN = "broken"


_VERDICTS = {
    StaleGeneration.code: Verdict.STALE,
    StaleAttempt.code: Verdict.FENCED,
    TooEarly.code: Verdict.AGAIN,
    NotReady.code: Verdict.AGAIN,
    WrongOwner.code: Verdict.MOVED,
    MOVING: Verdict.MOVED,
}


_ORDER = {found: place for place, found in enumerate(Verdict)}


class Pushes:
    """Pushes of one trainer. `again`: whether a step begins again in another generation, so that what was acknowledged before does not count."""

    def __init__(self, fleet: FleetClient, router: RowRouter, *, again: bool) -> None:
        self._fleet, self._router, self._again = fleet, router, again

    def __repr__(self) -> str:
        return f"<Pushes to {self._fleet!r}>"

    @asynccontextmanager
    async def pushing(
        self, header: PushHeader, outboxes: Mapping[int, Outbox], skip_after_s: float | None = None
    ) -> AsyncIterator[dict[int, Verdict]]:
        """Push to all parameter servers while the block of code fills the outboxes. After the block, the dict has the verdict of each."""
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
            await self._fleet.be_certain(backoff)
            if await self._fleet.is_silent(index, skip_after_s):
                return {index: Verdict.SKIPPED}
            try:
                answer = await self._fleet.port(index).push(header, outbox.stream())
            except StaleGeneration:
                return {index: Verdict.STALE}
            except PeerError as error:
                if self._fleet.silence.failed(index, error, skip_after_s):
                    return {index: Verdict.SKIPPED}
                # without a look for news: the failure is what followed from the last ones
                if self._again and self._fleet.generation > header.generation:
                    return {index: Verdict.STALE}
                await self._fleet.suspect(index, error)
                if routes is not None and self._fleet.routes.version != routes.version:
                    return await self._push_again(index, header, outbox, await outbox.items(), routes, skip_after_s)
                problem: object = error
            else:
                self._fleet.silence.answered(index)
                outbox.first = answer.first
                found, problem = verdict(answer, header.mode)
                if found is Verdict.BROKEN:
                    raise TriremeError(f"pserver-{index} refused a push of step {header.step}: {problem}")
                if found is Verdict.MOVED:
                    moved = moved_blocks(answer)
                    everything = await outbox.items()
                    rest = [item for item in everything if item[0].block in moved]
                    refusals += 1
                    before = self._fleet.routes if routes is None else routes
                    await self._fleet.rerouted(before.version, refusals, moving=is_moving(answer))
                    if self._fleet.generation > header.generation:
                        return {index: Verdict.STALE}
                    rows_moved = ROWS in moved and self._fleet.routes.version != before.version
                    if rows_moved or self._fleet.routes.split(moved - {ROWS}).keys() - {index}:
                        more = await self._push_again(index, header, outbox, rest, before, skip_after_s, everything)
                        return _join({index: Verdict.ACKNOWLEDGED}, more)
                    outbox, routes = Outbox.part(rest, everything, outbox.rows), self._fleet.routes
                    backoff.waited(problem)
                    continue
                if found is not Verdict.AGAIN:
                    return {index: found}
            if self._fleet.generation > header.generation:
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
        routes, boxes = self._fleet.routes, dict[int, list[tuple[PushBlock, memoryview]]]()
        for item in items:
            if item[0].block != ROWS:
                boxes.setdefault(routes.owners[item[0].block], []).append(item)
        lacking = {asked, *routes.changed_since(before)}
        for lane in [item.lanes[0] for item, _ in items if item.block == ROWS]:
            pushed = outbox.rows[lane]
            for index, part in self._router.row_parts(routes, pushed.rows).items():
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
        """Once this returns, the parameter servers refuse other data of the header's lanes in its step. Raises StepTorn if one has
        such data already (the job will go back to a checkpoint), StaleGeneration."""

        async def ask(routes: Routes, index: int) -> object:
            claim = header.with_fields(slots=routes.version)
            return await self._fleet.ask(index, lambda port: port.push(claim, _nothing()), routes=routes)

        await self._fleet.ask_all(ask)


async def _nothing() -> AsyncGenerator[tuple[PushBlock, memoryview], None]:
    return
    yield


def _join(verdicts: dict[int, Verdict], more: Mapping[int, Verdict]) -> dict[int, Verdict]:
    """In place: the worst of each parameter server."""
    for index, found in more.items():
        verdicts[index] = worst((verdicts.get(index, Verdict.ACKNOWLEDGED), found))
    return verdicts


def verdict(answer: PushAnswer, mode: Mode) -> tuple[Verdict, str]:
    """The worst that the answer says about any block, with a sentence."""
    found_worst, sentence = Verdict.ACKNOWLEDGED, ""
    for refusal in answer.refused:
        found = _VERDICTS.get(refusal.code, Verdict.BROKEN)
        if mode is Mode.ASYNC and refusal.code == TooEarly.code:
            found = Verdict.BEHIND
        if _ORDER[found] > _ORDER[found_worst]:
            found_worst = found
            why = refusal.message or f"it is at version {refusal.version}"
            sentence = f"block {refusal.block} refused: {refusal.code}, {why}"
    return found_worst, sentence


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    return max(verdicts, key=_ORDER.__getitem__, default=Verdict.ACKNOWLEDGED)


def is_moving(answer: PushAnswer) -> bool:
    """Whether blocks are frozen because they are on their way."""
    return any(refused.code == MOVING for refused in answer.refused)


def moved_blocks(answer: PushAnswer) -> frozenset[int]:
    """The blocks that have to be pushed to another parameter server."""
    return frozenset(refused.block for refused in answer.refused if _VERDICTS.get(refused.code) is Verdict.MOVED)
