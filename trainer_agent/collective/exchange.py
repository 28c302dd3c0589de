"""A StepExchange without parameter servers: the trainers of a collective job, each with all parameters and
their optimizer's state.

push     nodes of the tree ──► each block's owner, itself among them
pull     version s + 1: mean gradients from all owners (gathering.py) ─► the replica steps to it ─► use_next
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from trainer_agent.collective.gathering import LAST_ASK_S, MeanGradients, with_norm
from trainer_agent.collective.groups import Group
from trainer_agent.collective.mean_blocks import MeanStore, released
from trainer_agent.collective.replica import Gradients, Replica
from trainer_agent.collective.state.checkpoints import ShareCopies
from trainer_agent.collective.state.giving import StepIn, at_once
from trainer_agent.data_plane.pulls import check_finite
from trainer_agent.data_plane.pushes import Outbox, Pushes, Verdict
from trainer_agent.data_plane.row_lookups import RowRouter, Rows
from trainer_agent.model.compute import Compute
from trainer_agent.waiting import SingleErrorGroup, to_its_end
from trireme_shared.protocol.errors import Gone
from trireme_shared.protocol.lanes import Interval
from trireme_shared.protocol.records import JobSpec
from trireme_shared.protocol.records.operations import CheckpointRequest
from trireme_shared.protocol.records.step import StepRecord, StepResult
from trireme_shared.protocol.wire.messages import PushHeader
from trireme_shared.tables.hashing import Ids

if TYPE_CHECKING:
    from trainer_agent.collective.rows import ReplicaRows  # loads numba

LOOK_S = 0.1


class CollectiveGroup:
    """The trainers of a collective job, as one of them uses them. Run `run()` beside the loops."""

    #: whoever owned a block may be gone, with all that it had acknowledged
    makes_steps_again = True

    def __init__(
        self,
        means: MeanGradients,
        replica: Replica,
        compute: Compute,
        spec: JobSpec,
        copies: ShareCopies | None = None,
        step_in: StepIn = at_once,
    ) -> None:
        """`copies`: this trainer's share of checkpoints; None: nothing is saved. `step_in`: where the replica
        is stepped."""
        self.means, self.replica, self.fleet = means, replica, means.fleet
        self._compute, self._spec, self._copies, self._step_in = compute, spec, copies, step_in
        self._pulls = means.pulls
        self.router, self.rows = RowRouter(compute.layout, spec.gradient_dtype), ReplicaReader(replica)
        self._pushes = Pushes(self.fleet, self.router, again=self.makes_steps_again)
        #: held by whoever uses or changes the parameters
        self.in_use = asyncio.Lock()
        self.swapping = asyncio.Lock()
        #: to be set once it is known whether this trainer has the job's first values
        self.begun = asyncio.Event()
        #: results of steps that the last pull asked for
        self.results: tuple[StepResult, ...] = ()
        #: the norm of the last step's gradient, if it was measured
        self.grad_norm: float | None = None
        self._store_lost: MeanStore | None = None
        self._put_off = False  # the copy of the version in use

    def __repr__(self) -> str:
        return f"<CollectiveGroup {self.replica!r}, {self.means!r}>"

    # ------------------------------------------------------------ beside the loops

    def start(self) -> None:
        """The replica has a version now, its first one or one that it loaded: serve the next ones."""
        assert self.replica.record is not None
        self.means.begin(self.replica.record, self.replica.timeline)

    async def run(self) -> None:
        """Form the group of each generation, until cancelled."""
        means = self.means
        while True:
            following, group = means.view.next_group, means.view.group
            if group is not None and means.store is not None:
                await means.while_it_lasts(group, self._take_part(group))
            if means.lost:
                await self._forget()
            await following.wait()

    async def _take_part(self, group: Group) -> None:
        try:
            await self.means.form(group)
            if self.means.native is not None and group.owns:
                await self.means.native.run(group)
        except Gone as error:
            self._store_lost = self.means.store
            self.means.lose(error.message)

    async def _forget(self) -> None:
        async with self.in_use:
            # else the job went back meanwhile, and this trainer has loaded the checkpoint
            if self.means.store is self._store_lost:
                self.replica.forget()
                self.means.stop()
            self._store_lost = None
            self.means.found_again()

    # ------------------------------------------------------------ versions

    @asynccontextmanager
    async def joined(self, timeline: int, known: StepRecord | None) -> AsyncIterator[StepRecord]:
        """A spare that gets lanes may be behind: it makes the versions that the others have before it
        computes anything."""
        async with self._using(timeline):
            if known is None or known.version != self.replica.version:
                await self.means.formed()
                await self._step_and_use(self.means.has)
                if self.replica.record is None:
                    raise Gone("this trainer has no version to go on from")
                known = self.replica.record
            await self.reached()
            yield known

    @asynccontextmanager
    async def _using(self, timeline: int | None) -> AsyncIterator[None]:
        """Waits until the replica has a version, of that timeline (None: of any; one that joins at the end of
        training is still getting it)."""
        while True:
            async with self.in_use:
                if self.replica.record is not None and timeline in (None, self.replica.timeline):
                    yield
                    return
            await self.fleet.directory.changed(self.fleet.directory.revision, LOOK_S)

    async def pull(
        self,
        version: int | None,
        *,
        exact: bool = False,  # noqa: ARG002
        results_from: int | None = None,
    ) -> StepRecord | None:
        """See StepExchange.pull. `version` None: the newest one that any trainer has, which is in use
        then."""
        self.results = ()
        self._pulls.want_results(results_from)
        if version is None:
            return await self._pull_newest(results_from)
        stepped = self.replica.stepped
        if stepped is not None and stepped.version == version:
            self._check_norm(stepped)
            return stepped
        await self.means.gather_to(version, self._goes_on_in)
        await self._leaves()
        await self._step_to(version)
        if results_from is not None and self.means.store is not None:
            own = self.means.store.history.results.portion(results_from)
            if self.means.native is not None and (
                not own or own[0].step > results_from
            ):  # no pull has brought those of others
                await self._pulls.ask_for_results(results_from)
            self._join_results(own)
        return self.replica.stepped

    def _join_results(self, own: Sequence[StepResult]) -> None:
        """What the others keep of steps, with what this trainer knows of them: norms are known once a step
        was made."""
        known = {result.step: result for result in own}
        theirs, self.results = self._pulls.results, tuple(own)
        if theirs and (not own or theirs[0].step < own[0].step):
            self.results = tuple(known.get(result.step, result) for result in theirs)

    async def _pull_newest(self, results_from: int | None) -> StepRecord | None:
        """After training: the last version, which is in use or made from the one in use; and results of
        steps."""
        infos = None
        while infos is None:
            group = await self.means.formed()
            infos = await self.means.while_it_lasts(group, self.means.versions_in(group))
        newest = max([self.means.has, *(info.highest for info in infos)])
        async with self._using(None):
            await self._step_and_use(newest)
        if results_from is not None:
            self._pulls.want_results(results_from)
            await self._pulls.ask_for_results(results_from)
            self.results = self._pulls.results
        return self.replica.record

    async def _step_and_use(self, version: int) -> None:
        """Step until that version is in use, unless one as new is, or none any more."""
        while self.replica.version is not None and self.replica.version < version:
            await self.pull(self.replica.version + 1)
            await self.use_next()

    async def use_next(self) -> None:
        """Nothing happens if what was pulled last is in use already."""
        if self._swap():
            await self.reached()

    def _swap(self) -> bool:
        if self.replica.stepped is None:
            return False
        self.replica.swap()
        store = self.means.store
        if store is not None and self.replica.version is not None:
            store.in_use = self.replica.version
            store.forget()
        return True

    async def step_to(self, version: int) -> None:
        """Step a trainer without lanes to the next version, of which all mean gradients are there, and put it
        into use."""
        await self.pull(version)
        async with self.swapping:
            self._swap()

    def handed_over(self) -> None:
        """The replica has got a version from other trainers: the mean gradients, which began before, know the
        values of buffers from now on."""
        if self.means.store is not None and self.replica.version is not None:
            self.means.store.know_buffers(self.replica.version, self._compute.current)

    @asynccontextmanager
    async def other_values(self) -> AsyncIterator[None]:
        """The version in use is in use again afterwards: nobody else has it to pull it from. Meanwhile it is
        neither given nor saved."""
        async with self.in_use:
            compute = self._compute
            own = {block.number: bytes(compute.current(block.number)) for block in compute.layout.blocks()}
            self.replica.stepping = True
            try:
                yield
            finally:
                for number, payload in own.items():
                    compute.staging(number)[:] = payload
                compute.swap()
                self.replica.stepping = False

    async def settle(self, version: int) -> None:
        """Returns once all trainers of the generation have the version: any one that is left has it then."""
        while True:
            group = await self.means.formed()
            infos = await self.means.while_it_lasts(group, self.means.versions_in(group))
            if infos is not None and all(info.highest >= version for info in infos):
                return
            await asyncio.sleep(LAST_ASK_S)

    # ------------------------------------------------------------ shares of checkpoints

    async def reached(self) -> None:
        """Copies this trainer's share of the version in use, if a checkpoint of it is due. Nothing is copied
        for a generation whose group is not formed: its members may have made this version of other
        records."""
        group = self.means.view.group
        if group is None or not self.replica.at_rest:
            return
        self._put_off = not group.formed.is_set()
        if not self._put_off:
            await self._copy(group)

    async def _copy(self, group: Group) -> None:
        store, version = self.means.store, self.replica.version
        since = store.had_in(version) if store is not None and version is not None else None
        if self._copies is not None:
            await self._copies.at_version(group.trainers, since)

    async def _goes_on_in(self, group: Group) -> None:
        """The step behind the version in use is made in that generation, unless it ends before. Some trainers
        may have reached the version in the generation before, and some only now: a checkpoint that is to be
        evaluated would get parts of two generations, and be lost."""
        if self.replica.at_rest and self._copies is not None and self._copies.is_evaluated:
            await self._copy(group)

    async def _leaves(self) -> None:
        """The version in use is about to be stepped. If all mean gradients of the next one are there already,
        nothing else waits for the group: a late trainer would leave without a copy."""
        if self._put_off:
            await self.means.formed()
            await self.reached()

    async def version_stays(self) -> None:
        """A dead trainer may not have written its share of this version, so every new generation copies it
        again."""
        await self.reached()

    def checkpoint_again(self) -> CheckpointRequest | None:
        group = self.means.view.group
        return self._copies.again(group.trainers) if group is not None and self._copies is not None else None

    # ------------------------------------------------------------ pushes

    @asynccontextmanager
    async def pushing(
        self, header: PushHeader, outboxes: Mapping[int, Outbox]
    ) -> AsyncIterator[dict[int, Verdict]]:
        native = self.means.native
        if native is None:
            async with self._pushes.pushing(header, outboxes) as verdicts:
                yield verdicts
            return
        verdicts = {}
        async with SingleErrorGroup() as group:
            offer = group.create_task(native.offer(header, outboxes))
            yield verdicts
        verdicts[header.step] = offer.result()

    async def claim(self, header: PushHeader) -> None:
        await self._pushes.claim(header)

    async def missing(self, number: int, step: int) -> tuple[Interval, ...]:
        """Native exchange: none, because all lanes of a trainer come from itself."""
        return () if self.means.native is not None else await self.fleet.missing(number, step)

    async def begin_step(self, step: int) -> None:
        """A native group may still read the gradients of an earlier attempt."""
        if self.means.native is not None:
            await self.means.native.beginning(step)

    # ------------------------------------------------------------ steps

    async def _step_to(self, version: int) -> None:
        """The replica steps to `version`, the one after that in use. If cancelled, it returns when that is
        done."""
        store = self.means.store
        assert store is not None
        record = store.history.record(version)
        assert record is not None
        gradients = store.retained(version)
        self.replica.stepping = True
        tensors = {
            number: buffer.tensor if buffer is not None else None for number, buffer in gradients.items()
        }
        try:
            await to_its_end(self._make_step(store, tensors, record))
        finally:
            released(gradients)
        if self.replica.stepped is not None:
            self._check_norm(self.replica.stepped)

    def _check_norm(self, record: StepRecord) -> None:
        """Raises InvalidArgument: the norm is not finite, and the job fails then."""
        fails = self._spec.on_nonfinite == "fail"
        if self._spec.clip_grad_norm is not None and record.grad_norm is not None and fails:
            check_finite(record.version - 1, record.grad_norm)

    async def _make_step(self, store: MeanStore, gradients: Gradients, record: StepRecord) -> None:
        """With the norm of the whole gradient, if it is measured."""
        self.grad_norm = measured = await self._step_in(self.replica.step, gradients, record)
        if (rows := self.replica.rows) is not None:
            from trainer_agent.collective.rows import step_rows  # noqa: PLC0415  loads numba

            assert store.rows is not None
            rows.kept.most_bytes = self._spec.snapshot_bytes
            await step_rows(rows, store.rows.whole[record.version], record.lane_zero)
        if self._spec.clip_grad_norm is not None and measured is not None:
            self.replica.stepped = with_norm(record, measured)
            store.history.take_record(self.replica.stepped)


class ReplicaReader:
    """A RowReader: this trainer's own rows of all embedding tables."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    async def lookup(self, version: int | None, ids: Sequence[Ids], *, exact: bool = False) -> list[Rows]:  # noqa: ARG002
        from trainer_agent.collective.rows import rows_at  # noqa: PLC0415  loads numba

        return await rows_at(self._own_rows, version, ids)

    async def count_rows(self, table: int, version: int | None) -> int:  # noqa: ARG002
        return self._own_rows().rows_in_table(table)

    async def whole_table(self, table: int, version: int | None) -> tuple[Ids, Rows]:
        from trainer_agent.collective.rows import whole_table  # noqa: PLC0415  loads numba

        return whole_table(self._own_rows(), table, version)

    def _own_rows(self) -> ReplicaRows:
        if self._replica.rows is None:
            raise Gone("this trainer has no rows: the job went back, or it has none yet")
        return self._replica.rows
