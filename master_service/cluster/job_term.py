"""One job of a cluster while it is ACTIVE: its Master leads it under the cluster's lease, until the job ends or shall stop.

lead ─ COMPLETED, FAILED ─► standing written ─► its members leave ─► lock released
  └─── pause, preempted ──► checkpoint ─┐
  └─── cancel ──────────────────────────┴─► lock released ─► standing written
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from master_service.core.changes import Event
from master_service.core.state.job import Job, Members
from master_service.leadership.master import Master
from master_service.leadership.term import Term
from trireme_shared.platform.etcd import Compare, Delete, Lease, LeaseLost
from trireme_shared.platform.runtime import clock, ids, telemetry
from trireme_shared.protocol.errors import CallerError, PeerError, TriremeError, leaves
from trireme_shared.protocol.records import JobSpec, Phase, Stage
from trireme_shared.protocol.records.cluster import ClusterJob, Standing
from trireme_shared.protocol.records.operations import saves_on_demand

PAUSE_S = 0.5
LOOK_S = 1.0
SAVE_S = 30.0  # a stop that waits longer for its checkpoint goes back to the one before
LEAVE_S = 5.0  # how long the master of a job that has ended answers its members

log = telemetry.logger("job_term")

Finish = Callable[[str, Standing, str], Awaitable[None]]


class JobTerm:
    """`finish(job, standing, reason)` writes where the job is now. `on_resize()`: the job has other numbers of members, or other
    parameter servers. `on_members()`: other members, or they say something else. Run `run`."""

    def __init__(
        self,
        master: Master,
        job: ClusterJob,
        lease: Lease,
        finish: Finish,
        *,
        on_resize: Callable[[], None],
        on_members: Callable[[], None],
    ) -> None:
        self.master = master
        self.job = job.job
        self._lease, self._finish = lease, finish
        self._on_resize, self._on_members = on_resize, on_members
        self._members = Members()
        self._seen: tuple[JobSpec, int, int, bool] | None = None
        self._spec = job.spec
        self._stop: tuple[Standing, str] | None = None
        self._error: TriremeError | None = None
        self._left = False
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        return f"<JobTerm {self.job}: {self.master!r}>"

    def stop(self, standing: Standing, reason: str) -> None:
        """Leave the job: PAUSED or QUEUED with a checkpoint, CANCELLED without. A second call changes nothing."""
        if self._stop is None:
            self._stop = (standing, reason)
            self._changed.set()

    async def run(self) -> None:
        """Until the job's standing is written and its lock is free. Raises what leading it raised, if that is no TriremeError: nobody leads it then."""
        leading, ending = asyncio.ensure_future(self._lead()), asyncio.ensure_future(self._until_it_ends())
        try:
            await asyncio.wait([leading, ending], return_when=asyncio.FIRST_COMPLETED)
            if not ending.done():
                leading.result()
            standing, reason = await ending
            ended = standing in (Standing.COMPLETED, Standing.FAILED)
            if ended:
                await self._finish(self.job, standing, reason)
                await self._until_members_left()
        finally:
            term, self._left = self.master.current_term, True
            leading.cancel()
            ending.cancel()
            await asyncio.wait([leading, ending])
        if term is not None:
            await self._release(term.number)
        if not ended:
            await self._finish(self.job, standing, reason)

    # ---------------------------------------------------------------- leading

    async def _lead(self) -> None:
        # a TaskGroup whose children fail while it is cancelled raises their errors, not CancelledError: so `_left` is looked at
        while self._error is None and not self._left:
            try:
                await self.master.lead(self._lease)
            except* TriremeError as group:
                if not self._left:
                    self._note(list(leaves(group)))
            await asyncio.sleep(ids.jitter(PAUSE_S))

    def _note(self, errors: list[TriremeError]) -> None:
        """Errors of others are met again, or not, by the next attempt. One that a repetition meets again ends the job."""
        lasting = [error for error in errors if isinstance(error, CallerError) and not isinstance(error, LeaseLost)]
        log.warning("job_left", job=self.job, cause="; ".join(error.message for error in errors))
        if lasting:
            self._error = lasting[0]
            self._changed.set()

    async def _until_it_ends(self) -> tuple[Standing, str]:
        while True:
            if self._error is not None:
                return Standing.FAILED, self._error.message
            term = self.master.current_term
            if term is not None and term.job.state.phase.final:
                try:
                    await term.writer.settled()
                except PeerError:  # the term is over, or etcd takes no writes
                    await self._news()
                    continue
                state = term.job.state
                done = state.phase is Phase.COMPLETED
                return (Standing.COMPLETED if done else Standing.FAILED), state.reason
            if self._stop is not None:
                standing, reason = self._stop
                if standing is not Standing.CANCELLED and term is not None:
                    await self._save(term, reason)
                if self._is_final():  # it ended while it was saved
                    continue
                return standing, reason
            if term is not None and (seen := _numbers(term.job)) != self._seen:
                self._seen = seen
                self._on_resize()
            if term is not None and term.job.members is not self._members:
                self._members = term.job.members
                self._on_members()
            await self._news()

    def _is_final(self) -> bool:
        term = self.master.current_term
        return term is not None and term.job.state.phase.final

    async def _news(self) -> None:
        looking = [asyncio.ensure_future(self._changed.wait()), asyncio.ensure_future(self.master.events.next(LOOK_S))]
        await asyncio.wait(looking, return_when=asyncio.FIRST_COMPLETED)
        for each in looking:
            each.cancel()
        await asyncio.wait(looking)
        self._changed.clear()

    # ---------------------------------------------------------------- leaving

    async def _save(self, term: Term, cause: str) -> None:
        """A checkpoint of the present step, if the job trains and can make one."""
        state = term.job.state
        trains = state.stage is Stage.TRAIN and state.phase in {Phase.RUNNING, Phase.CHECKPOINTING}
        if not trains or not saves_on_demand(self._spec):
            return
        begin = clock.monotonic()
        try:
            asked = await term.operations.create_checkpoint("", cause, SAVE_S)
            done = await term.operations.wait(asked.operation_id, SAVE_S)
        except TriremeError as error:
            self._tell("stopped_unsaved", f"no checkpoint before the job stops: {error.message}")
            return
        took_s = round(clock.monotonic() - begin, 3)
        if done.running or done.error_code:
            self._tell("stopped_unsaved", f"no checkpoint within {took_s} s before the job stops: {done.reason}")

    def _tell(self, name: str, message: str) -> None:
        self.master.events.add([Event(name, message, {"job": self.job})])

    async def _until_members_left(self) -> None:
        """They see the end in etcd and leave; what they still ask is answered meanwhile."""
        deadline = clock.monotonic() + LEAVE_S
        while (term := self.master.current_term) is not None and clock.monotonic() < deadline:
            if not term.job.members.trainers and not term.job.members.pservers:
                return
            await asyncio.sleep(PAUSE_S / 5)

    async def _release(self, term: int) -> None:
        """The job's lock and address go, so that the next leader of it need not wait. Best effort: they go with the lease, too."""
        keys = self.master.keys
        held = Compare.create(keys.master_lock, "==", term)
        try:
            await self.master.etcd.txn([held], [Delete(keys.master_lock), Delete(keys.master_address)])
        except PeerError as error:
            log.warning("lock_not_released", job=self.job, cause=error.message)


def _numbers(job: Job) -> tuple[JobSpec, int, int, bool]:
    """What the numbers of members of a job in its cluster follow from."""
    return job.spec, job.pservers_needed, len(job.members.pservers), job.operations.number_of_trainers_asked()
