"""One request of each kind that changes something, on masters that can be killed at any await while it is
carried out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from fastapi import FastAPI

from master_service.api.app import make_api
from master_service.cluster.leader import ClusterMaster
from master_service.leadership.master import Master
from tests.equipment.cluster.crash_point import StoppingProcess
from tests.equipment.waiting import until
from tests.master_service.cluster import MasterCluster, spec_of
from tests.master_service.control.restoring import checkpoint, spec
from tests.master_service.many_jobs import Jobs, job_of
from trireme_shared.protocol.records import JobSpec, JobState, Phase
from trireme_shared.protocol.records.cluster import ClusterJob, Drain, PoolMember, Standing
from trireme_shared.protocol.records.job import FailureCause

STAMP = "2026-01-01T00:00:00.000+00:00"
SETTINGS = {
    "dataset": {"kind": "text_lines", "urls": ["train.txt"]},
    "mode": "async",
    "checkpoint_kind": "independent",
    "global_batch_size": 8,
    "records_per_task": 10,
}
WANTED = {"name": "new", "settings": SETTINGS, "script": "train.py"}
FAILURE = {"error_type": "ValueError", "message": "no"}
REPORT = {"trainer": "t1", "attempt": 1, "epoch": 0}

DELAY_S = (0.002, 0.002)  # so a kill falls before, while and after etcd does something

Effect = Callable[[Any], object]


@dataclass(frozen=True)
class Asked:
    """`first`: requests before it. `effect`: what it changed, once however often it is asked; `once` is that
    value. `moves`: its answer shows progress, so only the id in it stays. `world`: in which it is asked."""

    path: str
    body: dict[str, Any] | None
    effect: Effect
    once: object
    world: str = "tasks"
    first: tuple[tuple[str, dict[str, Any]], ...] = ()
    moves: str = ""


def _operations(master: Master) -> object:
    return [operation.kind for operation in master.job.operations.records.values()]


def _standing(name: str) -> Effect:
    return lambda leader: (leader.state.job(name).standing, leader.state.job(name).wanted)


TAKE = ("/v1/task-leases", {"trainer": "t1", "request": "first", "generation": 1})
SKIP = ("/v1/tasks/{task}/skip", {})
RESIZE = ("/v1/resizes", {"trainers": 3})
ASKED = {
    "acquireTask": Asked(
        "/v1/task-leases",
        {"trainer": "t1", "request": "key", "generation": 1},
        lambda master: len(master.job.training.pending),
        1,
    ),
    "reportTaskProgress": Asked(
        "/v1/task-leases/{task}/progress",
        {"trainer": "t1", "attempt": 1, "minibatches": 2},
        lambda master: len(master.job.training.pending),
        1,
        first=(TAKE,),
    ),
    "completeTask": Asked(
        "/v1/task-leases/{task}/complete", REPORT, lambda master: master.job.training.counts[2], 1,
        first=(TAKE,),
    ),
    "failTask": Asked(
        "/v1/task-leases/{task}/fail",
        {**REPORT, "failure": FAILURE},
        lambda master: [task.failures for task in master.job.training.requeued.values()],
        [1],
        first=(TAKE,),
    ),
    "retryTask": Asked(
        "/v1/tasks/{task}/retry",
        None,
        lambda master: (len(master.job.training.requeued), len(master.job.training.discarded)),
        (1, 0),
        first=(TAKE, SKIP),
    ),
    "skipTask": Asked(
        "/v1/tasks/{task}/skip",
        None,
        lambda master: (len(master.job.training.pending), len(master.job.training.discarded)),
        (0, 1),
        first=(TAKE,),
    ),
    "reportSuspect": Asked(
        "/v1/members/t2/suspect", None, lambda master: "t2" in master.job.members.trainers, once=False
    ),
    "reportFailure": Asked(
        "/v1/members/t1/failures", FAILURE, lambda master: master.job.budget.counts.total, 1
    ),
    "reportMetrics": Asked(
        "/v1/metric-batches", {"trainer": "t1", "generation": 1, "steps": []}, lambda _: None, None
    ),
    "createCheckpoint": Asked(
        "/v1/checkpoints", {"cause": "x"}, _operations, ["CREATE_CHECKPOINT"], "saved", moves="operation_id"
    ),
    "verifyCheckpoint": Asked(
        "/v1/checkpoints/at-40/verify", None, _operations, ["VERIFY_CHECKPOINT"], "saved",
        moves="operation_id",
    ),
    "restoreCheckpoint": Asked(
        "/v1/checkpoints/at-40/restore", None, _operations, ["RESTORE_CHECKPOINT"], "saved",
        moves="operation_id",
    ),
    "createResize": Asked(*RESIZE, _operations, ["RESIZE"], "saved", moves="operation_id"),
    "cancelResize": Asked(
        "/v1/resizes/{resize_id}/cancel",
        None,
        lambda master: [each.resize.phase for each in master.job.operations.records.values()],
        ["CANCELLED"],
        "saved",
        first=(RESIZE,),
    ),
    "createJob": Asked(
        "/v1/jobs", WANTED, lambda leader: sorted(leader.state.jobs), ["failed", "new", "paused", "waits"],
        "cluster",
    ),
    "pauseJob": Asked(
        "/v1/jobs/waits/pause", None, _standing("waits"), (Standing.PAUSED, "pause"), "cluster"
    ),
    "resumeJob": Asked(
        "/v1/jobs/paused/resume", None, _standing("paused"), (Standing.QUEUED, "run"), "cluster"
    ),
    "resumeJob of a failed one": Asked(
        "/v1/jobs/failed/resume", None, _standing("failed"), (Standing.QUEUED, "run"), "cluster"
    ),
    "cancelJob": Asked(
        "/v1/jobs/waits/cancel", None, _standing("waits"), (Standing.CANCELLED, "cancel"), "cluster"
    ),
    "createSchedule": Asked(
        "/v1/schedules",
        {**WANTED, "cron": "30 2 * * *", "time_zone": "UTC"},
        lambda leader: sorted(leader.state.schedules),
        ["new"],
        "cluster",
    ),
    "drainPoolMember": Asked(
        "/v1/pool-members/a/drain", None, lambda leader: sorted(leader.state.drains),
        [("trainer", "a"), ("trainer", "b")], "cluster",
    ),
    "undrainPoolMember": Asked(
        "/v1/pool-members/b/undrain", None, lambda leader: sorted(leader.state.drains), [], "cluster"
    ),
}  # fmt: skip


async def _remove_nothing(_: JobSpec) -> None:
    pass


class World:
    """An etcd with what the requests are about, and masters on it, one after the other."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.jobs = Jobs()  # of one of the two nothing is started
        self.cluster = MasterCluster(spec(lanes=4) if kind == "saved" else spec_of(max_user_failures=5))
        for simulated in (self.jobs.simulated, self.cluster.simulated):
            simulated.delay_s = DELAY_S

    def _master(self, name: str) -> Master | ClusterMaster:
        if self.kind == "cluster":
            return self.jobs.master(name, remove_files=_remove_nothing)
        return self.cluster.master(name)

    async def prepare(self) -> None:
        if self.kind == "cluster":
            await self._prepare_cluster()
            return
        await self.cluster.initialise("t1", *(["t2"] if self.kind == "tasks" else []))
        if self.kind == "saved":
            await checkpoint(self.cluster, 40)

    async def _prepare_cluster(self) -> None:
        etcd, keys = self.jobs.etcd, self.jobs.keys
        for number, (name, standing, wanted) in enumerate(
            (
                ("waits", Standing.QUEUED, "run"),
                ("paused", Standing.PAUSED, "pause"),
                ("failed", Standing.FAILED, "run"),
            )
        ):
            told = {"standing": standing, "wanted": wanted, "number": number, "create_time": STAMP}
            job: ClusterJob = job_of(name).model_copy(update=told)
            await etcd.put(keys.job(name), job.to_bytes())
        broken = JobState(phase=Phase.FAILED, reason="no members", cause=FailureCause.MEMBERS)
        await etcd.put(keys.keys_of("failed").state, broken.to_bytes())
        for name in ("a", "b"):
            place = PoolMember(member=name, kind="trainer", host="h", agent="a", pid=1, incarnation=name)
            await etcd.put(keys.member("trainer", name), place.to_bytes())
        await etcd.put(keys.drain("trainer", "b"), Drain(ask_time=STAMP).to_bytes())

    @asynccontextmanager
    async def leading(self, name: str, process: StoppingProcess | None = None) -> AsyncIterator[Any]:
        """A master that leads, and can be asked for what the requests are about."""
        master, stopping = self._master(name), asyncio.Event()
        running = (
            process.spawn(master.run(stopping)) if process else asyncio.ensure_future(master.run(stopping))
        )
        try:
            await until(lambda: running.done() or self._is_ready(master), f"{master} to lead")
            yield master
        finally:
            stopping.set()
            if process is None:
                await running
            else:
                await self._ended(process)

    @staticmethod
    async def _ended(process: StoppingProcess) -> None:
        """Nothing of a dead process is left behind: what it awaited is cancelled, once nobody sees it any
        more."""
        process.dead = False
        process.release()
        for task in process.tasks:
            task.cancel()
        await asyncio.wait(process.tasks)

    def _is_ready(self, master: Any) -> bool:
        if master.current_term is None:
            return False
        if self.kind == "cluster":
            return len(master.current_term.state.members) == 2
        job = master.current_term.job
        return job.state.phase is Phase.RUNNING and bool(self.kind == "tasks" or job.members.latest)


