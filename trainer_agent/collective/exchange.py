"""Direct exchange: what the loop of one trainer needs of the others in a collective job, as `Transfer` gives it of parameter servers.

push     nodes of the tree ──► each block's owner, itself among them
pull     version s + 1: mean gradients from all owners (gathering.py) ─► the replica steps to it ─► swap
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from shared.errors import BadFrame, Gone
from shared.lanes import Interval
from shared.records import JobSpec
from shared.records.step import StepRecord, StepResult
from shared.runtime import telemetry
from shared.serving.core.clipping import Clipping
from shared.tables.hashing import Ids
from shared.wire.messages import PulledBlock, PullEnd, PullRequest, PushHeader
from trainer_agent.collective.gathering import LAST_ASK_S, MeanGradients
from trainer_agent.collective.groups import Group, GroupView
from trainer_agent.collective.mean_blocks import MeanStore, released
from trainer_agent.collective.ports import CollectivePorts
from trainer_agent.collective.replica import Replica
from trainer_agent.collective.replica_optimizer import Gradients
from trainer_agent.data_plane.fleet_client import Connect, Suspect
from trainer_agent.data_plane.outbox import Outbox
from trainer_agent.data_plane.routing import Routes
from trainer_agent.data_plane.row_lookups import Rows
from trainer_agent.data_plane.step_norm import check_finite
from trainer_agent.data_plane.verdicts import Verdict
from trainer_agent.model.compute import Compute
from trainer_agent.waiting import SingleErrorGroup, to_its_end

if TYPE_CHECKING:
    from trainer_agent.collective.rows.stepping import ReplicaRows  # loads numba

LOOK_S = 0.1

log = telemetry.logger("exchange")


class Collective(MeanGradients):
    """Run `run()` beside the loops. `begun`: to be set once `begin_together` has returned. `in_use`: whoever uses or changes the parameters
    holds it. `on_lost` is called when what the replica has is of no use any more."""

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
        super().__init__(view, connect, compute, suspect, certain, spec, ports)
        self.replica = Replica(compute, Clipping.of(spec))
        self.in_use = asyncio.Lock()
        self.begun = asyncio.Event()
        self._measured: float | None = None
        self._store_lost: MeanStore | None = None
        self.on_lost: Callable[[], None] = lambda: None

    def __repr__(self) -> str:
        return f"<Collective {self.replica!r}, {self.view!r}>"

    # ------------------------------------------------------------ what it has

    def start(self) -> None:
        """The replica has a version now, its first one or one that it loaded: serve the next ones."""
        assert self.replica.record is not None
        self.begin(self.replica.record, self.replica.timeline)

    # ------------------------------------------------------------ beside the loops

    async def run(self) -> None:
        """Form the group of each generation. Until cancelled."""
        while True:
            following, group = self.view.next_group, self.view.group
            if group is not None and self.store is not None:
                await self._while_it_lasts(group, self._take_part(group))
            if self._lost:
                await self._forget()
            await following.wait()

    async def _take_part(self, group: Group) -> None:
        try:
            await self.form(group)
            if self.native is not None and group.owns:
                await self.native.run(group)
        except Gone as error:
            self._lose(error.message)

    @property
    def lost(self) -> bool:
        """Whether what it has is of no use any more, and is about to be forgotten."""
        return bool(self._lost)

    def _lose(self, cause: str) -> None:
        """What this trainer has is of no use any more: it is no member until it has got everything anew."""
        log.warning("version_lost", version=self.has, cause=cause)
        self._lost, self._store_lost = cause, self.store
        self.server.drop(self.server.generation)
        self.on_lost()
        if self.view.group is not None:
            self.view.group.formed.set()

    async def _forget(self) -> None:
        async with self.in_use:
            # else the job went back meanwhile, and this trainer has loaded the checkpoint
            if self.store is self._store_lost:
                self.replica.forget()
                self.stop()
            self._lost, self._store_lost = "", None

    # ------------------------------------------------------------ the loop's calls

    @asynccontextmanager
    async def using(self, timeline: int | None) -> AsyncIterator[None]:
        """Waits until the replica has a version, of that timeline (None: of any; one that joins at the end of training is still getting it)."""
        while True:
            async with self.in_use:
                if self.replica.record is not None and timeline in (None, self.replica.timeline):
                    yield
                    return
            await self._directory.changed(self._directory.revision, LOOK_S)

    async def join(self, timeline: int, known: StepRecord | None) -> StepRecord:  # noqa: ARG002
        """The version in use: `known`, if it is that. A spare that gets lanes may be behind: it makes the versions that the others have before it computes anything.
        Raises Gone."""
        if known is not None and known.version == self.replica.version:
            return known
        await self._formed()
        await self._step_and_swap_to(self.has)
        if self.replica.record is None:
            raise Gone("this trainer has no version to go on from")
        return self.replica.record

    @asynccontextmanager
    async def other_values(self) -> AsyncIterator[None]:
        """The version in use is in use again then: nobody else has it to pull it from. Meanwhile it is neither given nor saved."""
        async with self.in_use:
            compute = self._compute
            own = {block.number: bytes(compute.current(block.number)) for block in self._layout.blocks()}
            self.replica.stepping = True
            try:
                yield
            finally:
                for number, payload in own.items():
                    compute.staging(number)[:] = payload
                compute.swap()
                self.replica.stepping = False

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
            self._check_norm(stepped)
            return stepped
        await self.gather_to(version, self.goes_on_in)
        await self.leaves()
        await self._step_to(version)
        if results_from is not None and self.store is not None:
            own = self.store.history.results.portion(results_from)
            if self.native is not None and (
                not own or own[0].step > results_from
            ):  # no pull has brought those of others
                await self._ask_for_results(results_from)
            self._join_results(own)
        return self.replica.stepped

    async def goes_on_in(self, group: Group) -> None:
        """The version in use is used in that generation: the step behind it is made there, unless it ends before."""

    def _join_results(self, own: Sequence[StepResult]) -> None:
        """What the others keep of steps, with what this trainer knows of them: norms are known once a step was made."""
        known = {result.step: result for result in own}
        theirs, self.results = self.results, tuple(own)
        if theirs and (not own or theirs[0].step < own[0].step):
            self.results = tuple(known.get(result.step, result) for result in theirs)

    async def _pull_newest(self, results_from: int | None) -> StepRecord | None:
        """After training: the last version, which is in use or made from the one in use; and results of steps."""
        infos = None
        while infos is None:
            group = await self._formed()
            infos = await self._while_it_lasts(group, self._versions(group))
        newest = max([self.has, *(info.highest for info in infos)])
        async with self.using(None):
            await self._step_and_swap_to(newest)
        if results_from is not None:
            await self._ask_for_results(results_from)
        return self.replica.record

    async def _step_and_swap_to(self, version: int) -> None:
        """That version is in use afterwards, unless one as new is, or none any more."""
        while self.replica.version is not None and self.replica.version < version:
            await self.pull(self.replica.version + 1)
            self.swap()
            await self.reached()

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
        if self.store is not None and self.replica.version is not None:
            self.store.in_use = self.replica.version
            self.store.forget()

    @property
    def grad_norm(self) -> float | None:
        return self._measured

    async def leaves(self) -> None:
        """The version in use is about to be stepped."""

    # ------------------------------------------------------------ pushes

    @asynccontextmanager
    async def pushing(
        self, header: PushHeader, outboxes: Mapping[int, Outbox], skip_after_s: float | None = None
    ) -> AsyncIterator[dict[int, Verdict]]:
        if self.native is None:
            async with super().pushing(header, outboxes, skip_after_s) as verdicts:
                yield verdicts
            return
        verdicts = {}
        async with SingleErrorGroup() as group:
            offer = group.create_task(self.native.offer(header, outboxes))
            yield verdicts
        verdicts[header.step] = offer.result()

    async def missing(self, number: int, step: int) -> tuple[Interval, ...]:
        """Native: none, because all lanes of a trainer come from itself."""
        return () if self.native is not None else await super().missing(number, step)

    async def beginning(self, step: int) -> None:
        if self.native is not None:
            await self.native.beginning(step)

    # ------------------------------------------------------------ steps

    async def _step_to(self, version: int) -> None:
        """The replica steps to `version`, the one after that in use. If cancelled, it returns when that is done."""
        store = self.store
        assert store is not None
        record = store.history.record(version)
        assert record is not None
        gradients = store.retained(version)
        self.replica.stepping = True
        tensors = {number: buffer.tensor if buffer is not None else None for number, buffer in gradients.items()}
        try:
            await to_its_end(self._make_step(store, tensors, record))
        finally:
            released(gradients)
        if self.replica.stepped is not None:
            self._check_norm(self.replica.stepped)

    def _check_norm(self, record: StepRecord) -> None:
        """Raises UserCodeError."""
        if self._spec.clip_grad_norm is not None and record.grad_norm is not None and self._fails:
            check_finite(record.version - 1, record.grad_norm)

    async def _make_step(self, store: MeanStore, gradients: Gradients, record: StepRecord) -> None:
        """With the norm of the whole gradient, if it is measured."""
        self._measured = measured = await self._ports.step_in(self.replica.step, gradients, record)
        if (rows := self.replica.rows) is not None:
            from trainer_agent.collective.rows.stepping import step_rows  # noqa: PLC0415  loads numba

            assert store.rows is not None
            rows.kept.most_bytes = self._spec.snapshot_bytes
            await step_rows(rows, store.rows.whole[record.version], record.lane_zero)
        if self._spec.clip_grad_norm is not None and measured is not None:
            self.replica.stepped = with_norm(record, measured)
            store.history.take_record(self.replica.stepped)

    # ------------------------------------------------------------ rows of embedding tables

    async def lookup(self, version: int | None, ids: Sequence[Ids], *, exact: bool = False) -> list[Rows]:  # noqa: ARG002
        """Of this trainer's own rows."""
        from trainer_agent.collective.rows.stepping import rows_at  # noqa: PLC0415  loads numba

        return await rows_at(self._own_rows, version, ids)

    async def count_rows(self, table: int, version: int | None) -> int:  # noqa: ARG002
        return self._own_rows().rows_in_table(table)

    async def whole_table(self, table: int, version: int | None) -> tuple[Ids, Rows]:
        from trainer_agent.collective.rows.stepping import whole_table  # noqa: PLC0415  loads numba

        return whole_table(self._own_rows(), table, version)

    def _own_rows(self) -> ReplicaRows:
        if self.replica.rows is None:
            raise Gone("this trainer has no rows: the job went back, or it has none yet")
        return self.replica.rows


def _no_blocks(item: PulledBlock) -> memoryview:
    raise BadFrame(f"block {item.block} was not asked for")


def with_norm(record: StepRecord, norm: float) -> StepRecord:
    """Of a job that clips: as parameter servers know it."""
    result = record.result
    if result is not None:
        result = result.model_copy(update={"grad_norm": norm if math.isfinite(norm) else None})
    return record.model_copy(update={"grad_norm": norm, "result": result})
