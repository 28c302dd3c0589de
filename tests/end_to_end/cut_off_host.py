"""A job on two hosts (tests/equipment/two_hosts.py), one of which is cut off in the middle and comes back. No
launcher knows both.

    python -m tests.end_to_end.cut_off_host trainers|pserver|leader|agents FOLDER

FOLDER holds the script and its data (`write_job`). The last line on stdout is a Report as JSON. etcd is on
host 1; host 2 is cut off:

    trainers   members started by hand; host 2 has half of the trainers
    pserver    members started by hand; host 2 has a trainer and one of two parameter servers, host 1 one in
               reserve
    agents     host agents and the master of a cluster; host 2 has a trainer and one of two parameter servers,
               host 1 an idle place
    leader     members started by hand; host 2 has a trainer and the leading master, host 1 a standby
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.end_to_end.scripts import LOSS, write_script
from tests.equipment.two_hosts import ADDRESSES, Cut, Number, TwoHosts
from tests.equipment.waiting import until
from tests.soak import isolation
from trainer_agent.data_plane.http import HttpPserver
from trireme_shared.platform.etcd import Etcd
from trireme_shared.platform.etcd.embedded import EmbeddedEtcd
from trireme_shared.platform.membership.directory import Directory
from trireme_shared.platform.membership.etcd_access import EtcdAccess
from trireme_shared.protocol.keys import ClusterKeys, Keys
from trireme_shared.protocol.records import JobSpec, Phase, PserverMember
from trireme_shared.protocol.records.datasets import Npy
from trireme_shared.protocol.records.job_spec import JobSettings

JOB = "two-hosts"
TOKEN = "between-hosts"
NAMES: dict[Number, str] = {1: "one", 2: "two"}
LEASE_S, EPOCHS = 3.0, 50
LIMIT_S = 90.0
LOOK_S = 0.005
STEPS_BEFORE, STEPS_AFTER = 20, 5
SETTINGS: dict[str, Any] = {
    "epochs": EPOCHS,
    "global_batch_size": 32,
    "lanes": 4,
    "seed": 3,
    "records_per_task": 16,
    "block_bytes": 256,
    "trainers": 2,
    "pservers": 2,
    "lease_ttl_s": LEASE_S,
    "checkpoint_every_epochs": 10,
}
# as long as the file is there, so that the job is not over before its host is back
SLOW_LOSS = LOSS.replace("    return", '    time.sleep(0.01 if (HERE / "slow").exists() else 0)\n    return')


@dataclass
class Report:
    """`next_step_s`: from the cut to the first step that only members of host 1 made. `leases_end_s`: from
    the cut until etcd had none of host 2's keys any more: agents, members, master. `back_s`: from the end of
    the cut until members of host 2 train. `streams`: over what the trainers of each host opened their
    streams. Durations in seconds."""

    next_step_s: float = 0.0
    leases_end_s: float = 0.0
    back_s: float = 0.0
    lease_s: float = LEASE_S
    timeline: int = 0
    streams: dict[str, list[str]] = field(default_factory=dict)
    phase: str = ""
    state_dict: str = ""


def write_job(folder: Path) -> Path:
    """The script, with its data."""
    return write_script(folder, loss=SLOW_LOSS.replace("\ndef", "import time\n\n\ndef"))


def spec_in(folder: Path, **changes: Any) -> JobSpec:
    dataset = Npy(*(str(folder / name) for name in ("x.npy", "y.npy")), aligned=True)
    paths = {"script": str(folder / "script.py"), "storage": str(folder / "storage"), "dataset": dataset}
    return JobSpec.model_validate({**SETTINGS, "job": JOB, **paths, **changes})


class Job:
    """The two hosts, and the job as etcd and its parameter servers tell it."""

    def __init__(self, folder: Path, hosts: TwoHosts, etcd: Etcd, access: EtcdAccess) -> None:
        self.folder, self.hosts, self.etcd, self.access = folder, hosts, etcd, access
        self.directory = Directory(etcd, Keys(JOB))
        self.report = Report()

    async def start(self, number: Number, name: str, module: str, **settings: object) -> None:
        access = {
            name.removeprefix("TRIREME_").lower(): value for name, value in self.access.environment().items()
        }
        common = {**access, "job": JOB, "token": TOKEN, "begun_file": self.folder / f"{name}.begun"}
        await self.hosts.start(number, name, sys.executable, "-m", module, **(common | settings))

    async def seen(self, condition: Callable[[Directory], bool], what: str) -> None:
        await self.directory.wait_for(condition, LIMIT_S, what)

    async def pserver(self, index: int) -> PserverMember:
        await self.seen(lambda view: index in view.pservers, f"pserver-{index}")
        return self.directory.pservers[index]

    async def trainers_on(self, host: str, count: int) -> None:
        def train(view: Directory) -> bool:
            running = view.state is not None and view.state.phase is Phase.RUNNING
            return running and sum(name.startswith(f"{host}-") for name in view.trainers.names) >= count

        await self.seen(train, f"{count} trainers of {host} to train")

    async def cut_and_come_back(self, how: Cut, joined: Callable[[], Awaitable[None]]) -> None:
        """In mid-job. `joined`: waits until the members of host 2 train again."""
        clock, kept = asyncio.get_running_loop().time, self._kept_pserver()
        async with HttpPserver(kept, TOKEN) as port:
            await _until_steps(port, STEPS_BEFORE)
            before = await port.info()
            lost = await self._leased_by("two")
            at = clock()
            self.hosts.cut(how)
            ending = asyncio.create_task(self._gone_at(lost))
            self.report.next_step_s = await _next_step(port, before.timeline, clock, at) - at
            self.report.leases_end_s = await ending - at
            await _until_steps(port, STEPS_AFTER)
            at = clock()
            self.hosts.join()
            await joined()
            self.report.back_s = clock() - at
            await _until_steps(port, STEPS_AFTER)

    async def _leased_by(self, host: str) -> set[tuple[str, int]]:
        """The keys of its agent, its members and its master, and when they were created. Their names begin
        with the host's."""
        named = re.compile(rf'"{host}-(trainer|pserver|master)\b'.encode())
        found = (await self.etcd.range("/", prefix=True)).kvs
        return {(kv.key, kv.create_revision) for kv in found if kv.lease and named.search(kv.value)}

    async def _gone_at(self, keys: set[tuple[str, int]]) -> float:
        """When each of them has been deleted. Others may have created some of them again since."""
        clock = asyncio.get_running_loop().time
        async with asyncio.timeout(LIMIT_S):
            while keys:
                there = (await self.etcd.range("/", prefix=True, keys_only=True)).kvs
                keys &= {(kv.key, kv.create_revision) for kv in there}
                await asyncio.sleep(LOOK_S)
        return clock()

    def _kept_pserver(self) -> PserverMember:
        members = self.directory.pservers.values()
        return next(member for member in members if ADDRESSES[1] in member.url)

    async def end(self) -> None:
        (self.folder / "slow").unlink()
        await self.seen(lambda view: view.state is not None and view.state.phase.final, "the job to end")
        state = self.directory.state
        assert state is not None
        self.report.phase, self.report.timeline = str(state.phase), state.timeline
        if state.result is not None:
            self.report.state_dict = state.result.exports["state_dict"]
        for log in sorted(self.folder.rglob("*trainer-*.log")):
            events = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
            ways = {event["over"] for event in events if event["event"] == "stream_open"}
            self.report.streams[log.name.partition("-")[0]] = sorted(ways)


