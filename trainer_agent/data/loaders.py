"""A `torch.utils.data.DataLoader` that a script gives as its dataset: what of it a job keeps, and what it
cannot keep.

    DataLoader ──take_over──► LoaderItems: items by number, how a batch is made of them, settings of the job
                              InvalidArgument: names the argument that would change the result, and says what
                              to do

Nothing of a DataLoader is left out in silence. An argument is kept (dataset, batch_size, shuffle, drop_last,
collate_fn, WeightedRandomSampler), or refused, or, if it decides only how fast records are read, told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)

from trireme_shared.datasets.random_state import seed_of
from trireme_shared.protocol.errors import DatasetError, InvalidArgument

Weights = npt.NDArray[np.float64]
#: How many bits `seed_of` gives.
SEED_BITS = 63
#: Arguments that decide only how fast records are read, with their defaults: with and without processes.
SPEEDS: Mapping[str, tuple[Any, ...]] = {
    "prefetch_factor": (None, 2),
    "persistent_workers": (False,),
    "timeout": (0,),
    "pin_memory": (False,),
    "in_order": (True,),
}
READS_BESIDE = (
    "they decide only how fast records are read, and a trainer reads beside computing, with data_workers in "
    "processes (docs/data.md#a-dataloader)"
)
#: Instead of the count of what can only be iterated.
UNCOUNTED = -1
BY_JOB = "the order of records is that of the job, a function of its seed and the epoch: leave it out"


def is_loader(found: Any) -> bool:
    return isinstance(found, DataLoader)


class WeightedOrder:
    """Which items a WeightedRandomSampler with replacement draws. Draw `number` of an epoch depends on (seed,
    epoch, number) alone, so each trainer finds those of its tasks by itself, and needs no others.

    `weights`: float64 (items,), none negative, one above 0. `seed`: of the job.
    """

    def __init__(self, weights: Weights, seed: int) -> None:
        self._sums = np.cumsum(weights)  # one addition after the other: the same bits on every machine
        self._last = int(np.flatnonzero(weights)[-1])
        self._seed = seed

    def __repr__(self) -> str:
        return f"<WeightedOrder of {len(self._sums)} items, seed {self._seed}>"

    def drawn(self, epoch: int, number: int) -> int:
        """The number of the item."""
        share = seed_of(self._seed, "weights", epoch, number) / 2**SEED_BITS
        found = int(np.searchsorted(self._sums, share * self._sums[-1], side="right"))
        return min(found, self._last)  # the product may be rounded up to the sum of all


@dataclass(frozen=True, slots=True)
class LoaderItems:
    """What a job keeps of a DataLoader. `settings`: of the job, as the DataLoader has them. `weights`: of the
    items, if they are drawn by weight, `count` of them in each epoch. `count`: UNCOUNTED of an
    IterableDataset. `unused`: arguments that decide only how fast records are read, as text."""

    items: Any
    count: int
    collate: Callable[[list[Any]], Any]
    settings: Mapping[str, Any]
    weights: Weights | None = None
    unused: tuple[str, ...] = ()
    #: What each process that reads calls first, with its number.
    begin_worker: Callable[[int], Any] | None = None

    def __len__(self) -> int:
        return self.count

    @property
    def has_own_collate(self) -> bool:
        return self.collate is not default_collate


def take_over(loader: DataLoader[Any], what: str, *, evaluates: bool = False) -> LoaderItems:
    """`what`: who gives it, as messages call it. `evaluates`: it is the evaluation dataset. Raises
    InvalidArgument, with the name of what a job cannot keep and what to do."""

    def refuse(name: str, why: str, hint: str) -> InvalidArgument:
        return InvalidArgument(f"{what} is a DataLoader with {name}: {why}", hint=hint)

    kind, items = type(loader), loader.dataset
    if own := [
        name
        for name in ("__iter__", "__len__", "_get_iterator")
        if getattr(kind, name) is not getattr(DataLoader, name)
    ]:
        why = "a job reads the items by number, so that code would not run"
        raise refuse(f"a {own[0]} of its own ({kind.__name__})", why, "put it into the dataset or collate_fn")
    if loader.batch_size is None:
        given = loader.batch_sampler
        name = "batch_size=None" if given is None else f"the batch_sampler {type(given).__name__}"
        hint = "give DataLoader(dataset, batch_size=32), or a dataset whose items are batches"
        raise refuse(name, "a job makes each minibatch of as many items as a setting says", hint)
    sampler: Any = loader.sampler
    if loader.generator is not None or getattr(sampler, "generator", None) is not None:
        why = "nobody would carry its state from one trainer to another"
        raise refuse("a generator", why, BY_JOB + "; the setting seed decides it")
    if (reads := _reads_several(items)) is not None:
        why = f"{type(reads).__name__} reads several items in one call, and a job reads them one by one"
        raise refuse("a __getitems__", why, "give a dataset that has __getitem__ alone")
    if isinstance(items, IterableDataset):
        if evaluates and loader.drop_last:
            why = "an evaluation has all records, also the last ones"
            raise refuse("drop_last=True", why, "leave drop_last out")
        drops = {"drop_last": True} if loader.drop_last else {}
        settings = {"global_batch_size": loader.batch_size, "shuffle": False} | drops
        return LoaderItems(items, UNCOUNTED, loader.collate_fn, settings, None, _unused(loader))
    count = _length(items, what)
    shuffles, weights, drawn = _order(sampler, count, loader.batch_size, refuse)
    if evaluates and (shuffles or weights is not None):
        why = "an evaluation has each record once, in the order of the dataset"
        raise refuse("shuffle or a sampler", why, f"give DataLoader(dataset, batch_size={loader.batch_size})")
    if evaluates and loader.drop_last and drawn % loader.batch_size:
        why = f"an evaluation has all {drawn} records, also the last {drawn % loader.batch_size}"
        raise refuse("drop_last=True", why, "leave drop_last out")
    settings = {"global_batch_size": loader.batch_size, "shuffle": shuffles}
    if loader.drop_last:
        settings["drop_last"] = True
    begin_worker = loader.worker_init_fn if loader.num_workers else None
    if loader.num_workers and not evaluates:
        settings["data_workers"] = loader.num_workers
    return LoaderItems(items, drawn, loader.collate_fn, settings, weights, _unused(loader), begin_worker)


def taken_here(loader: DataLoader[Any], name: str, *, named: bool) -> LoaderItems:
    """In a trainer: what `take_over` gives of the DataLoader that the job calls `name`. `named`: the script
    has no `collate`. Raises DatasetError that ends the job: it is the same at every trainer."""
    try:
        taken = take_over(loader, name, evaluates=name.endswith(":evaluation_dataset"))
        if taken.has_own_collate and not named:
            raise two_collates(name)
    except InvalidArgument as error:
        raise DatasetError(error.message, hint=error.hint, fatal=True, url=name) from None
    return taken


def _order(
    sampler: Any, count: int, size: int, refuse: Callable[[str, str, str], InvalidArgument]
) -> tuple[bool, Weights | None, int]:
    """Whether items are shuffled, their weights, and how many an epoch has."""
    name, whole = (
        f"the sampler {type(sampler).__name__}",
        "each record of the dataset counts once in an epoch",
    )
    batches = f"batch_size={size}"
    subset = f"give DataLoader(torch.utils.data.Subset(dataset, indices), {batches}, shuffle=True)"
    if type(sampler) is SequentialSampler and len(sampler.data_source) == count:
        return False, None, count
    if type(sampler) is RandomSampler:
        drawn = f"torch.utils.data.WeightedRandomSampler([1.0] * {count}, {sampler.num_samples})"
        by_weight = f"to draw with replacement give DataLoader(dataset, {batches}, sampler={drawn})"
        if sampler.replacement:
            raise refuse(f"{name}(replacement=True)", whole, by_weight)
        if sampler.num_samples != count or len(sampler.data_source) != count:
            why = f"it draws {sampler.num_samples} of {count} records, and {whole}"
            raise refuse(f"{name}(num_samples={sampler.num_samples})", why, f"{subset}; {by_weight}")
        return True, None, count
    if type(sampler) is WeightedRandomSampler:
        return False, _weights(sampler, count, name, refuse), sampler.num_samples
    if isinstance(sampler, DistributedSampler):
        why = "it would leave out the records of other ranks, and the job shares records out by itself"
        raise refuse(name, why, f"give DataLoader(dataset, {batches}, shuffle=True) without a sampler")
    if isinstance(sampler, SubsetRandomSampler):
        raise refuse(name, whole, subset)
    hint = (
        f"for an order of your own give DataLoader(torch.utils.data.Subset(dataset, order), {batches}); for "
        f"weights DataLoader(dataset, {batches}, "
        f"sampler=torch.utils.data.WeightedRandomSampler(weights, {count}))"
    )
    raise refuse(name, "its order is not known to be a function of the job's seed and the epoch", hint)


def _weights(
    sampler: Any, count: int, name: str, refuse: Callable[[str, str, str], InvalidArgument]
) -> Weights:
    if not sampler.replacement:
        why = "each trainer draws for itself, and does not know what the others have drawn"
        hint = "draw with replacement, or weigh the loss of each record"
        raise refuse(f"{name}(replacement=False)", why, hint)
    weights: Weights = sampler.weights.detach().cpu().numpy()
    if len(weights) != count:
        why = f"it has {len(weights)} weights, and the dataset has {count} records"
        raise refuse(name, why, "give each record a weight")
    if not np.isfinite(weights).all() or (weights < 0).any() or not (0 < weights.sum() < np.inf):
        why = "weights must be finite, not negative, and not all 0"
        raise refuse(name, why, "correct the weights")
    return weights


def _length(items: Any, what: str) -> int:
    try:
        return len(items)
    except Exception as error:  # the user's code may raise anything
        why = f"{type(error).__name__}: {error}"
        msg = f"{what} is a DataLoader over {type(items).__name__}, which has no length: {why}"
        raise InvalidArgument(msg, hint="give the dataset a __len__") from error


def _reads_several(items: Any) -> Any:
    """A part of the dataset whose `__getitems__` may say something else than `__getitem__`; None: there is
    none. Those of torch and of Hugging Face's datasets call what reads single items."""
    if not callable(getattr(items, "__getitems__", None)):
        return None
    module = type(items).__module__
    if module.startswith("datasets."):
        return None
    if not module.startswith("torch.utils.data"):
        return items
    held = getattr(items, "datasets", None) or getattr(items, "dataset", None)
    inner = held.values() if isinstance(held, dict) else held if isinstance(held, list | tuple) else [held]
    return next((part for part in map(_reads_several, inner) if part is not None), None)


def _unused(loader: DataLoader[Any]) -> tuple[str, ...]:
    found = [
        f"{name}={value}"
        for name, defaults in SPEEDS.items()
        if (value := getattr(loader, name, defaults[0])) not in defaults
    ]
    if loader.multiprocessing_context is not None:
        found.append("multiprocessing_context")
    if loader.worker_init_fn is not None and not loader.num_workers:  # torch calls it in workers alone
        found.append("worker_init_fn (num_workers is 0)")
    return tuple(found)


def two_collates(what: str) -> InvalidArgument:
    return InvalidArgument(
        f"the script has a collate, and {what} is a DataLoader with a collate_fn: a minibatch is made by one",
        hint="give the function of the DataLoader another name than collate, which is used by itself, or "
        "return its dataset alone",
    )
