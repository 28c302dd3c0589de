"""Evaluations while a job trains, under kills of everybody: each once, with the undisturbed run's sums, and
no bit of training changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from master_service.core.state.job import Job
from tests.equipment.cluster.network import STEADY
from tests.equipment.replaced import replaced
from tests.simulation import invariants
from tests.simulation.asynchronous_evaluations import asynchronous_evaluations, done_evaluations
from tests.simulation.cluster import SimulatedCluster
from tests.simulation.compute import Speed, TinyCompute
from tests.simulation.plans import Fault, FaultKind, Plan, plan_of
from tests.simulation.reference import stopping as stopping_at
from tests.simulation.run import Outcome, simulate
from trainer_agent.data_plane.pulls import Pulls
from trainer_agent.tasks.source import TaskSource
from trireme_shared.protocol.errors import UserCodeError
from trireme_shared.protocol.records import CompleteTask, Dispatch, Mode, TakeNext, Task, TaskKind
from trireme_shared.protocol.records.job_choices import StopEarly

SEEDS = [pytest.param(seed, marks=[pytest.mark.soak] if seed >= 4 else []) for seed in range(8)]
FEW = range(3)
ONCE_FAILED: tuple[tuple[int, int | str], ...] = ((253, 1), (115, 2), (178, 2), (183, 2), (391, 2))
MANY = [
    ONCE_FAILED,
    *(tuple((n, (1, 2, "epoch")[n % 3]) for n in range(k, k + 50)) for k in range(0, 200, 50)),
]
"""Seeds, and how often each is evaluated."""
ENOUGH_S = 30.0
"""Of virtual time, after the last fault; without the safeguard it would take for ever."""


def plan(seed: int, every: int | str, mode: Mode = Mode.SYNC, dispatch: Dispatch = Dispatch.MASTER) -> Plan:
    drawn, best = plan_of(seed, mode, dispatch), ["value:min", "value:max", None][seed % 3]
    drawn = replace(drawn, evaluate=True, evaluate_every=every, keep_best=best, independent=False)
    return replace(
        drawn, job=replace(drawn.job, epochs=3, tables=seed % 2 == 1 and drawn.skip_after_s is None)
    )


def undisturbed(
    every: int | str, trainers: int = 2, mode: Mode = Mode.SYNC, dispatch: Dispatch = Dispatch.MASTER
) -> Plan:
    drawn = plan(0, every, mode, dispatch)
    quiet = replace(drawn, conditions=STEADY, faults=(), requests=(), slow=1.0, trainers=trainers)
    return replace(quiet, speed=Speed(0.01, 0.02))


def broken(outcome: Outcome) -> list[str]:
    return outcome.violations


@pytest.mark.parametrize("every", [1, 3, "epoch"])
@pytest.mark.parametrize("trainers", [1, 6])
def test_each_evaluation_is_of_its_version_and_training_keeps_its_bits(every: int | str, trainers: int):
    assert not broken(simulate(0, Mode.SYNC, plan=undisturbed(every, trainers)))


@pytest.mark.parametrize("mode", list(Mode))
def test_a_task_of_the_evaluation_after_training_may_take_longer_than_its_deadline(mode: Mode):
    drawn = replace(undisturbed("epoch", 1, mode), speed=Speed(0.4, 0.8))
    job = replace(drawn.job, files=(40,), task_records=40, minibatch=2, epochs=1)
    assert not broken(simulate(0, mode, plan=replace(drawn, job=job)))


@pytest.mark.parametrize("pservers", [1, 2])
def test_what_a_part_that_is_being_written_builds_on_is_kept(pservers: int):
    """Else a checkpoint whose parts take longer than training to the next one never counts, and training
    waits for its evaluation."""
    drawn = replace(undisturbed("epoch", 1), speed=Speed(0.1, 0.2), pservers=pservers, storage_s=2.0)
    job = replace(drawn.job, files=(7, 1, 16, 5), task_records=4, minibatch=2, lanes=4, tables=True)
    lines: list[str] = []
    outcome = simulate(
        0, Mode.SYNC, lines.append, replace(drawn, job=job, checkpoint_every=1, keep_checkpoints=1)
    )
    assert not broken(outcome), str(outcome)
    assert any("part_written" in line and "deltas=1" in line for line in lines)
    assert not any("builds on" in line for line in lines)


@pytest.mark.parametrize("seed", SEEDS)
def test_under_faults_each_evaluation_comes_once_with_the_same_sums(seed: int):
    outcome = simulate(seed, Mode.SYNC, plan=plan(seed, [1, 2, "epoch"][seed % 3]))
    assert not broken(outcome), str(outcome)


@pytest.mark.parametrize("seed", SEEDS)
def test_stop_early_ends_at_the_same_step_under_faults(seed: int):
    drawn = plan(seed, [1, 2, "epoch"][seed % 3])
    stopping = replace(
        drawn, stop_early="value:min:patience=1", job=replace(drawn.job, epochs=4, tables=seed % 2 == 1)
    )
    assert (
        stopping_at(stopping.job, [1, 2, "epoch"][seed % 3], StopEarly(metric="value:min", patience=1))
        is not None
    )
    outcome = simulate(seed, Mode.SYNC, plan=stopping)
    assert not broken(outcome), str(outcome)


@pytest.mark.parametrize("dispatch", list(Dispatch))
@pytest.mark.parametrize("seed", FEW)
def test_evaluations_of_an_asynchronous_job_are_each_of_one_version_under_faults(
    seed: int, dispatch: Dispatch
):
    drawn = plan(seed, [1, 3, "epoch"][seed % 3], Mode.ASYNC, dispatch)
    outcome = simulate(seed, Mode.ASYNC, plan=drawn, dispatch=dispatch)
    assert not broken(outcome), str(outcome)


@pytest.mark.parametrize("dispatch", list(Dispatch))
@pytest.mark.parametrize("seed", FEW)
def test_an_asynchronous_job_that_ends_early_has_trained_every_task_it_gave_once_under_faults(
    seed: int, dispatch: Dispatch
):
    drawn = replace(plan(seed, 1, Mode.ASYNC, dispatch), stop_early="value:min:patience=1")
    outcome = simulate(seed, Mode.ASYNC, plan=drawn, dispatch=dispatch)
    assert not broken(outcome), str(outcome)


@pytest.mark.parametrize("seed", FEW)
def test_a_masterless_job_gives_the_same_evaluations_and_stops_at_the_same_step_under_faults(seed: int):
    drawn = plan(seed, [1, 2, "epoch"][seed % 3], dispatch=Dispatch.ETCD)
    drawn = replace(drawn, stop_early="value:min:patience=1" if seed % 2 else None)
    outcome = simulate(seed, Mode.SYNC, plan=drawn, dispatch=Dispatch.ETCD)
    assert not broken(outcome), str(outcome)


@pytest.mark.soak
@pytest.mark.parametrize("dispatch", list(Dispatch))
@pytest.mark.parametrize("seeds", MANY, ids=range(len(MANY)))
def test_evaluations_of_asynchronous_jobs_are_each_of_one_version_in_many_seeds(
    seeds: tuple[tuple[int, int | str], ...], dispatch: Dispatch
):
    for seed, every in seeds:
        outcome = simulate(seed, Mode.ASYNC, plan=plan(seed, every, Mode.ASYNC, dispatch), dispatch=dispatch)
        assert not broken(outcome), f"every {every}: {outcome}"


def test_an_undisturbed_asynchronous_job_is_evaluated_about_as_often_as_it_says():
    done: list[int] = []

    def counted(cluster: SimulatedCluster, every: int | str) -> Iterator[str]:
        done.append(len(done_evaluations(cluster)))
        yield from asynchronous_evaluations(cluster, every)

    quiet = undisturbed("epoch", mode=Mode.ASYNC)
    with replaced(invariants, "asynchronous_evaluations", counted):
        assert not broken(simulate(0, Mode.ASYNC, plan=replace(quiet, speed=Speed(0.3, 0.6))))
    assert done == [2]


def test_without_the_pinned_version_an_asynchronous_job_evaluates_a_mixture():
    async def of_those_in_use(self: TinyCompute, names: tuple[int, ...], seed: int) -> dict[str, float]:
        self._pinned = [vector.copy() for vector in self._vectors[0]]
        return await validate(self, names, seed)

    validate = vars(TinyCompute)["_validate"]
    with replaced(TinyCompute, "_validate", of_those_in_use):
        found = broken(simulate(0, Mode.ASYNC, plan=undisturbed(2, mode=Mode.ASYNC)))
    assert any("is of no version that was pinned" in line for line in found), found


def test_without_the_parameters_set_again_training_is_changed():
    with replaced(TinyCompute, "use_current", lambda _: None):
        found = broken(simulate(0, Mode.SYNC, plan=undisturbed(2, 1)))
    assert any("final parameters differ" in line for line in found), found


@pytest.mark.parametrize(
    ("mode", "told"), [(Mode.SYNC, "these differ"), (Mode.ASYNC, "they are of two instants")]
)
def test_without_the_rows_of_its_checkpoint_an_evaluation_is_of_another_version(mode: Mode, told: str):
    pin, first = vars(TinyCompute)["pin_rows"], []

    def pinned_once(self: TinyCompute, tables: Any) -> None:
        first.append(tables)
        pin(self, first[0])

    quiet = undisturbed(2, 1, mode)
    quiet = replace(quiet, job=replace(quiet.job, tables=True), skip_after_s=None)
    assert not broken(simulate(0, mode, plan=quiet))
    with replaced(TinyCompute, "pin_rows", pinned_once):
        found = broken(simulate(0, mode, plan=quiet))
    assert len(first) > 1
    assert any(told in line for line in found), found


def test_without_the_tasks_of_an_evaluation_put_back_the_job_waits_for_a_dead_trainers():
    kill = Fault(3.0, FaultKind.KILL_TRAINER, 0.3, noticed=True)
    killed = replace(undisturbed(2, 3, mode=Mode.ASYNC), speed=Speed(0.2, 0.4), faults=(kill,))
    assert not broken(simulate(0, Mode.ASYNC, plan=killed))
    due_only = property(lambda job: (job.due,) if job.due is not None else ())
    with replaced(Job, "open_queues", due_only), replaced(Plan, "bound_s", property(lambda _: ENOUGH_S)):
        assert "not over" in broken(simulate(0, Mode.ASYNC, plan=killed))[0]


def exported_twice() -> Outcome:
    """The trainer's first report of the export is refused, so the export is tried again, after the best
    model's parameters were in use."""
    complete, refused = TaskSource.complete, []

    async def refused_once(
        self: TaskSource, task: Task, done: CompleteTask, following: TakeNext | None = None
    ) -> Any:
        if task.kind is TaskKind.EXPORT and not refused:
            refused.append(task)
            await self.fail(task, UserCodeError("the folder is full"))
            return None
        return await complete(self, task, done, following)

    best = replace(undisturbed(2, 1, Mode.ASYNC, Dispatch.ETCD), keep_best="value:min")
    with replaced(TaskSource, "complete", refused_once):
        outcome = simulate(0, Mode.ASYNC, plan=best, dispatch=Dispatch.ETCD)
    assert refused
    return outcome


def test_without_forgetting_what_was_pulled_an_export_that_is_tried_again_has_buffers_of_the_best_model():
    assert not broken(exported_twice())
    with replaced(Pulls, "forget", lambda _: None):
        found = broken(exported_twice())
    assert "the export is not what the parameter servers hold" in found