async def _until_steps(port: HttpPserver, count: int) -> None:
    """Until that many steps more are made."""
    first = (await port.info()).lowest
    async with asyncio.timeout(LIMIT_S):
        while (await port.info()).lowest < first + count:
            await asyncio.sleep(LOOK_S)


async def _next_step(port: HttpPserver, timeline: int, clock: Callable[[], float], since: float) -> float:
    """When the first step after the longest pause was made. What was sent before the cut may end some steps
    after it."""
    seen, at, best = await port.info(), since, (0.0, since)
    async with asyncio.timeout(LIMIT_S):
        while best[0] < 1.0 or clock() < best[1] + 1.0:  # no step takes a second, and each death costs more
            await asyncio.sleep(LOOK_S)
            info, now = await port.info(), clock()
            if info.timeline != seen.timeline:
                seen = info  # rolled back: no step
            elif info.lowest > seen.lowest:
                best, seen, at = max(best, (now - at, now)), info, now
    return best[1]


# ---------------------------------------------------------------- scenarios


async def trainers(job: Job) -> None:
    await _master(job, 1)
    await _members(job, 1)
    await job.cut_and_come_back("dropped", lambda: job.trainers_on("two", 1))


async def leader(job: Job) -> None:
    await _master(job, 2)
    await job.seen(lambda view: view.master is not None, "a leader")
    await job.start(1, "one-master", "master_service")
    await _members(job, 1)
    await job.cut_and_come_back("dropped", lambda: job.trainers_on("two", 1))


