"""Direct exchange: what the loop of one trainer needs of the others in a collective job, as `Transfer` gives it of parameter servers.

    push     nodes of the tree ──► each block's owner, itself among them
    pull     version s + 1: mean gradients from all owners ─► this trainer has it ─► the replica steps to it ─► swap
    a new generation: fenced ─► all say which version they have ─► who lacks the newest gets it from one that has it ─► shares are open

Calls of another generation are refused, and what came of a pull of another generation is thrown away: what a trainer has said that it has
stays true, and a step is made of data of one generation.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

from shared.blocks.buffers import Buffer
from shared.errors import BadFrame, Gone, NotReady, PeerError, StaleGeneration
from shared.records import JobSpec
from shared.records.step import StepRecord
from shared.runtime import telemetry
from shared.serving.core.clipping import Clipping
from shared.wire.messages import PserverInfo, PulledBlock, PullEnd, PullRequest
from trainer_agent.collective.arriving import Arriving
from trainer_agent.collective.groups import Group, GroupView
from trainer_agent.collective.mean_blocks import MeanStore
from trainer_agent.collective.own_share import OwnShare
from trainer_agent.collective.ports import CollectivePorts
from trainer_agent.collective.replica import Replica
from trainer_agent.core.steps import agreed
from trainer_agent.data_plane.http import PserverPort
from trainer_agent.data_plane.peers import Connect, Suspect
from trainer_agent.data_plane.routing import Routes
from trainer_agent.data_plane.step_norm import check_finite
from trainer_agent.data_plane.transfer import Transfer, found
from trainer_agent.model.compute import Compute
from trainer_agent.waiting.single_error import SingleErrorGroup

GRACE_S = 0.1  # for answers to calls of a generation that is over; then their connections are closed
FIRST_ASK_S, LAST_ASK_S = 0.002, 0.1  # pauses between questions to a trainer that is not in the generation yet
ANSWER_S = 5.0
LOOK_S = 0.1

T = TypeVar("T")
log = telemetry.logger("exchange")


class Collective(Transfer):
    """Run `run()` beside the loops. `in_use`: whoever uses or changes the parameters holds it."""

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
        self.replica = Replica(compute, Clipping.of(spec))
        self.in_use = asyncio.Lock()
        self._compute, self._ports = compute, ports
        self._own = OwnShare(ports.server)
        self._store: MeanStore | None = None
        self._gathering = asyncio.Lock()
        self._stepped = asyncio.Event()
        self._measured: float | None = None
        view.regrouped = self._regroup
        ports.server.on_step = self._stepped.set

    def __repr__(self) -> str:
        return f"<Collective {self.replica!r}, {self.view!r}>"

    # ------------------------------------------------------------ what it has

    def start(self) -> None:
        """The replica has a version now, its first one or one that it loaded: serve the next ones."""
        replica = self.replica
        assert replica.record is not None
        if self._store is not None:
            self._store.let_go()
        layout, lanes = self._layout, self._spec.lanes
        current = self._compute.current
        self._store = MeanStore(self._spec.job, layout, lanes, replica.record, current, self.server.new_pool())
        self.server.serve(self._store, replica.timeline)
        self._regroup()

    @property
    def has(self) -> int:
        """The version of which it has all mean gradients; -1: none."""
        return self._store.has if self._store is not None else -1

    def _regroup(self) -> None:
        """In the same instant in which the generation becomes known here."""
        group = self.view.group
        place, own = -1, frozenset[int]()
        if group is not None:
            place = group.place
            own = frozenset(number for number, owner in enumerate(self.routes.owners) if owner == place)
            self._ports.forget_peers(group.trainers.names)
        self.server.regroup(self.view.generation, place, group.slots if group is not None else None, own)
        self._known = {}
        self._stepped.set()
        log.info("regrouped", generation=self.view.generation, place=place, blocks=len(own), version=self.has)

    # ------------------------------------------------------------ beside the loops

    async def run(self) -> None:
        """Form the group of each generation, until cancelled."""
        while True:
            following, group = self.view.next_group, self.view.group
            if group is not None and self._store is not None:
                await self._while_it_lasts(group, self._form(group))
            await following.wait()

    async def _form(self, group: Group) -> None:
        """Learn what the trainers of the group have, and get what this one lacks."""
        await self.view.learn_addresses(group)
        group.learn(await self._versions(group), self.has)
        log.info("versions_known", generation=group.generation, newest=group.newest, own=self.has)
        while self.has < group.newest:
            await self._gather(group)
        self.server.open(group.generation)
        group.formed.set()

    async def _versions(self, group: Group) -> list[PserverInfo]:
        async with SingleErrorGroup() as tasks:
            asked = [tasks.create_task(self._ask_for_version(group, place)) for place in group.others]
        return [task.result() for task in asked]

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
        msg = f"generation {group.generation} is over"
        raise StaleGeneration(msg)

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

    # ------------------------------------------------------------ the loop's calls

    @asynccontextmanager
    async def using(self, timeline: int) -> AsyncIterator[None]:
        """Waits until the replica has a version of that timeline."""
        while True:
            async with self.in_use:
                if self.replica.record is not None and self.replica.timeline == timeline:
                    yield
                    return
            await self._directory.changed(self._directory.revision, LOOK_S)

    async def join(self, timeline: int, known: StepRecord | None) -> StepRecord:  # noqa: ARG002
        """The version in use: `known`, if it is that."""
        if known is not None and known.version == self.replica.version:
            return known
        assert self.replica.record is not None
        return self.replica.record

    async def settled(self, version: int) -> None:
        """Until all trainers of the generation have it: whoever is left has it then."""
        while True:
            group = await self._formed()
            infos = await self._while_it_lasts(group, self._versions(group))
            if infos is not None and all(info.highest >= version for info in infos):
                return
            await asyncio.sleep(LAST_ASK_S)

    async def pull(
        self,
        version: int | None,
        skip_after_s: float | None = None,  # noqa: ARG002
        *,
        exact: bool = False,  # noqa: ARG002
        results_from: int | None = None,
    ) -> StepRecord | None:
        """The version after the one in use, into the staging vectors; None: the newest one that any trainer has."""
        self.results, self._results_from = (), results_from
        if version is None:
            return await self._pull_newest(results_from)
        stepped = self.replica.stepped
        if stepped is not None and stepped.version == version:
            return stepped
        while self.has < version:
            await self._gather(await self._formed())
        if results_from is not None and self._store is not None:
            self._take_results(self._store.history.results.portion(results_from))
        await self._step_to(version)
        return self.replica.stepped

    async def _pull_newest(self, results_from: int | None) -> StepRecord | None:
        """After training: the last version, which is in use or made from the one in use; and results of steps."""
        infos = None
        while infos is None:
            group = await self._formed()
            infos = await self._while_it_lasts(group, self._versions(group))
        newest = max([self.has, *(info.highest for info in infos)])
        async with self.in_use:
            while self.replica.version is not None and self.replica.version < newest:
                await self.pull(self.replica.version + 1)
                self.swap()
        if results_from is not None:
            await self._ask_for_results(results_from)
        return self.replica.record

    async def _ask_for_results(self, first: int) -> None:
        """In place: `results` of steps from `first` on, as far as an owner keeps them."""

        async def ask(routes: Routes, place: int) -> PullEnd:
            wanted = {"version": None, "blocks": (), "results_from": first}
            request = PullRequest(**self.envelope(), **wanted)
            return await self._ask(place, lambda port: port.pull(request, _no_blocks), routes=routes)

        for end in await self._ask_by_one_map(ask):
            self._take_results(end.results)

    def swap(self) -> None:
        """Nothing, if what was pulled last is in use already."""
        if self.replica.stepped is None:
            return
        self.replica.swap()
        if self._store is not None and self.replica.version is not None:
            self._store.in_use = self.replica.version
            self._store.forget()

    @property
    def grad_norm(self) -> float | None:
        return self._measured

    # ------------------------------------------------------------ mean gradients

    async def _formed(self) -> Group:
        """The group of the present generation, once it is formed."""
        while True:
            following, group = self.view.next_group, self.view.group
            if group is None:
                await following.wait()
            elif group.formed.is_set() or await self._while_it_lasts(group, group.formed.wait()):
                return group

    async def _gather(self, group: Group) -> None:
        """The next version of all blocks, unless the generation ends before. Raises Gone: nobody can give it."""
        async with self._gathering:
            store = self._store
            if store is None or self.view.group is not group:
                return
            self._vectors = arriving = Arriving(self.server, store)
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
        store.complete(arriving.version, arriving.complete(), record)
        self._known, self._staged = self._staged, {}

    async def _arrived(self, group: Group, arriving: Arriving, store: MeanStore) -> StepRecord | None:
        """The version's record, once all blocks have come. Raises StaleGeneration: the generation is over."""
        self._staged = {}
        async with SingleErrorGroup() as tasks:
            ending = tasks.create_task(self._end_of(group, GRACE_S))
            pulls = [
                tasks.create_task(self._pull_part(place, blocks, arriving))
                for place, blocks in self._parts_of(group, arriving, store).items()
            ]
            if arriving.version > group.newest and store.own:
                pulls.append(tasks.create_task(self._own_record(store, arriving)))
            if pulls:
                await asyncio.wait(pulls)
            ending.cancel()
        arriving.check()
        return agreed([pull.result() for pull in pulls])

    async def _pull_part(self, place: int, blocks: Sequence[int], arriving: Arriving) -> StepRecord | None:
        """None: the generation is over. The pulls from other trainers may come to their ends, too, so that connections stay."""
        try:
            return await self._pull_from(place, blocks, arriving.version, None, self._narrow)
        except StaleGeneration:
            if not arriving.is_over:
                raise
            return None

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
            self._stepped.clear()
            await self._stepped.wait()
        return store.history.record(arriving.version)

    def _check_pull(self) -> None:
        assert isinstance(self._vectors, Arriving)
        self._vectors.check()

    def _may_be_same(self, block: int, known: str) -> bool:
        return bool(known) or (self._store is not None and not self._store.blocks[block].is_buffer)

    # ------------------------------------------------------------ steps

    async def _step_to(self, version: int) -> None:
        """The replica steps to `version`, the one after that in use. If cancelled, it returns when that is done."""
        store = self._store
        assert store is not None
        record = store.history.record(version)
        assert record is not None
        gradients = store.retained(version)
        tensors = {number: buffer.tensor if buffer is not None else None for number, buffer in gradients.items()}
        stepping = asyncio.ensure_future(self._ports.step_in(self.replica.step, tensors, record))
        try:
            self._measured = await asyncio.shield(stepping)
        finally:
            while not stepping.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([stepping])
            _release(gradients)
        if self._fails and self._spec.clip_grad_norm is not None and self._measured is not None:
            check_finite(version - 1, self._measured)

    # ------------------------------------------------------------ peers

    def _port(self, index: int) -> PserverPort:
        group = self.view.group
        if group is not None and index == group.place:
            return self._own
        return super()._port(index)


def _no_blocks(item: PulledBlock) -> memoryview:
    raise BadFrame(f"block {item.block} was not asked for")


def _release(gradients: Mapping[int, Buffer | None]) -> None:
    for buffer in gradients.values():
        if buffer is not None:
            buffer.release()