_apis: dict[
    type[Any], FastAPI
] = {}  # one for all masters of a kind: making its routes takes longer than all requests of a test


async def post(master: Any, path: str, body: Any, key: str = "key") -> httpx.Response:
    async with client_of(master) as client:
        return await client.post(path, json=body, headers={"Idempotency-Key": key})


def client_of(master: Any) -> httpx.AsyncClient:
    """Without what guards the routes."""
    api = _apis.get(type(master)) or _apis.setdefault(type(master), make_api(master))
    api.state.jobs = master
    transport = httpx.ASGITransport(api, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://master")


async def begin(world: World, master: Any, asked: Asked) -> str:
    """What comes before the request; its path."""
    names: dict[str, str] = {}
    for number, (path, body) in enumerate(asked.first):
        answer = (
            await post(master, path.format(**names), body, body.get("request", f"first-{number}"))
        ).json()
        names |= {"task": answer["task"]["task_id"]} if answer.get("task") else {}
        names |= {"resize_id": answer["operation_id"]} if "operation_id" in answer else {}
    world.cluster.dead.add("http://t2")
    return asked.path.format(**names)


def shown(asked: Asked, response: httpx.Response) -> object:
    """What stays the same in the answer."""
    assert response.is_success, response.text
    body = response.json()
    return response.status_code, body[asked.moves] if asked.moves else body
