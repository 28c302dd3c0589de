"""What scripts are told of the number of their steps: `trireme.steps_per_epoch()`,
`trireme.total_steps()`."""

from __future__ import annotations

import asyncio

import pytest
import torch

import trireme
from tests.equipment.cluster.cluster import Cluster
from tests.trainer_agent.own_loop.scripts import write_loop
from tests.trainer_agent.scripts import spec_for, write_script
from trainer_agent import process
from trainer_agent.own_loop.job_steps import JobSteps, telling
from trainer_agent.script.inspect import inspect_script
from trainer_agent.script.user_module import load
from trireme.plain import plain_spec, run
from trireme_shared.platform.membership.directory import Directory
from trireme_shared.protocol.errors import InvalidArgument, NotReady, UserCodeError
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import EpochPlan, JobState, Phase

ONE_CYCLE = """
def scheduler(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps={steps})
"""
PLAN = EpochPlan(records=60, tasks=3, task_records=20, steps=4)


def with_cycle(folder, steps: object = "trireme.total_steps()"):
    return write_script(folder, scheduler=ONE_CYCLE.format(steps=steps))


def test_a_schedule_of_all_steps_ends_with_training(tmp_path):
    user = load(with_cycle(tmp_path))
    spec = plain_spec(user, {"epochs": 3, "global_batch_size": 8})
    result = run(user, spec)
    assert result.steps == 3 * 8
    assert result.optimizer.param_groups[0]["lr"] < 0.001  # at the end of the cycle; it began with 0.004


def test_a_schedule_that_would_end_before_is_refused_before_the_first_step(tmp_path):
    user = load(with_cycle(tmp_path, 23))
    spec = plain_spec(user, {"epochs": 3, "global_batch_size": 8})
    said = (
        r"OneCycleLR has total_steps 23, and the job makes 24 steps \(3 epochs of 8\): "
        r".*trireme.total_steps\(\)"
    )
    with pytest.raises(InvalidArgument, match=said):
        run(user, spec)
    assert run(load(with_cycle(tmp_path, 24)), spec).steps == 24
    assert run(
        load(with_cycle(tmp_path, 2)), spec_for(tmp_path / "script.py", schedule_per="epoch", epochs=3)
    ).steps


def test_a_schedule_inside_of_another_one_that_ends_before_says_what_to_do(tmp_path):
    nested = ONE_CYCLE.format(steps=3).replace("return ", "cycle = ") + (
        "    constant = torch.optim.lr_scheduler.ConstantLR(optimizer)\n"
        "    return torch.optim.lr_scheduler.SequentialLR(optimizer, [constant, cycle], milestones=[2])\n"
    )
    user = load(write_script(tmp_path, scheduler=nested))
    with pytest.raises(InvalidArgument, match=r"Tried to step 4 times.*; make it with total_steps=trireme"):
        run(user, plain_spec(user, {"global_batch_size": 4}))


def test_a_loop_of_ones_own_makes_its_scheduler_in_a_function(tmp_path):
    loop = write_loop(
        tmp_path,
        prepare="""
            model, optimizer, batches = trireme.prepare(
                model, optimizer, dataset, epochs=2, global_batch_size=8,
                scheduler=lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
                    optimizer, max_lr=0.1, total_steps=trireme.total_steps()
                ),
            )
            steps = trireme.steps_per_epoch(), trireme.total_steps()
        """,
        after="torch.save(steps, {folder!r} + '/steps.pt')",
    )
    user = load(loop)
    assert run(user, plain_spec(user, {})).steps == 16
    user.loop.end()
    assert torch.load(tmp_path / "steps.pt") == (8, 16)


BEFORE = (
    "print(trireme.total_steps())\nmodel, optimizer, batches = trireme.prepare(model, optimizer, dataset)"
)


def test_before_prepare_nobody_knows_in_a_trainer_as_in_a_process_of_ones_own(tmp_path):
    loop = write_loop(tmp_path, prepare=BEFORE)
    with (
        telling(lambda: JobSteps(8, 2)),
        pytest.raises(UserCodeError, match=r"known once the job's dataset is counted"),
    ):
        load(loop).call("model")


def test_while_a_module_is_imported_nobody_knows(monkeypatch):
    # a loop that a test has left may wait for ever
    monkeypatch.setattr("trainer_agent.own_loop.job_steps._find", [])
    with pytest.raises(InvalidArgument, match=r"trireme.steps_per_epoch\(\) is known once") as refused:
        trireme.steps_per_epoch()
    assert "scheduler(optimizer)" in refused.value.hint


def test_the_steps_of_a_job_of_an_earlier_version_are_not_made_up():
    with (
        telling(lambda: JobSteps(None, 2)),
        pytest.raises(InvalidArgument, match="an earlier version of Trireme began"),
    ):
        trireme.total_steps()


def test_the_inspection_of_a_script_takes_a_number_of_its_own(tmp_path, capsys):
    assert inspect_script(str(with_cycle(tmp_path)), check=True, settings=["epochs=2"]) == 0, (
        capsys.readouterr().out
    )
    assert inspect_script(str(with_cycle(tmp_path, 3)), check=True, settings=["epochs=2"]) == 0


async def test_a_trainer_waits_until_the_master_has_counted(tmp_path):
    cluster = Cluster(spec_for(write_script(tmp_path), epochs=5))
    directory = Directory(cluster.etcd, Keys(cluster.spec.job))
    async with asyncio.TaskGroup() as group:
        following = group.create_task(directory.run())
        await cluster.etcd.put(cluster.keys.spec, cluster.spec.to_bytes())
        asked = group.create_task(process.steps_of(directory))
        await asyncio.sleep(0.01)
        assert not asked.done()
        await cluster.etcd.put(cluster.keys.plan, PLAN.to_bytes())
        assert await asked == JobSteps(4, 5)
        assert directory.task_records == 20
        await cluster.etcd.delete(cluster.keys.plan)
        await cluster.etcd.put(cluster.keys.state, JobState(phase=Phase.FAILED).to_bytes())
        await directory.wait_for(lambda view: view.plan is None and view.state is not None, 5.0, "the end")
        with pytest.raises(NotReady, match="has ended before its dataset was counted"):
            await process.steps_of(directory)
        following.cancel()
