"""A dataset in which each kind of bad record stands once. Each costs its task, which is listed with its
cause; all other records are trained exactly once, whatever dies. The kinds that raise, in all their variants:
tests/trainer_agent/loops/test_bad_records.py."""

from __future__ import annotations

import re

import pytest

from tests.end_to_end.cluster_command import answered, good, job_when, up
from tests.end_to_end.local_cluster import cluster_of
from trireme_shared.platform.etcd.reading import must_read
from trireme_shared.protocol.records import DiscardedTask, JobSpec, Phase
from trireme_shared.protocol.records.datasets import MapStyle

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

TASK = 8
CLEAN = 24  # tasks, until the master knows that a step is done
LIMIT_S = 5.0  # of a minibatch
SCRIPT = """
import ctypes, os, re, signal, sys, time
import torch, trireme
from torch import nn
from torch.nn import functional as F

KINDS = {kinds!r}

def bad(kind):
    match kind:
        case "raises": raise ValueError("broken record")
        case "exits": sys.exit("bad record")
        case "_exit": os._exit(0)
        case "segfault": ctypes.string_at(0)
        case "abort": os.abort()
        case "killed": os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when memory is short
        case "hangs": time.sleep(1e6)
        case "sleeps_with_interpreter": ctypes.PyDLL(None).sleep(1000000)
        case "keeps_interpreter": re.match("(a+)+$", "a" * 64 + "b")

class Points(torch.utils.data.Dataset):
    def __len__(self): return {records}
    def __getitem__(self, i):
        kind, where = KINDS.get(i, ("", ""))
        if where == "read": bad(kind)
        x = torch.rand(6, generator=torch.Generator().manual_seed(i))
        item = {{"x": x, "y": (x.sum() > 3).long(), "n": i}}
        match kind:
            case "requires_grad": item["x"] = x.requires_grad_()
            case "wrong_shape": item["x"] = torch.zeros(7)
            case "nan": item["x"] = x * float("nan")
        return item

def model(): return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
def dataset(): return Points()
def optimizer(model): return torch.optim.SGD(model.parameters(), lr=0.1)

def loss(model, batch):
    time.sleep(0.05)
    for n in batch["n"].tolist():
        kind, where = KINDS.get(n, ("", ""))
        if where == "loss": bad(kind)
    return F.cross_entropy(model(batch["x"]), batch["y"])
"""
LOOP = """
def main():
    net = model()
    points = trireme.data.MapStyle("deadly:Points", records={records})
    net, steps, batches = trireme.prepare(net, optimizer(net), points)
    for batch in batches:
        steps.zero_grad()
        trireme.backward(loss(net, batch))
        steps.step()

if __name__ == "__main__": main()
"""
RAISING = {
    ("raises", "read"): "ValueError: broken record",
    ("raises", "loss"): "ValueError: broken record",
    ("exits", "loss"): "SystemExit: bad record",
    ("requires_grad", "read"): "RuntimeError: Can't call numpy",
    ("wrong_shape", "collate"): "column 'x'",
}
DEADLY = {
    ("_exit", "loss"): "ended with exit code 0",
    ("segfault", "loss"): "crashed with SIGSEGV",
    ("abort", "read"): "crashed with SIGABRT",
    ("killed", "loss"): r"was killed by SIGKILL \(out of memory\?\)",
    ("killed", "read"): r"was killed by SIGKILL \(out of memory\?\)",
    ("hangs", "loss"): "hung for 5 s|silent for",
    ("sleeps_with_interpreter", "loss"): "ended with exit code 1|was killed by SIGKILL|silent for",
    ("keeps_interpreter", "loss"): "ended with exit code 1|was killed by SIGKILL|silent for",
}


