"""Asynchronous training: every minibatch of every epoch is applied to every block exactly once, whoever
dies."""

from __future__ import annotations

import asyncio

import pytest

from tests.equipment.replaced import replaced
from tests.trainer_agent.cluster import cluster
from tests.trainer_agent.scripts import RECORDS, differing, spec_for, train_plainly, write_script
from trainer_agent.core.duties import Duty, Next
from trainer_agent.loops.context import LoopContext
from trainer_agent.tasks.source import TaskSource
from trireme_shared.protocol.records import Mode, Phase, TaskKind

EPOCHS = 3


def spec_of(script, **values):
    defaults = {
        "mode": Mode.ASYNC,
        "epochs": EPOCHS,
        "global_batch_size": 3,
        "records_per_task": 20,
        "pservers": 2,
        "push_every": 2,
    }
    return spec_for(script, **(defaults | values))


def minibatches_of_an_epoch(spec):
    whole, rest = divmod(RECORDS, spec.records_per_task)
    return whole * -(-spec.records_per_task // spec.minibatch_size) + -(-rest // spec.minibatch_size)


async def job(made):
    return [ledger for pserver in made.pservers for ledger in (await pserver.info()).ledger]


async def updates(made, number):
    """Wait until the optimizers have stepped so often, over all blocks."""
    async with asyncio.timeout(30):
        while sum(pserver.store.updates if pserver.store else 0 for pserver in made.pservers) < number:
            await asyncio.sleep(0.001)


def assert_exactly_once(found, spec):
    assert [ledger.epoch for ledger in found] == list(range(EPOCHS)) * spec.pservers
    for ledger in found:
        expected = minibatches_of_an_epoch(spec)
        assert (ledger.applied_lowest, ledger.applied_highest, ledger.tasks_open) == (expected, expected, 0)


@pytest.mark.parametrize(("push_every", "pull_every"), [(1, 1), (3, 2), (100, 5)])
async def test_each_minibatch_counts_once_however_pushes_and_pulls_are_cut(tmp_path, push_every, pull_every):
    spec = spec_of(write_script(tmp_path), push_every=push_every, pull_every=pull_every)
    async with cluster(spec, 2) as made:
        assert (await made.ended()).phase is Phase.COMPLETED
        assert_exactly_once(await job(made), spec)


async def test_each_minibatch_counts_once_although_a_trainer_was_killed_in_the_middle(tmp_path):
    spec = spec_of(write_script(tmp_path))
    async with cluster(spec, 2) as made:
        for victim, update in (("trainer-0-x", 40), ("trainer-1-x", 120)):
            await updates(made, update)
            await made.kill(victim)
            made.add_trainer(f"{victim}-again")
        assert (await made.ended()).phase is Phase.COMPLETED
        assert_exactly_once(await job(made), spec)


async def test_one_trainer_that_pushes_and_pulls_each_minibatch_gives_the_bits_of_plain_pytorch(tmp_path):
    script = write_script(
        tmp_path,
        model="def model():\n    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))\n",
        scheduler="def scheduler(optimizer):\n"
        "    return torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)\n",
    )
    spec = spec_of(script, push_every=1)
    async with cluster(spec, 1) as made:
        assert (await made.ended()).phase is Phase.COMPLETED
        plain = train_plainly(script, spec.model_copy(update={"mode": Mode.SYNC, "lanes": 1}))
        assert differing(made.exported(), plain) == []


async def test_the_schedule_goes_on_where_the_epoch_stands_when_a_trainer_is_replaced(tmp_path):
    script = write_script(
        tmp_path,
        model="def model():\n    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))\n",
        scheduler="def scheduler(optimizer):\n"
        "    return torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)\n",
    )
    spec = spec_of(script, push_every=1)
    async with cluster(spec, 1) as made:
        await updates(made, 100)
        await made.kill("trainer-0-x")
        made.add_trainer("trainer-1-x")
        assert (await made.ended()).phase is Phase.COMPLETED
        assert_exactly_once(await job(made), spec)
        steps = EPOCHS * minibatches_of_an_epoch(spec)
        assert made.computes["trainer-1-x"].optimizer.param_groups[0]["lr"] == 0.1 * 0.5 ** (steps // 4)


async def test_a_task_that_always_fails_is_discarded_and_the_rest_is_trained(tmp_path):
    script = write_script(
        tmp_path,
        loss="""
        def loss(model, batch):
            if (batch["x"][:, 0] == POISON).any():
                raise ValueError("poisoned record")
            return F.cross_entropy(model(batch["x"]), batch["y"])
        """,
        poison="import numpy as np\nPOISON = float(np.load({folder!r} + '/x.npy')[RECORD][0])\n".replace(
            "RECORD", "5"
        ),
    )
    spec = spec_of(script, max_discarded_fraction=0.5, max_user_failures=1000)
    async with cluster(spec, 1) as made:
        state = await made.ended()
        assert (state.phase, state.result.discarded_tasks, state.result.discarded_records) == (
            Phase.COMPLETED,
            EPOCHS,
            EPOCHS * spec.records_per_task,
        )


async def test_a_task_of_the_evaluation_that_came_in_a_pause_at_the_end_of_training_is_done(tmp_path):
    """The trainer had asked ahead. It forgot the answer when it went on and training was over, and the job
    waited for the task's time limit."""
    script = write_script(
        tmp_path,
        evaluation="""
        def evaluation_dataset():
            return dataset()

        def evaluate(model, batch):
            return {"records": len(batch["y"])}
        """,
    )
    spec = spec_of(script, epochs=1, evaluation_dataset=spec_of(script).dataset, task_timeout_floor_s=600)
    asking, evaluation_tasks = 0, 0
    acquire, duty = TaskSource.acquire, LoopContext.duty

    async def acquired(source, *arguments, **more):
        nonlocal asking, evaluation_tasks
        asking += 1
        answer = await acquire(source, *arguments, **more)
        asking -= 1
        evaluation_tasks += answer.task is not None and answer.task.kind is TaskKind.EVALUATE
        return answer

    def paused_while_it_asks_ahead(context):
        return Next(Duty.WAIT, "a pause") if asking and not evaluation_tasks else duty(context)

    with replaced(TaskSource, "acquire", acquired), replaced(LoopContext, "duty", paused_while_it_asks_ahead):
        async with cluster(spec, 1) as made:
            async with asyncio.timeout(30):
                assert (await made.ended()).phase is Phase.COMPLETED
    assert evaluation_tasks
