"""What a job keeps of a DataLoader, and that it refuses or tells the rest by name."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils import data
from torch.utils.data import DataLoader, Subset, TensorDataset

from trainer_agent.data.loaders import UNCOUNTED, WeightedOrder, take_over
from trireme_shared.protocol.errors import InvalidArgument

RECORDS = 10
ITEMS = [(torch.tensor([float(i)]), i) for i in range(RECORDS)]


class Stream(data.IterableDataset):
    def __iter__(self):
        return iter(ITEMS)


class Several(data.Dataset):
    """A dataset that reads a minibatch in one call."""

    def __len__(self):
        return RECORDS

    def __getitem__(self, number):
        return ITEMS[number]

    def __getitems__(self, numbers):
        return [ITEMS[number] for number in reversed(numbers)]


class NoLength(data.Dataset):
    def __getitem__(self, number):
        return ITEMS[number]


class Backwards(DataLoader):
    def __iter__(self):
        return reversed(list(super().__iter__()))


class OfThree(DataLoader):
    """As libraries make their own: other arguments, the same iteration."""

    def __init__(self, dataset):
        super().__init__(dataset, batch_size=3, collate_fn=list)


def weighted(count=RECORDS, number=20, *, replacement=True, **more):
    return data.WeightedRandomSampler(torch.arange(1.0, count + 1), number, replacement, **more)


def test_dataset_batch_size_shuffle_drop_last_and_collate_are_kept():
    taken = take_over(DataLoader(ITEMS, 4, shuffle=True, drop_last=True, collate_fn=list), "train:dataset")
    assert taken.settings == {"global_batch_size": 4, "shuffle": True, "drop_last": True}
    assert (taken.items, len(taken), taken.collate, taken.unused) == (ITEMS, RECORDS, list, ())
    assert taken.has_own_collate
    plain = take_over(DataLoader(ITEMS, 5), "train:dataset")
    assert plain.settings == {"global_batch_size": 5, "shuffle": False}
    assert not plain.has_own_collate
    assert take_over(OfThree(ITEMS), "train:dataset").settings["global_batch_size"] == 3
    own = take_over(DataLoader(ITEMS, 4, sampler=data.RandomSampler(ITEMS)), "train:dataset")
    assert own.settings["shuffle"] is True


def test_what_can_only_be_iterated_is_counted_later_and_not_shuffled():
    taken = take_over(DataLoader(Stream(), 4, drop_last=True, collate_fn=list), "train:dataset")
    assert (taken.count, taken.collate) == (UNCOUNTED, list)
    assert taken.settings == {"global_batch_size": 4, "shuffle": False, "drop_last": True}


@pytest.mark.parametrize(
    ("loader", "names", "advice"),
    [
        (lambda: DataLoader(Stream(), batch_size=None), "batch_size=None", "batch_size=32"),
        (lambda: DataLoader(ITEMS, batch_size=None), "batch_size=None", "batch_size=32"),
        (
            lambda: DataLoader(
                ITEMS, batch_sampler=data.BatchSampler(data.SequentialSampler(ITEMS), 3, drop_last=False)
            ),
            "the batch_sampler BatchSampler",
            "batch_size=32",
        ),
        (lambda: DataLoader(ITEMS, shuffle=True, generator=torch.Generator()), "a generator", "seed"),
        (
            lambda: DataLoader(ITEMS, sampler=data.RandomSampler(ITEMS, generator=torch.Generator())),
            "a generator",
            "seed",
        ),
        (lambda: DataLoader(ITEMS, sampler=weighted(generator=torch.Generator())), "a generator", "seed"),
        (lambda: DataLoader(ITEMS, sampler=[3, 1, 2]), "the sampler list", "Subset"),
        (
            lambda: DataLoader(ITEMS, sampler=data.SubsetRandomSampler([1, 2])),
            "SubsetRandomSampler",
            "Subset",
        ),
        (
            lambda: DataLoader(ITEMS, sampler=data.SequentialSampler(range(4))),
            "the sampler SequentialSampler",
            "Subset",
        ),
        (
            lambda: DataLoader(ITEMS, sampler=data.RandomSampler(ITEMS, replacement=True)),
            "RandomSampler(replacement=True)",
            "WeightedRandomSampler",
        ),
        (
            lambda: DataLoader(ITEMS, sampler=data.RandomSampler(ITEMS, num_samples=4)),
            "RandomSampler(num_samples=4)",
            "Subset",
        ),
        (
            lambda: DataLoader(ITEMS, sampler=data.DistributedSampler(ITEMS, num_replicas=2, rank=0)),
            "DistributedSampler",
            "shuffle=True",
        ),
        (
            lambda: DataLoader(ITEMS, sampler=weighted(number=4, replacement=False)),
            "WeightedRandomSampler(replacement=False)",
            "loss",
        ),
        (lambda: DataLoader(ITEMS, sampler=weighted(count=4)), "has 4 weights", "each record a weight"),
        (
            lambda: DataLoader(ITEMS, sampler=data.WeightedRandomSampler([-1.0] + [1.0] * 9, 4)),
            "not negative",
            "correct",
        ),
        (lambda: DataLoader(Several()), "a __getitems__", "__getitem__ alone"),
        (lambda: DataLoader(Subset(Several(), [1, 2])), "a __getitems__", "__getitem__ alone"),
        (lambda: DataLoader(NoLength(), sampler=data.SequentialSampler(ITEMS)), "no length", "__len__"),
        (lambda: Backwards(ITEMS), "a __iter__ of its own (Backwards)", "collate_fn"),
    ],
)
def test_what_would_change_the_result_is_refused_by_name(loader, names, advice):
    with pytest.raises(InvalidArgument) as caught:
        take_over(loader(), "train:dataset")
    assert caught.value.message.startswith("train:dataset is a DataLoader ")
    assert names in caught.value.message
    assert advice in str(caught.value.hint)


@pytest.mark.parametrize(
    ("loader", "names"),
    [
        (lambda: DataLoader(ITEMS, 4, shuffle=True), "shuffle or a sampler"),
        (lambda: DataLoader(ITEMS, 4, sampler=weighted()), "shuffle or a sampler"),
        (lambda: DataLoader(ITEMS, 4, drop_last=True), "drop_last=True"),
        (lambda: DataLoader(Stream(), 4, drop_last=True), "drop_last=True"),
    ],
)
def test_an_evaluation_has_each_record_once(loader, names):
    with pytest.raises(InvalidArgument, match=names):
        take_over(loader(), "train:evaluation_dataset", evaluates=True)
    assert take_over(DataLoader(ITEMS, 5, drop_last=True), "it", evaluates=True).count == RECORDS


def test_what_decides_only_the_speed_is_named():
    loader = DataLoader(
        ITEMS,
        num_workers=2,
        prefetch_factor=3,
        persistent_workers=True,
        timeout=5,
        pin_memory=True,
        multiprocessing_context="spawn",
        in_order=False,
    )
    taken = take_over(loader, "it")
    assert taken.settings["data_workers"] == 2
    assert taken.unused == (
        "prefetch_factor=3",
        "persistent_workers=True",
        "timeout=5",
        "pin_memory=True",
        "in_order=False",
        "multiprocessing_context",
    )


def test_a_worker_init_fn_is_kept_with_workers_and_told_without():
    taken = take_over(DataLoader(ITEMS, num_workers=1, worker_init_fn=print), "it")
    assert (taken.begin_worker, taken.unused) == (print, ())
    told = take_over(DataLoader(ITEMS, worker_init_fn=print), "it")
    assert (told.begin_worker, told.unused) == (None, ("worker_init_fn (num_workers is 0)",))


def test_datasets_of_torch_that_pass_several_numbers_on_are_read_one_by_one():
    tensors = TensorDataset(torch.arange(10))
    for items in (Subset(tensors, [1, 2]), Subset(Subset(tensors, [1, 2]), [0]), data.StackDataset(tensors)):
        assert take_over(DataLoader(items), "it").items is items


def test_weights_draw_by_seed_epoch_and_number_alone():
    weights = np.array([0.0, 1.0, 0.0, 3.0, 4.0, 0.0])
    order = WeightedOrder(weights, 7)
    drawn = [order.drawn(epoch, number) for epoch in range(2) for number in range(4000)]
    again = WeightedOrder(weights, 7)
    assert drawn[4000:] == [again.drawn(1, number) for number in range(4000)]
    assert drawn[:4000] != drawn[4000:]
    assert drawn[:4000] != [WeightedOrder(weights, 8).drawn(0, number) for number in range(4000)]
    shares = {item: found / 8000 for item, found in Counter(drawn).items()}
    assert shares == pytest.approx({1: 1 / 8, 3: 3 / 8, 4: 4 / 8}, abs=0.02)
