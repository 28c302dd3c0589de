"""What killing a process costs a running local job.

observe(probe) -> Before     a process dies     measure(probe, before) -> Receipt, from
                                                  the launcher's log and the master's events: how it was noticed
                                                  the parameter servers' versions: the next committed step
                                                  etcd: the next task that a master dispatched
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from trireme.cli.faults.job_probe import SETTLE_S, JobProbe
from trireme.view.child_events import read_events
from trireme.view.names import without_tokens
from trireme_shared.platform.runtime import clock
from trireme_shared.protocol.errors import DeadlineExceeded
from trireme_shared.protocol.records import JobState, Mode, Phase

LIMIT_S = 120.0
POLL_S = 0.02
MASTER_SIGNS = {"generation_changed", "rolling_back", "master_elected"}


@dataclass(frozen=True, slots=True)
class Receipt:
    """Seconds since the kill; None: not seen. `next_step_s` is also None if the job ended before its next step.
    `next_task_s`: only for a killed master. Steps are counted as in `trireme status`; the parameter servers of an asynchronous
    job have no common count, so `next_step` and `rolled_back_to` are None there, and `next_step_s` is that of the next one anywhere.
    `updates_lost`: minibatches that a parameter server lacks since it came back."""

    job: str
    killed: str
    pid: int
    noticed: str = "not yet"
    noticed_s: float | None = None
    next_step: int | None = None
    next_step_s: float | None = None
    next_task_s: float | None = None
    rolled_back: bool = False
    rolled_back_to: int | None = None
    records_replayed: int = 0
    records_lost: int = 0
    updates_lost: Mapping[str, int] = field(default_factory=dict)
    phase: str = ""

    def text(self) -> str:
        noticed = f"{self.noticed_s:.2f} s later: {self.noticed}" if self.noticed_s is not None else self.noticed
        step = f"{self.next_step_s:.2f} s" if self.next_step_s is not None else "none: training is over"
        if self.next_step is not None:
            step += f" (step {self.next_step})"
        replayed = f"{self.records_replayed:,}"
        if self.rolled_back:
            where = "its newest checkpoint" if self.rolled_back_to is None else f"step {self.rolled_back_to}"
            replayed += f" (the job went back to {where})"
        rows = [
            ("killed", f"{self.killed} (pid {self.pid}, SIGKILL) of job {self.job}"),
            ("noticed", noticed),
            ("next committed step", step),
            ("records replayed", replayed),
            ("records lost", f"{self.records_lost:,}"),
            *[("updates lost", f"{name}: {count:,} minibatches") for name, count in self.updates_lost.items() if count],
            ("job", self.phase),
        ]
        if self.next_task_s is not None:
            rows.insert(3, ("next task given out", f"{self.next_task_s:.2f} s"))
        return "\n".join(f"{name:<20}{value}" for name, value in rows)


@dataclass(frozen=True, slots=True)
class Before:
    """The job a moment before a process dies. `versions`: lowest and highest of all blocks. `event`: id of the last event.
    `since` and `stamp`: that moment by the loop's clock and as text."""

    state: JobState
    versions: tuple[int, int] | None
    discarded: int
    event: int
    revision: int
    since: float
    stamp: str


async def observe(probe: JobProbe) -> Before:
    """Kill right after this. Raises DeadlineExceeded if etcd does not give the job's state."""
    await probe.directory.wait_for(lambda view: view.state is not None, SETTLE_S, "the job's state")
    discarded, events, versions = await probe.discarded_records(), await probe.events(0), await probe.versions()
    event = events[-1].event_id if events else 0
    return Before(probe.state, versions, discarded, event, await probe.revision(), clock.monotonic(), clock.timestamp())


async def measure(probe: JobProbe, before: Before, victims: Mapping[str, int], *, master: bool = False) -> Receipt:
    """`victims`: name -> pid. `master`: also wait for the next dispatched task. Raises DeadlineExceeded."""
    receipt = Receipt(probe.job, " and ".join(victims), next(iter(victims.values())))
    async with asyncio.TaskGroup() as group:
        dispatched = group.create_task(_next_task(probe, before)) if master else None
        step = await _next_step(probe, before)
        while dispatched is not None and not dispatched.done() and _is_same_stage(probe, before):  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
        if dispatched is not None and not dispatched.done():
            dispatched.cancel()
    if step is not None:
        receipt = replace(receipt, next_step=step[0] if probe.mode is Mode.SYNC else None, next_step_s=step[1])
    if dispatched is not None and not dispatched.cancelled():
        receipt = replace(receipt, next_task_s=dispatched.result())
    receipt = await _with_masterless_rollback(probe, await _with_signs(probe, receipt, before, victims), before)
    return replace(
        receipt,
        records_lost=max(0, await probe.discarded_records() - before.discarded),
        phase=_phase_of(probe.state),
    )


