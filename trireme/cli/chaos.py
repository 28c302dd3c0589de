"""`trireme chaos kill`: SIGKILL one process of a running local job and show what it cost.

run.json, children.jsonl --> who runs --> observe --> kill --> measure --> Receipt, from
                                          the launcher's log and the master's events: how it was noticed
                                          the parameter servers (collective: the trainers): the next committed
                                          step
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from trainer_agent.data_plane.http import HttpPserver
from trireme.cli import exit_codes
from trireme.cli.targets import cluster_of, token_of_run
from trireme.launch import resume, run_folder
from trireme.view.child_events import ENDS, read_events
from trireme.view.job_address import OpenJob, open_job
from trireme.view.report import without_tokens
from trireme_shared.platform.etcd.reading import read_record
from trireme_shared.platform.membership.directory import Directory
from trireme_shared.platform.membership.etcd_access import EtcdAccess
from trireme_shared.platform.runtime import clock, ids, telemetry
from trireme_shared.platform.security.tls import client_context
from trireme_shared.protocol.errors import Conflict, DeadlineExceeded, NotFound, PeerError, TriremeError
from trireme_shared.protocol.events import EventRecord
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import (
    Dispatch,
    JobState,
    Mode,
    Phase,
    PserverMember,
    Strategy,
    TrainerMember,
)
from trireme_shared.protocol.records.checkpoints import CheckpointLatest

ANSWER_S = 2.0
STALL_S = 0.5
SETTLE_S = 3.0
RETRY_S = 0.1
LIMIT_S = 120.0
POLL_S = 0.02
MASTER_SIGNS = {"generation_changed", "rolling_back", "master_elected"}


def kill(name: str | None, job: str | None, data_dir: Path | None, *, at_random: bool, as_json: bool) -> int:
    """Returns the exit code."""
    telemetry.configure(level="ERROR", json=False)
    try:
        if (cluster := cluster_of(job, data_dir, None)) is not None:
            msg = (
                "trireme chaos kill ends processes of a `trireme run` in a data folder of this "
                f"machine, not at {cluster.address}"
            )
            hint = (
                "`trireme pool` shows on which host a member of a cluster runs: kill it there, or "
                "`trireme pool drain` it"
            )
            raise Conflict(msg, hint=hint)
        folder, _ = run_folder.find_run(data_dir, job)
        receipt = asyncio.run(kill_one(folder, _victim(folder, name, at_random=at_random)))
    except TriremeError as error:
        return exit_codes.report_error(error, as_json=as_json)
    print(json.dumps(asdict(receipt)) if as_json else receipt.text())  # noqa: T201
    return exit_codes.OK


async def kill_one(folder: Path, name: str) -> Receipt:
    """SIGKILL the child `name` of the run in `folder` and wait until training goes on. Raises NotFound,
    DeadlineExceeded."""
    async with JobProbe(folder) as probe:
        pid = alive(folder).get(name, 0)
        before = await observe(probe)
        try:
            if pid == 0:
                raise ProcessLookupError
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError as error:
            msg = f"{name} ended by itself before it could be killed"
            raise NotFound(msg, hint="is the job over? see `trireme status`") from error
        return await measure(probe, before, {name: pid}, master=name.startswith("master-"))


def alive(folder: Path) -> dict[str, int]:
    """Name -> pid of the children of the run in `folder`."""
    found: dict[str, int] = {}
    for event in read_events(folder):
        if event["what"] in ("started", "restarted"):
            found[event["child"]] = event["pid"]
        elif event["what"] in (*ENDS, "finished"):
            found.pop(event["child"], None)
    return {child: pid for child, pid in found.items() if _is_child(child, pid)}


def _victim(folder: Path, name: str | None, *, at_random: bool) -> str:
    """A child that is alive. Raises NotFound."""
    names = sorted(alive(folder))
    if not names:
        msg = f"no process of the run in {folder} is alive"
        raise NotFound(msg, hint="start it with `trireme run SCRIPT`")
    if at_random:
        return ids.source.choice(names)
    if name == "etcd" and (existing := run_folder.read_json(folder / resume.ETCD_FILE)):
        msg = (
            f"the etcd of this job, at {existing['etcd']}, was not started by trireme run, which kills "
            "only its own processes"
        )
        raise NotFound(msg, hint="stop it with its own tools")
    if name not in names:
        msg = f"no process {name!r} is alive; alive are {', '.join(names)}"
        raise NotFound(msg)
    return name


def _is_child(name: str, pid: int) -> bool:
    """The pid may belong to another process by now."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        if name == "etcd":
            return "etcd" in process.name()
        # for a forked process /proc/PID/environ is the fork server's
        forked = f"[{name}]" in " ".join(process.cmdline())
        return forked or process.environ().get("TRIREME_NAME") == name
    except psutil.Error:
        return False


