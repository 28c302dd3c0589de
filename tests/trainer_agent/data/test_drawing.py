"""Records that draw random numbers: the same ones whoever reads them, when, in which order and beside what;
and nobody else's are changed."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
import torch

from trainer_agent.data import open_dataset
from trainer_agent.data.in_code import LOOK_AT_LEAST, LOOK_EVERY, PROBED, reading
from trireme_shared.datasets.random_state import Generators, seed_everything, seeded
from trireme_shared.protocol.errors import InvalidArgument
from trireme_shared.protocol.records.datasets import Custom, IterableStyle, MapStyle

MODULE = """
import random, threading
import numpy as np
import torch

class Noisy:
    def __len__(self): return 40
    def __getitem__(self, i):
        return {"i": i, "torch": torch.rand(1).item(), "numpy": np.random.random(), "python": random.random()}

class Seeding:
    def __len__(self): return 40
    def __getitem__(self, i):
        torch.manual_seed(i)
        return {"i": i, "torch": torch.rand(1).item()}

class Stream:
    def __iter__(self):
        return self.items(random.random())
    def items(self, start):
        shift = start + random.random()
        for i in range(40):
            yield {"i": i, "python": shift + np.random.random()}

class Reader:
    def count(self, url): return 40
    def read(self, url, first, count):
        for i in range(first, first + count):
            yield {"i": i, "torch": torch.rand(1).item()}

class Late:
    def __len__(self): return 1000
    def __getitem__(self, i):
        return {"i": i, "x": np.random.random() if i >= 300 else 0.5}

class Quiet:
    inside = threading.Event()
    def __len__(self): return 1000
    def __getitem__(self, i):
        self.inside.set()
        return {"i": i}
"""
DATASETS = {
    "Noisy": MapStyle("drawing_items:Noisy", records=40),
    "Seeding": MapStyle("drawing_items:Seeding", records=40),
    "Stream": IterableStyle("drawing_items:Stream", records=40),
    "Reader": Custom("-", reader="drawing_items:READER"),
}


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / "drawing_items.py").write_text(MODULE + "\nREADER = Reader()\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    import sys

    sys.modules.pop("drawing_items", None)


def read(reader, first, count, epoch=0):
    with reading(epoch):
        return list(reader.read("file", first, count).minibatch(np.arange(count)))


@pytest.mark.parametrize("name", DATASETS)
def test_records_are_the_same_in_any_order_and_after_any_draws_and_disturb_nobody(name):
    seed_everything(1)
    one = open_dataset(DATASETS[name], 3)
    expected = [*read(one, 0, 16), *read(one, 16, 16), *read(one, 32, 8)]
    assert len({record[key] for record in expected for key in record if key != "i"}) > 30, "they are random"
    seed_everything(2)
    before = Generators.now()
    other = open_dataset(DATASETS[name], 3)
    found = {first: read(other, first, 8) for first in (32, 0, 24, 16, 8)}
    assert [record for first in sorted(found) for record in found[first]] == expected
    assert before.differs() == ""
    if name != "Seeding":
        assert read(open_dataset(DATASETS[name], 4), 0, 16) != expected[:16]


def test_another_epoch_draws_other_numbers_but_for_an_iterable_that_goes_on_through_epochs():
    changes = {
        name: read(open_dataset(d, 3), 0, 8, 1) != read(open_dataset(d, 3), 0, 8, 0)
        for name, d in DATASETS.items()
    }
    assert changes == {"Noisy": True, "Seeding": False, "Stream": False, "Reader": True}


def test_forward_passes_beside_it_draw_as_if_nobody_read():
    reader, stop = open_dataset(DATASETS["Noisy"], 3), threading.Event()
    expected = read(reader, 0, 40)

    def forward():
        with seeded(5):
            return [torch.rand(3).sum().item() + np.random.random() + random.random() for _ in range(50)]  # noqa: NPY002

    alone = forward()

    def keep_reading():
        while not stop.is_set():
            assert read(reader, 0, 40) == expected

    thread = threading.Thread(target=keep_reading)
    thread.start()
    try:
        assert all(forward() == alone for _ in range(30))
    finally:
        stop.set()
        thread.join()


def test_records_that_do_not_draw_are_read_while_others_compute():
    reader = open_dataset(MapStyle("drawing_items:Quiet"), 3)
    read(reader, 0, PROBED)
    import drawing_items

    with seeded(5):  # as a forward pass
        thread = threading.Thread(target=read, args=(reader, PROBED, 1))
        drawing_items.Quiet.inside.clear()
        thread.start()
        assert drawing_items.Quiet.inside.wait(20)
        thread.join(20)
        assert not thread.is_alive()


def test_a_record_is_looked_at_while_nothing_is_computed_and_one_of_many_waits_for_that():
    """So a forward pass that is always under way neither keeps reading, nor hides draws for ever."""
    reader = open_dataset(MapStyle("drawing_items:Late"), 3)
    read(reader, 0, PROBED)
    found = []

    def keep_reading():
        for number in range(300, 1000):
            try:
                read(reader, number, 1)
            except InvalidArgument:
                found.append(number)
                return

    thread = threading.Thread(target=keep_reading)
    with seeded(5):  # as a forward pass
        thread.start()
        thread.join(1.0)
        assert thread.is_alive()
        assert not found
    thread.join(20)
    assert 300 < found[0] <= 300 + LOOK_AT_LEAST


def test_a_dataset_that_draws_only_after_many_records_is_refused_by_name():
    reader = open_dataset(MapStyle("drawing_items:Late"), 3)
    read(reader, 0, PROBED + 2 * LOOK_EVERY)
    for _ in range(2):
        with pytest.raises(
            InvalidArgument, match=r"record 300 of drawing_items:Late draws from .* of numpy\.random"
        ) as caught:
            read(reader, 300, LOOK_EVERY)
        assert "let each record draw, or none" in caught.value.hint
