"""A cluster with five jobs, one of which is poisoned in many ways, one after the other: each poison ends as
it should, and says why; the other four keep their processes, their leader and their bits, and finish.

good jobs train ── POISONS[0] ─ deleted ── POISONS[1] ─ deleted ── ... ── good jobs COMPLETED, with the bits
                                                                          of a job that was alone
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from master_service.api.server_sent import Streams
from tests.end_to_end.cluster_command import up
from tests.end_to_end.command import Command
from tests.end_to_end.local_cluster import EPOCHS as FEW_EPOCHS
from tests.end_to_end.local_cluster import cluster_of, completed, same_bits, spec_of
from tests.end_to_end.once import made_once
from tests.end_to_end.poisoned_cluster import (
    ENVIRONMENT,
    LOG_BYTES,
    LOGS_BYTES,
    PLACES,
    Cluster,
    settled,
)
from tests.end_to_end.scripts import HEAD, LOSS
from tests.end_to_end.test_deadly_records import SCRIPT as DEADLY_SCRIPT
from tests.end_to_end.test_deadly_records import TASK
from tests.equipment.command_lines import command_line
from tests.equipment.forked import ForkedProcess
from tests.equipment.memory_groups import SmallGroup, memory_group
from trireme_shared.platform.runtime import clock
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records.cluster import JobSchedule
from trireme_shared.protocol.records.datasets import Custom, JsonLines, MapStyle, Npy, TextLines
from trireme_shared.protocol.records.job_spec import SPEC_BYTES, JobSpec
from trireme_shared.protocol.times import rfc3339

pytestmark = [pytest.mark.processes]
Does = Callable[[Cluster, str], Awaitable[str]]
MANY_EPOCHS = 80  # on a busy machine all poisons take ten minutes
STREAMS = Streams().share
MEMORY = 1 << 30  # of the members, in a control group of their own


@dataclass(frozen=True)
class Poison:
    """`does` gives the poison to the cluster, asserts how it ends, and returns what was said of it; a job of
    its name that is left is deleted afterwards."""

    name: str
    does: Does
    leader_dies: bool = False


# ---------------------------------------------------------------- code that counts records


READER = """
import ctypes, os, re, subprocess, sys, time

class Reader:
    def read(self, url, first, count): return iter(())
    def count(self, url):
        print("counting", url, flush=True)
        {code}
        return 3

reader = Reader()
"""


def counting(code: str, told: str, **settings: Any) -> Does:
    """The job's own reader runs `code` when its records are counted."""

    async def does(cluster: Cluster, name: str) -> str:
        modules = {"mine.py": READER.format(code=code)}
        dataset = {"dataset": Custom("a", reader="mine:reader").model_dump(), "evaluation_dataset": None}
        text = cluster.script(cluster.slow, 0.0, dataset=READS, evaluation="")
        await cluster.submit(name, text, modules=modules, **dataset, **settings)
        return await failed(cluster, name, told)

    return does


async def failed(cluster: Cluster, name: str, told: str) -> str:
    job = await cluster.ended(name)
    said = f"{job.standing}: {job.reason}"
    assert job.standing == "FAILED", job
    assert re.search(told, said), said
    return said


READS = """
def dataset():
    return trireme.data.Custom("a", reader="mine:reader")
"""

# ---------------------------------------------------------------- scripts


def script(told: str, *, attempts: int = 1, **parts: str) -> Does:
    """The job's script has other pieces, and fails it."""

    async def does(cluster: Cluster, name: str) -> str:
        await cluster.submit(name, cluster.script(cluster.slow, 0.0, **parts), max_user_failures=attempts)
        return await failed(cluster, name, told)

    return does


