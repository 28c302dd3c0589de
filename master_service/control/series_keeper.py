"""The metrics of a job in one term: what the terms before have stored, and what is reported now.

term begins ─► stored files read ─► in memory, answers queries
report ─► memory, and a file every FLUSH_S
FILES files ─► one with all of it, the others are deleted
term ends ─► what is left is written

What is not stored when a master is killed is asked for by the next one, if it is of whole steps: the owner of
lane 0 and the parameter servers keep it until it is stored. Else it is lost, at most FLUSH_S of it. A storage
that does not answer costs nothing but that: what is not written yet stays in memory, bounded.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from master_service.core.state.metrics import KEPT_STEPS
from master_service.core.state.series import Epoch, SeriesTable, Value, WholeSteps, values_of
from master_service.storage.series_files import SeriesFiles, add_encoded, encoded, name_of, to_read
from trireme_shared.platform.runtime import clock, ids, telemetry
from trireme_shared.platform.runtime.clock import Notices
from trireme_shared.platform.runtime.containment import described
from trireme_shared.protocol.errors import StorageUnreachable
from trireme_shared.protocol.evaluations import Evaluation
from trireme_shared.protocol.metrics import EVALUATION, LOSS, SPEED, TIME
from trireme_shared.protocol.records import MetricBatch, MetricsTaken, StepMetrics
from trireme_shared.protocol.records.checkpoints import CheckpointRef

FLUSH_S = 5.0
PAUSE_S = 1.0
SPEED_S = 0.25
FILES = 64
ENDING_S = 2.0

log = telemetry.logger("series")


class Origin(NamedTuple):
    """The job's timeline; the version with which it began, and the timeline of that version (None: not
    known); the checkpoints that are kept."""

    timeline: int = 0
    step: int | None = 0
    before: int | None = 0
    kept: tuple[CheckpointRef, ...] = ()


class SeriesKeeper:
    """`files` None: metrics live as long as the term. `skips`: minibatches that are not finite are left out,
    and counted by step. `origin`: where the job's timeline began. `push_every`: so many minibatches are a
    step. `leads`: whether the term still holds: a file that is written later would stand before those of the
    next master, which has not read it. Run `run()` in a TaskGroup."""

    def __init__(
        self,
        files: SeriesFiles | None,
        term: int,
        *,
        skips: bool = False,
        origin: Callable[[], Origin] = Origin,
        push_every: int = 1,
        leads: Callable[[], bool] = lambda: True,
    ) -> None:
        self._skips, self._origin, self._push_every, self._leads = skips, origin, push_every, leads
        self._speed: tuple[float, int] | None = None  # since when records are counted, and how many they are
        self._files, self._term, self._written, self._number = files, term, 0, 1
        self._all, self._fresh = SeriesTable(), SeriesTable()
        self._steps = WholeSteps()
        # the first whole step in `_fresh`; those before `_stored` are in files
        self._first, self._stored = 0, 0
        self._epochs: set[int] = set()  # that were told of since the last file
        self._back_to: int | None = None  # the job went to a checkpoint while a file was being written
        self._whole_due = False  # the job went to a checkpoint: the next file has everything
        self._writing = asyncio.Lock()
        self._obstacle = "" if files is None else "they are being read"
        self._evaluations: dict[int, Evaluation] = {}  # to be noted once it is known what is stored
        self._away = Notices()

    @property
    def table(self) -> SeriesTable:
        """To read. Raises StorageUnreachable while what was stored before is not known."""
        if self._obstacle:
            raise StorageUnreachable(f"the metrics stored before are not known: {self._obstacle}; ask again")
        return self._all

    def note_result(self, metrics: Mapping[str, float], timeline: int) -> None:
        """Of the evaluation at the job's end: at its last step."""
        losses = self._all.by_name.get(LOSS)
        step = max((bucket.step for bucket in losses or ()), default=0)
        for name, value in metrics.items():
            if math.isfinite(value):
                self.add(EVALUATION + name, step, timeline, Value(value, 1, value, value))

    def note_evaluation(self, done: Evaluation) -> None:
        """While the job trains: once, also if it is told again."""
        if self._obstacle:
            self._evaluations[done.number] = done
            return
        step = done.step // self._push_every
        for name, value in done.metrics.items():
            known = self._all.by_name.get(EVALUATION + name, ())
            if not any((bucket.step, bucket.timeline) == (step, done.timeline) for bucket in known):
                self.add(EVALUATION + name, step, done.timeline, Value(value, 1, value, value))

    @property
    def epochs(self) -> Mapping[int, Epoch]:
        """Of whole steps. Raises StorageUnreachable."""
        self.table  # noqa: B018  raises
        return self._steps.epochs

    @property
    def timeline(self) -> int:
        """That of the whole steps that are known."""
        return self._steps.timeline

    def step_losses(self) -> dict[int, tuple[float, float]]:
        """Loss x records and records of the last whole steps, by step; empty where steps share a bucket."""
        series = self._all.by_name.get(LOSS)
        if series is None or series.width > 1:
            return {}
        first = self._steps.next - KEPT_STEPS
        return {
            bucket.step: (bucket.value.total, bucket.value.weight)
            for bucket in series
            if bucket.step >= first
        }

    @property
    def known(self) -> int:
        """Whole steps before this one are known."""
        return self._steps.next

    def note(self, batch: MetricBatch) -> MetricsTaken:
        """Shares of steps in the job's present timeline, or whole steps. What is known already is not taken
        again."""
        taken: Sequence[StepMetrics] = ()
        if not batch.whole:
            taken = batch.steps
            for share in taken:
                for name, value in values_of(share, skips=self._skips):
                    self.add(name, share.step, share.timeline, value)
        elif not self._obstacle and self._follow(batch):
            taken = self._steps.portion(batch.steps, batch.lost_before)
            for share in taken:
                self._take(share)
        self._note_times(batch)
        self._note_speed(taken)
        return self.taken

    @property
    def taken(self) -> MetricsTaken:
        """What is known of whole steps."""
        if self._obstacle:
            return MetricsTaken()
        known = self._steps.next
        return MetricsTaken(next=known, stored=known if self._files is None else min(self._stored, known))

    def _take(self, share: StepMetrics) -> None:
        values = list(values_of(share, skips=self._skips))
        for name, value in values:
            if (
                self._all.add(name, share.step, share.timeline, value, ordered=True)
                and self._files is not None
            ):
                self._fresh.add(name, share.step, share.timeline, value, ordered=True)
        self._steps.count(share, values)
        self._epochs.add(share.epoch)

    def _follow(self, batch: MetricBatch) -> bool:
        """The job's timeline is another one: steps from where it began are trained again. False: where that
        was is not known yet."""
        found = self._origin()
        if found.timeline == self._steps.timeline:
            return True
        step = found.step
        if step is None:  # its checkpoint is not kept any more
            if not batch.steps:
                return False
            step = min(share.step for share in batch.steps)
        known = self._steps.next
        cut = self._steps.follow(found.timeline, step, found.before, found.kept, self._all)
        self._fresh.rewind(cut, known)
        self._first, self._stored, self._whole_due = min(self._first, cut), min(self._stored, cut), True
        self._number += 1  # the file under way may be there in part, and has another name
        self._epochs.update(self._steps.epochs)
        self._back_to = cut if self._back_to is None else min(self._back_to, cut)
        return True

    def _note_times(self, batch: MetricBatch) -> None:
        if (times := batch.times) is not None:
            for name in ("compute", "push", "pull"):
                seconds = getattr(times, name)
                part = seconds / times.seconds
                self.add(TIME + name, times.step, times.timeline, Value(seconds, times.seconds, part, part))

    def _note_speed(self, taken: Sequence[StepMetrics]) -> None:
        """Records per second, from one report to another at least SPEED_S later. What came before the first
        one is not known."""
        now, records = clock.monotonic(), sum(share.records for share in taken)
        if not taken:
            return
        if self._speed is None:
            self._speed = now, 0
            return
        since, before = self._speed
        self._speed = since, before + records
        if (seconds := now - since) >= SPEED_S:
            last, rate = taken[-1], (before + records) / seconds
            self.add(SPEED, last.step, last.timeline, Value(before + records, seconds, rate, rate))
            self._speed = now, 0

    def add(self, name: str, step: int, timeline: int, value: Value) -> None:
        if self._all.add(name, step, timeline, value) and self._files is not None:
            self._fresh.add(name, step, timeline, value)

    async def run(self) -> None:
        """Until cancelled."""
        if self._files is None:
            return
        try:
            while True:
                if self._obstacle and not await self._read(self._files):
                    await asyncio.sleep(ids.jitter(PAUSE_S))
                    continue
                await asyncio.sleep(FLUSH_S)
                await self._write(self._files)
        finally:
            await self._end(self._files)

    async def _read(self, stored: SeriesFiles) -> bool:
        """Whether all is known now."""
        before, steps = SeriesTable(), WholeSteps()
        try:
            names, over = to_read(await stored.names())
            for name in names:
                add_encoded(before, steps, await stored.read(name), name)
        except FileNotFoundError:
            return False  # another master has put them together meanwhile
        except Exception as error:  # noqa: BLE001  of the storage's library, or a file is damaged
            self._obstacle = described(error)
            self._tell("metrics_unread", error)
            return False
        before.merge(self._all)  # what was reported meanwhile
        self._all, self._obstacle, self._written = before, "", len(names) + len(over)
        self._steps, self._first, self._stored = steps, steps.next, steps.next
        waiting, self._evaluations = self._evaluations, {}
        for number in sorted(waiting):
            self.note_evaluation(waiting[number])
        return True

    @property
    def all_stored(self) -> bool:
        """Whether nothing is known that is in no file."""
        unwritten = self._obstacle or self._fresh.by_name or self._whole_due or self._writing.locked()
        return not unwritten and self._first == self._steps.next

    async def store(self) -> None:
        """What is known now is in a file when this returns, if the storage answers."""
        if self._files is not None and not self._obstacle:
            await self._write(self._files)

    async def _write(self, stored: SeriesFiles) -> None:
        """What is new; from time to time all of it, in place of the files before."""
        async with self._writing:
            await self._write_alone(stored)

    async def _write_alone(self, stored: SeriesFiles) -> None:
        known = self._steps.next
        if not (self._fresh.by_name or self._whole_due or self._first != known) or not self._leads():
            return
        taken, self._fresh = self._fresh, SeriesTable()
        first, self._first, self._back_to = self._first, known, None
        epochs, self._epochs = self._epochs, set()
        everything = (self._written >= FILES or self._whole_due) and not self._obstacle
        self._whole_due = False
        name = name_of(self._term, self._number, everything=everything)
        steps = None if self._obstacle else self._steps
        if everything:
            content = encoded(self._all, steps, 0, self._steps.epochs.keys(), everything=True)
        else:
            content = encoded(taken, steps, first, epochs)
        try:
            await stored.write(name, content)
        except BaseException as error:
            # perhaps it is written: the next attempt has the same name, and takes its place
            if (back_to := self._went_back()) is not None:
                taken.rewind(back_to, known)
            taken.merge(self._fresh)
            self._whole_due = self._whole_due or everything
            self._fresh, self._first, self._epochs = taken, min(first, self._first), epochs | self._epochs
            if not isinstance(error, Exception):
                raise
            self._tell("metrics_unwritten", error)
            return
        back_to = self._went_back()
        self._stored = known if back_to is None else min(known, back_to)
        self._number += 1
        self._written += 1
        if everything:
            await self._forget_older(stored)
        self._away.over()

    def _went_back(self) -> int | None:
        """Where to, since the last file was begun."""
        return self._back_to

    async def _forget_older(self, stored: SeriesFiles) -> None:
        try:
            _, over = to_read(await stored.names())
            await stored.remove(over)
            self._written = 1
        except Exception as error:  # noqa: BLE001  of the storage's library
            self._tell("metrics_left_behind", error)

    async def _end(self, stored: SeriesFiles) -> None:
        """What is left, also while being cancelled; bounded."""
        try:
            async with asyncio.timeout(ENDING_S):
                await asyncio.shield(asyncio.ensure_future(self._write(stored)))
        except TimeoutError:
            log.warning("metrics_left", cause=f"the storage took longer than {ENDING_S:g} s")

    def _tell(self, event: str, error: Exception) -> None:
        if self._away.due(clock.monotonic()):
            log.warning(event, cause=described(error))
