"""How fast the REST API answers beside a running job: python -m benchmarks.api [--rate 200] [--seconds 30]
[--json]

A local job (etcd, a master, a parameter server, two trainers, with tokens) trains all the time. Requests are
sent at --rate a second whether or not earlier ones were answered, so a slow answer does not hide those that
wait behind it: each time is counted from the moment when the request was due. They take turns: the job, its
tasks, its members, events, metrics, checkpoints, Prometheus. The first request for each path counts, too.
Shown are quantiles in ms over all of them and for each path, and the steps/s of the job without and beside
them. The requests come from a process of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import sys
import tempfile
from pathlib import Path

import aiohttp
import numpy as np

from trireme.client import ONLY_JOB
from trireme.launch.cluster import LocalCluster
from trireme.launch.supervision import ClusterSettings
from trireme.view.job_address import client_of
from trireme_shared.platform.runtime import clock, telemetry
from trireme_shared.platform.security.tokens import Role, TokenFolder
from trireme_shared.protocol.records import JobSpec
from trireme_shared.protocol.records.datasets import Npy

PATHS = (
    "/v1/job",
    "/v1/tasks?page_size=100",
    "/v1/members",
    "/v1/events?after=0",
    "/v1/metrics?metric=step_loss",
    "/v1/checkpoints",
    "/v1/task-summary",
    "/metrics",
)
GOAL_MS = 20.0
CALM_S = 5.0
START_S = 60.0
RECORDS = 4096
SCRIPT = """
import time

import torch
import trireme
from torch import nn
from torch.nn import functional as F


def model():
    return nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 1))


def dataset():
    return trireme.data.Npy({data!r})


def loss(model, batch):
    time.sleep({sleep_s!r})
    return F.mse_loss(model(batch["x"])[:, 0], batch["x"][:, 0])


def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.01)
"""


async def ask(url: str, token: str, rate: float, seconds: float) -> dict[str, list[float]]:
    """Seconds from when each request was due until its answer was read, by path. Raises SystemExit for an
    answer that is none."""
    found: dict[str, list[float]] = {path: [] for path in PATHS}
    connector = aiohttp.TCPConnector(limit=64)
    async with aiohttp.ClientSession(
        connector=connector, headers={"Authorization": f"Bearer {token}"}
    ) as session:

        async def one(path: str, due: float) -> None:
            async with session.get(url + path) as answer:
                content = await answer.read()
            if answer.status != 200:
                sys.exit(f"{path} answered {answer.status}: {content[:500]!r}")
            found[path].append(clock.monotonic() - due)

        begin = clock.monotonic() + 0.1
        async with asyncio.TaskGroup() as group:
            for number in range(int(rate * seconds)):
                due = begin + number / rate
                await asyncio.sleep(max(0.0, due - clock.monotonic()))
                group.create_task(one(PATHS[number % len(PATHS)], due))
    return found


def ask_alone(
    url: str,
    token: str,
    rate: float,
    seconds: float,
    told: multiprocessing.SimpleQueue[dict[str, list[float]]],
) -> None:
    told.put(asyncio.run(ask(url, token, rate, seconds)))


async def steps_of(url: str, token: str) -> int:
    async with client_of(url, token) as client:
        return (await client.get_job(ONLY_JOB)).progress.step or 0


async def steps_a_second(url: str, token: str, seconds: float) -> float:
    first, begin = await steps_of(url, token), clock.monotonic()
    await asyncio.sleep(seconds)
    return (await steps_of(url, token) - first) / (clock.monotonic() - begin)


async def measure(given: argparse.Namespace, folder: Path) -> dict[str, object]:
    data, script = folder / "x.npy", folder / "script.py"
    np.save(data, np.random.default_rng(1).random((RECORDS, 32), np.float32))
    script.write_text(SCRIPT.format(data=str(data), sleep_s=given.sleep))
    spec = JobSpec(
        job="api",
        script=str(script),
        dataset=Npy(str(data)),
        storage=str(folder / "run"),
        epochs=100_000,
        global_batch_size=32,
        lanes=2,
        trainers=2,
        pservers=1,
        checkpoint_every_epochs=10,
    )
    tokens = TokenFolder(folder / "run")
    tokens.prepare("")
    admin, viewer = tokens.token(Role.ADMIN), tokens.token(Role.VIEWER)
    async with LocalCluster(spec, folder / "run", ClusterSettings(tokens=tokens)) as cluster:
        url = await cluster.master_url()
        async with asyncio.timeout(START_S):
            while await steps_of(url, admin) < 20:
                await asyncio.sleep(0.2)
        calm = await steps_a_second(url, admin, CALM_S)
        told: multiprocessing.SimpleQueue[dict[str, list[float]]] = multiprocessing.get_context(
            "spawn"
        ).SimpleQueue()
        arguments = (url, viewer, given.rate, given.seconds, told)
        asking = multiprocessing.get_context("spawn").Process(target=ask_alone, args=arguments)
        asking.start()
        beside = asyncio.ensure_future(steps_a_second(url, admin, given.seconds))
        found = await asyncio.to_thread(told.get)
        asking.join()
        steps = await beside
    return {"times_s": found, "calm_steps": calm, "beside_steps": steps}


def row(name: str, times_s: list[float]) -> str:
    p50, p95, p99 = np.percentile(np.array(times_s) * 1000, [50, 95, 99])
    return f"| {name} | {len(times_s)} | {p50:.1f} | {p95:.1f} | {p99:.1f} | {max(times_s) * 1000:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", type=float, default=200.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument(
        "--sleep", type=float, default=0.02, help="seconds of a minibatch, beside its arithmetic"
    )
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    telemetry.configure(level="ERROR", json=False)
    with tempfile.TemporaryDirectory(prefix="trireme-api-") as folder:
        found = asyncio.run(measure(given, Path(folder)))
    if given.json:
        print(json.dumps(found))
        return
    times = found["times_s"]
    assert isinstance(times, dict)
    print(f"{given.rate:g} requests/s for {given.seconds:g} s; goal: p99 < {GOAL_MS:g} ms\n")
    print("| path | requests | p50 ms | p95 | p99 | longest |\n|---|---|---|---|---|---|")
    print(row("**all**", [each for group in times.values() for each in group]))
    print("\n".join(row(path, group) for path, group in times.items()))
    print(f"\nsteps/s: {found['calm_steps']:.1f} without, {found['beside_steps']:.1f} beside the requests")


if __name__ == "__main__":
    main()
