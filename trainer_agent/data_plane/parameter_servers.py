"""A StepExchange with parameter servers: they keep the parameters, and step them once they have the gradients of all lanes.

push     blocks, as backward finishes them ──► their owners' acknowledgements
pull     the next version ──► staging vectors ──use_next──► in use
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from trainer_agent.data_plane.fleet_client import FleetClient, Unanswered
from trainer_agent.data_plane.outbox import Outbox
from trainer_agent.data_plane.pulls import Pull, Pulls, StagingVectors, Within
from trainer_agent.data_plane.pushes import Pushes, Verdict
from trainer_agent.data_plane.routing import Routes
from trainer_agent.data_plane.row_lookups import RowLookups, RowRouter
from trainer_agent.data_plane.step_exchange import found
from trainer_agent.model.compute import Compute
from trireme_shared.protocol.lanes import Interval
from trireme_shared.protocol.records.job_choices import Nonfinite, Transported
from trireme_shared.protocol.records.operations import CheckpointRequest
from trireme_shared.protocol.records.step import StepRecord, StepResult
from trireme_shared.protocol.wire.messages import LedgerAnswer, LedgerQuery, PushHeader


class ParameterServers:
    """All parameter servers of the job, as one trainer uses them. An asynchronous loop also uses `pulls` and `ledgers`."""

    #: what a parameter server has acknowledged stays so, whoever the trainers are by then
    makes_steps_again = False

    def __init__(
        self,
        fleet: FleetClient,
        compute: Compute,
        parameter_dtype: Transported = "float32",
        gradient_dtype: Transported = "float32",
        on_nonfinite: Nonfinite = "fail",
    ) -> None:
        self.fleet, self._compute = fleet, compute
        self.router = RowRouter(compute.layout, gradient_dtype)
        self.rows = RowLookups(fleet, self.router, parameter_dtype)
        self.pushes = Pushes(fleet, self.router, again=self.makes_steps_again)
        self.pulls = Pulls(fleet, parameter_dtype, on_nonfinite)
        self._into = StagingVectors(compute)
        self._pulled: Pull | None = None  # and not in use yet
        self.swapping = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<ParameterServers {self.fleet!r}>"

    # ------------------------------------------------------------ versions

    @asynccontextmanager
    async def joined(self, timeline: int, known: StepRecord | None) -> AsyncIterator[StepRecord]:
        """Pulls the lowest version in force, unless `known` is in use. Nobody else changes the parameters in use."""
        if known is None:
            version = min(info.lowest for info in await self.fleet.infos(timeline))
            known = found(await self.pull(version), version)
            self.swap()
        yield known

    async def pull(
        self,
        version: int | None,
        skip_after_s: float | None = None,
        *,
        exact: bool = False,
        results_from: int | None = None,
        within: Within | None = None,
    ) -> StepRecord | None:
        """See StepExchange.pull and Pulls.pull."""
        self.pulls.want_results(results_from)
        self._pulled = None
        record, self._pulled = await self.pulls.pull(
            version, self._into, skip_after_s=skip_after_s, exact=exact, within=within
        )
        return record

    async def pull_within(self, within: Within, skip_after_s: float | None = None) -> None:
        """Asynchronous: pulls, once the bound holds. Raises Abandoned, Gone, InvalidArgument."""
        await self.pull(None, skip_after_s, within=within)
        if within.waited:  # what the others sent is as old as the wait was long
            await self.pull(None, skip_after_s)

    def swap(self) -> None:
        """What was pulled last becomes the parameters in use."""
        self._compute.swap()
        if self._pulled is not None:
            self.pulls.use(self._pulled)
        else:
            self.pulls.forget()
        self._pulled = None

    async def use_next(self) -> None:
        self.swap()

    @asynccontextmanager
    async def other_values(self) -> AsyncIterator[None]:
        """Parameters that were pulled have to be pulled again afterwards."""
        self.pulls.forget()
        yield

    async def settle(self, version: int) -> None:
        """Returns at once: parameter servers that die go on from a checkpoint, whoever of the trainers has the version."""

    async def version_stays(self) -> None:
        """Parameter servers save what they have without their trainers."""

    def checkpoint_again(self) -> CheckpointRequest | None:
        """None: parameter servers that died before their part was written go on from an earlier checkpoint."""
        return None

    @property
    def results(self) -> tuple[StepResult, ...]:
        return self.pulls.results

    @property
    def grad_norm(self) -> float | None:
        return self.pulls.grad_norm

    # ------------------------------------------------------------ pushes

    async def begin_step(self, step: int) -> None:
        """Returns at once: nobody reads gradients of a push that was answered."""

    def pushing(
        self, header: PushHeader, outboxes: Mapping[int, Outbox], skip_after_s: float | None = None
    ) -> AbstractAsyncContextManager[dict[int, Verdict]]:
        return self.pushes.pushing(header, outboxes, skip_after_s)

    async def claim(self, header: PushHeader) -> None:
        await self.pushes.claim(header)

    async def missing(self, number: int, step: int) -> tuple[Interval, ...]:
        return await self.fleet.missing(number, step)

    # ------------------------------------------------------------ asynchronous

    async def ledgers(self, query: LedgerQuery, skip_after_s: float | None = None) -> dict[int, LedgerAnswer]:
        """Ask all parameter servers for their ledgers. The answers are by index; a parameter server that gave none for `skip_after_s` is missing."""

        async def ask(routes: Routes, index: int) -> tuple[int, LedgerAnswer | None]:
            question = query.with_fields(slots=routes.version)
            try:
                return index, await self.fleet.ask(index, lambda port: port.ledger(question), skip_after_s, routes)
            except Unanswered:
                return index, None

        return {index: answer for index, answer in await self.fleet.ask_all(ask) if answer is not None}