async def pserver(job: Job) -> None:
    await _master(job, 1)
    await _members(job, 2)
    ready = job.folder / "in-reserve"
    await job.start(1, "one-pserver-2", "pserver_service", ready_file=ready)
    await until(ready.exists, "the parameter server in reserve", LIMIT_S)
    await job.cut_and_come_back("down", lambda: job.trainers_on("two", 1))


async def _master(job: Job, host: Number) -> None:
    path = job.folder / "spec.json"
    path.write_bytes(spec_in(job.folder).to_bytes())
    await job.start(host, f"{NAMES[host]}-master", "master_service", spec=path)


async def _members(job: Job, second: Number) -> None:
    """A parameter server on host 1, one on host `second`, and a trainer on each host. Half of them listen on
    all addresses."""
    sockets = {"uds": job.folder / "uds"}  # in files that both hosts see
    sockets["uds"].mkdir()
    everywhere = {number: {"host": "0.0.0.0", "advertise": address} for number, address in ADDRESSES.items()}
    await job.start(1, "one-pserver-0", "pserver_service", **sockets)
    await job.start(second, f"{NAMES[second]}-pserver-1", "pserver_service", **sockets, **everywhere[second])
    await job.start(1, "one-trainer-0", "trainer_agent")
    await job.start(2, "two-trainer-0", "trainer_agent", **everywhere[2])
    for name in NAMES.values():
        await job.trainers_on(name, 1)


async def agents(job: Job) -> None:
    await job.start(1, "master", "master_service", job="", storage=job.folder / "storage")
    settings = {"trainers": 1, "agent_ttl_s": LEASE_S, "drain_seconds": 5, "job": ""}
    for number, name in NAMES.items():
        places = {"pservers": 3 - number, "data_dir": job.folder / name, "node": name}
        await job.start(number, name, "trireme.host", **settings, **places)
    await _submit(job)
    for name in NAMES.values():
        await job.trainers_on(name, 1)
    away = [member for member in job.directory.pservers.values() if ADDRESSES[2] in member.url]
    assert len(away) == 1, job.directory.pservers
    await job.cut_and_come_back("down", lambda: job.trainers_on("two", 1))


async def _submit(job: Job) -> None:
    """As a user does, by REST."""
    keys = ClusterKeys()
    async with asyncio.timeout(LIMIT_S):
        while len((await job.etcd.range(keys.member("trainer", ""), prefix=True)).kvs) < 2:
            await asyncio.sleep(0.05)
    settings = spec_in(job.folder).model_dump(mode="json", include=set(JobSettings.model_fields))
    asked = {"name": JOB, "settings": settings, "script": str(job.folder / "script.py")}
    url = await _leader_url(job, keys)
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {TOKEN}"}, trust_env=False) as client:
        answer = await client.post(f"{url}/v1/jobs", json=asked, timeout=LIMIT_S)
        assert answer.status_code == 201, answer.text


async def _leader_url(job: Job, keys: ClusterKeys) -> str:
    async with asyncio.timeout(LIMIT_S):
        while (found := await job.etcd.get(keys.address)) is None:
            await asyncio.sleep(0.05)
    return str(json.loads(found.value)["url"])


SCENARIOS = {scenario.__name__: scenario for scenario in (trainers, pserver, leader, agents)}


async def run(scenario: Callable[[Job], Awaitable[None]], folder: Path) -> Report:
    async with AsyncExitStack() as stack:
        hosts = await stack.enter_async_context(TwoHosts(folder / "processes"))
        embedded = await stack.enter_async_context(EmbeddedEtcd(folder / "etcd", host=ADDRESSES[1]))
        stack.push_async_callback(hosts.stop)  # before their etcd
        access = EtcdAccess((embedded.url,), user=embedded.user, password=embedded.password)
        etcd = access.connect()
        stack.push_async_callback(etcd.close)
        (folder / "slow").touch()
        job = Job(folder, hosts, etcd, access)
        following = asyncio.create_task(job.directory.run())
        stack.callback(following.cancel)
        await scenario(job)
        await job.end()
        return job.report


def main() -> int:
    isolation.enter()
    name, folder = sys.argv[1:]
    report = asyncio.run(run(SCENARIOS[name], Path(folder)))
    sys.stdout.write(f"{json.dumps(asdict(report))}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
