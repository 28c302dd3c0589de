"""Records that the user's code makes, of which some draw random numbers (augmentation, noise, a crop).

torch, NumPy and Python have one generator for all threads of a process, and records are read in threads beside forward passes. A record that
draws would get other numbers each time, and so would forward. So such a record is read alone, with a seed of its own, and the generators are put
back behind it:

    record of a dataset that draws      ALONE ─► seeded by (seed, epoch, file, number) ─► read ─► generators as they were
    record of one that does not         read, beside whatever runs

Whether a dataset draws is found out with its first records, and looked at again with one record of each task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from trireme_shared.datasets.random_state import Generators, seed_everything, seed_of, undisturbed
from trireme_shared.platform.runtime import clock
from trireme_shared.protocol.errors import InvalidArgument

EVALUATION = -1
PROBED = 256  # first records of a dataset in a process
TURN_S = 0.005  # then forward may go on

T = TypeVar("T")
_epoch: ContextVar[int] = ContextVar("epoch", default=EVALUATION)


@contextmanager
def reading(epoch: int) -> Iterator[None]:
    """Records that are read in the block, in this thread, are those of an epoch, or of EVALUATION."""
    token = _epoch.set(epoch)
    try:
        yield
    finally:
        _epoch.reset(token)


class Drawing:
    """One dataset in one process. `what`: its name, for messages. `seed`: of the job. `by_epoch`: a record draws other numbers in another epoch; not
    those of an iterable, since an iterator goes on from epoch to epoch at one trainer and begins again at another."""

    def __init__(self, what: str, seed: int, *, by_epoch: bool = True) -> None:
        self._what, self._seed, self._by_epoch = what, seed, by_epoch
        self._generator = ""  # which one it draws from
        self._read = 0
        self._late = ""

    def __repr__(self) -> str:
        return f"<Drawing of {self._what}: {self._generator or 'none'} after {self._read} records>"

    def each(self, file: str, numbers: range, read: Callable[[int], T]) -> Iterator[T]:
        """`read(number)` of each record of `file`. Raises what it raises, and InvalidArgument if a record draws although those before it did not."""
        seed = seed_of(self._seed, _epoch.get() if self._by_epoch else EVALUATION, file)
        self._check()
        done = 0
        while done < len(numbers):
            if self._generator or self._read < PROBED or done == 1:
                for value in self._alone(seed, numbers[done:], read):
                    done += 1
                    yield value
            else:
                yield read(numbers[done])
                done, self._read = done + 1, self._read + 1

    def _alone(self, seed: int, numbers: range, read: Callable[[int], T]) -> list[T]:
        """At least one of them, for TURN_S."""
        found: list[T] = []
        with undisturbed():
            until = clock.monotonic() + TURN_S
            for number in numbers:
                seed_everything(seed_of(seed, number))
                before = None if self._generator else Generators.now()
                found.append(read(number))
                if before is not None and (drawn := before.differs()):
                    self._found(drawn, number)
                self._read += 1
                if clock.monotonic() > until or not (self._generator or self._read < PROBED):
                    break
        return found

    def _found(self, generator: str, number: int) -> None:
        """Raises InvalidArgument if records were read already as if none drew."""
        self._generator = generator
        if self._read > PROBED:
            self._late = (
                f"record {number} of {self._what} draws from the random generator of {generator}, and the first {PROBED} did not: those between were "
                "read beside forward passes, whose random numbers they may have changed"
            )
            self._check()

    def _check(self) -> None:
        if self._late:
            hint = "let each record draw, or none: draw a number that is not used where none is needed"
            raise InvalidArgument(self._late, hint=hint)
