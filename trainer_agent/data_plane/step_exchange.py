"""What the synchronous loop needs of a step, and how parameter servers give it: push this trainer's lanes,
bring the next version, know which versions are kept.

StepExchange        the protocol
ParameterServers    they keep the parameters, and step them once they have the gradients of all lanes
    push     blocks, as backward finishes them ──► their owners' acknowledgements
    pull     the next version ──► staging vectors ──use_next──► in use
CollectiveGroup     (trainer_agent/collective/exchange.py) the trainers keep the parameters, and step them
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

from trainer_agent.data_plane.fleet_client import FleetClient, Routes, Unanswered
from trainer_agent.data_plane.pulls import Pull, Pulls, StagingVectors, Within
from trainer_agent.data_plane.pushes import Outbox, Pushes, Verdict
from trainer_agent.data_plane.row_lookups import RowLookups, RowRouter, Rows
from trainer_agent.model.compute import Compute
from trireme_shared.protocol.errors import Gone
from trireme_shared.protocol.lanes import Interval
from trireme_shared.protocol.records.job_choices import Nonfinite, Transported
from trireme_shared.protocol.records.operations import CheckpointRequest
from trireme_shared.protocol.records.step import StepRecord, StepResult
from trireme_shared.protocol.wire.messages import LedgerAnswer, LedgerQuery, PushHeader
from trireme_shared.tables.hashing import Ids


class RowReader(Protocol):
    """Rows of the embedding tables, as lookups and exports read them."""

    async def lookup(self, version: int | None, ids: Sequence[Ids], *, exact: bool = False) -> list[Rows]:
        """The rows at `version` (None: the newest ones): of each table float32 (n, dim). `ids`: of each table
        int64 (n,), ascending, each once. Waits until the version is there. Raises Gone, InvalidArgument,
        StaleGeneration."""
        ...

    async def count_rows(self, table: int, version: int | None) -> int:
        """How many rows the table has at the newest version. Raises Gone: that is not `version`;
        DeadlineExceeded."""
        ...

    async def whole_table(self, table: int, version: int | None) -> tuple[Ids, Rows]:
        """All ids, int64 (n,), ascending, and rows, float32 (n, dim), at the newest version. Raises as
        `count_rows`."""
        ...


class StepExchange(Protocol):
    """The loop of one trainer has one StepExchange."""

    #: who serves which blocks
    fleet: FleetClient
    #: who owns which rows of embedding tables
    router: RowRouter
    #: held while a minibatch is evaluated, or while parameters are replaced beside the loop
    swapping: asyncio.Lock
    #: whether in another generation a step begins again from nothing; else what was acknowledged stays so
    makes_steps_again: bool

    @property
    def rows(self) -> RowReader:
        """Rows of embedding tables."""
        ...

    # ------------------------------------------------------------ versions

    def joined(self, timeline: int, known: StepRecord | None) -> AbstractAsyncContextManager[StepRecord]:
        """Give the version in use to this trainer's steps, which are made in the block. It is `known` if that
        still holds. Nobody else changes the parameters until the block ends. Raises Gone: no version can be
        joined; StaleGeneration."""
        ...

    async def pull(
        self, version: int | None, *, exact: bool = False, results_from: int | None = None
    ) -> StepRecord | None:
        """Bring the version after the one in use (None: the newest one), and return its record: None if
        nobody has that any more. `use_next` puts it into use. `exact`: in full precision, whatever the job's
        parameter_dtype is. `results_from`: `results` will be those of steps from this one on, as far as they
        are kept. Raises Gone: the version is no longer kept; InvalidArgument, UserCodeError."""
        ...

    async def use_next(self) -> None:
        """The version that was pulled last is in use from now on."""
        ...

    def other_values(self) -> AbstractAsyncContextManager[None]:
        """In this block parameters of elsewhere, a checkpoint's, are put into use."""
        ...

    async def settle(self, version: int) -> None:
        """Returns once `version` cannot be lost any more, whichever trainers die."""
        ...

    async def version_stays(self) -> None:
        """Called again and again while the version in use is not stepped for long; the members may be others
        than when it came into use."""
        ...

    def checkpoint_again(self) -> CheckpointRequest | None:
        """A checkpoint that the owner of lane 0 asks for by itself, in place of one that was lost; None:
        there is none."""
        ...

    @property
    def results(self) -> tuple[StepResult, ...]:
        """The results of steps that the last pull asked for."""
        ...

    @property
    def grad_norm(self) -> float | None:
        """The norm of the gradient of the step that made the version which was pulled last, if it was
        measured."""
        ...

    # ------------------------------------------------------------ pushes

    async def begin_step(self, step: int) -> None:
        """Returns once the memory of this trainer's gradients may be overwritten: it begins `step`, maybe
        once more."""
        ...

    def pushing(
        self, header: PushHeader, outboxes: Mapping[int, Outbox]
    ) -> AbstractAsyncContextManager[dict[int, Verdict]]:
        """Push what the block of code puts into the outboxes. After the block, the dict has a verdict of each
        receiver."""
        ...

    async def claim(self, header: PushHeader) -> None:
        """Once this returns, other data of the header's lanes in its step is refused. Raises StepTorn: some
        block has such data already, so the job will go back to a checkpoint; StaleGeneration."""
        ...

    async def missing(self, number: int, step: int) -> tuple[Interval, ...]:
        """The lanes that `step` lacks, as one receiver of pushes says; `number` chooses it. Raises
        PeerError."""
        ...


def found(record: StepRecord | None, version: int) -> StepRecord:
    """The record that a pull of `version` brought. Raises Gone: nobody has it."""
    if record is None:
        raise Gone(f"no parameter server keeps the reader positions of version {version}")
    return record


class ParameterServers:
    """All parameter servers of the job, as one trainer uses them. An asynchronous loop also uses `pulls` and
    `ledgers`."""

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
        """Pulls the lowest version in force, unless `known` is in use. Nobody else changes the parameters in
        use."""
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
        """Returns at once: parameter servers that die go on from a checkpoint, whoever of the trainers has
        the version."""

    async def version_stays(self) -> None:
        """Parameter servers save what they have without their trainers."""

    def checkpoint_again(self) -> CheckpointRequest | None:
        """None: parameter servers that died before their part was written go on from an earlier
        checkpoint."""
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
        """Ask all parameter servers for their ledgers. The answers are by index; a parameter server that gave
        none for `skip_after_s` is missing."""

        async def ask(routes: Routes, index: int) -> tuple[int, LedgerAnswer | None]:
            question = query.with_fields(slots=routes.version)
            try:
                return index, await self.fleet.ask(
                    index, lambda port: port.ledger(question), skip_after_s, routes
                )
            except Unanswered:
                return index, None

        return {index: answer for index, answer in await self.fleet.ask_all(ask) if answer is not None}
