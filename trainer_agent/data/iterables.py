"""What the user's own code can only iterate: shards of an object, read from their starts, with an iterator
kept for each lane, which goes on with the lane's next task.

    task of a shard ─► the iterator that stands nearest before it, or a new one ─► items before the task are
        skipped ─► its records, of which the first one must be the counted one
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any

from trainer_agent.data.in_code import Drawing, as_record, loaded
from trainer_agent.data.loaders import LoaderItems, taken_here
from trainer_agent.data.reader import too_short
from trainer_agent.data.shard import ItemShard, RecordShard, Shard
from trireme_shared.datasets.iterables import (
    END,
    Shards,
    has_shards,
    next_item,
    record_digest,
    shards_of,
)
from trireme_shared.protocol.errors import DatasetError
from trireme_shared.protocol.records.datasets import IterableStyle

MOST_ITERATORS = 256
#: An iterator that was not used in so many reads, for each one that is kept, belongs to no lane of now.
IDLE_READS, SPARE_READS = 2, 8


@dataclass(slots=True)
class _Place:
    """An iterator of a shard. `next`: number of the item that it gives next. `used`: the read that used it
    last."""

    shard: str
    iterator: Iterator[Any]
    next: int = 0
    used: int = 0


#: Of Hugging Face's `state_dict()`: what gives the same records in the same order, iterated shard by shard.
_BY_SHARDS = {
    "ArrowExamplesIterable",
    "ExamplesIterable",
    "FilteredExamplesIterable",
    "FormattedExamplesIterable",
    "MappedExamplesIterable",
    "RebatchedArrowExamplesIterable",
    "TypedExamplesIterable",
    "VerticallyConcatenatedMultiSourcesExamplesIterable",
}
_NAMED = {
    "BufferShuffledExamplesIterable": "shuffle() (the setting shuffle does that, by seed and epoch)",
    "CyclingMultiSourcesExamplesIterable": (
        "shuffle() or interleave_datasets() (the setting shuffle shuffles)"
    ),
    "RepeatExamplesIterable": "repeat()",
    "SkipExamplesIterable": "skip()",
    "TakeExamplesIterable": "take()",
}


def described(found: Any, name: str) -> tuple[int, str]:
    """In how many shards the object that the job calls `name` is iterated, and what the user should know of
    that, as a sentence."""
    shards, kinds = shards_of(found), _kinds_of(found)
    other = next((kind for kind in kinds if kind not in _BY_SHARDS), "")
    once = "its records are counted by iterating it once, before training begins"
    if shards > 1 and not other:
        batches = "MappedExamplesIterable" in kinds or "FilteredExamplesIterable" in kinds
        more = "; a batched map or filter gets batches of one shard" if batches else ""
        return shards, f"{name} has {shards} shards: {once}; a trainer iterates those of its lanes{more}"
    whole = (
        f"{name} is iterated as one shard: {once}; each trainer iterates it up to the records of its lanes, "
        "so several trainers read most of it several times"
    )
    if shards > 1:
        what = _NAMED.get(other, other)
        return (
            1,
            f"{whole}. It has {shards} shards, but {what} would give other records in each: leave it out",
        )
    what = "more files" if has_shards(found) else "num_shards and shard(num_shards, index), or a __getitem__"
    return 1, f"{whole}. Give it {what}"


def _kinds_of(found: Any) -> list[str]:
    """What a dataset of Hugging Face is made of."""
    if not has_shards(found) or not callable(getattr(found, "state_dict", None)):
        return []
    parts, kinds = [found.state_dict()], []
    while parts:
        part = parts.pop()
        if isinstance(part, Mapping):
            kinds += [str(part["type"])] if "type" in part else []
            parts += part.values()
        elif isinstance(part, list):
            parts += part
    return kinds


class IterableStyleReader:
    """`named`: an item becomes a record with named values; else it is left as it is. `changed`: is told of a
    task whose first record is not the counted one, which is then trained; None: it is refused."""

    def __init__(
        self,
        dataset: IterableStyle,
        seed: int,
        *,
        named: bool = True,
        changed: Callable[[str], object] | None = None,
    ) -> None:
        self._dataset, self._seed, self._named, self._changed = dataset, seed, named, changed
        self._shards = Shards(dataset, seed)
        self._drawing = Drawing(dataset.reader, seed, by_epoch=False)
        self._taken: LoaderItems | None = None
        self._checked = False
        self._places: list[_Place] = []
        self._reads = 0
        self._lock = Lock()

    def read(self, file: str, first: int, count: int, offset: int | None = None) -> Shard:
        """`offset`: the digest of record `first`, if it was counted by iterating."""
        with self._lock:
            self._check()
            if not count:
                return RecordShard([])
            place = self._place(file, first)
            numbers, found = range(place.next, first + count), []
            made = self._drawing.each(self._shards.label(file), numbers, partial(self._item, place))
            try:
                for number, item in zip(numbers, made, strict=False):
                    if item is END:
                        raise too_short(file, first, count, number)
                    if number == first and offset is not None and record_digest(item) != offset:
                        self._differs(file, number)
                    if number >= first:
                        found.append(item)
            except BaseException:
                self._places.remove(place)
                raise
        if self._taken is not None:
            return ItemShard(found, self._taken.collate)
        columns, named = self._dataset.columns, self._named
        return RecordShard(
            [as_record(item, columns, file, first + n, named=named) for n, item in enumerate(found)]
        )

    def _check(self) -> None:
        """Raises DatasetError, InvalidArgument: what the job describes is not what is here."""
        if self._checked:
            return
        made = loaded(self._dataset, self._seed)
        if self._dataset.loader:
            self._taken = taken_here(made, self._dataset.reader, named=self._named)
        self._checked = True

    @property
    def taken(self) -> LoaderItems | None:
        """See MapStyleReader."""
        with self._lock:
            self._check()
            return self._taken

    def _item(self, place: _Place, number: int) -> Any:
        item = next_item(place.iterator, place.shard, number)
        place.next = number + 1
        return item

    def _place(self, shard: str, first: int) -> _Place:
        """The iterator to read record `first` with."""
        self._reads += 1
        behind = [place for place in self._places if place.shard == shard and place.next <= first]
        if behind:
            chosen = max(behind, key=lambda place: place.next)
        else:
            iterator, alone = self._shards.begin(shard)
            chosen = _Place(shard, iterator)
            self._places = [chosen] if alone else [*self._places, chosen]
        chosen.used = self._reads
        oldest = self._reads - IDLE_READS * len(self._places) - SPARE_READS
        kept = [place for place in self._places if place.used >= oldest]
        self._places = sorted(kept, key=lambda place: place.used)[-MOST_ITERATORS:]
        return chosen

    def _differs(self, file: str, number: int) -> None:
        """Raises DatasetError."""
        msg = f"record {number} of {file} is not the one that was there when the records were counted"
        if self._changed is not None:
            self._changed(f"{msg}; it is trained all the same (changed_files = report)")
            return
        hint = (
            "an iterable must give the same records in the same order each time and in every process: sort "
            "what it lists, seed what it shuffles with a number of its own, and read no clock"
        )
        raise DatasetError(msg, hint=hint, fatal=True, url=file)