class JobProbe:
    """Reads the job that runs in `folder`. Use `async with`: a task follows etcd meanwhile. Make a new probe
    after the launcher was started again.

    `directory`: the job's keys in etcd, followed all the time. `etcd`, `keys`: for what the directory does
    not follow. `stall_s`: how long a member that says nothing is asked for its version.
    """

    def __init__(self, folder: Path, stall_s: float = STALL_S) -> None:
        facts = json.loads((folder / run_folder.RUN_FILE).read_text(encoding="utf-8"))
        self.folder = folder
        self.job = str(facts["job"])
        self.keys = Keys(self.job)
        self.etcd = EtcdAccess.from_facts(facts).connect()
        self.directory = Directory(self.etcd, self.keys)
        self._url = str(facts["url"])
        self._token = token_of_run(folder)
        self._stall_s = stall_s
        self._pservers: dict[str, HttpPserver] = {}
        self._tasks = asyncio.TaskGroup()

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        self._following = self._tasks.create_task(self.directory.run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._following.cancel()
        if not isinstance(error, asyncio.CancelledError):
            kind = error = traceback = None  # the group would wrap it; it leaves the block as it is
        try:
            await self._tasks.__aexit__(kind, error, traceback)
        finally:
            for pserver in self._pservers.values():
                await pserver.close()
            await self.etcd.close()

    @property
    def state(self) -> JobState:
        """The last known one while etcd is away."""
        return self.directory.state or JobState()

    @property
    def mode(self) -> Mode:
        return self.directory.spec.mode if self.directory.spec is not None else Mode.SYNC

    @property
    def is_masterless(self) -> bool:
        return self.directory.spec is not None and self.directory.spec.dispatch is Dispatch.ETCD

    async def leader(self) -> str:
        """Id of the leading master. Raises PeerError, DeadlineExceeded."""
        await self.directory.wait_for(lambda view: view.master is not None, SETTLE_S, "a master")
        async with self._open() as (client, job):
            return (await client.get_job(job)).master.master_id

    async def missing(self) -> int:
        """How many trainers and parameter servers the job still lacks; 1 while no master answers."""
        try:
            async with self._open() as (client, job):
                members = (await client.get_job(job)).members
        except PeerError:
            return 1
        return max(0, members.trainers_desired - members.trainers) + max(
            0, members.pservers_desired - members.pservers
        )

    async def versions(self) -> tuple[int, int] | None:
        """(lowest, highest) version over all blocks; None while a parameter server is away or restoring.
        Collective: of the listed trainers."""
        try:
            members = await self._serving()
            infos = await asyncio.gather(*(self._pserver(member).info() for member in members))
        except PeerError:
            return None
        if not infos:
            return None
        if not all(info.ready and info.timeline == self.state.timeline for info in infos):
            return None
        if infos[0].mode is Mode.ASYNC:
            updates = sum(info.updates for info in infos)
            return updates, updates
        filled = [info for info in infos if info.blocks]
        return min(info.lowest for info in filled), max(info.highest for info in filled)

    async def _serving(self) -> list[PserverMember]:
        """The members that hold the parameters; empty while one of them is away. Raises PeerError."""
        if self.directory.spec is None or self.directory.spec.strategy is not Strategy.COLLECTIVE:
            found = self.directory.pservers
            return list(found.values()) if len(found) == self.directory.pservers_desired else []
        keys = await self.etcd.range(self.keys.trainers, prefix=True, timeout_s=ANSWER_S)
        records = [
            read_record(TrainerMember, kv.key, kv.value) for kv in keys.kvs if self.keys.is_trainer(kv.key)
        ]
        there = {each.trainer: each for each in records if each is not None and each.exchange is not None}
        names = self.directory.trainers.names
        return [_as_pserver(there[name]) for name in names] if there.keys() >= set(names) else []

    def _pserver(self, member: PserverMember) -> HttpPserver:
        if member.incarnation not in self._pservers:
            self._pservers[member.incarnation] = HttpPserver(
                member, self._token, tls=client_context(), stall_s=self._stall_s
            )
        return self._pservers[member.incarnation]

    async def revision(self) -> int:
        """The newest revision in etcd; the directory's last one if etcd is away."""
        with contextlib.suppress(PeerError):
            return (await self.etcd.range(self.keys.state, timeout_s=ANSWER_S)).revision
        return self.directory.revision

    async def checkpoint_step(self) -> int | None:
        """The step of the checkpoint that the job's timeline began with; None: not known."""
        with contextlib.suppress(PeerError):
            found = await self.etcd.get(self.keys.latest, timeout_s=ANSWER_S)
            latest = read_record(CheckpointLatest, self.keys.latest, found.value if found else None)
            kept = latest.kept if latest else ()
            return next((ref.step for ref in kept if ref.uuid == self.state.checkpoint), None)
        return None

    async def discarded_records(self) -> int:
        """Records of discarded tasks; 0 while no master answers."""
        for _ in range(int(SETTLE_S / RETRY_S)):
            with contextlib.suppress(PeerError):
                async with self._open() as (client, job):
                    return sum([task.count async for task in client.list_tasks(job, state="DISCARDED")])
            await asyncio.sleep(RETRY_S)
        return 0

    async def events(self, after: int) -> list[EventRecord]:
        """The master's events with a number above `after`; as many as it answers for."""
        found: list[EventRecord] = []
        with contextlib.suppress(PeerError):
            async with self._open() as (client, job):
                while page := (await client.list_events(job, after=after)).events:
                    found += page
                    after = page[-1].event_id
        return found

    def _open(self) -> AbstractAsyncContextManager[OpenJob]:
        """Raises PeerError while no master leads."""
        if self.is_masterless:
            return open_job(self._url, timeout_s=ANSWER_S)
        if self.directory.master is None:
            raise PeerError("there is no master right now")
        return open_job(self.directory.master.url, token=self._token, timeout_s=ANSWER_S)


def _as_pserver(trainer: TrainerMember) -> PserverMember:
    """The trainer as a parameter server, because it answers the same requests."""
    assert trainer.exchange is not None
    where = {name: getattr(trainer, name) for name in ("incarnation", "host", "pid", "network")}
    return PserverMember(index=0, url=trainer.exchange.url, uds=trainer.exchange.uds, **where)


@dataclass(frozen=True, slots=True)
class Receipt:
    """Seconds since the kill; None: not seen. `next_step_s` is also None if the job ended before its next
    step. `next_task_s`: only for a killed master. Steps are counted as in `trireme status`; the parameter
    servers of an asynchronous job have no common count, so `next_step` and `rolled_back_to` are None there,
    and `next_step_s` is that of the next one anywhere. `updates_lost`: minibatches that a parameter server
    lacks since it came back."""

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
        noticed = (
            f"{self.noticed_s:.2f} s later: {self.noticed}" if self.noticed_s is not None else self.noticed
        )
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
            *[
                ("updates lost", f"{name}: {count:,} minibatches")
                for name, count in self.updates_lost.items()
                if count
            ],
            ("job", self.phase),
        ]
        if self.next_task_s is not None:
            rows.insert(3, ("next task given out", f"{self.next_task_s:.2f} s"))
        return "\n".join(f"{name:<20}{value}" for name, value in rows)