def given_up(told: str, head: str) -> Does:
    """The job's script ends its process before that is a trainer: the place is given up, and the job waits
    for another one."""

    async def does(cluster: Cluster, name: str) -> str:
        await cluster.submit(name, cluster.script(cluster.slow, 0.0, head=HEAD + head))
        async with asyncio.timeout(300):
            while not (causes := await cluster.explained(name, "PROCESSES_FAIL")):
                await asyncio.sleep(0.5)
        assert re.search(told, causes[0]), causes
        job = await cluster.job(name)
        assert job.standing == "ACTIVE", job
        return f"{job.standing}: {causes[0]}"

    return does


BEYOND_ITS_LIMIT = LOSS.replace(
    "    return",
    """    import resource
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), -1))
    bytearray(1 << 30)
    return""",
)
OUT_OF_MEMORY = """
kept = []
while True:
    kept.append(bytearray(64 << 20))
"""
LEAVES = """
import subprocess
subprocess.Popen(["sleep", "86399.5"])
"""
PRINTS = """
import threading, time

def prints():
    for number in range(10**9):
        print("poison " * 15_000, flush=True)
        (HERE / "printed").write_text(str(105_000 * number))
        time.sleep(0.025)

if __name__ != "__main__":
    threading.Thread(target=prints, daemon=True).start()
"""


async def leaves(cluster: Cluster, name: str) -> str:
    """What its processes have started ends with them."""

    def left() -> list[int]:
        return [each.pid for each in psutil.process_iter() if command_line(each) == "sleep 86399.5"]

    own = cluster.script(cluster.slow, 0.05) + LEAVES
    await cluster.submit(name, own, epochs=1000)
    await cluster.trains(name)
    started = left()
    assert started
    await cluster.ask(lambda client: client.cancel_job(name))
    await settled(lambda: not left(), "the processes that the script has started to end")
    return f"CANCELLED: {len(started)} processes of the script ended with it"


async def prints(cluster: Cluster, name: str) -> str:
    """Up to 4 MB a second into the log of its trainer."""
    await cluster.submit(name, cluster.script(cluster.slow, 0.05) + PRINTS, epochs=1000)
    await cluster.trains(name)
    logs, printed = cluster.facts.folder / "host" / "logs", cluster.folder / "data" / "printed"

    def has_filled_it() -> bool:
        return printed.exists() and int(printed.read_text() or 0) > 4 * LOGS_BYTES

    await settled(has_filled_it, "four times its quota to be printed", 120)
    await cluster.ask(lambda client: client.cancel_job(name))
    await cluster.ended(name)

    def kept() -> int:
        return sum(path.stat().st_size for path in logs.glob("*/*"))

    await settled(lambda: kept() < LOGS_BYTES + LOG_BYTES, "its logs to keep within the bounds")
    return (
        f"CANCELLED: {int(printed.read_text()) >> 10} KiB were printed, {kept() >> 10} KiB of logs are kept"
    )


async def edited(cluster: Cluster, name: str) -> str:
    """Its script is a path, is edited there under way, and its trainer dies: the next one runs what is
    there."""
    folder = cluster.folder / "edited"
    folder.mkdir()
    path = folder / "script.py"
    path.write_text(text := cluster.script(cluster.slow, 0.2))
    await cluster.submit(name, "", script=str(path), epochs=1000)
    await cluster.trains(name)
    path.write_text(f"{text}\nraise RuntimeError('edited under way')\n")
    for pid in await cluster.members(name):
        if "trainer_agent" in command_line(psutil.Process(pid)):
            psutil.Process(pid).kill()
    return await failed(cluster, name, "RuntimeError: edited under way")


# ---------------------------------------------------------------- records and files


BAD_RECORDS = {
    ("raises", "read"): "ValueError: broken record",
    ("exits", "loss"): "SystemExit: bad record",
    ("wrong_shape", "collate"): "column 'x'",
    ("segfault", "loss"): "crashed with SIGSEGV",
    ("_exit", "loss"): "ended with exit code 0",
    ("killed", "read"): r"was killed by SIGKILL \(out of memory\?\)",
    ("hangs", "loss"): "hung for 3 s|silent for",
}


