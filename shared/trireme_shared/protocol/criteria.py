"""Which of two evaluations is better, as settings say it: `accuracy:max`."""

from __future__ import annotations

import re
from typing import NamedTuple

METRIC_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
_TEXT = re.compile(rf"({METRIC_NAME.pattern}):(min|max)")


class Criterion(NamedTuple):
    """The smaller value of `metric` (`lowest`), or the larger one, is better."""

    metric: str
    lowest: bool

    @classmethod
    def parse(cls, text: str) -> Criterion:
        """Of `accuracy:max`. Raises ValueError."""
        found = _TEXT.fullmatch(text)
        if found is None:
            msg = f"{text!r} is not of the form metric:min or metric:max, for example accuracy:max"
            raise ValueError(msg)
        return cls(found[1], found[2] == "min")

    def is_better(self, value: float, than: float, by: float = 0.0) -> bool:
        """By more than `by`. Equal values: the earlier evaluation stays the best one."""
        return value < than - by if self.lowest else value > than + by
