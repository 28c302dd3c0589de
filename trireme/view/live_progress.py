"""While a local job runs: ask its master twice a second and show what changed. If no master answers, it is asked again."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from typing import Any

from shared.errors import PeerError, TriremeError
from shared.records import JobSpec, Mode, Phase, Stage
from shared.runtime import clock
from trireme.view.child_events import ChildEvent
from trireme.view.job_address import Connect
from trireme.view.progress import Display, progress_of
from trireme.view.report import Counts

POLL_S = 0.5
SHOWN_EVENTS = {
    "master_elected",
    "job_running",
    "generation_changed",
    "rolling_back",
    "rolled_back",
    "checkpoint_unusable",
    "checkpoint_failed",
    "storage_away",
    "etcd_out_of_space",
    "etcd_has_space_again",
    "checkpoint_works_again",
    "started_over",
    "pserver_lost",
    "pserver_back",
    "checkpoint_given_up",
    "member_dead",
    "task_discarded",
    "stage_changed",
    "user_failure",
}


CONSEQUENCES = {
    ("trainer", Mode.SYNC): "other trainers take its lanes, no record is lost",
    ("trainer", Mode.ASYNC): "other trainers continue its tasks where the ledgers stand",
    ("pserver", Mode.ASYNC): "it returns with its newest checkpoint, the others go on",
    ("master", Mode.SYNC): "trainers go on meanwhile",
    ("master", Mode.ASYNC): "trainers go on meanwhile",
}


def too_few_tasks(spec: JobSpec, tasks: int) -> str:
    """A warning for the user if some trainers will have nothing to do, else ""."""
    if tasks >= spec.trainers:
        return ""
    made = f"{tasks} task{'' if tasks == 1 else 's'} of {spec.task_records} records"
    return (
        f"an epoch has {made} for {spec.trainers} trainers: {spec.trainers - tasks} of them will have nothing to do; "
        "set a smaller records_per_task"
    )


class ProgressReporter:
    """Shows progress and events on `screen`. `restarts`: by child. The last loss and step are kept for the summary."""

    def __init__(self, spec: JobSpec, screen: Display) -> None:
        self._spec, self._mode = spec, spec.mode
        self._counted = False  # whether the tasks of an epoch are known
        self._polling = asyncio.Lock()
        self.restarts: Counter[str] = Counter()
        self._screen = screen
        self._last: dict[str, Any] = {}
        self._after = 0

    def on_child(self, event: ChildEvent) -> None:
        match event.what:
            case "died":
                consequence = CONSEQUENCES.get((event.child.rpartition("-")[0], self._mode))
                then = f"{consequence}; it is started again" if consequence else "it is started again"
                self._screen.event(f"{event.child} died ({event.cause}, pid {event.pid}): {then}")
            case "given_up":
                self._screen.event(f"{event.child} died ({event.cause}, pid {event.pid}): it is not started again")
            case "restarted":
                self.restarts[event.child] += 1
            case "lease_left":
                self._screen.event(
                    f"{event.child}: its lease could not be revoked ({event.cause}); it expires by itself"
                )

    async def run(self, connect: Connect) -> None:
        """Poll until cancelled."""
        while True:
            with contextlib.suppress(PeerError):  # no master now: a standby takes over, or it is started again
                await self.poll(connect)
            await asyncio.sleep(POLL_S)

    async def last_counts(self, connect: Connect) -> Counts:
        """The counts for the summary, as far as the master still answers."""
        with contextlib.suppress(TriremeError):
            await self.poll(connect)  # includes the last events
        discarded: list[dict[str, Any]] = []
        with contextlib.suppress(TriremeError):
            async with connect() as client:
                discarded = [task async for task in client.tasks("DISCARDED")]
        progress = self._last.get("progress", {})
        step = progress.get("step")
        steps = step + 1 if step is not None and self._mode is Mode.SYNC else step  # steps are numbered from 0
        records, epochs = progress.get("records_done", 0), progress.get("epoch", 0)
        return Counts(dict(self.restarts), progress.get("loss"), steps, records, epochs, discarded)

    async def poll(self, connect: Connect) -> None:
        """Ask once and show what changed. Raises TriremeError."""
        async with (
            self._polling,  # so that each event is shown once
            connect() as client,
        ):
            page = await client.events(after=self._after)
            self._last = await client.job()
            over = Phase(self._last["phase"]).final
            if not self._counted and not over and self._last["stage"] == Stage.TRAIN:
                self._count((await client.task_summary())["total"])
            self._after = page["next_after"]  # last, so that a failed poll gets the same events again
        for event in page["events"]:
            if event["name"] in SHOWN_EVENTS or (event["name"] == "task_requeued" and "failures" in event["fields"]):
                self._screen.event(event["message"])
        if not over:  # at the end the summary follows instead
            self._screen.show(progress_of(self._last, self.restarts.total()), clock.monotonic())

    def _count(self, tasks: int) -> None:
        """`tasks`: of an epoch; 0 while the dataset is being counted."""
        self._counted = tasks > 0
        if self._counted and (warning := too_few_tasks(self._spec, tasks)):
            self._screen.event(warning)
