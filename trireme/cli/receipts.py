"""What a death cost a running local job, seen from outside.

look() -> Before      something dies      receipt(Before) -> launcher's log and master's events: how it was noticed
                                                             parameter servers' versions: the next committed step
                                                             etcd: the next task that a master gave out
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from shared import etcd as etcd_client
from shared.errors import DeadlineExceeded, PeerError
from shared.etcd.reading import read_record
from shared.keys import Keys
from shared.membership.directory import Directory
from shared.records import Dispatch, JobState, Mode, PserverMember
from shared.records.checkpoints import CheckpointLatest
from shared.runtime import clock
from trainer_agent.data_plane.http import HttpPserver
from trireme.launch import run_folder
from trireme.launch.child import read_events
from trireme.view.client import Client
from trireme.view.job_address import reach
from trireme.view.spectator import Spectator

LIMIT_S = 120.0
POLL_S = 0.02
ANSWER_S = 2.0
STALL_S = 0.5
SETTLE_S = 3.0
MASTER_SIGNS = {"generation_changed", "rolling_back", "master_elected"}


@dataclass(frozen=True, slots=True)
class Receipt:
    """Seconds since the kill; None: not seen. `next_step_s` is also None if the job was over before its next step.
    `next_task_s`: of a killed master only."""

    job: str
    killed: str
    pid: int
    noticed: str = "nobody yet"
    noticed_s: float | None = None
    next_step: int | None = None
    next_step_s: float | None = None
    next_task_s: float | None = None
    rolled_back_to: int | None = None
    records_replayed: int = 0
    records_lost: int = 0
    phase: str = ""

    def text(self) -> str:
        noticed = f"{self.noticed_s:.2f} s later: {self.noticed}" if self.noticed_s is not None else self.noticed
        step = (
            f"{self.next_step_s:.2f} s (step {self.next_step})"
            if self.next_step_s is not None
            else "none: training is over"
        )
        replayed = f"{self.records_replayed:,}"
        if self.rolled_back_to is not None:
            replayed += f" (everybody went back to step {self.rolled_back_to})"
        rows = [
            ("killed", f"{self.killed} (pid {self.pid}, SIGKILL) of job {self.job}"),
            ("noticed", noticed),
            ("next committed step", step),
            ("records replayed", replayed),
            ("records lost", f"{self.records_lost:,}"),
            ("job", self.phase),
        ]
        if self.next_task_s is not None:
            rows.insert(3, ("next task given out", f"{self.next_task_s:.2f} s"))
        return "\n".join(f"{name:<20}{value}" for name, value in rows)


@dataclass(frozen=True, slots=True)
class Before:
    """The job a moment before something dies. `versions`: lowest and highest of all blocks; `event`: the last one's id;
    `since` and `stamp`: that moment, by the loop's clock and for people."""

    state: JobState
    versions: tuple[int, int] | None
    discarded: int
    event: int
    revision: int
    since: float
    stamp: str


