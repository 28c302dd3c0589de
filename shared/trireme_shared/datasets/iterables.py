"""Objects that can only be iterated, in shards: who counts records and who trains them iterate alike.

    object ─► its shards, by name ─begin─► iterator ─next_item─► item 0, item 1, … END

    counting  iterates each shard once, and keeps a digest of the first record of each task
    training  iterates what it needs, and compares: an iterable that gives other records the second time, or
              at another host, is found by that

Items that draw random numbers get the seed of their shard and number, as trainers give it to them.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from threading import Lock
from typing import Any

import numpy as np

from trireme_shared.datasets.random_state import (
    PROBED,
    Generators,
    seed_everything,
    seed_of,
    seeded,
    undisturbed,
)
from trireme_shared.datasets.user_modules import load_object
from trireme_shared.platform.runtime import clock
from trireme_shared.platform.storage.files import trouble_in_user_code
from trireme_shared.protocol.errors import DatasetError, TriremeError, is_interrupt
from trireme_shared.protocol.records.datasets import IterableStyle

END = object()
#: Instead of an epoch: an iterator goes on from one epoch to the next at one trainer, and begins again at
#: another, so its records draw the same in each of them.
EACH_EPOCH = -1
AT_ONCE = 64
LOOK_EVERY = 256
TELL_S = 10.0
_DEPTH = 8
_DIGEST_BITS = 52  # exact in JSON numbers of every language
_CORRECT = "correct the dataset's __iter__"


class Shards:
    """The shards of one dataset in this process. `seed`: of the job."""

    def __init__(self, dataset: IterableStyle, seed: int) -> None:
        self._dataset, self._seed = dataset, seed
        self._numbers = {name: number for number, name in enumerate(dataset.shard_names)}
        self._lock = Lock()

    def __repr__(self) -> str:
        return f"<Shards of {self._dataset.reader}: {self._dataset.shards}>"

    def object(self) -> Any:
        """What is iterated: of a DataLoader its dataset. Raises DatasetError, also if it has another number
        of shards than were counted."""
        with self._lock:  # threads that count make it once
            made = load_object(self._dataset, self._seed)
        found = made.dataset if self._dataset.loader else made
        shards = shards_of(found)
        if self._dataset.shards not in {1, shards}:
            msg = (
                f"{self._dataset.reader} has {shards} shard{'s' * (shards != 1)} here, and "
                f"{self._dataset.shards} when the job was made"
            )
            hint = (
                "it must have the same shards in every process, whatever the host, the time and the process"
            )
            raise DatasetError(msg, hint=hint, fatal=True, url=self._dataset.reader)
        return found

    def label(self, name: str) -> str:
        """What seeds of a shard's records are named by."""
        return "" if self._dataset.shards == 1 else name

    def begin(self, name: str) -> tuple[Iterator[Any], bool]:
        """An iterator of the shard called `name`, and whether it is the object itself, which can be iterated
        once at a time. Raises DatasetError, and what the machine or the storage lacks."""
        try:
            found = self.object()
            with seeded(self._seed):
                if has_shards(found):  # of one, too: each iterator gets an object of its own
                    found = found.shard(num_shards=self._dataset.shards, index=self._numbers.get(name, 0))
                iterator = iter(found)
        except TriremeError:
            raise
        except BaseException as error:  # the user's code may raise anything
            raise _failure(error, name, f"{name} cannot be iterated") from error
        return iterator, iterator is found

    def records(self, name: str) -> Iterator[Any]:
        """All items of a shard, drawing what they draw in training. What takes long says so on standard
        error: it may be endless. Raises DatasetError, and what the machine or the storage lacks."""
        told = clock.monotonic()
        for number, item in enumerate(self._drawn(name)):
            yield item
            if (number + 1) % LOOK_EVERY == 0 and (now := clock.monotonic()) - told > TELL_S:
                told = now
                sys.stderr.write(
                    f"{name}: {number + 1} records are counted by iterating it, and it goes on; what has no "
                    "end is made one that has: itertools.islice(records, 1_000_000)\n"
                )

    def _drawn(self, name: str) -> Iterator[Any]:
        iterator, _ = self.begin(name)
        seed, number, draws = seed_of(self._seed, EACH_EPOCH, self.label(name)), 0, False
        while True:
            if not draws and number >= PROBED:
                item = next_item(iterator, name, number)
                if item is END:
                    return
                yield item
                number += 1
                continue
            found = []
            with undisturbed():
                for _ in range(AT_ONCE):
                    seed_everything(seed_of(seed, number))
                    before = None if draws else Generators.now()
                    found.append(next_item(iterator, name, number))
                    draws = draws or (before is not None and bool(before.differs()))
                    number += 1
                    if found[-1] is END:
                        break
            for item in found:
                if item is END:
                    return
                yield item


def next_item(iterator: Iterator[Any], name: str, number: int) -> Any:
    """END behind the last one. Raises DatasetError, and what the machine or the storage lacks."""
    try:
        return next(iterator, END)
    except BaseException as error:  # the user's code may raise anything
        raise _failure(error, name, f"item {number} of {name} cannot be read") from error


def _failure(error: BaseException, name: str, what: str) -> BaseException:
    """The error to raise."""
    if is_interrupt(error):
        return error
    if (trouble := trouble_in_user_code(error, name)) is not None:
        return trouble
    return DatasetError(f"{what}: {type(error).__name__}: {error}", hint=_CORRECT, url=name)


def has_shards(found: Any) -> bool:
    """Whether `found` says how many shards it has, and gives each of them, as Hugging Face's datasets do."""
    return callable(getattr(found, "shard", None)) and isinstance(getattr(found, "num_shards", None), int)


def shards_of(found: Any) -> int:
    return max(1, found.num_shards) if has_shards(found) else 1


def record_digest(record: Any) -> int:
    """Of a record's values, the same in every process: 52 bits."""
    made = hashlib.blake2b(digest_size=8)
    _add(made, record, _DEPTH)
    return int.from_bytes(made.digest(), "little") >> (64 - _DIGEST_BITS)


def _add(made: Any, value: Any, depth: int) -> None:
    """Of objects of unknown kinds the attributes; of those without any the class alone."""
    made.update(f"{type(value).__name__} ".encode())
    if value is None or isinstance(value, bool | int | float | complex):
        made.update(repr(value).encode())
    elif isinstance(value, str | bytes | bytearray):
        content = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
        made.update(f"{len(content)} ".encode() + content)
    elif depth == 0:
        return
    elif isinstance(value, Mapping):
        for key, each in value.items():
            _add(made, key, depth - 1)
            _add(made, each, depth - 1)
    elif isinstance(value, list | tuple):
        made.update(f"{len(value)} ".encode())
        for each in value:
            _add(made, each, depth - 1)
    elif isinstance(value, np.ndarray | np.generic):
        made.update(f"{value.dtype.str} {value.shape} ".encode())
        made.update(repr(value.tolist()).encode() if value.dtype.hasobject else value.tobytes())
    elif callable(getattr(value, "tolist", None)):  # a tensor, of whatever dtype
        made.update(f"{getattr(value, 'dtype', '')} {value.tolist()!r}".encode())
    elif callable(getattr(value, "tobytes", None)):  # an image
        made.update(f"{getattr(value, 'size', '')} ".encode() + value.tobytes())
    elif is_dataclass(value):
        _add(made, {field.name: getattr(value, field.name) for field in fields(value)}, depth - 1)
    elif hasattr(value, "__dict__"):
        _add(made, vars(value), depth - 1)
