"""Records that are their own numbers: no file is opened. `Custom` readers are found by name, as a user's
would be."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from master_service.core.queue.file_table import TableFile
from tests.simulation.plans import Job


def files_of(source: str, job: Job) -> tuple[TableFile, ...]:
    """Paths say which number their first record has: `training/12`."""
    firsts = [0, *accumulate(job.files)]
    return tuple(
        TableFile(f"{source}/{first}", count) for first, count in zip(firsts, job.files, strict=False)
    )


class Numbers:
    """The reader of the simulated datasets."""

    def count(self, url: str) -> int:
        raise AssertionError("the simulation's tables are made by files_of")

    def read(self, url: str, first: int, count: int) -> Iterator[dict[str, int]]:
        base = int(url.rpartition("/")[2])
        return ({"name": base + first + index} for index in range(count))


reader = Numbers()