class Witness:
    """Watches the job that runs in `folder`; made anew when the launcher was started again. Enter it where it may run a
    task beside you."""

    def __init__(self, folder: Path) -> None:
        facts = json.loads((folder / run_folder.RUN_FILE).read_text(encoding="utf-8"))
        self._facts = facts
        self.job = str(facts["job"])
        self._folder = folder
        self._keys = Keys(self.job)
        self._etcd = etcd_client.connect([str(facts["etcd"])])
        self._view = Directory(self._etcd, self._keys)
        self._token = os.environ.get("TRIREME_TOKEN", "")
        self._ports: dict[str, HttpPserver] = {}
        self._tasks = asyncio.TaskGroup()

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        self._following = self._tasks.create_task(self._view.run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._following.cancel()
        try:
            await self._tasks.__aexit__(kind, error, traceback)
        finally:
            for port in self._ports.values():
                await port.close()
            await self._etcd.close()

    async def look(self) -> Before:
        """Kill right afterwards. Raises DeadlineExceeded if etcd does not say what the job is at."""
        await self._view.wait_for(lambda view: view.state is not None, SETTLE_S, "the job's state")
        discarded, event, versions = await self._discarded(), await self._last_event(), await self.versions()
        revision = self._view.revision  # older than now: what the view does not follow has changed since
        with contextlib.suppress(PeerError):
            revision = (await self._etcd.range(self._keys.state, timeout_s=ANSWER_S)).revision
        return Before(self._state, versions, discarded, event, revision, clock.monotonic(), clock.timestamp())

    async def receipt(self, before: Before, victims: Mapping[str, int], *, master: bool = False) -> Receipt:
        """`victims`: name -> pid; `master`: wait also for a task that is given out. Raises DeadlineExceeded."""
        receipt = Receipt(self.job, " and ".join(victims), next(iter(victims.values())))
        async with asyncio.TaskGroup() as group:
            given = group.create_task(self._next_task(before)) if master else None
            step = await self._next_step(before)
            while given is not None and not given.done() and self._is_under_way(before):  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)
            if given is not None and not given.done():
                given.cancel()
        if step is not None:
            receipt = replace(receipt, next_step=step[0], next_step_s=step[1])
        if given is not None and not given.cancelled():
            receipt = replace(receipt, next_task_s=given.result())
        receipt = await self._way_back(await self._noticed(receipt, before, victims), before)
        return replace(
            receipt,
            records_lost=max(0, await self._discarded() - before.discarded),
            phase=f"{self._state.phase}: {self._state.reason}",
        )

    # ---------------------------------------------------------------- what can be asked

    async def leader(self) -> str:
        """Id of the leading master. Raises PeerError, DeadlineExceeded."""
        await self._view.wait_for(lambda view: view.master is not None, SETTLE_S, "a master")
        async with self._master() as client:
            return str((await client.job())["master"]["master_id"])

    async def missing(self) -> int:
        """Trainers and parameter servers that the job wants and has not; 1 while no master can be asked."""
        try:
            async with self._master() as client:
                members = (await client.job())["members"]
        except PeerError:
            return 1
        return sum(max(0, int(members[f"{kind}_desired"]) - int(members[kind])) for kind in ("trainers", "pservers"))

    @property
    def _state(self) -> JobState:
        """The last one known while etcd is away."""
        return self._view.state or JobState()

    async def versions(self) -> tuple[int, int] | None:
        """(lowest, highest) version over all blocks; None while a parameter server is away or restoring."""
        members = self._view.pservers
        if not members or len(members) != self._view.pservers_desired:
            return None
        try:
            infos = [await self._port(member).info() for member in members.values()]
        except PeerError:
            return None
        if not all(info.ready and info.timeline == self._state.timeline for info in infos):
            return None
        if infos[0].mode is Mode.ASYNC:
            updates = sum(info.updates for info in infos)
            return updates, updates
        filled = [info for info in infos if info.blocks]
        return min(info.lowest for info in filled), max(info.highest for info in filled)

    def _port(self, member: PserverMember) -> HttpPserver:
        if member.incarnation not in self._ports:
            self._ports[member.incarnation] = HttpPserver(member, self._token, stall_s=STALL_S)
        return self._ports[member.incarnation]

    def _is_under_way(self, before: Before) -> bool:
        return not self._state.phase.final and self._state.stage == before.state.stage

    # ---------------------------------------------------------------- when the job went on

    async def _next_step(self, before: Before) -> tuple[int, float] | None:
        """The first step that was begun and committed since, and the seconds; None if the stage of the job ended before.
        Raises DeadlineExceeded."""
        base, timeline = before.versions[1] if before.versions else None, before.state.timeline
        while (seconds := clock.monotonic() - before.since) < LIMIT_S:
            if self._view.state is not None and self._state.timeline != timeline:
                base, timeline = await self._step_of(self._state.checkpoint), self._state.timeline
            versions = await self.versions()
            if versions is not None and base is None:
                base = versions[0]
            elif versions is not None and base is not None and versions[1] < base:
                base = versions[1]  # asynchronous: a parameter server came back alone, its counts begin again
            elif versions is not None and base is not None and versions[0] > base and self._state.timeline == timeline:
                return versions[0], round(clock.monotonic() - before.since, 3)
            if self._view.state is not None and not self._is_under_way(before):
                return None
            await asyncio.sleep(POLL_S)
        msg = f"no step was committed for {seconds:.0f} s: {self._state.phase}: {self._state.reason}"
        raise DeadlineExceeded(msg, hint=f"the logs are in {self._folder / 'logs'}")

    async def _step_of(self, checkpoint: str) -> int | None:
        with contextlib.suppress(PeerError):
            found = await self._etcd.get(self._keys.latest, timeout_s=ANSWER_S)
            latest = read_record(CheckpointLatest, self._keys.latest, found.value if found else None)
            return next((ref.step for ref in (latest.kept if latest else ()) if ref.uuid == checkpoint), None)
        return None

    async def _next_task(self, before: Before) -> float:
        """Seconds until a master gave out a task; runs until there is one."""
        prefix, start = self._keys.pending(""), before.revision + 1
        async with aclosing(self._etcd.watch(prefix, prefix=True, start_revision=start)) as batches:
            async for batch in batches:
                if any(event.type == "put" for event in batch.events):
                    break
        return round(clock.monotonic() - before.since, 3)

    # ---------------------------------------------------------------- how it was noticed, and what it cost

    async def _noticed(self, receipt: Receipt, before: Before, victims: Mapping[str, int]) -> Receipt:
        """The earliest sign in the launcher's log and the master's events; the master tells what was replayed."""
        deadline = clock.monotonic() + SETTLE_S
        while not (signs := self._seen_by_launcher(before, victims)) and clock.monotonic() < deadline:
            if receipt.next_step_s is not None and receipt.next_step_s > SETTLE_S:
                break  # time enough for the launcher: it was frozen, not killed
            await asyncio.sleep(POLL_S)
        for event in await self._events(before.event):
            seconds = clock.seconds_between(before.stamp, event["event_time"])
            if seconds < 0:
                continue
            if event["name"] == "member_dead":
                signs.append((seconds, "a peer suspected it and the master found its port closed"))
            elif event["name"] in MASTER_SIGNS and not event["message"].endswith("joined"):
                signs.append((seconds, event["message"]))
            if event["name"] == "rolled_back":
                receipt = replace(
                    receipt,
                    rolled_back_to=int(event["fields"]["step"]),
                    records_replayed=receipt.records_replayed + int(event["fields"]["records_replayed"]),
                )
        if signs:
            seconds, how = min(signs)
            receipt = replace(receipt, noticed=how, noticed_s=round(max(0.0, seconds), 3))
        return receipt

    def _seen_by_launcher(self, before: Before, victims: Mapping[str, int]) -> list[tuple[float, str]]:
        return [
            (clock.seconds_between(before.stamp, line["time"]), "the launcher saw it exit")
            for line in read_events(self._folder)
            if line["what"] == "died" and victims.get(line["child"]) == line["pid"]
        ]

    async def _last_event(self) -> int:
        events = await self._events(0)
        return int(events[-1]["event_id"]) if events else 0

    async def _discarded(self) -> int:
        """Records of discarded tasks; 0 while no master answers."""
        for _ in range(int(SETTLE_S / 0.1)):
            with contextlib.suppress(PeerError):
                async with self._master() as client:
                    return sum([int(task["count"]) async for task in client.tasks("DISCARDED")])
            await asyncio.sleep(0.1)
        return 0

    async def _events(self, after: int) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        with contextlib.suppress(PeerError):
            async with self._master() as client:
                while page := (await client.events(after=after))["events"]:
                    found += page
                    after = page[-1]["event_id"]
        return found

    def _master(self) -> AbstractAsyncContextManager[Client | Spectator]:
        """Or what stands for it in a masterless job. Raises PeerError while none leads."""
        if self._is_masterless:
            return reach(str(self._facts["url"]), timeout_s=ANSWER_S)
        if self._view.master is None:
            raise PeerError("there is no master right now")
        return Client(self._view.master.url, token=self._token, timeout_s=ANSWER_S)

    @property
    def _is_masterless(self) -> bool:
        return self._view.spec is not None and self._view.spec.dispatch is Dispatch.ETCD

    async def _way_back(self, receipt: Receipt, before: Before) -> Receipt:
        """A masterless job has no events: the step it went back to, and what it had committed since, are told by the steps."""
        step = await self._step_of(self._state.checkpoint)
        if not self._is_masterless or self._state.timeline == before.state.timeline or step is None:
            return receipt
        steps = max(0, before.versions[1] - step) if before.versions else 0
        records = steps * self._view.spec.global_batch_size if self._view.spec else 0
        return replace(receipt, rolled_back_to=step, records_replayed=records)