@dataclass(frozen=True, slots=True)
class Before:
    """The job a moment before a process dies. `versions`: lowest and highest of all blocks. `event`: id of
    the last event. `since` and `stamp`: that moment by the loop's clock and as text."""

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
    discarded, events, versions = (
        await probe.discarded_records(),
        await probe.events(0),
        await probe.versions(),
    )
    event = events[-1].event_id if events else 0
    return Before(
        probe.state, versions, discarded, event, await probe.revision(), clock.monotonic(), clock.timestamp()
    )


async def measure(
    probe: JobProbe, before: Before, victims: Mapping[str, int], *, master: bool = False
) -> Receipt:
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
        receipt = replace(
            receipt, next_step=step[0] if probe.mode is Mode.SYNC else None, next_step_s=step[1]
        )
    if dispatched is not None and not dispatched.cancelled():
        receipt = replace(receipt, next_task_s=dispatched.result())
    receipt = await _with_masterless_rollback(
        probe, await _with_signs(probe, receipt, before, victims), before
    )
    return replace(
        receipt,
        records_lost=max(0, await probe.discarded_records() - before.discarded),
        phase=_phase_of(probe.state),
    )


def _phase_of(state: JobState) -> str:
    """`RUNNING`, else with the reason."""
    return (
        str(state.phase) if state.phase is Phase.RUNNING else without_tokens(f"{state.phase}: {state.reason}")
    )


def _is_same_stage(probe: JobProbe, before: Before) -> bool:
    return not probe.state.phase.final and probe.state.stage == before.state.stage


async def _next_step(probe: JobProbe, before: Before) -> tuple[int, float] | None:
    """The first step that was begun and committed since `before`, and the seconds; None if the stage of the
    job ended first. Raises DeadlineExceeded."""
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
        elif (
            versions is not None
            and base is not None
            and versions[0] > base
            and probe.state.timeline == timeline
        ):
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


async def _with_signs(
    probe: JobProbe, receipt: Receipt, before: Before, victims: Mapping[str, int]
) -> Receipt:
    """The receipt with the earliest sign in the launcher's log and the master's events, and with the records
    that were replayed."""
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
        if line["what"] in ENDS and victims.get(line["child"]) == line["pid"]
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
