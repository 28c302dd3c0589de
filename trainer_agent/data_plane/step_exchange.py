"""What the synchronous loop needs of a step: push this trainer's lanes, bring the next version, know which versions are kept.

parameter_servers.py   ParameterServers: they keep the parameters, and step them
collective/            CollectiveGroup: the trainers keep the parameters, and step them
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from trainer_agent.data_plane.fleet_client import FleetClient
from trainer_agent.data_plane.outbox import Outbox
from trainer_agent.data_plane.pushes import Verdict
from trainer_agent.data_plane.row_lookups import RowRouter, Rows
from trireme_shared.protocol.errors import Gone
from trireme_shared.protocol.lanes import Interval
from trireme_shared.protocol.records.operations import CheckpointRequest
from trireme_shared.protocol.records.step import StepRecord, StepResult
from trireme_shared.protocol.wire.messages import PushHeader
from trireme_shared.tables.hashing import Ids


class RowReader(Protocol):
    """Rows of the embedding tables, as lookups and exports read them."""

    async def lookup(self, version: int | None, ids: Sequence[Ids], *, exact: bool = False) -> list[Rows]:
        """The rows at `version` (None: the newest ones): of each table float32 (n, dim). `ids`: of each table int64 (n,), ascending, each once.
        Waits until the version is there. Raises Gone, InvalidArgument, StaleGeneration."""
        ...

    async def count_rows(self, table: int, version: int | None) -> int:
        """How many rows the table has at the newest version. Raises Gone: that is not `version`; DeadlineExceeded."""
        ...

    async def whole_table(self, table: int, version: int | None) -> tuple[Ids, Rows]:
        """All ids, int64 (n,), ascending, and rows, float32 (n, dim), at the newest version. Raises as `count_rows`."""
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
        """Give the version in use to this trainer's steps, which are made in the block. It is `known` if that still holds. Nobody else changes the
        parameters until the block ends. Raises Gone: no version can be joined; StaleGeneration."""
        ...

    async def pull(
        self, version: int | None, *, exact: bool = False, results_from: int | None = None
    ) -> StepRecord | None:
        """Bring the version after the one in use (None: the newest one), and return its record: None if nobody has that any more. `use_next` puts
        it into use. `exact`: in full precision, whatever the job's parameter_dtype is. `results_from`: `results` will be those of steps from this
        one on, as far as they are kept. Raises Gone: the version is no longer kept; InvalidArgument, UserCodeError."""
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
        """Called again and again while the version in use is not stepped for long; the members may be others than when it came into use."""
        ...

    def checkpoint_again(self) -> CheckpointRequest | None:
        """A checkpoint that the owner of lane 0 asks for by itself, in place of one that was lost; None: there is none."""
        ...

    @property
    def results(self) -> tuple[StepResult, ...]:
        """The results of steps that the last pull asked for."""
        ...

    @property
    def grad_norm(self) -> float | None:
        """The norm of the gradient of the step that made the version which was pulled last, if it was measured."""
        ...

    # ------------------------------------------------------------ pushes

    async def begin_step(self, step: int) -> None:
        """Returns once the memory of this trainer's gradients may be overwritten: it begins `step`, maybe once more."""
        ...

    def pushing(
        self, header: PushHeader, outboxes: Mapping[int, Outbox]
    ) -> AbstractAsyncContextManager[dict[int, Verdict]]:
        """Push what the block of code puts into the outboxes. After the block, the dict has a verdict of each receiver."""
        ...

    async def claim(self, header: PushHeader) -> None:
        """Once this returns, other data of the header's lanes in its step is refused. Raises StepTorn: some block has such data already, so the
        job will go back to a checkpoint; StaleGeneration."""
        ...

    async def missing(self, number: int, step: int) -> tuple[Interval, ...]:
        """The lanes that `step` lacks, as one receiver of pushes says; `number` chooses it. Raises PeerError."""
        ...


def found(record: StepRecord | None, version: int) -> StepRecord:
    """The record that a pull of `version` brought. Raises Gone: nobody has it."""
    if record is None:
        raise Gone(f"no parameter server keeps the reader positions of version {version}")
    return record