async def check(tmp_path, kinds, *, own_loop=False, **changes):
    """Each kind stands in the middle of a task of its own, with a task between; the first steps are clean.
    The minibatch of a record that is NaN is left out, as `on_nonfinite` says, and its task is not
    discarded."""
    bad = {CLEAN + 2 * number: kind for number, kind in enumerate(kinds)}  # by task
    records = TASK * (CLEAN + 2 * len(kinds))
    folder = tmp_path / "script"
    folder.mkdir()
    places = {TASK * task + 5: kind for task, kind in bad.items()} | {TASK * (CLEAN - 2) + 5: ("nan", "item")}
    (folder / "deadly.py").write_text(
        (SCRIPT + (LOOP if own_loop else "")).format(kinds=places, records=records)
    )
    settings = {
        "job": "deadly",
        "script": str(folder / "deadly.py"),
        "dataset": MapStyle("deadly:Points", records=records),
        "storage": str(tmp_path / "run"),
        "epochs": 1,
        "global_batch_size": 16,
        "lanes": 4,
        "records_per_task": TASK,
        "shuffle": False,
        "trainers": 2,
        "pservers": 0 if "collective" in changes.values() else 1,
        "max_discarded_fraction": 0.9,
        "max_user_failures": 99,
        "on_nonfinite": "skip",
        "task_timeout_ceiling_s": LIMIT_S,
    }
    spec = JobSpec.model_validate(settings | changes)
    async with cluster_of(spec, tmp_path) as cluster:
        state = await cluster.wait(500)
        found = await cluster.etcd.range(cluster.directory.keys.discarded(""), prefix=True)
    lost = {
        int(kv.key.rpartition("/")[2].partition("@")[0]): must_read(DiscardedTask, kv.key, kv.value).cause
        for kv in found.kvs
    }
    assert state.phase is Phase.COMPLETED, state.reason
    assert lost.keys() == bad.keys(), {task: cause for task, cause in lost.items() if task not in bad}
    wrong = {
        bad[task]: cause
        for task, cause in lost.items()
        if not re.search((RAISING | DEADLY)[bad[task]], cause)
    }
    assert not wrong
    counted = (state.result.trained_records, state.result.discarded_records)
    assert counted == (records - TASK * len(bad), TASK * len(bad))


async def test_records_that_end_or_hang_the_process_cost_their_tasks_alone(tmp_path):
    chosen = [("killed", "loss"), ("abort", "read"), ("sleeps_with_interpreter", "loss")]
    await check(tmp_path, chosen, trainers=1, task_timeout_ceiling_s=3.0)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"strategy": "collective"},
        {"mode": "async", "checkpoint_kind": "independent"},
        {"dispatch": "etcd"},
        {"dispatch": "etcd", "strategy": "collective"},
        {"dispatch": "etcd", "mode": "async", "checkpoint_kind": "independent"},
    ],
    ids=lambda changes: "-".join(changes.values()) or "sync",
)
async def test_every_kind_of_bad_record_costs_its_task_alone(tmp_path, changes):
    await check(tmp_path, [*RAISING, *DEADLY], **changes)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "changes", [{}, {"strategy": "collective"}], ids=lambda changes: "-".join(changes.values())
)
async def test_deadly_records_in_a_loop_of_the_scripts_own_cost_their_tasks_alone(tmp_path, changes):
    """What raises there ends the job: nobody can go on in the middle of a loop."""
    await check(tmp_path, [*DEADLY], own_loop=True, **changes)


@pytest.mark.soak
def test_a_deadly_record_of_a_job_in_a_cluster_costs_its_task_alone_and_gives_up_no_place(trireme):
    records, kinds = TASK * 40, {TASK * 30 + 5: ("segfault", "loss"), TASK * 34 + 5: ("killed", "read")}
    script = trireme.folder / "deadly.py"
    script.write_text(SCRIPT.format(kinds=kinds, records=records))
    settings = (
        "global_batch_size=16",
        "lanes=4",
        f"records_per_task={TASK}",
        "shuffle=false",
        "max_discarded_fraction=0.9",
    )
    given = [argument for each in settings for argument in ("--set", each)]
    with up(trireme, "--trainers", 2, "--pservers", 1):
        good(
            answered(trireme, "submit", script, "--name", "d", "--no-check", "--epochs", 1, *given, "--json")
        )
        job = job_when(trireme, "d", lambda job: job["standing"] in ("COMPLETED", "FAILED"))
    assert job["standing"] == "COMPLETED", job
    assert (job["result"]["trained_records"], job["result"]["discarded_records"]) == (
        records - 2 * TASK,
        2 * TASK,
    )