async def bad_records(cluster: Cluster, name: str) -> str:
    """Each costs its task alone."""
    bad = {24 + 2 * number: kind for number, kind in enumerate(BAD_RECORDS)}  # by task
    records = TASK * (24 + 2 * len(bad))
    places = {TASK * task + 5: kind for task, kind in bad.items()}
    settings = {
        "dataset": MapStyle("deadly:Points", records=records).model_dump(),
        "evaluation_dataset": None,
        "epochs": 1,
        "global_batch_size": 16,
        "records_per_task": TASK,
        "shuffle": False,
        "max_discarded_fraction": 0.9,
        "max_user_failures": 99,
        "task_timeout_floor_s": 1.0,
        "task_timeout_ceiling_s": 3.0,
    }
    text = DEADLY_SCRIPT.format(kinds=places, records=records)
    await cluster.submit(name, text, file_name="deadly.py", **settings)
    job = await cluster.ended(name)
    assert (job.standing, job.result and job.result.discarded_tasks) == ("COMPLETED", len(bad)), job
    prefix = Keys(name).discarded("")
    causes = {
        int(each.key.rpartition("/")[2].partition("@")[0]): json.loads(each.value)["cause"]
        for each in (await cluster.etcd.range(prefix, prefix=True)).kvs
    }
    assert causes.keys() == bad.keys()
    wrong = {
        kind: causes[task] for task, kind in bad.items() if not re.search(BAD_RECORDS[kind], causes[task])
    }
    assert not wrong
    return f"COMPLETED, with {len(bad)} of {records // TASK} tasks discarded"


async def broken_file(cluster: Cluster, name: str) -> str:
    """It ends in the middle of its records."""
    path = cluster.folder / "broken.npy"
    np.save(path, np.zeros((192, 8), np.float32))
    path.write_bytes(path.read_bytes()[:-1000])
    files = [str(path), str(cluster.folder / "data" / "y.npy")]
    dataset = Npy(*files, aligned=True, columns=("x", "y")).model_dump()
    await cluster.submit(name, cluster.script(cluster.slow, 0.0), dataset=dataset)
    return await failed(cluster, name, "broken.npy")


async def broken_lines(cluster: Cluster, name: str) -> str:
    path = cluster.folder / "broken.jsonl"
    path.write_bytes(b'{"x": 1}\n' * 100 + b"\xff\xfe{broken\n" * 50)
    dataset = JsonLines(str(path)).model_dump()
    changes = {"dataset": dataset, "evaluation_dataset": None, "max_discarded_fraction": 0.1}
    await cluster.submit(name, cluster.script(cluster.slow, 0.0, evaluation=""), **changes)
    return await failed(cluster, name, "broken.jsonl|broken")


# ---------------------------------------------------------------- what the leader is told


async def names(cluster: Cluster, name: str) -> str:
    """Those of a cluster's own keys, and one that a run has."""
    text = cluster.script(cluster.slow, 0.0)
    said = []
    for taken in ("pool", "cluster", "jobs", "sources"):
        told = await cluster.refusal("POST", "/v1/jobs", cluster.body(name, text) | {"name": taken})
        assert "are keys of a cluster itself" in json.dumps(told), told
    keys = Keys(name)
    spec = cluster.spec(job=name, storage="/runs/of/its/own")
    await cluster.etcd.put(keys.spec, spec.to_bytes())
    told = await cluster.refusal("POST", "/v1/jobs", cluster.body(name, text))
    said.append(told["detail"])
    assert f"the name {name} is in use: it is a run" in told["detail"]
    await cluster.refusal("DELETE", f"/v1/jobs/{name}", None)
    found = await cluster.etcd.get(keys.spec)
    assert found is not None
    assert found.value == spec.to_bytes()
    await cluster.etcd.delete(keys.spec)
    assert name not in await cluster.names()
    return f"refused: {said}"


