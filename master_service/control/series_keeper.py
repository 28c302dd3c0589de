"""The metrics of a job in one term: what the terms before have stored, and what is reported now.

term begins ─► stored files read ─► in memory, answers queries          report ─► memory, and a file every FLUSH_S
FILES files ─► one with all of it, the others are deleted               term ends ─► what is left is written

A master that is killed loses what was reported in the last FLUSH_S. A storage that does not answer costs nothing but that: what is
not written yet stays in memory, bounded.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping

from master_service.core.state.series import SeriesTable, Value
from master_service.storage.series_files import SeriesFiles, add_encoded, encoded, name_of, to_read
from shared.errors import StorageUnreachable
from shared.evaluations import Evaluation
from shared.metric_names import EVALUATION, LOSS, NONFINITE, SPEED, TIME, rate_names
from shared.records import MetricBatch
from shared.runtime import clock, ids, telemetry
from shared.runtime.waiting import Notices

FLUSH_S = 5.0
PAUSE_S = 1.0
SPEED_S = 0.25
FILES = 64
ENDING_S = 2.0

log = telemetry.logger("series")


class SeriesKeeper:
    """`files` None: metrics live as long as the term. `skips`: minibatches that are not finite are left out, and counted by step. Run
    `run()` in a TaskGroup."""

    def __init__(self, files: SeriesFiles | None, term: int, *, skips: bool = False) -> None:
        self._skips = skips
        self._speed: tuple[float, int] | None = None  # since when records are counted, and how many they are
        self._files, self._term, self._written, self._number = files, term, 0, 1
        self._all, self._fresh = SeriesTable(), SeriesTable()
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
        for name, value in done.metrics.items():
            known = self._all.by_name.get(EVALUATION + name, ())
            if not any((bucket.step, bucket.timeline) == (done.step, done.timeline) for bucket in known):
                self.add(EVALUATION + name, done.step, done.timeline, Value(value, 1, value, value))

    def note(self, batch: MetricBatch) -> None:
        """Shares of steps in the job's present timeline."""
        for share in batch.steps:
            if share.records and math.isfinite(share.loss_sum):
                loss = share.loss_sum / share.records
                self.add(LOSS, share.step, share.timeline, Value(share.loss_sum, share.records, loss, loss))
            for name, value in share.metrics.items():
                logged = Value(value.total, value.weight, value.least, value.most)
                self.add(name, share.step, share.timeline, logged)
            for name, rate in zip(rate_names(len(share.lr)), share.lr, strict=True):
                self.add(name, share.step, share.timeline, Value(rate, 1, rate, rate))
            if self._skips:
                self.add(NONFINITE, share.step, share.timeline, Value(share.skipped, 1, share.skipped, share.skipped))
        if (times := batch.times) is not None:
            for name in ("compute", "push", "pull"):
                seconds = getattr(times, name)
                part = seconds / times.seconds
                self.add(TIME + name, times.step, times.timeline, Value(seconds, times.seconds, part, part))
        self._note_speed(batch)

    def _note_speed(self, batch: MetricBatch) -> None:
        """Records per second, from one report to another at least SPEED_S later. What came before the first one is not known."""
        now, records = clock.monotonic(), sum(share.records for share in batch.steps)
        if not batch.steps:
            return
        if self._speed is None:
            self._speed = now, 0
            return
        since, before = self._speed
        self._speed = since, before + records
        if (seconds := now - since) >= SPEED_S:
            last, rate = batch.steps[-1], (before + records) / seconds
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
        before = SeriesTable()
        try:
            names, over = to_read(await stored.names())
            for name in names:
                add_encoded(before, await stored.read(name), name)
        except FileNotFoundError:
            return False  # another master has put them together meanwhile
        except OSError as error:
            self._obstacle = str(error)
            self._tell("metrics_unread", error)
            return False
        before.merge(self._all)  # what was reported meanwhile
        self._all, self._obstacle, self._written = before, "", len(names) + len(over)
        waiting, self._evaluations = self._evaluations, {}
        for number in sorted(waiting):
            self.note_evaluation(waiting[number])
        return True

    async def _write(self, stored: SeriesFiles) -> None:
        """What is new; from time to time all of it, in place of the files before."""
        if not self._fresh.by_name:
            return
        taken, self._fresh = self._fresh, SeriesTable()
        everything = self._written >= FILES and not self._obstacle
        name = name_of(self._term, self._number, everything=everything)
        try:
            await stored.write(name, encoded(self._all if everything else taken))
        except OSError as error:  # perhaps it is written: the next attempt has the same name, and takes its place
            self._tell("metrics_unwritten", error)
            taken.merge(self._fresh)
            self._fresh = taken
            return
        self._number += 1
        self._written += 1
        if everything:
            await self._forget_older(stored)
        self._away.over()

    async def _forget_older(self, stored: SeriesFiles) -> None:
        try:
            _, over = to_read(await stored.names())
            await stored.remove(over)
            self._written = 1
        except OSError as error:
            self._tell("metrics_left_behind", error)

    async def _end(self, stored: SeriesFiles) -> None:
        """What is left, also while being cancelled; bounded."""
        try:
            async with asyncio.timeout(ENDING_S):
                await asyncio.shield(asyncio.ensure_future(self._write(stored)))
        except TimeoutError:
            log.warning("metrics_left", cause=f"the storage took longer than {ENDING_S:g} s")

    def _tell(self, event: str, error: OSError) -> None:
        if self._away.due(clock.monotonic()):
            log.warning(event, cause=str(error))
