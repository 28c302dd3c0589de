"""Asynchronous trainers that join find the learning rate of their push without the steps of all pushes before
it."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.trainer_agent.cluster import cluster
from tests.trainer_agent.scripts import spec_for, write_script
from trainer_agent.model import schedule as push_schedule
from trainer_agent.model.schedule import PushSchedule
from trainer_agent.model.torch_compute import TorchCompute
from trireme_shared.protocol.records import Mode, Phase
from trireme_shared.protocol.records.step import LaneZero, StepRecord
from trireme_shared.serving.core import asynchronous
from trireme_shared.serving.core.asynchronous import STATE_EVERY, ScheduleStates, newest_at

SCHEDULERS = [
    "MultiStepLR(optimizer, [2, 2, 1500], 0.5)",
    "OneCycleLR(optimizer, max_lr=0.2, total_steps=4000)",
    (
        "SequentialLR(optimizer, [LinearLR(optimizer, 0.1, total_iters=50), "
        "CosineAnnealingLR(optimizer, 2500)], [50])"
    ),
    "CosineAnnealingWarmRestarts(optimizer, 300)",
]
FIRST, JOINS = 3 * STATE_EVERY, 3 * STATE_EVERY + 150


@pytest.fixture
def counted(monkeypatch):
    """How many steps schedulers have made, by compute."""
    steps: dict[int, int] = {}

    original = TorchCompute.begin_step

    def counting(compute, before):
        steps[id(compute)] = steps.get(id(compute), 0) + 1
        return original(compute, before)

    monkeypatch.setattr(TorchCompute, "begin_step", counting)
    return steps


async def options_at(schedule: PushSchedule, numbers) -> list[LaneZero]:
    return [await schedule.options_of(number) for number in numbers]


@pytest.mark.parametrize("text", SCHEDULERS)
async def test_who_joins_takes_the_newest_state_and_has_the_same_rates(build, counted, text):
    hooks = f"from torch.optim.lr_scheduler import *\ndef scheduler(optimizer):\n    return {text}\n"
    first, joiner, replaying = (build(scheduler=hooks) for _ in range(3))
    told = await options_at(PushSchedule(first), range(0, FIRST + 1, 500))
    known = ScheduleStates()
    for state in told:
        known.take(LaneZero.model_validate(json.loads(state.model_dump_json())))
    assert [state.number for state in known.kept] == [0, 2000, 3000]
    after = range(JOINS, JOINS + 5)
    found = await options_at(PushSchedule(joiner, known.kept), after)
    assert counted[id(joiner)] == JOINS - FIRST + 4
    expected = await options_at(PushSchedule(replaying), after)
    assert [state.options for state in found] == [state.options for state in expected]
    assert counted[id(replaying)] == JOINS + 5


async def test_a_push_before_all_known_states_has_the_rate_of_its_number(build, counted):
    hooks = "def scheduler(optimizer):\n    return torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.9)\n"
    late, plain = build(scheduler=hooks), build(scheduler=hooks)
    known = await PushSchedule(build(scheduler=hooks)).options_of(STATE_EVERY)
    schedule = PushSchedule(late, [known])
    assert await schedule.options_of(40) == await PushSchedule(plain).options_of(40)
    assert counted[id(late)] == 41
    assert (await schedule.options_of(STATE_EVERY)).options == known.options  # it has gone there by itself


async def test_states_of_another_schedule_do_not_count(build, counted):
    """The user has accepted another one."""
    before, after = (
        f"def scheduler(optimizer):\n    return torch.optim.lr_scheduler.StepLR(optimizer, 7, {gamma})\n"
        for gamma in (0.9, 0.5)
    )
    known = await PushSchedule(build(scheduler=before)).options_of(STATE_EVERY)
    expected = await PushSchedule(build(scheduler=after)).options_of(STATE_EVERY + 9)
    found = await PushSchedule(build(scheduler=after), [known], 1).options_of(STATE_EVERY + 9)
    assert found.options == expected.options
    told = await PushSchedule(build(scheduler=after), [known], 1).options_of(STATE_EVERY)
    assert (known.options_change, told.options_change) == (0, 1)
    late = build(scheduler=after)
    assert (await PushSchedule(late, [known, told], 1).options_of(STATE_EVERY + 9)).options == found.options
    assert counted[id(late)] == 9


def test_fewer_states_are_kept_the_older_they_are():
    known = ScheduleStates()
    for number in range(0, 1_000_001, STATE_EVERY):
        known.take(LaneZero(options=(), scheduler={"state": number}, number=number + number % 7))
        assert known.kept[-1].number // STATE_EVERY == number // STATE_EVERY
    assert len(known.kept) <= 12
    newest = known.kept[-1].number
    for number in range(STATE_EVERY, newest, 997):
        state = newest_at(known.kept, number)
        assert state is None or number - state.number <= 3 * (newest - number) + 3 * STATE_EVERY
    assert newest_at(known.kept, newest // 2) is not None
    known.take(LaneZero(options=()))
    known.take(None)
    assert known.kept[-1].number == newest


async def test_a_trainer_that_joins_makes_few_steps(tmp_path, counted, monkeypatch):
    for module in (asynchronous, push_schedule):
        monkeypatch.setattr(module, "STATE_EVERY", 8)
    script = write_script(
        tmp_path,
        scheduler="def scheduler(optimizer):\n"
        "    return torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.9)\n",
    )
    spec = spec_for(script, mode=Mode.ASYNC, epochs=12, global_batch_size=3, records_per_task=12, pservers=2)
    async with cluster(spec) as made:
        made.add_trainer("first")
        async with asyncio.timeout(30):
            while not (store := made.pservers[1].store) or len(store.schedules.kept) < 5:
                await asyncio.sleep(0.001)
        made.add_trainer("joins")
        assert (await made.ended()).phase is Phase.COMPLETED
        newest = store.schedules.kept[-1].number
        assert newest > 5 * 8
        assert counted[id(made.computes["joins"])] < newest - 3 * 8
        copied = store.begin_copy(StepRecord(version=1, positions=()))
        assert copied.record.schedules == store.schedules.kept  # in checkpoints, too
        copied.release()
