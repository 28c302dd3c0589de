"""`trireme chaos kill`: SIGKILL one process of a running local job and tell how the job got over it.

run.json, children.jsonl --> who runs      kill --> launcher's log and master's events: how it was noticed
                                           parameter servers' versions: seconds until the next committed step
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import psutil

from shared import clock, ids
from shared import etcd as etcd_client
from shared.errors import DeadlineExceeded, NotFound, PeerError, TriremeError
from shared.keys import Keys
from shared.manifest import CheckpointLatest
from shared.records import JobState, Mode, PserverMember
from trainer_agent.pservers import HttpPserver
from trireme import exits, run_dir
from trireme.children import read_events
from trireme.client import Client
from trireme.run_command import DATA_DIR

LIMIT_S = 120.0
POLL_S = 0.02
ANSWER_S = 2.0
SETTLE_S = 3.0


@dataclass(frozen=True, slots=True)
class Receipt:
    """Seconds since the kill; None: not seen. `next_step_s` is also None if the job was over before its next step."""

    job: str
    killed: str
    pid: int
    noticed: str
    noticed_s: float | None
    next_step: int | None
    next_step_s: float | None
    rolled_back_to: int | None
    records_replayed: int
    records_lost: int
    phase: str

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
        rows = (
            ("killed", f"{self.killed} (pid {self.pid}, SIGKILL) of job {self.job}"),
            ("noticed", noticed),
            ("next committed step", step),
            ("records replayed", replayed),
            ("records lost", f"{self.records_lost:,}"),
            ("job", self.phase),
        )
        return "\n".join(f"{name:<20}{value}" for name, value in rows)


def kill(name: str | None, job: str | None, data_dir: Path | None, *, at_random: bool, as_json: bool) -> int:
    """Returns the exit code."""
    try:
        folder = _folder(job, data_dir)
        receipt = asyncio.run(_kill(folder, _victim(folder, name, at_random=at_random)))
    except TriremeError as error:
        return exits.tell(error, as_json=as_json)
    print(json.dumps(asdict(receipt)) if as_json else receipt.text())  # noqa: T201
    return exits.OK


def _folder(job: str | None, data_dir: Path | None) -> Path:
    place = data_dir or Path(os.environ.get("TRIREME_DATA_DIR") or DATA_DIR)
    facts = run_dir.read_run_file(place, job)
    if facts is None:
        msg = f"there is no run of {f'job {job}' if job else 'any job'} in {place}"
        raise NotFound(msg, hint="start one with `trireme run SCRIPT`, or give --data-dir")
    return place / str(facts["job"])


def _victim(folder: Path, name: str | None, *, at_random: bool) -> tuple[str, int]:
    """(name, pid) of a child that is alive. Raises NotFound."""
    alive = {child: pid for child, pid in _children(folder).items() if _is_child(child, pid)}
    if not alive:
        msg = f"nothing of the run in {folder} is alive"
        raise NotFound(msg, hint="start it with `trireme run SCRIPT`")
    if at_random:
        name = ids.source.choice(sorted(alive))
    if name not in alive:
        msg = f"there is no child {name!r} alive; there are {', '.join(sorted(alive))}"
        raise NotFound(msg)
    return name, alive[name]


def _children(folder: Path) -> dict[str, int]:
    """Name -> pid of all that were started and did not die since."""
    found: dict[str, int] = {}
    for event in read_events(folder):
        if event["what"] in ("started", "restarted"):
            found[event["child"]] = event["pid"]
        elif event["what"] in ("died", "finished"):
            found.pop(event["child"], None)
    return found


def _is_child(name: str, pid: int) -> bool:
    """A pid may be somebody else's by now."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        return "etcd" in process.name() if name == "etcd" else process.environ().get("TRIREME_NAME") == name
    except psutil.Error:
        return False


# -------------------------------------------------------------------- the kill


async def _kill(folder: Path, victim: tuple[str, int]) -> Receipt:
    name, pid = victim
    facts = json.loads((folder / run_dir.RUN_FILE).read_text(encoding="utf-8"))
    async with _Watcher(folder, facts) as watcher:
        before = await watcher.state()
        lost = await watcher.discarded()
        after_event = await watcher.last_event()
        start = await watcher.versions()
        since, stamp = clock.monotonic(), clock.timestamp()
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError as error:
            msg = f"{name} (pid {pid}) ended by itself before it could be killed"
            raise NotFound(msg, hint="is the job over? see `trireme status`") from error
        receipt = Receipt(
            job=str(facts["job"]),
            killed=name,
            pid=pid,
            noticed="nobody yet",
            noticed_s=None,
            next_step=None,
            next_step_s=None,
            rolled_back_to=None,
            records_replayed=0,
            records_lost=0,
            phase="",
        )
        receipt = await watcher.next_step(receipt, before, start, since)
        receipt = await watcher.noticed(receipt, after_event, stamp)
        state = await watcher.state()
        return replace(
            receipt, records_lost=max(0, await watcher.discarded() - lost), phase=f"{state.phase}: {state.reason}"
        )


