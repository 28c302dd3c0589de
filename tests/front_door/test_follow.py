"""What the launcher says beside the progress."""

from __future__ import annotations

import pytest

from shared.records import JobSpec
from trireme.follow import too_few_tasks


@pytest.mark.parametrize(
    ("trainers", "tasks", "said"),
    [
        (2, 2, ""),
        (1, 1, ""),
        (3, 1, "an epoch has 1 task of 64 records for 3 trainers: 2 of them will have nothing to do"),
        (4, 3, "an epoch has 3 tasks of 64 records for 4 trainers: 1 of them will have nothing to do"),
    ],
)
def test_a_dataset_of_too_few_tasks_is_told(trainers, tasks, said):
    spec = JobSpec.model_construct(trainers=trainers, records_per_task=64)
    assert too_few_tasks(spec, tasks).startswith(said)
    assert bool(too_few_tasks(spec, tasks)) == bool(said)
