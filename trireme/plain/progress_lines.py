"""Lines that say how plain training goes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shared.records import JobSpec
from shared.runtime import clock

REPORT_SECONDS = 2.0


class ProgressLines:
    """A line every REPORT_SECONDS, and one at each epoch's end."""

    def __init__(self, spec: JobSpec, records: int, report: Any) -> None:
        self._spec, self._records, self._report = spec, records, report
        self._epoch_started = self._last = clock.monotonic()

    def update(self, epoch: int, step: int, records: int, means: Mapping[str, float], *, final: bool = False) -> None:
        now = clock.monotonic()
        if not final and now - self._last < REPORT_SECONDS:
            return
        rate = records / max(now - self._epoch_started, 1e-9)
        shown = "  ".join(f"{name} {value:.4f}" for name, value in means.items())
        self._report(
            f"epoch {epoch + 1}/{self._spec.epochs}  step {step}  {shown}  "
            f"{records}/{self._records} records  {rate:.0f}/s"
        )
        self._last = now
        if final:
            self._epoch_started = now
