"""Metrics of steps that a job left when it was restored to an older checkpoint. A restore of a newer one brings them back.

timeline 0: steps 0 ─► 50, checkpoints at 19 and 44
restore of 19: timeline 1 begins at step 19          `take` keeps steps 19 to 50 of timeline 0 aside
restore of 44: timeline 2 begins at step 44          `give` puts steps 19 to 44 of timeline 0 back, those of timeline 1 are kept aside

Steps are kept aside for as long as a checkpoint is kept that was made after them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from master_service.core.state.series import Series, SeriesTable
from trireme_shared.protocol.records.checkpoints import CheckpointRef


class Part(NamedTuple):
    """Steps from `first` until before `end` were made in `timeline`; None: nobody knows in which."""

    timeline: int | None
    first: int
    end: int


Path = tuple[Part, ...]


@dataclass(slots=True)
class LeftSteps:
    #: By timeline: its first step, and the timeline of the checkpoint that it began with (None: not known).
    begins: dict[int, tuple[int, int | None]] = field(default_factory=dict)
    #: By timeline: the metrics that were left in it.
    tables: dict[int, SeriesTable] = field(default_factory=dict)
    #: By timeline: its steps before this one were known.
    ends: dict[int, int] = field(default_factory=dict)
    #: By number of an epoch that was left: its first step.
    epochs: dict[int, int] = field(default_factory=dict)

    def learn(self, kept: Sequence[CheckpointRef]) -> None:
        """Note, in place, where the timelines of these checkpoints began: the job may not have reported any step in one of them."""
        refs = {ref.uuid: ref for ref in kept}
        for ref in kept:
            if ref.timeline and (not ref.origin or ref.origin in refs):
                origin = refs.get(ref.origin)
                self.begins.setdefault(ref.timeline, (origin.step, origin.timeline) if origin is not None else (0, 0))

    def path(self, timeline: int | None, end: int) -> Path:
        """The parts of the steps before `end` on the way to `timeline`, the first steps first."""
        parts: list[Part] = []
        while end > 0:
            if timeline is None or (timeline and timeline not in self.begins):
                parts.append(Part(None, 0, end))
                break
            first, before = self.begins.get(timeline, (0, 0))
            if first < end:
                parts.append(Part(timeline, first, end))
                end = first
            timeline = before
        return tuple(reversed(parts))

    def take(self, table: SeriesTable, first: int, end: int) -> None:
        """Move the buckets of whole steps from `first` on out of `table`, where steps end before `end`. In place."""
        for name, series in list(table.by_name.items()):
            if not series.ordered:
                continue
            for bucket in series.cut(first):
                kept = self.tables.setdefault(bucket.timeline, SeriesTable()).by_name.setdefault(name, Series())
                kept.widen(series.width)
                kept.add(*bucket)
                reached = min(bucket.step + series.width, end)
                self.ends[bucket.timeline] = max(self.ends.get(bucket.timeline, 0), reached)
            if not len(series):
                del table.by_name[name]

    def give(self, table: SeriesTable, first: int, path: Path) -> int:
        """Move buckets from `first` on back into `table`, which ends before it, as far as `path` goes. In place. Answers up to which step nothing is
        missing."""
        reached = first
        for part in path:
            while reached < part.end and (timeline := self._which(part, reached)) is not None:
                reached = self._move(timeline, table, reached, part.end)
            if reached < part.end:
                break
        return reached

    def _which(self, part: Part, step: int) -> int | None:
        """The timeline whose metrics of `step` are here, of those that the part allows."""
        allowed = sorted(self.tables, reverse=True) if part.timeline is None else [part.timeline]
        return next((timeline for timeline in allowed if self._holds(timeline, step)), None)

    def _holds(self, timeline: int, step: int) -> bool:
        """Whether the metrics of that step are here. A wide bucket that has it beside earlier steps was not moved here."""
        series = self.tables[timeline].by_name.values() if timeline in self.tables else ()
        begins = min((bucket.step - each.width + 1 for each in series for bucket in each.first()), default=step + 1)
        return begins <= step < self.ends.get(timeline, 0)

    def _move(self, timeline: int, table: SeriesTable, first: int, end: int) -> int:
        left, reached = self.tables[timeline], min(end, self.ends[timeline])
        for name, kept in list(left.by_name.items()):
            series = table.by_name.setdefault(name, Series())
            series.widen(kept.width)
            later, moved = kept.cut(end), kept.cut(first)
            for bucket in moved:
                series.append(*bucket)
            series.cover(reached, self.ends[timeline])
            for bucket in later:
                kept.add(*bucket)
            for names, found in ((left, kept), (table, series)):
                if not len(found):
                    del names.by_name[name]
        if not left.by_name:
            del self.tables[timeline], self.ends[timeline]
        assert reached > first, f"no step after {first} was given back of timeline {timeline}"
        return reached

    def forget(self, kept: Sequence[CheckpointRef], timeline: int) -> None:
        """Drop what no kept checkpoint needs and the present `timeline` does not, in place."""
        parts = [part for ref in kept for part in self.path(ref.timeline, ref.step)]
        needed = {part.timeline for part in parts}
        if None not in needed:
            for left in list(self.tables):
                self._trim(left, max((part.end for part in parts if part.timeline == left), default=0))
        if not self.tables:
            self.epochs.clear()
        way = needed | {timeline} | {part.timeline for part in self.path(timeline, 1 << 62)}
        for begun in self.begins.keys() - way:
            del self.begins[begun]

    def _trim(self, timeline: int, end: int) -> None:
        """Nobody needs steps from `end` on."""
        by_name, width = self.tables[timeline].by_name, 1
        for name, series in list(by_name.items()):
            series.cut(end)
            width = max(width, series.width)
            if not len(series):
                del by_name[name]
        self.ends[timeline] = min(
            self.ends[timeline], -(-end // width) * width
        )  # the last bucket may go on beyond `end`
        if not by_name:
            del self.tables[timeline], self.ends[timeline]


def same_until(one: Path, other: Path) -> int:
    """The first step that the two ways made in different timelines, or with which one of them ends."""
    end = min(one[-1].end if one else 0, other[-1].end if other else 0)
    for step in sorted({part.first for part in (*one, *other)}):
        if step < end:
            mine, its = _at(one, step), _at(other, step)
            if mine is not None and its is not None and mine != its:
                return step
    return end


def _at(path: Path, step: int) -> int | None:
    return next((part.timeline for part in path if part.first <= step < part.end), None)
