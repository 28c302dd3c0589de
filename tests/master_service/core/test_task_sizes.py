"""How many records a task gets, how many steps an epoch has then, and what is told of short ones."""

from __future__ import annotations

import random

import pytest

from master_service.core.queue.file_table import MOST_MINIBATCHES, FileTable, TableFile, TaskSizes
from master_service.core.queue.streams import Streams, news_of, plan_of, short_steps
from tests.master_service.cluster import spec_of
from trireme_shared.protocol.records import EpochPlan, JobSpec, Mode, TaskKind


def job_of(**values):
    return spec_of(
        **{"mode": Mode.SYNC, "lanes": 8, "global_batch_size": 256, "records_per_task": None} | values
    )


def cut(spec: JobSpec, files: tuple[int, ...]) -> tuple[FileTable, EpochPlan]:
    table = TaskSizes.of(spec).table([TableFile(f"f{n}", count) for n, count in enumerate(files)])
    streams = Streams(TaskKind.TRAIN, table, spec.streams, spec.seed, spec.shuffle, spec.minibatch_size)
    return table, plan_of(spec, streams)


def even(records: int, files: int) -> tuple[int, ...]:
    return tuple(records // files + (n < records % files) for n in range(files))


README = (480, 479, 479)  # the handwritten digits


def test_the_job_of_the_readme_makes_steps_of_256_records():
    spec = job_of(epochs=5)
    table, plan = cut(spec, README)
    assert (plan.steps, table.task_records, plan.tasks) == (6, 96, 15)  # it was 15 steps of 96 records
    assert short_steps(spec, table, plan) == ""


@pytest.mark.parametrize(
    ("records", "files", "lanes", "steps", "minibatches"),
    [
        (1_000, 1, 8, 4, 4),
        (1_000, 4, 64, 4, 4),
        (100_000, 1, 8, 392, 8),
        (100_000, 4, 64, 392, 14),
        (10**9, 1, 1, 3_906_250, 16),
        (10**9, 1, 64, 3_906_256, 16),
        (10**9, 1_000, 8, 3_906_250, 16),
    ],
)
def test_steps_are_full_and_large_datasets_have_few_tasks(records, files, lanes, steps, minibatches):
    spec = job_of(lanes=lanes)
    table, plan = cut(spec, even(records, files))
    assert (plan.steps, table.task_records // spec.minibatch_size) == (steps, minibatches)
    assert short_steps(spec, table, plan) == ""


@pytest.mark.parametrize("seed", range(20))
def test_no_task_size_makes_steps_that_a_smaller_one_would_save(seed):
    rng = random.Random(seed)
    spec = job_of(lanes=rng.choice((1, 2, 8, 64)), global_batch_size=rng.choice((64, 256, 1024)))
    table, plan = cut(spec, tuple(rng.randrange(1, 6000) for _ in range(rng.randrange(1, 12))))
    ideal = -(-sum(-(-file.records // spec.minibatch_size) for file in table.files) // spec.lanes)
    assert ideal <= plan.steps <= ideal * 1.01
    assert table.task_records <= MOST_MINIBATCHES * spec.minibatch_size


def test_a_size_that_the_job_names_stays_and_what_it_costs_is_told():
    spec = job_of(records_per_task=512)
    table, plan = cut(spec, README)
    assert (plan.steps, table.task_records) == (15, 512)
    assert short_steps(spec, table, plan) == (
        "an epoch has 15 steps of 95.87 records on average, global_batch_size is 256 (6 steps "
        "would do): 3 tasks of up to 512 records "
        "are no equal shares for 8 lanes, so some lanes have no records while others train; leave "
        "records_per_task out"
    )


def test_a_size_that_ends_within_a_minibatch_is_told():
    spec = job_of(lanes=1, global_batch_size=64, records_per_task=100)
    table, plan = cut(spec, (1000,))
    assert short_steps(spec, table, plan) == (
        "an epoch has 20 steps of 50 records on average, global_batch_size is 64 (16 steps would "
        "do): records_per_task 100 is no multiple "
        "of the 64 records of a minibatch; leave records_per_task out"
    )


def test_files_that_are_smaller_than_a_minibatch_are_told_with_numbers():
    spec = job_of()
    table, plan = cut(spec, (10,) * 100)
    assert plan.steps == 13
    (event,) = news_of(spec, table, plan)
    assert event.name == "steps_are_short"
    assert event.message.startswith(
        "an epoch has 13 steps of 76.92 records on average, global_batch_size is 256 (4 steps would do)"
    )
    assert "100 files of 10 records on average do not fill minibatches of 32; join the files" in event.message


def test_one_step_that_the_dataset_does_not_fill_is_no_warning():
    spec = job_of()
    table, plan = cut(spec, (100,))
    assert (plan.steps, short_steps(spec, table, plan)) == (1, "")


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("given", [None, 64, 100])
@pytest.mark.parametrize("seed", range(5))
def test_each_warning_has_a_reason_and_an_advice(seed, given, shuffle):
    rng = random.Random(seed)
    spec = job_of(lanes=rng.choice((1, 2, 8)), records_per_task=given, shuffle=shuffle)
    table, plan = cut(spec, tuple(rng.randrange(1, 300) for _ in range(rng.randrange(1, 30))))
    sentence = short_steps(spec, table, plan)
    assert bool(sentence) == (plan.steps > -(-plan.records // 256) and plan.records < 0.9 * plan.steps * 256)
    assert not sentence or sentence.count("; ") >= 1


def test_an_asynchronous_job_has_tasks_for_each_of_its_trainers_and_counts_pushes():
    spec = job_of(mode=Mode.ASYNC, trainers=3, push_every=2, global_batch_size=32)
    table, plan = cut(spec, README)
    assert (plan.tasks, table.task_records, plan.steps) == (3, 512, 3 * 8)
    spec = job_of(mode=Mode.ASYNC, trainers=4, global_batch_size=32)
    assert cut(spec, README)[1].tasks >= 4


def test_a_job_that_has_begun_keeps_its_task_size():
    spec = job_of()
    assert TaskSizes.of(spec, known=512).choose(README) == 512
    assert TaskSizes.of(spec).choose(README) == 96


# -------------------------------------------------------------------- drop_last


def test_drop_last_leaves_out_the_ends_of_files_and_says_how_many_records():
    spec = job_of(drop_last=True)
    table, plan = cut(spec, (*README, 31))
    assert [file.records for file in table.files] == [480, 448, 448, 0]
    assert (plan.left_out, plan.records) == (93, 1376)
    assert all(table.locate(task).count % 32 == 0 for task in range(table.tasks))
    assert FileTable.from_map(table.to_map()) == table
    (event,) = news_of(spec, table, plan)
    assert event.message == (
        "drop_last leaves out 93 of 1469 records in each epoch: the ends of files, which do not "
        "fill a minibatch of 32"
    )


def test_drop_last_is_for_training_alone():
    spec = job_of(drop_last=True)
    assert TaskSizes.evaluated(spec).table([TableFile("f", 33)]).records == 33


def test_drop_last_does_not_go_with_tasks_that_end_within_a_minibatch():
    with pytest.raises(
        ValueError, match="drop_last is set, and records_per_task 100 is not a multiple of the 32 records"
    ):
        job_of(drop_last=True, records_per_task=100)