def _phase_of(state: JobState) -> str:
    """`RUNNING`, else with the reason."""
    return str(state.phase) if state.phase is Phase.RUNNING else without_tokens(f"{state.phase}: {state.reason}")


def _is_same_stage(probe: JobProbe, before: Before) -> bool:
    return not probe.state.phase.final and probe.state.stage == before.state.stage


async def _next_step(probe: JobProbe, before: Before) -> tuple[int, float] | None:
    """The first step that was begun and committed since `before`, and the seconds; None if the stage of the job ended first.
    Raises DeadlineExceeded."""
    base, timeline = before.versions[1] if before.versions else None, before.state.timeline
    while (seconds := clock.monotonic() - before.since) < LIMIT_S:
        if probe.directory.state is not None and probe.state.timeline != timeline:
            base = await probe.checkpoint_step() if probe.mode is Mode.SYNC else 0
            timeline = probe.state.timeline
        versions = await probe.versions()
        if versions is not None and base is None:
            base = versions[0]
        elif versions is not None and base is not None and versions[1] < base:
            base = versions[1]  # asynchronous: a parameter server came back alone, its counts begin again
        elif versions is not None and base is not None and versions[0] > base and probe.state.timeline == timeline:
            return versions[0], round(clock.monotonic() - before.since, 3)
        if probe.directory.state is not None and not _is_same_stage(probe, before):
            return None
        await asyncio.sleep(POLL_S)
    msg = f"no step was committed for {seconds:.0f} s: {probe.state.phase}: {probe.state.reason}"
    raise DeadlineExceeded(msg, hint=f"the logs are in {probe.folder / 'logs'}")


async def _next_task(probe: JobProbe, before: Before) -> float:
    """Seconds until a master dispatched a task; runs until there is one."""
    prefix, start = probe.keys.pending(""), before.revision + 1
    async with aclosing(probe.etcd.watch(prefix, prefix=True, start_revision=start)) as batches:
        async for batch in batches:
            if any(event.type == "put" for event in batch.events):
                break
    return round(clock.monotonic() - before.since, 3)


async def _with_signs(probe: JobProbe, receipt: Receipt, before: Before, victims: Mapping[str, int]) -> Receipt:
    """The receipt with the earliest sign in the launcher's log and the master's events, and with the records that were replayed."""
    deadline = clock.monotonic() + SETTLE_S
    while not (signs := _seen_by_launcher(probe, before, victims)) and clock.monotonic() < deadline:
        if receipt.next_step_s is not None and receipt.next_step_s > SETTLE_S:
            break  # the launcher had time enough to see a death: the process was frozen, not killed
        await asyncio.sleep(POLL_S)
    for event in await probe.events(before.event):
        seconds = clock.seconds_between(before.stamp, event.event_time)
        if seconds < 0:
            continue
        if event.name == "member_dead":
            signs.append((seconds, "a peer suspected it and the master found its port closed"))
        elif event.name in MASTER_SIGNS and not event.message.endswith("joined"):
            signs.append((seconds, without_tokens(event.message)))
        if event.name == "rolled_back":
            receipt = replace(
                receipt,
                rolled_back=True,
                rolled_back_to=int(event.fields["step"]) if probe.mode is Mode.SYNC else None,
                records_replayed=receipt.records_replayed + int(event.fields["records_replayed"]),
            )
        if event.name == "pserver_back":
            lost = {f"pserver-{event.fields['pserver']}": int(event.fields["lost_minibatches"])}
            receipt = replace(receipt, updates_lost={**receipt.updates_lost, **lost})
    if signs:
        seconds, how = min(signs)
        receipt = replace(receipt, noticed=how, noticed_s=round(max(0.0, seconds), 3))
    return receipt


def _seen_by_launcher(probe: JobProbe, before: Before, victims: Mapping[str, int]) -> list[tuple[float, str]]:
    return [
        (clock.seconds_between(before.stamp, line["time"]), "the launcher saw it exit")
        for line in read_events(probe.folder)
        if line["what"] in ("died", "lost_lease") and victims.get(line["child"]) == line["pid"]
    ]


async def _with_masterless_rollback(probe: JobProbe, receipt: Receipt, before: Before) -> Receipt:
    """A masterless job has no rollback events: the steps before and after tell what was replayed."""
    step = await probe.checkpoint_step()
    if not probe.is_masterless or probe.state.timeline == before.state.timeline or step is None:
        return receipt
    if probe.mode is not Mode.SYNC:
        return replace(receipt, rolled_back=True)
    steps = max(0, before.versions[1] - step) if before.versions else 0
    records = steps * probe.directory.spec.global_batch_size if probe.directory.spec else 0
    return replace(receipt, rolled_back=True, rolled_back_to=step, records_replayed=records)