class _Watcher:
    """What can be seen of a running job from outside."""

    def __init__(self, folder: Path, facts: dict[str, Any]) -> None:
        self._folder = folder
        self._keys = Keys(str(facts["job"]))
        self._etcd = etcd_client.connect([str(facts["etcd"])])
        self._token = os.environ.get("TRIREME_TOKEN", "")
        self._ports: dict[str, HttpPserver] = {}
        self._state = JobState()
        self._members: list[PserverMember] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for port in self._ports.values():
            await port.close()
        await self._etcd.close()

    async def state(self) -> JobState:
        """The last one known while etcd is away."""
        with contextlib.suppress(PeerError):
            found = await self._etcd.get(self._keys.state, timeout_s=ANSWER_S)
            if found is not None:
                self._state = JobState.model_validate_json(found.value)
        return self._state

    async def versions(self) -> tuple[int, int] | None:
        """(lowest, highest) version over all blocks; None while a parameter server is away or restoring."""
        try:
            found = await self._etcd.range(self._keys.pservers, prefix=True, timeout_s=ANSWER_S)
            self._members = [PserverMember.model_validate_json(kv.value) for kv in found.kvs]
        except PeerError:
            pass  # etcd is away, the parameter servers are not
        try:
            infos = [await self._port(member).info() for member in self._members]
        except PeerError:
            return None
        timeline = (await self.state()).timeline
        if not infos or not all(info.ready and info.timeline == timeline for info in infos):
            return None
        if infos[0].mode is Mode.ASYNC:
            updates = sum(info.updates for info in infos)
            return updates, updates
        filled = [info for info in infos if info.blocks]
        return min(info.lowest for info in filled), max(info.highest for info in filled)

    def _port(self, member: PserverMember) -> HttpPserver:
        if member.incarnation not in self._ports:
            self._ports[member.incarnation] = HttpPserver(member, self._token, stall_s=ANSWER_S)
        return self._ports[member.incarnation]

    async def next_step(
        self, receipt: Receipt, before: JobState, start: tuple[int, int] | None, since: float
    ) -> Receipt:
        """With the first step that was begun and committed after the kill. Raises DeadlineExceeded."""
        base, timeline = start[1] if start else None, before.timeline
        while clock.monotonic() - since < LIMIT_S:
            state, versions = await self.state(), await self.versions()
            if state.timeline != timeline:
                base, timeline = await self._step_of(state.checkpoint), state.timeline
            if versions is not None and base is None:
                base = versions[0]
            elif versions is not None and base is not None and versions[0] > base:
                return replace(receipt, next_step=versions[0], next_step_s=round(clock.monotonic() - since, 3))
            if state.phase.final or state.stage != before.stage:
                return receipt
            await asyncio.sleep(POLL_S)
        state = await self.state()
        msg = f"{receipt.killed} was killed {LIMIT_S:g} s ago and no step was committed since: {state.phase}: {state.reason}"
        raise DeadlineExceeded(msg, hint=f"its log is in {self._folder / 'logs'}")

    async def _step_of(self, checkpoint: str) -> int | None:
        with contextlib.suppress(PeerError):
            found = await self._etcd.get(self._keys.latest, timeout_s=ANSWER_S)
            kept = CheckpointLatest.model_validate_json(found.value).kept if found else ()
            return next((ref.step for ref in kept if ref.uuid == checkpoint), None)
        return None

    # ---------------------------------------------------------------- how it was noticed, and what it cost

    async def noticed(self, receipt: Receipt, after: int, stamp: str) -> Receipt:
        """The earliest sign in the launcher's log and the master's events; the master tells what was replayed."""
        signs: list[tuple[float, str]] = []
        deadline = clock.monotonic() + SETTLE_S
        while not signs and clock.monotonic() < deadline:
            signs += [
                (clock.seconds_between(stamp, line["time"]), "the launcher saw it exit")
                for line in read_events(self._folder)
                if (line["child"], line["pid"], line["what"]) == (receipt.killed, receipt.pid, "died")
            ]
            await asyncio.sleep(POLL_S)
        for event in await self._events(after):
            seconds = clock.seconds_between(stamp, event["event_time"])
            fields = event["fields"]
            if seconds < 0:
                continue
            if event["name"] == "member_dead":
                signs.append((seconds, "a peer suspected it and the master found its port closed"))
            if event["name"] == "rolled_back":
                receipt = replace(
                    receipt,
                    rolled_back_to=int(fields["step"]),
                    records_replayed=receipt.records_replayed + int(fields["records_replayed"]),
                )
        if signs:
            seconds, how = min(signs)
            receipt = replace(receipt, noticed=how, noticed_s=round(max(0.0, seconds), 3))
        return receipt

    async def last_event(self) -> int:
        events = await self._events(0)
        return int(events[-1]["event_id"]) if events else 0

    async def discarded(self) -> int:
        """Records of discarded tasks; 0 while no master answers."""
        for _ in range(int(SETTLE_S / 0.1)):
            with contextlib.suppress(PeerError, FileNotFoundError):
                async with self._master() as client:
                    return sum([int(task["count"]) async for task in client.tasks("DISCARDED")])
            await asyncio.sleep(0.1)
        return 0

    async def _events(self, after: int) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        with contextlib.suppress(PeerError, FileNotFoundError):
            async with self._master() as client:
                while page := (await client.events(after=after))["events"]:
                    found += page
                    after = page[-1]["event_id"]
        return found

    def _master(self) -> Client:
        facts = json.loads((self._folder / run_dir.RUN_FILE).read_text(encoding="utf-8"))
        return Client(str(facts["url"]), token=self._token, timeout_s=ANSWER_S)
