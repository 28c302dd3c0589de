"""Files of lines are counted before anybody knows the size of a task: the bytes at which tasks start are
right all the same."""

from __future__ import annotations

import random

import numpy as np
import pytest

from master_service.core.queue.file_table import KEPT_BY_LANE, TaskSizes
from master_service.storage.counting import TaskStarts
from master_service.storage.job_storage import FileStorage, count_records
from tests.equipment.replaced import replaced
from tests.master_service.cluster import spec_of
from trainer_agent.data import open_dataset
from trireme_shared.protocol.errors import DatasetError
from trireme_shared.protocol.records import Mode
from trireme_shared.protocol.records.datasets import TextLines


def write_lines(folder, counts):
    for number, count in enumerate(counts):
        lines = (f"{number} {line} {'x' * (line % 7)}" for line in range(count))
        (folder / f"{number}.txt").write_text("\n".join(lines) + "\n" * bool(count))
    return TextLines(f"{folder}/*.txt")


@pytest.mark.parametrize("kept", [KEPT_BY_LANE, 1])
@pytest.mark.parametrize(
    "sizes", [TaskSizes(4, 8), TaskSizes(3, 2), TaskSizes(4, 8, drop_last=True), TaskSizes(4, 8, 10)]
)
def test_each_task_is_read_from_the_byte_at_which_it_starts(tmp_path, sizes, kept, monkeypatch):
    monkeypatch.setattr("master_service.core.queue.file_table.KEPT_BY_LANE", kept)
    counts = (479, 2000, 3, 0, 33)
    dataset = write_lines(tmp_path, counts)
    table = count_records(dataset, sizes)
    reader = open_dataset(dataset)
    seen = []
    for place in map(table.locate, range(table.tasks)):
        shard = reader.read(place.file, place.first, place.count, place.offset)
        seen += [record["text"].split()[:2] for record in shard.records(np.arange(place.count))]
    left = [count % sizes.minibatch if sizes.drop_last else 0 for count in counts]
    assert seen == [[str(f), str(line)] for f, count in enumerate(counts) for line in range(count - left[f])]
    assert (table.left_out, table.records) == (sum(left), sum(counts) - sum(left))


def test_of_a_long_file_few_bytes_are_kept_while_it_is_counted():
    sizes = TaskSizes(2, 4)
    starts, rng, records = TaskStarts(sizes), random.Random(1), 0
    while records < 200_000:
        some = np.arange(records, records + rng.randrange(500), dtype=np.int64) * 10
        starts.take(some)
        records += len(some)
        assert len(starts.kept) <= max(2 * KEPT_BY_LANE * 4, records // (16 * 2) + 1)
    found = starts.counted("f")
    assert found.offsets == tuple(range(0, records * 10, sizes.stride(records) * 10))


def test_drop_last_that_leaves_nothing_is_refused_with_the_number(tmp_path):
    dataset = write_lines(tmp_path, (3, 2))
    with pytest.raises(
        DatasetError, match="drop_last leaves out all 5 records: no file has the 4 of a minibatch"
    ):
        count_records(dataset, TaskSizes(4, drop_last=True))


async def test_a_table_that_is_lost_is_cut_again_as_it_was_by_whoever_began_the_job(tmp_path):
    dataset = write_lines(tmp_path, (100, 90))
    now = spec_of(
        mode=Mode.SYNC,
        lanes=4,
        global_batch_size=16,
        records_per_task=None,
        dataset=dataset,
        storage=str(tmp_path),
    )
    first = await FileStorage(now).count(dataset, TaskSizes.of(now))
    later = now.model_copy(update={"trainers": 9})
    with replaced(
        TaskSizes, "choose", lambda self, counts: self.fixed or 1
    ):  # another version would choose another size
        again = await FileStorage(later).count(dataset, TaskSizes.of(later, known=first.task_records))
    assert (again.digest, again.task_records) == (first.digest, first.task_records)
