"""Mean gradients of a collective job made by a native group, in place of pushes to owners and pulls from
them.

a generation is formed ─► the trainers with lanes build a group ─► for each step:
    all say which nodes they give ─► buckets, as backward finishes them ─► buffers
        ─► (fast: all have everything) ─► the version is there
an error, or a step that begins again: the group is cut and built anew; another generation: the same, with its
trainers

Versions, statements, what is kept for those who lack a version, spares, joiners and checkpoints stay as in
direct exchange: only how the members of one generation make the next version differs. With the fast reduction
its bits depend on who they are. So nobody uses a version before all have received it: whoever is left has it
then, and no other one is made.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from pydantic import ValidationError

from trainer_agent.collective.groups import Group, GroupView
from trainer_agent.collective.mean_blocks import MeanStore, released
from trainer_agent.collective.native.link import (
    Link,
    Meeting,
    NativeStatement,
    OperationLimit,
    Overtaken,
    check_alike,
)
from trainer_agent.collective.native.reducing import Given
from trainer_agent.collective.native.step import StepMaker
from trainer_agent.collective.server import ShareServer
from trainer_agent.data_plane.pushes import Outbox, Verdict
from trainer_agent.waiting import SingleErrorGroup
from trireme_shared.blocks.buffers import Buffer
from trireme_shared.collective.group import Broken
from trireme_shared.platform.etcd import Etcd
from trireme_shared.platform.runtime import clock, telemetry
from trireme_shared.platform.runtime.http import own_network
from trireme_shared.protocol.errors import InvalidArgument
from trireme_shared.protocol.records import JobSpec
from trireme_shared.protocol.records.layout import Layout
from trireme_shared.protocol.records.step import StepRecord
from trireme_shared.protocol.wire.messages import PROTOCOL_VERSION, PushHeader

HEAD_BYTES = 8
AGAIN_S = 0.05
# between two looks whether a trainer that is waited for lives, and whether the others begin anew
LOOK_S = 1.0
LAST_LOOK_S = 5.0
log = telemetry.logger("native")


@dataclass(frozen=True, slots=True)
class NativePlace:
    """Of this process. `host`: the address at which others reach it. `backend`: gloo or nccl."""

    host: str
    backend: str


class Means(Protocol):
    """The mean gradients that a trainer has, see MeanGradients."""

    view: GroupView
    server: ShareServer
    store: MeanStore | None

    @property
    def layout(self) -> Layout: ...

    @property
    def has(self) -> int: ...

    async def look_for_dead(self, group: Group) -> None: ...

    async def catch_up(self, group: Group) -> None: ...


class NativeExchange:
    """Of one trainer. `host`: its mean gradients. Run `run` in each generation in which it has lanes. `link`:
    to its group, if there is one; `attempts`: the last generation, and how often its group was begun."""

    def __init__(
        self,
        host: Means,
        spec: JobSpec,
        trainer: str,
        etcd: Etcd,
        lease_id: Callable[[], int],
        place: NativePlace,
    ) -> None:
        self._host, self._spec, self._trainer, self._place = host, spec, trainer, place
        self._etcd, self._lease_id = etcd, lease_id
        self._layout = host.layout
        self._maker, self._limit = StepMaker(spec, host.layout), OperationLimit()
        self._canonical = spec.reduction == "canonical"
        self._given: Given | None = None
        self.link: Link | None = None
        self._received: Received | None = None
        self.attempts = (-1, 0)
        self._changed = asyncio.Event()
        self._failure: Exception | None = None

    def __repr__(self) -> str:
        return f"<NativeExchange, {self._spec.reduction}, {len(self._maker.buckets)} buckets: {self.link!r}>"

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # ------------------------------------------------------------ generations

    def regroup(self, group: Group | None) -> None:
        """In the instant in which another generation is known here. What was received whole is kept: the
        trainers with lanes tell each other of it. One that has none any more says in its own way what it
        has."""
        if self.link is not None:
            self.link.cut()
        if self._given is not None:
            self._given.end()
        self._given = None
        received = self._received
        spare = group is not None and group.place >= 0 and not group.owns
        if spare and received is not None and self._host.view.generation == received.generation + 1:
            self._settle()  # later than that it may have been made once more
        self._notify()

    def _settle(self) -> None:
        """What was received whole is the version that this trainer has, from now on."""
        received, self._received = self._received, None
        if received is None:
            return
        store, version = received.store, received.version
        if not received.follows(self._host.store):
            received.release()
            return
        store.complete(version, received.arrived, received.record)
        for number in store.own:
            self._host.server.stepped(number, version)
        self._notify()

    def _keep(self, received: Received | None) -> None:
        before, self._received = self._received, received
        if before is not None:
            before.release()

    async def run(self, group: Group) -> None:
        """Build the group and make versions with it, again and again. Until cancelled. Whoever waits for a
        version is told if there can be none."""
        try:
            await self._run(group)
        except InvalidArgument as error:
            self._failure = error
            self._notify()

    async def _run(self, group: Group) -> None:
        while self._host.view.group is group:
            attempt = self._next_attempt(group.generation)
            try:
                async with self._entered(group, attempt) as (link, meeting), SingleErrorGroup() as tasks:
                    if meeting is not None:
                        tasks.create_task(self._until_overtaken(meeting))
                    while True:
                        await self._step(group, link)
            except Overtaken as error:
                self.attempts = group.generation, error.attempt
            except Broken as error:
                if self._host.view.group is group:
                    log.warning(
                        "group_broken", generation=group.generation, attempt=attempt, cause=str(error)
                    )
                    await self._host.look_for_dead(group)
            await asyncio.sleep(AGAIN_S)

    def _next_attempt(self, generation: int) -> int:
        before, following = self.attempts
        attempt = following if before == generation else 0
        self.attempts = generation, attempt + 1
        return attempt

    @asynccontextmanager
    async def _entered(self, group: Group, attempt: int) -> AsyncIterator[tuple[Link, Meeting | None]]:
        """Raises Broken, InvalidArgument."""
        link = self.link = Link(
            self._place.host, self._place.backend, self._spec.threads_per_trainer, self._limit
        )
        size = group.trainers.owner_count
        try:
            meeting = None
            if size > 1:
                base = self._host.view.keys.exchange_of(group.generation)
                meeting = Meeting(self._etcd, base, attempt, self._lease_id, group.place, size)
                await self._meet(group, link, meeting)
            self._settle()
            yield link, meeting
        finally:
            link.cut()
            try:
                await link.idle()
            finally:
                link.close()
                self.link = None

    async def _until_overtaken(self, meeting: Meeting) -> None:
        """A trainer that computes, or has nothing more to do, notices by no operation that the others begin
        anew. Raises Overtaken."""
        pause_s, before = LOOK_S, self._host.has
        while True:
            await asyncio.sleep(pause_s)
            has, pause_s = self._host.has, min(2 * pause_s, LAST_LOOK_S)
            if has != before:
                before, pause_s = has, LOOK_S
                continue
            await meeting.check()

    async def _meet(self, group: Group, link: Link, meeting: Meeting) -> None:
        attempt, size = meeting.attempt, meeting.size
        mine = NativeStatement(
            trainer=self._trainer,
            version=self._host.has,
            received=self._kept_of(),
            listener=await link.listen(),
            network=own_network(),
            manifest=self._manifest(size),
        )
        async with SingleErrorGroup() as tasks:
            looking = tasks.create_task(self._look_for_dead(group))
            statements = await meeting.statements(mine)
            looking.cancel()
        check_alike(statements)
        versions = [each.version for each in statements]
        group.newest = max(group.newest, *versions)
        group.givers = [
            place for place, version in enumerate(versions) if version == group.newest != self._host.has
        ]
        self._notify()
        while self._host.has < group.newest:
            await self._host.catch_up(group)
        await link.connect(meeting, statements)
        assert link.group is not None
        await link.call(link.group.exchange, [group.generation, attempt], link.limit.seconds)
        await self._spread(link, statements, group.newest)
        if group.place == 0:
            await meeting.forget()
        log.info("group_built", generation=group.generation, attempt=attempt, rank=group.place, trainers=size)

    def _kept_of(self) -> int:
        if self._received is not None and not self._received.follows(self._host.store):
            self._keep(None)
        return self._received.generation if self._received is not None else -1

    async def _spread(self, link: Link, statements: list[NativeStatement], newest: int) -> None:
        """What some have received whole, to all: of what was made in several generations, the last. All have
        it then, or nobody counts on it."""
        having = [
            (each.received, -rank)
            for rank, each in enumerate(statements)
            if each.version == newest and each.received >= 0
        ]
        if not having or link.group is None:
            self._keep(None)
            return
        generation, rank = max(having)
        mine = self._received if self._kept_of() == generation else None
        data = mine.to_bytes() if mine is not None and link.rank == -rank else None
        told = await link.call(link.group.tell, data, -rank, link.limit.seconds)
        store = self._host.store
        if mine is None and store is not None:
            self._keep(Received.read(told, store, generation))
        await link.call(link.group.exchange, [newest + 1], link.limit.seconds)
        log.info("received_elsewhere", version=newest + 1, made_in=generation, had=mine is not None)

    async def _look_for_dead(self, group: Group) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            await self._host.look_for_dead(group)

    def _manifest(self, size: int) -> dict[str, str]:
        return {
            "protocol": str(PROTOCOL_VERSION),
            "trainers": str(size),
            "layout": self._layout.digest,
            "backend": self._place.backend,
            "reduction": self._spec.reduction,
            "buckets": str([bucket.described() for bucket in self._maker.buckets]),
        }

    # ------------------------------------------------------------ the loop's calls

    async def offer(self, header: PushHeader, boxes: Mapping[int, Outbox]) -> Verdict:
        """Take all blocks of a push, as they are finished. They are read until the step is over, or begins
        again."""
        async with SingleErrorGroup() as tasks:
            taking = [tasks.create_task(self._take(header, box)) for box in boxes.values()]
        verdicts = {task.result() for task in taking}
        if verdicts != {Verdict.ACKNOWLEDGED}:
            return next(iter(verdicts - {Verdict.ACKNOWLEDGED}), Verdict.ACKNOWLEDGED)
        for box in boxes.values():
            box.first = tuple(position.lane for position in header.positions)
        return Verdict.ACKNOWLEDGED

    async def _take(self, header: PushHeader, box: Outbox) -> Verdict:
        place, push = 0, None
        while (found := await box.at(place)) is not None:
            place += 1
            item, payload = found
            store = self._host.store
            if store is None or header.generation != self._host.view.generation:
                return Verdict.STALE
            if header.step < store.has:
                continue  # the version is there already
            push = push or store.admit(header)
            if store.judge(push, item.lanes) is not None:
                return Verdict.FENCED
            if item.lanes not in push.noted:
                push.noted.add(item.lanes)
                store.history.note(header, push.positions, item.lanes, item.result)
            self._given_to(header).add(header, item, payload)
        return Verdict.ACKNOWLEDGED if header.generation == self._host.view.generation else Verdict.STALE

    def _given_to(self, header: PushHeader) -> Given:
        given = self._given
        if given is None or (given.step, given.generation) != (header.step, header.generation):
            given = self._given = Given(header.step, header.generation)
            self._notify()
        return given

    async def beginning(self, step: int) -> None:
        """This trainer begins a step, and uses the memory of its gradients. If it had begun that step before,
        the group, which may be reading it, is cut."""
        given = self._given
        if given is None or given.step != step:
            if self.link is not None and self.link.is_cut:
                await self.link.idle()
            return
        given.end()
        self._given = None
        if self.link is not None:
            self.link.cut()
            await self.link.idle()

    async def reached(self, group: Group, version: int) -> None:
        """Until this trainer has it, or another one of the group has what this one lacks, or the generation
        is over. Raises InvalidArgument: there can be none."""
        while self._host.has < version and self._host.has >= group.newest and self._host.view.group is group:
            if self._failure is not None:
                raise self._failure
            await self._changed.wait()

    # ------------------------------------------------------------ one step

    async def _step(self, group: Group, link: Link) -> None:
        """The next version of this trainer, once all have its gradients. Raises Broken, InvalidArgument."""
        store = self._host.store
        while store is None or self._given is None or self._given.step != store.has:
            await self._changed.wait()
            store = self._host.store
        given = self._given
        await given.begun(group.trainers.lanes_of(self._trainer))
        began = clock.monotonic()
        try:
            made = await self._maker.made(link, given, store, self._host.server)
            self._keep(Received(store, group.generation, made.version, made.arrived, made.record))
            if not self._canonical and link.group is not None:
                await self._maker.all_have(link, made)
        except Broken:
            self._limit.broke(clock.monotonic() - began)
            raise
        self._limit.took(clock.monotonic() - began)
        self._settle()


@dataclass(slots=True)
class Received:
    """A version that a trainer has received whole before it knows that all others have, too: kept beside what
    it has, until that is known.

        reduced ─► Received ─ all say that they have it ─► the version that the trainer has
                      `─ the group breaks: told in the next one ─► who lacks it gets it ─► all say ...

    `generation`: in which it was made: with another one the bits are others. `arrived`: all blocks; it has a
    reference to each. `store`: which lacks it."""

    store: MeanStore
    generation: int
    version: int
    arrived: dict[int, Buffer | None]
    record: StepRecord

    def follows(self, store: MeanStore | None) -> bool:
        """Whether it is the version after the one that `store` has."""
        return self.store is store and self.version == self.store.has + 1

    def release(self) -> None:
        released(self.arrived)
        self.arrived = {}

    def to_bytes(self) -> bytes:
        blocks = sorted(self.arrived)
        parts = [b"" if (buffer := self.arrived[number]) is None else bytes(buffer.view) for number in blocks]
        told = {"record": self.record.model_dump(mode="json"), "sizes": [len(part) for part in parts]}
        head = json.dumps(told).encode()
        return len(head).to_bytes(HEAD_BYTES, "big") + head + b"".join(parts)

    @classmethod
    def read(cls, data: bytes, store: MeanStore, generation: int) -> Received:
        """Raises Broken: it does not fit what `store` has."""
        first = HEAD_BYTES + int.from_bytes(data[:HEAD_BYTES], "big")
        try:
            told = json.loads(data[HEAD_BYTES:first])
            record, sizes = StepRecord.model_validate(told["record"]), [int(size) for size in told["sizes"]]
        except (ValidationError, ValueError, KeyError, TypeError) as error:
            raise Broken(
                f"a version that was received elsewhere cannot be read: {str(error)[:200]}"
            ) from None
        places = [store.blocks[number].place for number in sorted(store.blocks)]
        fits = len(sizes) == len(places) and all(
            size in (0, place.bytes) for size, place in zip(sizes, places, strict=True)
        )
        if not fits or record.version != store.has + 1 or len(data) != first + sum(sizes):
            raise Broken(
                f"version {record.version} that was received elsewhere does not follow version {store.has}"
            )
        ends = [first]
        for size in sizes:
            ends.append(ends[-1] + size)
        arrived: dict[int, Buffer | None] = {}
        for place, (begin, end) in zip(places, pairwise(ends), strict=True):
            arrived[place.number] = None
            if end > begin:
                buffer = store.pool.take(place.dtype, place.elements)
                buffer.view[:] = data[begin:end]
                arrived[place.number] = buffer
        return cls(store, generation, record.version, arrived, record)
