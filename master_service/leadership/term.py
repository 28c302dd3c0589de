"""One term of one master: its writer, its watch of the members and its supervisor. They all end with the lock."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from master_service.control.observation import Observer, StallWatch
from master_service.control.series_keeper import Origin, SeriesKeeper
from master_service.control.supervisor import Supervisor
from master_service.control.task_service import TaskService, WaitingAsks
from master_service.control.tracking import Tracking, result_of
from master_service.core.changes import Change, Event
from master_service.core.decisions.membership import storage_events
from master_service.core.decisions.recovery import ref_of
from master_service.core.decisions.tasks import freed_by
from master_service.core.state.job import Job, Members
from master_service.store.leader_writer import LeaderWriter
from master_service.store.members_watch import MembersWatch
from master_service.store.takeover import Takeover
from master_service.store.writer import HeldLock, MasterWriter
from trireme_shared.protocol.evaluations import Evaluation
from trireme_shared.protocol.records import JobState, Mode, Phase


class Term:
    """`job` may be read at any time; it changes only through `writer`."""

    def __init__(self, master: TaskService, lock: HeldLock, start: Takeover) -> None:
        self.number = lock.term
        self.lease = lock.lease
        self.job: Job = start.job
        self.asks = WaitingAsks()
        self._start, self._events = start, master.events
        self._watch = MembersWatch(master.etcd, master.keys, self._on_members)
        self.writer = MasterWriter(
            master.etcd,
            master.keys,
            start.job,
            lock,
            commit_revision=start.commit_revision,
            on_events=self._on_events,
            on_changes=self._on_changes,
        )
        self.storage = master.storage(start.job.spec)
        spec = start.job.spec
        self.series = SeriesKeeper(
            self.storage.series,
            lock.term,
            skips=spec.on_nonfinite == "skip",
            origin=self._origin,
            push_every=spec.push_every if spec.mode is Mode.ASYNC else 1,
            leads=lambda: lock.lease.alive,
        )
        for number in sorted(self.job.evaluations):  # the master before may not have stored the last ones
            self.series.note_evaluation(self.job.evaluations[number])
        writer = LeaderWriter(master.etcd, master.keys, self.writer)
        self._supervisor = Supervisor(master, writer, lock, self.storage, self.asks.freed)
        self._tracking = Tracking(
            start.job.spec,
            permitted_s=lambda: lock.lease.remaining_s,
            result=self._result,
            tell=self._events.add,
            find_folder=self.storage.script_folder,
        )
        self.operations = self._supervisor.operations
        self.evictions = self._supervisor.evictions
        self.stall = StallWatch(master.etcd)
        self.observer = Observer(master.etcd, master.keys, self.stall)

    def _origin(self) -> Origin:
        state, latest = self.job.state, self.job.members.latest
        ref = ref_of(latest, state.checkpoint)
        kept = latest.kept if latest is not None else ()
        if ref is None:
            return Origin(
                state.timeline, None if state.checkpoint else 0, None if state.checkpoint else state.timeline, kept
            )
        return Origin(state.timeline, ref.step, ref.timeline, kept)

    def _result(self) -> dict[str, Any] | None:
        """For trackers, once the job has ended and they can read all of it."""
        state = self.job.state
        return (
            result_of(state.phase, state.reason, state.result) if state.phase.final and self.series.all_stored else None
        )

    @property
    def storage_away(self) -> str:
        """Why a rollback cannot read its checkpoint now, or ""."""
        return self._supervisor.recovery.storage_away

    async def run(self) -> None:
        """Until the lock is lost (raises LockLost in an ExceptionGroup) or cancelled."""
        self._on_members(self._watch.start(self._start.found.values()))
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.writer.run())
                group.create_task(self._watch.run(self._start.revision + 1))
                group.create_task(self._supervisor.run())
                group.create_task(self.series.run())
                if self.job.spec.trackers:
                    group.create_task(self._tracking.run())
        finally:
            self.asks.changed()  # they learn that the term is over

    def _on_members(self, members: Members) -> None:
        self._events.add(storage_events(self.job.members, members))
        self.job.members = members
        self._supervisor.members_changed()

    def _on_changes(self, changes: Sequence[Change]) -> None:
        for change in changes:
            if isinstance(change, JobState) and change.phase is Phase.COMPLETED:
                self.series.note_result(change.result.metrics, change.timeline)
            if isinstance(change, Evaluation):
                self.series.note_evaluation(change)
        freed = freed_by(changes)
        if freed is None:
            self.asks.changed()
        elif freed:
            self.asks.freed(freed)

    def _on_events(self, events: Sequence[Event]) -> None:
        self._events.announce(events)
        if events:
            self.operations.look_again()
