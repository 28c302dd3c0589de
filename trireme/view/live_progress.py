"""While a local job runs: ask its master twice a second, tell what changed. A master that is away is asked again."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from typing import TYPE_CHECKING, Any

from shared.errors import PeerError, TriremeError
from shared.records import JobSpec, Mode, Phase, Stage
from shared.runtime import clock
from trireme.launch.child import ChildEvent
from trireme.view.progress import Display, Progress
from trireme.view.report import Counts

if TYPE_CHECKING:
    from trireme.launch.cluster import LocalCluster

POLL_S = 0.5
REQUEST_TIMEOUT_S = 5.0
TOLD = {
    "master_elected",
    "job_running",
    "generation_changed",
    "rolling_back",
    "rolled_back",
    "checkpoint_unusable",
    "checkpoint_failed",
    "storage_away",
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
    ("trainer", Mode.SYNC): "its lanes move to the others, no record is lost",
    ("trainer", Mode.ASYNC): "its tasks go on elsewhere, where the ledgers stand",
    ("pserver", Mode.ASYNC): "it comes back from its newest checkpoint, the others go on",
    ("master", Mode.SYNC): "trainers go on meanwhile",
    ("master", Mode.ASYNC): "trainers go on meanwhile",
}


def progress_of(job: dict[str, Any], restarts: int) -> Progress:
    """The master's job document as a Progress."""
    members, progress = job["members"], job["progress"]
    return Progress(
        phase=job["phase"],
        stage=job["stage"],
        epoch=progress["epoch"],
        epochs=progress["epochs"],
        step=progress.get("step"),
        loss=progress.get("loss"),
        records_done=progress["records_done"],
        records_total=progress["records_total"],
        records_per_s=progress.get("records_per_s"),
        eta_s=progress.get("eta_s"),
        trainers=members["trainers"],
        trainers_desired=members["trainers_desired"],
        pservers=members["pservers"],
        pservers_desired=members["pservers_desired"],
        restarts=restarts,
        generation=job["generation"],
        reason=job["reason"],
    )


def too_few_tasks(spec: JobSpec, tasks: int) -> str:
    """For people: not every trainer will have something to do; "" if it will."""
    if tasks >= spec.trainers:
        return ""
    made = f"{tasks} task{'' if tasks == 1 else 's'} of {spec.task_records} records"
    return (
        f"an epoch has {made} for {spec.trainers} trainers: {spec.trainers - tasks} of them will have nothing to do; "
        "set a smaller records_per_task"
    )


class Follower:
    """`restarts` by child; the last loss and step seen stay for the summary."""

    def __init__(self, spec: JobSpec, screen: Display) -> None:
        self._spec, self._mode = spec, spec.mode
        self._counted = False  # the tasks of an epoch
        self._asking = asyncio.Lock()
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
            case "restarted":
                self.restarts[event.child] += 1
            case "lease_left":
                self._screen.event(
                    f"{event.child}: its lease could not be revoked ({event.cause}); it runs out by itself"
                )
            case _:
                return

    async def run(self, cluster: LocalCluster) -> None:
        """Until cancelled."""
        while True:
            with contextlib.suppress(PeerError):  # no master right now: a standby takes over, or it is started again
                await self._ask(cluster)
            await asyncio.sleep(POLL_S)

    async def last_counts(self, cluster: LocalCluster) -> Counts:
        """What the summary wants, as far as it can still be had."""
        with contextlib.suppress(TriremeError):
            await self._ask(cluster)  # events of the end included
        discarded: list[dict[str, Any]] = []
        with contextlib.suppress(TriremeError):
            async with cluster.client(REQUEST_TIMEOUT_S) as client:
                discarded = [task async for task in client.tasks("DISCARDED")]
        progress = self._last.get("progress", {})
        return Counts(dict(self.restarts), progress.get("loss"), progress.get("step"), discarded)

    async def _ask(self, cluster: LocalCluster) -> None:
        async with (
            self._asking,  # each event is told once
            cluster.client(REQUEST_TIMEOUT_S) as client,
        ):
            page = await client.events(after=self._after)
            self._last = await client.job()
            over = Phase(self._last["phase"]).final
            if not self._counted and not over and self._last["stage"] == Stage.TRAIN:
                self._count((await client.task_summary())["total"])
            self._after = page["next_after"]  # last: a question that fails is asked again, with the events it had
        for event in page["events"]:
            if event["name"] in TOLD or (event["name"] == "task_requeued" and "failures" in event["fields"]):
                self._screen.event(event["message"])
        if not over:  # then the summary follows
            self._screen.show(progress_of(self._last, self.restarts.total()), clock.monotonic())

    def _count(self, tasks: int) -> None:
        """The tasks of an epoch; 0: the dataset is being counted."""
        self._counted = tasks > 0
        if self._counted and (warning := too_few_tasks(self._spec, tasks)):
            self._screen.event(warning)
