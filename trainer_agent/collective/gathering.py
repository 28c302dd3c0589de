"""The mean gradients of a collective job as one trainer gets them: its own share, the others' shares, and what belongs to a generation.

    a new generation: fenced ─► all say which version they have ─► who lacks the newest gets it from one that has it ─► shares are open
    pull     version s + 1: from all owners, each its share ─► all of it is there ─► this trainer has it

Calls of another generation are refused, and what came of a pull of another generation is thrown away: what a trainer has said that it has
stays true, and a step is made of data of one generation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from shared.errors import BadFrame, Gone, NotReady, PeerError, StaleGeneration
from shared.records import JobSpec
from shared.records.layout import Layout
from shared.records.step import StepRecord
from shared.runtime import telemetry
from shared.serving.core.progress import missing_lanes
from shared.tables.hashing import Ids
from shared.tables.payload import ids_in, rows_in
from shared.wire.messages import PserverInfo, RowMeansPart, TableRequest
from trainer_agent.collective.arriving import Arriving
from trainer_agent.collective.groups import Group, GroupView
from trainer_agent.collective.late_members import LateMembers
from trainer_agent.collective.mean_blocks import MeanStore
from trainer_agent.collective.native.exchange import NativeExchange
from trainer_agent.collective.own_share import OwnShare
from trainer_agent.collective.ports import CollectivePorts
from trainer_agent.core.steps import agreed
from trainer_agent.data_plane.http import PserverPort
from trainer_agent.data_plane.lookups import Rows
from trainer_agent.data_plane.peers import Connect, Suspect
from trainer_agent.data_plane.transfer import Transfer, found
from trainer_agent.model.compute import Compute
from trainer_agent.waiting.retry import Backoff
from trainer_agent.waiting.single_error import SingleErrorGroup

if TYPE_CHECKING:
    from trainer_agent.collective.rows.means import RowMeans  # loads numba

GRACE_S = 0.1  # for answers to calls of a generation that is over; then their connections are closed
FIRST_ASK_S, LAST_ASK_S = 0.002, 0.1  # pauses between questions to a trainer that is not in the generation yet
ANSWER_S = 5.0
LOOK_S = 1.0

T = TypeVar("T")
log = telemetry.logger("exchange")


class MeanGradients(Transfer):
    """`store`: those that this trainer has; None: none."""

    makes_steps_again = True

    def __init__(
        self,
        view: GroupView,
        connect: Connect,
        compute: Compute,
        suspect: Suspect,
        certain: Callable[[], Awaitable[bool]],
        spec: JobSpec,
        ports: CollectivePorts,
    ) -> None:
        super().__init__(
            view, connect, compute, suspect, spec.gradient_dtype, certain, spec.on_nonfinite, spec.gradient_dtype
        )
        self.view, self.server, self._spec = view, ports.server, spec
        self._compute, self._ports = compute, ports
        self._own = OwnShare(ports.server)
        self._late = LateMembers(suspect, spec.lease_ttl_s)
        self.store: MeanStore | None = None
        self.native: NativeExchange | None = None  # of a job with native exchange
        self._gathering = asyncio.Lock()
        self._lost = ""
        self.on_formed: Callable[[], None] = lambda: None
        view.regrouped = self._regroup

    # ------------------------------------------------------------ what it has

    def begin(self, record: StepRecord, timeline: int) -> None:
        """Have the mean gradients of the versions behind that one."""
        if self.store is not None:
            self.store.let_go()
        layout, lanes, current = self._layout, self._spec.lanes, self._compute.current
        self.store = MeanStore(self._spec.job, layout, lanes, record, current, self.server.new_pool())
        self.server.serve(self.store, timeline)
        self.view.begin_again()

    def stop(self) -> None:
        """It has nothing any more. Nobody may be pulling."""
        if self.store is not None:
            self.store.let_go()
        self.store = None
        self.server.drop(self.server.generation)

    @property
    def layout(self) -> Layout:
        return self._layout

    @property
    def has(self) -> int:
        """The version of which it has all mean gradients; -1: none."""
        return self.store.has if self.store is not None else -1

    # ------------------------------------------------------------ generations

    def _regroup(self) -> None:
        """In the same instant in which the generation becomes known here."""
        group = self.view.group
        if self.native is not None:
            self.native.regroup(group)
        place, own = -1, frozenset[int]()
        if group is not None:
            place = group.place
            own = frozenset(number for number, owner in enumerate(self.routes.owners) if owner == place)
            self._ports.forget_peers(group.trainers.names)
        self.server.regroup(self.view.generation, place, group.slots if group is not None else None, own)
        self._known = {}
        self.server.block_stepped.set()
        log.info("regrouped", generation=self.view.generation, place=place, blocks=len(own), version=self.has)

    async def form(self, group: Group) -> None:
        """Learn what the trainers of the group have, and get what this one lacks. Raises Gone: nobody can give that."""
        await self.view.learn_addresses(group)
        said = await self._versions(group)
        if self.store is None:
            raise Gone("this trainer has no version to go on from")
        group.learn(said, self.server.stated(self.store))
        log.info("versions_known", generation=group.generation, newest=group.newest, own=self.has)
        if self.has > group.newest:  # whoever knew this version is gone, and it may be made of other records
            msg = f"no trainer of generation {group.generation} has version {self.has}"
            raise Gone(msg)
        if group.other_records:
            msg = f"version {self.has} of this trainer is made of other records than that of generation {group.generation}"
            raise Gone(msg)
        while self.has < group.newest:
            await self.catch_up(group)
        self.server.open(group.generation)
        group.formed.set()
        self.on_formed()

    async def _versions(self, group: Group) -> list[PserverInfo]:
        async with SingleErrorGroup() as tasks:
            asked = [tasks.create_task(self._ask_for_version(group, place)) for place in group.others]
        return [task.result() for task in asked]

    async def look_for_dead(self, group: Group) -> None:
        """Ask all others; who does not answer is suspected. It is not waited for."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await self._versions(group)

    async def catch_up(self, group: Group) -> None:
        """The next of the versions that others of the group have. Raises Gone; StaleGeneration: the generation is over, and nothing may have come."""
        await self._gather(group, group.newest)
        if self.view.group is not group:
            raise StaleGeneration(_over(group))

    async def _while_it_lasts(self, group: Group, work: Coroutine[Any, Any, T]) -> T | None:
        """None: another generation came first."""
        try:
            async with SingleErrorGroup() as tasks:
                ending = tasks.create_task(self._end_of(group))
                result = await work
                ending.cancel()
        except StaleGeneration:
            if self.view.group is group:
                raise
            return None
        finally:
            work.close()
        return result

    async def _end_of(self, group: Group, grace_s: float = 0.0) -> None:
        """Raises StaleGeneration `grace_s` after the end of the group's generation."""
        while self.view.group is group:
            await self.view.next_group.wait()
        await asyncio.sleep(grace_s)
        raise StaleGeneration(_over(group))

    async def _ask_for_version(self, group: Group, place: int) -> PserverInfo:
        """What the trainer at that place has, in this generation."""
        pause_s = FIRST_ASK_S
        while True:
            try:
                async with asyncio.timeout(ANSWER_S):
                    info = await self._port(place).info()
                if info.ready and info.generation == group.generation and info.timeline == self.server.timeline:
                    return info.model_copy(update={"index": place})
            except NotReady:
                await self.view.learn_addresses(group)
            except (PeerError, TimeoutError) as error:
                if (member := group.members.get(place)) is not None:
                    self._suspect(member.incarnation, str(error))
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_ASK_S)

    async def _formed(self) -> Group:
        """The group of the present generation, once it is formed. Raises Gone: what this trainer has is lost, and it forms no group until nobody uses
        that any more."""
        while True:
            if self._lost:
                raise Gone(self._lost)
            following, group = self.view.next_group, self.view.group
            if group is None:
                await following.wait()
            elif group.formed.is_set():
                return group
            else:
                await self._while_it_lasts(group, group.formed.wait())

    # ------------------------------------------------------------ versions

    async def gather_to(self, version: int, in_each: Callable[[Group], Awaitable[None]] | None = None) -> None:
        """Until all mean gradients of `version` are here; `in_each`: awaited in each generation meanwhile. Raises Gone: nobody can give them."""
        while self.has < version:
            group = await self._formed()
            if self.store is None:
                raise Gone("this trainer has no version to go on from")
            if in_each is not None:
                await in_each(group)
            await self._gather(group, version)

    async def _gather(self, group: Group, version: int) -> None:
        """All blocks of the next version, unless this trainer has `version`, or the generation ends before. Raises Gone: nobody can give it."""
        if self.native is not None and group.owns and self.has >= group.newest:
            with self._late.watching(group, lambda: range(group.trainers.owner_count)):  # an operation is one of all
                await self.native.reached(group, version)
            return
        async with self._gathering:
            store = self.store
            if store is None or store.has >= version or self.view.group is not group:
                return
            self._vectors = arriving = Arriving(self.server, store, group.newest)
            try:
                record = await self._arrived(group, arriving, store)
                self._complete(store, arriving, found(record, arriving.version))
            except StaleGeneration:
                pass
            finally:
                arriving.release()

    def _complete(self, store: MeanStore, arriving: Arriving, record: StepRecord) -> None:
        """All of it is there. Raises StaleGeneration: it does not count any more."""
        arriving.check()
        store.complete(arriving.version, arriving.complete(), record, arriving.rows)
        self._known, self._staged = self._staged, {}

    async def _arrived(self, group: Group, arriving: Arriving, store: MeanStore) -> StepRecord | None:
        """The version's record, once all blocks have come. Raises StaleGeneration: the generation is over."""
        self._staged = {}
        async with SingleErrorGroup() as tasks:
            ending = tasks.create_task(self._end_of(group, GRACE_S))
            parts = self._parts_of(group, arriving, store)
            pulls = {
                place: tasks.create_task(self._pull_part(place, blocks, arriving)) for place, blocks in parts.items()
            }
            if arriving.version > group.newest and group.owns:
                pulls[group.place] = tasks.create_task(self._own_record(store, arriving))
            if pulls:
                with self._late.watching(group, lambda: _late_places(group, store, pulls)):
                    await asyncio.wait(pulls.values())
            ending.cancel()
        arriving.check()
        return agreed([pull.result() for pull in pulls.values()])

    async def _pull_part(self, place: int, blocks: Sequence[int], arriving: Arriving) -> StepRecord | None:
        """None: the generation is over. The pulls from other trainers may come to their ends, too, so that connections stay."""
        try:
            record = await self._pull_from(place, blocks, arriving.version, None, self._narrow)
            if self._layout.tables and _place_of_rows(place, arriving) not in arriving.rows:  # they are many
                await self._pull_rows(place, arriving)
            return record
        except StaleGeneration:
            if not arriving.is_over:
                raise
            return None

    async def _pull_rows(self, place: int, arriving: Arriving) -> None:
        """The mean gradients of rows of a trainer that has them: it had the whole version of its blocks. Raises StaleGeneration: the generation is over."""
        arriving.check()
        arriving.rows[_place_of_rows(place, arriving)] = await self._row_means(place, arriving)

    @property
    def _row_means_wanted(self) -> int | None:
        vectors = self._vectors
        return vectors.shares if self._layout.tables and isinstance(vectors, Arriving) else None

    def _take_row_means(self, index: int, found: RowMeansPart) -> None:
        """Raises StaleGeneration: it does not count any more."""
        from trainer_agent.collective.rows.means import RowMeans  # noqa: PLC0415  loads numba

        arriving = self._vectors
        assert isinstance(arriving, Arriving)
        arriving.check()
        payload = bytearray(found.payload)  # loops are compiled for arrays that can be written
        ids = ids_in(payload, found.counts, self._dims, rows=True)
        rows = rows_in(payload, found.counts, self._dims, ids=True)
        arriving.rows[_place_of_rows(index, arriving)] = RowMeans(ids, rows, found.has_data)

    async def _row_means(self, place: int, arriving: Arriving) -> RowMeans:
        """Of all tables: one request, more only if they are large."""
        from trainer_agent.collective.rows.means import RowMeans  # noqa: PLC0415  loads numba

        backoff = Backoff(f"mean gradients of rows from the trainer at place {place}")
        parts, first = list[tuple[list[Ids], list[Rows]]](), 0
        while True:
            arriving.check()
            fields = {"version": arriving.version, "table": 0, "first": first, "slots": arriving.shares}
            try:
                end, payload = await self._port(place).table(TableRequest(**self.envelope(), **fields))
            except (PeerError, StaleGeneration) as error:
                arriving.check()
                await self._suspect_peer(place, error)
                await backoff.failed(error)
                continue
            ids = ids_in(payload, end.counts, self._dims, rows=True)
            parts.append((ids, rows_in(payload, end.counts, self._dims, ids=True)))
            if end.next >= end.total:
                arriving.check()
                if len(parts) > 1:
                    ids, rows = (
                        [np.concatenate(each) for each in zip(*some, strict=True)] for some in zip(*parts, strict=True)
                    )
                else:
                    ids, rows = parts[0]
                return RowMeans(ids, rows, end.has_data)
            if end.next <= first:
                raise BadFrame(f"the trainer at place {place} sent no mean gradients of rows from the {first}th on")
            first = end.next

    def _parts_of(self, group: Group, arriving: Arriving, store: MeanStore) -> Mapping[int, Sequence[int]]:
        """Which blocks come from where."""
        if arriving.version > group.newest:
            return {place: blocks for place, blocks in self.routes.blocks.items() if place != group.place}
        if not group.givers:
            msg = f"no other trainer of generation {group.generation} has version {arriving.version}"
            raise Gone(msg)
        giver = group.givers[group.place % len(group.givers)]
        return {giver: tuple(store.blocks)}

    async def _own_record(self, store: MeanStore, arriving: Arriving) -> StepRecord | None:
        """Once the own share has the version; None: the generation is over."""
        while not store.own_share_has(arriving.version) and not arriving.is_over:
            self.server.block_stepped.clear()
            await self.server.block_stepped.wait()
        return store.history.record(arriving.version)

    def _check_pull(self) -> None:
        assert isinstance(self._vectors, Arriving)
        self._vectors.check()

    def _may_be_same(self, block: int, known: str) -> bool:
        return bool(known) or (self.store is not None and not self.store.blocks[block].is_buffer)

    # ------------------------------------------------------------ peers

    def _port(self, index: int) -> PserverPort:
        group = self.view.group
        if group is not None and index == group.place:
            return self._own
        return super()._port(index)


def _place_of_rows(place: int, arriving: Arriving) -> int:
    """As in `Arriving.rows`."""
    from trainer_agent.collective.rows.means import WHOLE_PLACE  # noqa: PLC0415  loads numba

    return place if arriving.shares else WHOLE_PLACE


def _late_places(group: Group, store: MeanStore, pulls: Mapping[int, asyncio.Task[StepRecord | None]]) -> set[int]:
    """Whose lanes the own share lacks. If it lacks none: whose mean gradients have not come."""
    own = pulls.get(group.place)
    if own is None or own.done():
        return {place for place, pull in pulls.items() if not pull.done()}
    trainers = group.trainers
    return {trainers.place_of(lane) for first, last in missing_lanes(store) for lane in range(first, last)}


def _over(group: Group) -> str:
    return f"generation {group.generation} is over"