def many_files(count: int) -> dict[str, Any]:
    return TextLines(
        *(f"s3://a-bucket-with-a-name/{number:07}/{'x' * 60}" for number in range(count))
    ).model_dump()


async def large_specs(cluster: Cluster, name: str) -> str:
    text = cluster.script(cluster.slow, 0.0)
    body = cluster.body(name, text)
    body["settings"] |= {"dataset": many_files(6000)}
    schedule = body | {"cron": "* * * * *"}
    said = []
    for path, asked in (("/v1/jobs", body), ("/v1/schedules", schedule)):
        told = await cluster.refusal("POST", path, asked)
        assert f"at most {SPEC_BYTES} are taken; dataset alone has" in told["detail"], told
        said.append(told["detail"])
    assert name not in await cluster.names()
    return f"refused: {said[-1]}"


async def large_schedule_that_is_due(cluster: Cluster, name: str) -> str:
    """As an earlier version took it. With its job it is too large for a transaction."""
    spec = cluster.spec(job=name, storage="").with_fields(dataset=TextLines(*many_files(6000)["urls"]))
    schedule = JobSchedule(name=name, cron="* * * * *", spec=spec, next_time=rfc3339(clock.wall_time() - 5))
    await cluster.etcd.put(cluster.keys.schedule(name), schedule.to_bytes())
    await cluster.kill_leader()

    async def reason() -> str:
        found = await cluster.ask(lambda client: client.get_schedule(name))
        return str(found.reason)

    async with asyncio.timeout(60):
        while "do not fit" not in await reason():
            await asyncio.sleep(0.2)
    said = await reason()
    await cluster.ask(lambda client: client.delete_schedule(name))
    assert name not in await cluster.names()
    return f"left out: {said}"


async def calls_given_up(cluster: Cluster, name: str) -> str:
    """Their callers go away before they are answered, some of them at once."""
    await cluster.train_slowly(name)
    facts, (host, port) = cluster.facts, cluster.address
    for number in range(60):
        verb = ("pause", "resume", "cancel", "checkpoints")[number % 4 if number > 50 else number % 2]
        path = f"/v1/jobs/{name}/{verb}"
        head = f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nAuthorization: Bearer {facts.token}\r\n"
        head += f"Idempotency-Key: {name}-{number}\r\nContent-Type: application/json\r\n"
        head += "Content-Length: 2\r\n\r\n{}"
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(head.encode())
        await writer.drain()
        await asyncio.sleep(number % 5 * 0.01)
        writer.transport.abort()
        del reader
    job = await cluster.ended(name)
    assert job.standing == "CANCELLED"
    return f"{job.standing}: {job.reason}"


async def viewers(cluster: Cluster, name: str) -> str:
    """More streams of its events than one token may hold: others still get theirs."""
    await cluster.train_slowly(name)
    facts, (host, port) = cluster.facts, cluster.address
    reading = (facts.folder / "tokens" / "viewer").read_text().strip()
    opened: list[asyncio.StreamWriter] = []

    async def status(token: str) -> str:
        reader, writer = await asyncio.open_connection(host, port)
        opened.append(writer)
        head = f"GET /v1/jobs/{name}/events/stream HTTP/1.1\r\nHost: {host}:{port}\r\n"
        writer.write(f"{head}Authorization: Bearer {token}\r\n\r\n".encode())
        async with asyncio.timeout(60):
            return (await reader.readline()).split()[1].decode()

    try:
        answers = Counter([await status(reading) for _ in range(STREAMS + 40)])
        assert answers == {"200": STREAMS, "429": 40}
        assert await status(facts.token) == "200"
    finally:
        for writer in opened:
            writer.close()
    return f"of {answers.total()} streams for one token {answers['429']} are refused"


# ---------------------------------------------------------------- what somebody does to its keys and files


