"""What can only be iterated, in shards: each record once, read in sequence, and the same ones each time."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections import Counter

import pytest
import torch

from master_service.core.queue.file_table import TaskSizes
from master_service.core.queue.streams import Streams
from master_service.storage.job_storage import count_records
from trainer_agent.data import open_dataset
from trireme_shared.datasets.iterables import record_digest
from trireme_shared.protocol.errors import DatasetError
from trireme_shared.protocol.records import TaskKind
from trireme_shared.protocol.records.datasets import IterableStyle, MapStyle

LENGTHS = (37, 0, 20, 64)
SCRIPT = f"""
import itertools, random, torch

LENGTHS = {LENGTHS}
read = []

class Stream(torch.utils.data.IterableDataset):
    num_shards = len(LENGTHS)

    def __init__(self, shards=range(len(LENGTHS))):
        self.shards = shards

    def shard(self, num_shards, index):
        return type(self)([list(self.shards)[index]]) if num_shards > 1 else type(self)()

    def value(self, number):
        return number

    def __iter__(self):
        for shard in self.shards:
            for n in range(LENGTHS[shard]):
                read.append(shard)
                yield {{"x": self.value(1000.0 * shard + n)}}

class Noisy(Stream):
    def value(self, number):
        return number + random.random()

class Mixed(Stream):
    "A buffer that is shuffled while it is filled, by numbers that torch draws."

    def __iter__(self):
        held = []
        for record in super().__iter__():
            held.append(record)
            if len(held) > 5:
                yield held.pop(int(torch.randint(len(held), ())))
        yield from held

clock = itertools.count()

class Late(Stream):
    def value(self, number):
        return number + next(clock)

class Itself:
    def __iter__(self):
        self.place = 0
        return self

    def __next__(self):
        if self.place == 121:
            raise StopIteration
        self.place += 1
        return {{"x": float(self.place)}}

def loader():
    return torch.utils.data.DataLoader(Stream(), batch_size=10)

def generated():
    return ({{"x": float(n)}} for n in range(121))
