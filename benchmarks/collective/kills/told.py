"""What trainers of a job told of their versions (scripts/told_versions.py), against a job that was left
alone.

lines of each process ─► digests of a job of one trainer, left alone: its place there is a digest's version
    ─► who had which version when
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# by process: when it began with a version, and that version's digest
Lines = Mapping[int, Sequence[tuple[float, str]]]


def lines_of(folder: Path) -> dict[int, list[tuple[float, str]]]:
    found = {}
    for path in folder.iterdir():
        if path.name.isdecimal():
            pairs = (line.split() for line in path.read_text().split("\n")[:-1])
            found[int(path.name)] = [(float(moment), digest) for moment, digest in pairs]
    return found


@dataclass(frozen=True)
class History:
    """`versions[pid]`: (moment, version), ascending moments; None: no version of the job that was left alone
    has this digest. `pids`: of a kill's survivors."""

    versions: Mapping[int, Sequence[tuple[float, int | None]]]

    @classmethod
    def of(cls, lines: Lines, left_alone: Sequence[str]) -> History:
        places = {digest: place for place, digest in enumerate(left_alone)}
        return cls(
            {pid: [(moment, places.get(digest)) for moment, digest in own] for pid, own in lines.items()}
        )

    def next_step_s(self, at: float, survivors: Iterable[int]) -> float | None:
        """From `at` until each survivor has finished the first step that nobody had begun by then; None: one
        of them never did."""
        before = (
            v for each in self.versions.values() for moment, v in each if moment <= at and v is not None
        )
        newest, ends = max(before, default=-1), []
        for each in (self.versions.get(pid, ()) for pid in survivors):
            moments = (moment for moment, v in each if moment > at and v is not None and v >= newest + 2)
            ends.append(next(moments, None))
        return None if None in ends else max(end for end in ends if end is not None) - at

    def wrong(self, first: float, last: float) -> int:
        """How many processes began, between two moments, with a version that was not the undisturbed job's,
        or with one that they had before."""
        count = 0
        for own in self.versions.values():
            newest, bad = -1, False
            for moment, version in own:
                bad = bad or (first <= moment < last and (version is None or version <= newest))
                newest = max(newest, version if version is not None else -1)
            count += bad
        return count


def equal_at_the_end(folder: Path, pids: Iterable[int], alone: Path, since: float) -> tuple[int, str]:
    """How many of the processes have torch.equal parameters with the job that was left alone, at the newest
    version after `since` that all have saved, and that version's digest; empty: there is none."""
    import torch

    (digest, *_) = [*reversed(all_saved(folder, pids, since)), ""]
    if not digest:
        return 0, ""
    (undisturbed,) = (alone / "saved").glob(f"{digest}-*")
    wanted = torch.load(undisturbed)
    found = [torch.load(folder / "saved" / f"{digest}-{pid}") for pid in pids]
    return sum(all(map(torch.equal, wanted, each)) for each in found), digest


def all_saved(folder: Path, pids: Iterable[int], since: float) -> list[str]:
    """Digests of the versions after `since` whose parameters all these processes have saved, in order."""
    told, wanted = lines_of(folder), list(pids)
    first, *_ = wanted
    after = [digest for moment, digest in told.get(first, ()) if moment > since]
    return [each for each in after if all((folder / "saved" / f"{each}-{pid}").exists() for pid in wanted)]