async def unreadable(cluster: Cluster, name: str) -> str:
    """Rubbish in the place of its record."""
    await cluster.train_slowly(name)
    await cluster.etcd.put(cluster.keys.job(name), b'{"job": 7, "spec": [')
    await cluster.kill_leader()
    job = await cluster.until(name, lambda job: job.standing == "UNREADABLE", "being set aside")
    assert "cannot be understood" in job.reason
    assert (await cluster.standings())[name] == "UNREADABLE"
    told = await cluster.refusal("POST", f"/v1/jobs/{name}/pause", {})
    assert "UNREADABLE" in told["detail"]
    return f"{job.standing}: {job.reason}"


async def unknown_field(cluster: Cluster, name: str) -> str:
    """Of another version: it stays, and the job goes on."""
    slow = cluster.folder / f"slow-{name}"
    slow.touch()
    await cluster.submit(name, cluster.script(slow, 0.3), epochs=10)
    await cluster.trains(name)
    found = await cluster.etcd.get(cluster.keys.job(name))
    assert found is not None
    document = json.loads(found.value) | {"colour": "red"}
    document["spec"] |= {"warp_factor": 9}
    await cluster.etcd.put(cluster.keys.job(name), json.dumps(document).encode())
    await cluster.kill_leader()
    slow.unlink()
    job = await cluster.ended(name)
    assert (job.standing, job.starts) == ("COMPLETED", 1), job
    found = await cluster.etcd.get(cluster.keys.job(name))
    assert found is not None
    kept = json.loads(found.value)
    assert (kept["colour"], kept["spec"]["warp_factor"]) == ("red", 9)
    assert "job_fields_unknown" in await cluster.events(name)
    return "COMPLETED, and keeps what nobody knows"


async def without_timer(cluster: Cluster, name: str) -> str:
    """Its checkpoint timer is off when the leader is killed."""
    slow = cluster.folder / f"slow-{name}"
    slow.touch()
    await cluster.submit(name, cluster.script(slow, 0.3), epochs=10, checkpoint_every_seconds="off")
    await cluster.trains(name)
    await cluster.kill_leader()
    slow.unlink()
    job = await cluster.ended(name)
    assert (job.standing, job.starts) == ("COMPLETED", 1), job
    assert job.settings is not None
    assert job.settings.checkpoint_every_seconds is None
    return "COMPLETED"


async def undeletable(cluster: Cluster, name: str) -> str:
    """Its files raise out of the library that deletes them, and what they raise is neither ours nor an
    OSError."""
    await cluster.submit(name, cluster.script(cluster.slow, 0.05), epochs=1000)
    await cluster.trains(name)
    await cluster.ask(lambda client: client.cancel_job(name))
    await cluster.ended(name)
    deep = cluster.storage / name / "deep"
    await asyncio.to_thread(subprocess.run, ["mkdir", "-p", deep / ("d/" * 1500)], check=True)
    try:
        done = await cluster.deleted(name)
        assert (done.state, "RecursionError" in done.reason) == ("FAILED", True), done
        job = await cluster.job(name)
        assert (job.standing, job.wanted) == ("CANCELLED", "delete")
        async with asyncio.timeout(60):  # the leader tries it again by itself
            while "job_not_deleted" not in await cluster.events(name):
                await asyncio.sleep(0.5)
    finally:
        await asyncio.to_thread(subprocess.run, ["rm", "-rf", deep], check=True)
    return f"{done.state}: {done.reason}"


# ---------------------------------------------------------------- the table


