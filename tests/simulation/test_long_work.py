"""Work that takes longer than a task may be silent, at trainers that live: nobody else gets it, and nobody is
evicted for waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from tests.equipment.cluster.network import STEADY
from tests.equipment.replaced import replaced
from tests.simulation.compute import Speed, TinyCompute
from tests.simulation.job_spec import TASK_CEILING_S, TASK_FLOOR_S
from tests.simulation.plans import EQUALLY_FAST, Plan, plan_of
from tests.simulation.run import simulate
from trainer_agent.loops.evaluating import read_checkpoint
from trainer_agent.tasks.source import TaskSource
from trireme_shared.protocol.records import Dispatch, Mode


def undisturbed(mode: Mode, dispatch: Dispatch, every: int | str | None = None) -> Plan:
    drawn = replace(plan_of(0, mode, dispatch), evaluate=True, evaluate_every=every, independent=False)
    quiet = replace(
        drawn, conditions=STEADY, faults=(), requests=(), slow=1.0, trainers=2, speed=Speed(0.01, 0.02)
    )
    # what a drawn factor adds to a minibatch here may be what the ceiling leaves
    return replace(quiet, job=replace(quiet.job, epochs=2), stragglers=False, slowness=EQUALLY_FAST)


def run(plan: Plan) -> list[str]:
    """What was logged. No rule is broken."""
    lines: list[str] = []
    outcome = simulate(0, plan.job.mode, lines.append, plan)
    assert not outcome.violations, str(outcome)
    return lines


@pytest.mark.parametrize("dispatch", list(Dispatch))
@pytest.mark.parametrize("mode", list(Mode))
def test_an_export_may_take_as_long_as_it_does(mode: Mode, dispatch: Dispatch):
    export, begun = TinyCompute.export, []

    async def slow(compute: TinyCompute, directory: str) -> Mapping[str, str]:
        begun.append(directory)
        await asyncio.sleep(5 * TASK_CEILING_S)
        return await export(compute, directory)

    with replaced(TinyCompute, "export", slow):
        lines = run(undisturbed(mode, dispatch))
    assert len(begun) == 1
    assert not any("task_requeued" in line for line in lines)


@pytest.mark.parametrize("dispatch", list(Dispatch))
def test_trainers_that_wait_for_an_evaluation_are_not_evicted(dispatch: Dispatch):
    """A spare trainer computes it. Its minibatches take longer than one of training may."""
    evaluate, late = TinyCompute.evaluate, iter([1.8 * TASK_FLOOR_S] * 4)

    async def slow(compute: TinyCompute, *arguments: Any, pinned: bool = False) -> dict[str, float]:
        await asyncio.sleep(next(late, 0.0) if pinned else 0.0)
        return await evaluate(compute, *arguments, pinned=pinned)

    plan = undisturbed(Mode.SYNC, dispatch, every=24)
    plan = replace(plan, speed=Speed(0.2, 0.3), checkpoint_every=None)
    job = replace(plan.job, files=(60,), task_records=20, minibatch=1, lanes=1, epochs=1)
    with replaced(TinyCompute, "evaluate", slow):
        lines = run(replace(plan, job=job))
    assert any("waiting what=evaluation" in line for line in lines)
    assert not [line for line in lines if "ran over its time" in line or "task_requeued" in line]


@pytest.mark.parametrize("dispatch", list(Dispatch))
def test_a_trainer_that_hangs_in_an_evaluation_is_evicted(dispatch: Dispatch):
    """Nobody else is there to evaluate, or to say that it hangs."""
    evaluate, hung = TinyCompute.evaluate, iter([1e9])

    async def once(compute: TinyCompute, *arguments: Any, pinned: bool = False) -> dict[str, float]:
        await asyncio.sleep(next(hung, 0.0) if pinned else 0.0)
        return await evaluate(compute, *arguments, pinned=pinned)

    with replaced(TinyCompute, "evaluate", once):
        lines = run(replace(undisturbed(Mode.SYNC, dispatch, every=2), trainers=1))
    assert any("ran over its time" in line for line in lines)


@pytest.mark.parametrize("dispatch", list(Dispatch))
def test_minibatches_of_an_evaluation_may_take_longer_than_those_of_training(dispatch: Dispatch):
    """Also where the trainers with lanes compute them, and wait for each other in the next step."""
    evaluate, late = TinyCompute.evaluate, iter([0.0] * 3 + [1.5 * TASK_FLOOR_S] * 3)

    async def slow(compute: TinyCompute, *arguments: Any, pinned: bool = False) -> dict[str, float]:
        await asyncio.sleep(next(late, 0.0) if pinned else 0.0)
        return await evaluate(compute, *arguments, pinned=pinned)

    plan = replace(undisturbed(Mode.SYNC, dispatch, every=30), speed=Speed(0.2, 0.3), checkpoint_every=None)
    job = replace(plan.job, files=(80,), task_records=20, minibatch=1, lanes=2, epochs=1)
    with replaced(TinyCompute, "evaluate", slow):
        lines = run(replace(plan, job=job))
    assert not [line for line in lines if "ran over its time" in line]


@pytest.mark.parametrize("dispatch", list(Dispatch))
def test_a_checkpoint_that_is_loaded_slowly_for_an_evaluation_is_waited_for(dispatch: Dispatch):
    init = TaskSource.__init__

    def reading_slowly(source: TaskSource, *arguments: Any, **named: Any) -> None:
        init(source, *arguments, **named)
        offload = source.offload

        async def slow(work: Callable[..., Any], *values: Any) -> Any:
            if work is read_checkpoint:
                *_, memory = values
                for _ in range(10):
                    memory(0)
                    await asyncio.sleep(0.5 * TASK_FLOOR_S)
            return await offload(work, *values)

        source.offload = slow

    with replaced(TaskSource, "__init__", reading_slowly):
        lines = run(undisturbed(Mode.SYNC, dispatch, every="epoch"))
    assert not [line for line in lines if "ran over its time" in line or "task_requeued" in line]