"""
SHARDED = ("Stream", "Noisy", "Mixed")


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "streams_module.py").write_text(SCRIPT)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("streams_module")
    sys.modules.pop("streams_module", None)


def dataset_of(name):
    return IterableStyle(f"streams_module:{name}", shards=len(LENGTHS) if name in SHARDED else 1)


def epoch_of(table, lanes, epoch, *, shuffle=True):
    """For each lane its places, in order."""
    streams = Streams(TaskKind.TRAIN, table, lanes, 3, shuffle, 4)
    order = streams.order(epoch)
    return [
        [table.locate(order.task_at(lane + n * lanes)) for n in range(streams.length(lane))]
        for lane in range(lanes)
    ]


def in_turn(places):
    """As lanes read: one task each."""
    return [place for row in itertools.zip_longest(*places) for place in row if place is not None]


def values(reader, places):
    shards = (reader.read(p.file, p.first, p.count, p.offset, p.stamp) for p in places)
    return [record["x"] for shard in shards for record in shard.minibatch(range(len(shard)))]


def table_of(dataset, seed=3):
    return count_records(dataset, TaskSizes(4, fixed=8), seed=seed)


@pytest.mark.parametrize("name", [*SHARDED, "Itself", "generated"])
def test_each_record_is_read_once_an_epoch_by_any_number_of_trainers_to_the_same_values(module, name):
    dataset = dataset_of(name)
    table = table_of(dataset)
    assert [file.records for file in table.files] == (list(LENGTHS) if name in SHARDED else [121])
    assert table.in_sequence
    plain = values(open_dataset(dataset, 3), in_turn(epoch_of(table, 1, 0, shuffle=False)))
    assert len(set(plain)) == len(plain) == 121
    if name == "Stream":
        assert plain == [record["x"] for record in module.Stream()]
    for epoch, trainers in itertools.product((0, 1), (1, 2, 4)):
        lanes, found = epoch_of(table, 4, epoch), []
        for trainer in range(trainers):
            reader, mine = (
                open_dataset(dataset, 3),
                lanes[trainer * 4 // trainers : (trainer + 1) * 4 // trainers],
            )
            found += values(reader, in_turn(mine))
        assert sorted(found) == sorted(plain), "another trainer, or another epoch, draws the same"
    orders = [epoch_of(table, 2, epoch) for epoch in range(6)]
    assert any(order != orders[0] for order in orders) == (name in SHARDED), "shards are shuffled"


def test_lanes_go_on_with_their_iterators_so_reading_is_not_quadratic(module):
    table = table_of(dataset_of("Stream"))
    reader, lanes, started = open_dataset(dataset_of("Stream"), 3), 4, len(module.read)
    for epoch in range(3):
        values(reader, in_turn(epoch_of(table, lanes, epoch)))
    # a lane that begins inside of a shard skips what is before
    assert 3 * 121 <= len(module.read) - started <= 3 * 2 * 121
    begun = len(module.read)
    values(open_dataset(dataset_of("Stream"), 3), epoch_of(table, lanes, 0)[3])
    read = Counter(module.read[begun:])
    assert read == {0: 1, 3: 64}, (
        "a trainer reads the shards of its own lanes, and the first record for types"
    )


def test_other_records_than_the_counted_ones_end_the_job_or_are_told(module):
    dataset = IterableStyle("streams_module:Late")
    place = table_of(dataset).locate(0)
    with pytest.raises(
        DatasetError, match="record 0 of streams_module:Late is not the one that was"
    ) as caught:
        open_dataset(dataset, 3).read(place.file, place.first, place.count, place.offset)
    assert caught.value.details["fatal"]
    told = []
    values(open_dataset(dataset, 3, told.append), [place])
    assert len(told) == 1
    assert told[0].endswith("it is trained all the same (changed_files = report)")


def test_shards_that_are_gone_or_shorter_are_named_with_both_counts(module):
    table, dataset = table_of(dataset_of("Stream")), dataset_of("Stream")
    last = table.locate(table.tasks - 1)
    assert last.file == "streams_module:Stream shard 4 of 4"
    module.LENGTHS = (37, 0, 20, 60)
    with pytest.raises(DatasetError, match="ends at record 60, but records"):
        values(open_dataset(dataset, 3), [last])
    module.Stream.num_shards = 3
    with pytest.raises(DatasetError, match="has 3 shards here, and 4 when the job was made"):
        values(open_dataset(dataset, 3), [last])


def test_a_record_that_cannot_be_read_is_named_and_the_next_task_begins_anew(module):
    reader, dataset = open_dataset(dataset_of("Stream"), 3), dataset_of("Stream")
    first = table_of(dataset).locate(0)
    module.Stream.value = lambda _, number: number if number != 2 else 1 / 0
    with pytest.raises(
        DatasetError, match="item 2 of streams_module:Stream shard 1 of 4 cannot be read: Zero"
    ):
        values(reader, [first])
    module.Stream.value = lambda _, number: number
    assert values(reader, [first])[:3] == [0.0, 1.0, 2.0]


def test_the_digest_of_a_record_sees_each_value():
    record = {"x": torch.arange(3.0), "y": (1, "a", b"b", None, [2.5])}
    assert record_digest(record) == record_digest({"x": torch.arange(3.0), "y": (1, "a", b"b", None, [2.5])})
    others = (
        {"x": torch.arange(3), "y": record["y"]},
        {"x": torch.arange(1, 4.0), "y": record["y"]},
        {"x": record["x"], "y": (1, "a", b"b", None, [2.75])},
        {"z": record["x"], "y": record["y"]},
        record | {"y": (True, "a", b"b", None, [2.5])},
    )
    assert record_digest(record) not in set(map(record_digest, others))
    assert 0 <= record_digest(record) < 2**52


def test_the_records_of_a_loader_may_be_stated_though_its_length_counts_batches_or_nothing(module):
    dataset = IterableStyle("streams_module:loader", records=121, loader=True)
    for length in (lambda _: 121, lambda stream: stream.raises):
        module.Stream.__len__ = length
        found = open_dataset(dataset, 3).read("streams_module:loader", 0, 121)
        assert [record["x"] for record in found.minibatch(range(121))] == list(
            itertools.chain.from_iterable(batch["x"].tolist() for batch in module.loader())
        )


def test_a_job_whose_dataset_has_no_numbers_says_so_by_name(module):
    dataset = MapStyle("streams_module:loader", records=121, loader=True)
    with pytest.raises(DatasetError, match="DataLoader over an IterableDataset") as caught:
        open_dataset(dataset, 3).read("streams_module:loader", 0, 1)
    assert caught.value.details["fatal"]
    assert "iterable_style" in caught.value.hint