POISONS = (
    Poison("counts-exits", counting("sys.exit('enough')", "SystemExit: enough")),
    Poison("counts-crashes", counting("ctypes.string_at(0)", "ended its process with SIGSEGV")),
    Poison("counts-ends", counting("os._exit(3)", "ended its process with exit code 3")),
    Poison(
        "counts-hangs",
        counting(
            "ctypes.PyDLL(None).sleep(1000000)",  # and keeps the interpreter
            r"was not done within 2 s \(task_timeout_ceiling_s\)",
            task_timeout_floor_s=1.0,
            task_timeout_ceiling_s=2.0,
        ),
    ),
    Poison("script-exits", script("SystemExit: no more", head=HEAD + 'raise SystemExit("no more")\n')),
    Poison("script-is-wrong", script("SyntaxError", model="def model(:\n")),
    Poison("script-dies", given_up("the last time with exit code 3", "import os\nos._exit(3)\n")),
    Poison("loss-is-short-of-memory", script("MemoryError", loss=BEYOND_ITS_LIMIT)),
    Poison("out-of-memory", given_up(r"out of memory \(limit 1 GiB, 1 GiB used\)", OUT_OF_MEMORY)),
    Poison("leaves", leaves),
    Poison("prints", prints),
    Poison("edited", edited),
    Poison("bad-records", bad_records),
    Poison("broken-file", broken_file),
    Poison("broken-lines", broken_lines),
    Poison("names", names),
    Poison("large-specs", large_specs),
    Poison("large-schedule", large_schedule_that_is_due, leader_dies=True),
    Poison("calls-given-up", calls_given_up),
    Poison("viewers", viewers),
    Poison("unreadable", unreadable, leader_dies=True),
    Poison("unknown-field", unknown_field, leader_dies=True),
    Poison("without-timer", without_timer, leader_dies=True),
    Poison("undeletable", undeletable),
)
SOME = ("counts-crashes", "script-exits", "names", "unreadable")


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """What a good job gives without a cluster, and without anybody beside it."""

    async def run(folder: Path) -> dict[str, torch.Tensor]:
        spec: JobSpec = spec_of(folder, epochs=MANY_EPOCHS, trainers=1, pservers=1)
        async with cluster_of(spec, folder) as cluster:
            return await completed(cluster)

    return made_once("poisoned", tmp_path_factory, lambda folder: asyncio.run(run(folder)))


async def give(folder: Path, poisons: Iterable[Poison], epochs: int) -> dict[str, dict[str, torch.Tensor]]:
    async with Cluster(folder, epochs) as cluster:
        await cluster.begin()
        for poison in poisons:
            began = clock.monotonic()
            async with cluster.unharmed(leader_dies=poison.leader_dies):
                said = await poison.does(cluster, poison.name)
                if poison.name in await cluster.names():
                    await cluster.remove(poison.name)
            sys.stdout.write(f"{poison.name} ({clock.monotonic() - began:.0f} s): {said}\n")
        return await cluster.finish()


def enter(group: SmallGroup, up: ForkedProcess) -> None:
    """The host agent, and what it will start."""
    agents = [child for child in psutil.Process(up.pid).children() if "trireme.host" in command_line(child)]
    for process in (*agents, *(child for agent in agents for child in agent.children(recursive=True))):
        group.procs.write_text(str(process.pid))


def check(trireme: Command, poisons: Iterable[Poison], epochs: int, alone: dict[str, torch.Tensor]) -> None:
    trireme.environment |= ENVIRONMENT
    with memory_group(MEMORY) as group, up(trireme, *PLACES) as process:
        if group is not None:
            enter(group, process)
        given = [each for each in poisons if group is not None or each.name != "out-of-memory"]
        found = asyncio.run(give(trireme.folder, given, epochs))
    wrong = [name for name, parameters in found.items() if not same_bits(parameters, alone)]
    assert not wrong


@pytest.mark.timeout(400)
def test_some_poisons_harm_nobody_else(trireme: Command, undisturbed: dict[str, torch.Tensor]) -> None:
    check(trireme, [each for each in POISONS if each.name in SOME], FEW_EPOCHS, undisturbed)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_no_poison_harms_anybody_else(trireme: Command, alone: dict[str, torch.Tensor]) -> None:
    check(trireme, POISONS, MANY_EPOCHS, alone)
