"""The mean gradients of a collective job as one trainer gets them: its own share, the others' shares, and
what belongs to a generation.

    a new generation: fenced ─► all say which version they have
        ─► who lacks the newest gets it from one that has it ─► shares are open
    pull     version s + 1: from all owners, each its share ─► all of it is there ─► this trainer has it

Calls of another generation are refused, and what came of a pull of another generation is thrown away: what a
trainer has said that it has stays true, and a step is made of data of one generation.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from trainer_agent.collective.groups import Group, GroupView, LateMembers
from trainer_agent.collective.mean_blocks import Arriving, MeanStore, released
from trainer_agent.collective.native.exchange import NativeExchange
from trainer_agent.collective.ports import CollectivePorts
from trainer_agent.collective.server import OwnShare
from trainer_agent.collective.state.catching_up import Step
from trainer_agent.data_plane.fleet_client import Connect, FleetClient, Suspect
from trainer_agent.data_plane.http import PserverPort
from trainer_agent.data_plane.pulls import Pull, Pulls, agreed
from trainer_agent.data_plane.step_exchange import found
from trainer_agent.membership.lease import Membership
from trainer_agent.model.compute import Compute
from trainer_agent.waiting import SingleErrorGroup
from trireme_shared.platform.runtime import telemetry
from trireme_shared.protocol.errors import Gone, NotReady, PeerError, StaleGeneration
from trireme_shared.protocol.records import JobSpec, TrainerList
from trireme_shared.protocol.records.layout import Layout
from trireme_shared.protocol.records.step import StepRecord
from trireme_shared.protocol.wire.messages import PserverInfo
from trireme_shared.serving.core.store import missing_lanes

GRACE_S = 0.1  # for answers to calls of a generation that is over; then their connections are closed
# pauses between questions to a trainer that is not in the generation yet
FIRST_ASK_S, LAST_ASK_S = 0.002, 0.1
ANSWER_S = 5.0
LOOK_S = 1.0

T = TypeVar("T")
log = telemetry.logger("exchange")


class MeanGradients:
    """The mean gradients that one trainer has, and those that it gets from the others of its group."""

    def __init__(
        self,
        view: GroupView,
        connect: Connect,
        compute: Compute,
        suspect: Suspect,
        standing: Membership,
        spec: JobSpec,
        ports: CollectivePorts,
    ) -> None:
        self.view, self.server = view, ports.server
        self._own = OwnShare(ports.server)
        self.fleet = FleetClient(view, connect, compute.layout, suspect, standing.certain, self._own_port)
        self.pulls = Pulls(self.fleet, spec.gradient_dtype, spec.on_nonfinite)
        self._spec, self._compute, self._standing = spec, compute, standing
        self._suspect, self._forget_peers = suspect, ports.forget_peers
        self._late = LateMembers(suspect, spec.lease_ttl_s)
        #: None: this trainer has no version
        self.store: MeanStore | None = None
        #: makes the mean gradients of a job with native exchange
        self.native: NativeExchange | None = None
        self._gathering = asyncio.Lock()
        self._lost = ""
        view.observers.append(self._regroup)

    def __repr__(self) -> str:
        return f"<MeanGradients to version {self.has}, {self.view!r}>"

    def _own_port(self, place: int) -> PserverPort | None:
        group = self.view.group
        return self._own if group is not None and place == group.place else None

    # ------------------------------------------------------------ what it has

    def begin(self, record: StepRecord, timeline: int) -> None:
        """From now on this trainer has the mean gradients of the versions behind that one."""
        if self.store is not None:
            self.store.let_go()
        layout, lanes, current = self.fleet.layout, self._spec.lanes, self._compute.current
        self.store = MeanStore(self._spec.job, layout, lanes, record, current, self.server.new_pool())
        self.server.serve(self.store, timeline)
        self.view.begin_again()

    def stop(self) -> None:
        """This trainer has no mean gradients any more. Nobody may be pulling."""
        if self.store is not None:
            self.store.let_go()
        self.store = None
        self.server.drop(self.server.generation)

    @property
    def layout(self) -> Layout:
        return self.fleet.layout

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
            own = frozenset(number for number, owner in enumerate(self.fleet.routes.owners) if owner == place)
            self._forget_peers(group.trainers.names)
        self.server.regroup(self.view.generation, place, group.slots if group is not None else None, own)
        self.pulls.forget()
        self.server.block_stepped.set()
        log.info("regrouped", generation=self.view.generation, place=place, blocks=len(own), version=self.has)

    async def form(self, group: Group) -> None:
        """Learn what the trainers of the group have, and get what this one lacks. Raises Gone: nobody can
        give that."""
        await self.view.learn_addresses(group)
        said = await self.versions_in(group)
        if self.store is None:
            raise Gone("this trainer has no version to go on from")
        group.learn(said, self.server.stated(self.store))
        log.info("versions_known", generation=group.generation, newest=group.newest, own=self.has)
        if self.has > group.newest:  # whoever knew this version is gone, and it may be made of other records
            msg = f"no trainer of generation {group.generation} has version {self.has}"
            raise Gone(msg)
        if group.other_records:
            msg = (
                f"version {self.has} of this trainer is made of other records than that of generation "
                f"{group.generation}"
            )
            raise Gone(msg)
        while self.has < group.newest:
            await self.catch_up(group)
        self.server.open(group.generation)
        group.formed.set()
        self._standing.without_doubt()

    async def versions_in(self, group: Group) -> list[PserverInfo]:
        """What each of the other trainers of the group has."""
        async with SingleErrorGroup() as tasks:
            asked = [tasks.create_task(self.ask_for_version(group, place)) for place in group.others]
        return [task.result() for task in asked]

    async def look_for_dead(self, group: Group) -> None:
        """Ask all others; who does not answer is suspected. It is not waited for."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await self.versions_in(group)

    async def catch_up(self, group: Group) -> None:
        """The next of the versions that others of the group have. Raises Gone; StaleGeneration: the
        generation is over, and nothing may have come."""
        await self._gather(group, group.newest)
        if self.view.group is not group:
            raise StaleGeneration(_over(group))

    async def while_it_lasts(self, group: Group, work: Coroutine[Any, Any, T]) -> T | None:
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

    async def ask_for_version(self, group: Group, place: int) -> PserverInfo:
        """What the trainer at that place has, in this generation."""
        pause_s = FIRST_ASK_S
        while True:
            try:
                async with asyncio.timeout(ANSWER_S):
                    info = await self.fleet.port(place).info()
                if (
                    info.ready
                    and info.generation == group.generation
                    and info.timeline == self.server.timeline
                ):
                    return info.with_fields(index=place)
            except NotReady:
                await self.view.learn_addresses(group)
            except (PeerError, TimeoutError) as error:
                if (member := group.members.get(place)) is not None:
                    self._suspect(member.incarnation, str(error))
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_ASK_S)

    @property
    def lost(self) -> str:
        """Why what this trainer has is of no use any more, and is about to be forgotten; "": it is of use."""
        return self._lost

    def lose(self, cause: str) -> None:
        """What this trainer has is of no use any more: it is no member until it has got everything anew."""
        log.warning("version_lost", version=self.has, cause=cause)
        self._lost = cause
        self.server.drop(self.server.generation)
        self._standing.set(holds=None)
        if self.view.group is not None:
            self.view.group.formed.set()

    def found_again(self) -> None:
        """What was lost is forgotten; what this trainer has now, if anything, is of use."""
        self._lost = ""

    async def formed(self) -> Group:
        """The group of the present generation, once it is formed. Raises Gone: what this trainer has is lost,
        and it forms no group until nobody uses that any more."""
        while True:
            if self._lost:
                raise Gone(self._lost)
            following, group = self.view.next_group, self.view.group
            if group is None:
                await following.wait()
            elif group.formed.is_set():
                return group
            else:
                await self.while_it_lasts(group, group.formed.wait())

    # ------------------------------------------------------------ versions

    async def gather_to(
        self, version: int, in_each: Callable[[Group], Awaitable[None]] | None = None
    ) -> None:
        """Until all mean gradients of `version` are here; `in_each`: awaited in each generation meanwhile.
        Raises Gone: nobody can give them."""
        while self.has < version:
            group = await self.formed()
            if self.store is None:
                raise Gone("this trainer has no version to go on from")
            if in_each is not None:
                await in_each(group)
            await self._gather(group, version)

    # ----------------------------------------------------- versions, for a trainer without lanes (see Follow)

    def listed(self) -> TrainerList | None:
        """The trainers of the present generation, if they are known."""
        return self.view.group.trainers if self.view.group is not None else None

    async def wait(self, version: int) -> None:
        """Returns once this trainer has all mean gradients of that version. Raises Gone."""
        await self.gather_to(version)

    def take(self, version: int) -> Step:
        """How that version, which it has, follows from the one before. Those before it are not kept for this
        trainer any more."""
        store = self.store
        assert store is not None
        record, gradients = store.history.record(version), store.retained(version)
        assert record is not None
        store.in_use = version
        store.forget()
        tensors = {
            number: buffer.tensor if buffer is not None else None for number, buffer in gradients.items()
        }
        rows = store.rows.whole[version] if store.rows is not None else None
        return Step(record, tensors, lambda: released(gradients), rows)

    def measured(self, version: int, norm: float) -> StepRecord:
        """The record of a version with the norm of the gradient that made it, if the job clips. Raises Gone:
        the job went back meanwhile."""
        record = self.store.history.record(version) if self.store is not None else None
        if self.store is None or record is None:
            raise Gone(f"this trainer has no version {version} any more")
        if self._spec.clip_grad_norm is not None:
            record = with_norm(record, norm)
            self.store.history.take_record(record)
        return record

    # ------------------------------------------------------------ parts

    async def _gather(self, group: Group, version: int) -> None:
        """All blocks of the next version, unless this trainer has `version`, or the generation ends before.
        Raises Gone: nobody can give it."""
        if self.native is not None and group.owns and self.has >= group.newest:
            # an operation is one of all
            with self._late.watching(group, lambda: range(group.trainers.owner_count)):
                await self.native.reached(group, version)
            return
        async with self._gathering:
            store = self.store
            if store is None or store.has >= version or self.view.group is not group:
                return
            arriving = Arriving(self.server, store, group.newest)
            pull = self.pulls.begun(arriving.version, arriving)
            try:
                record = found(await self._arrived(group, pull, arriving, store), arriving.version)
                arriving.check()
                store.complete(arriving.version, arriving.complete(), record, arriving.rows)
                self.pulls.use(pull)
            except StaleGeneration:
                pass
            finally:
                arriving.release()

    async def _arrived(
        self, group: Group, pull: Pull, arriving: Arriving, store: MeanStore
    ) -> StepRecord | None:
        """The version's record, once all blocks have come. Raises StaleGeneration: the generation is over."""
        async with SingleErrorGroup() as tasks:
            ending = tasks.create_task(self._end_of(group, GRACE_S))
            parts = self._parts_of(group, arriving, store)
            pulls = {
                place: tasks.create_task(self._pull_part(place, blocks, pull, arriving))
                for place, blocks in parts.items()
            }
            if arriving.version > group.newest and group.owns:
                pulls[group.place] = tasks.create_task(self._own_record(store, arriving))
            if pulls:
                with self._late.watching(group, lambda: _late_places(group, store, pulls)):
                    await asyncio.wait(pulls.values())
            ending.cancel()
        arriving.check()
        return agreed([each.result() for each in pulls.values()])

    async def _pull_part(
        self, place: int, blocks: Sequence[int], pull: Pull, arriving: Arriving
    ) -> StepRecord | None:
        """None: the generation is over. The pulls from other trainers may come to their ends, too, so that
        connections stay."""
        try:
            record = await self.pulls.pull_from(pull, place, blocks)
            await arriving.pull_rows(self.fleet, place)
            return record
        except StaleGeneration:
            if not arriving.is_over:
                raise
            return None

    def _parts_of(self, group: Group, arriving: Arriving, store: MeanStore) -> Mapping[int, Sequence[int]]:
        """Which blocks come from where."""
        if arriving.version > group.newest:
            return {
                place: blocks for place, blocks in self.fleet.routes.blocks.items() if place != group.place
            }
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


def _late_places(
    group: Group, store: MeanStore, pulls: Mapping[int, asyncio.Task[StepRecord | None]]
) -> set[int]:
    """Whose lanes the own share lacks. If it lacks none: whose mean gradients have not come."""
    own = pulls.get(group.place)
    if own is None or own.done():
        return {place for place, pull in pulls.items() if not pull.done()}
    trainers = group.trainers
    return {trainers.place_of(lane) for first, last in missing_lanes(store) for lane in range(first, last)}


def _over(group: Group) -> str:
    return f"generation {group.generation} is over"


def with_norm(record: StepRecord, norm: float) -> StepRecord:
    """Of a job that clips: as parameter servers know it."""
    result = record.result
    if result is not None:
        result = result.with_fields(grad_norm=norm if math.isfinite(norm) else None)
    return record.with_fields(grad_norm=norm, result=result)
