"""Which parameter servers give no answer (asynchronous jobs, `skip_after_seconds`): they are left out until they answer again.

answers --calls fail for skip_after_seconds--> silent: left out at once, asked now and then --it answers, with parameters--> answers
"""

from __future__ import annotations

from shared.errors import PeerError
from shared.records import JobSpec
from shared.runtime import clock, telemetry

ASK_S = 0.25  # what a silent one is given to answer
SHARE = 9.0  # times as long as that, training goes on before it is asked again
SHORTEST_S = 0.1
ROUNDING_S = 1e-6

log = telemetry.logger("silence")


def call_limit_s(spec: JobSpec, stall_s: float) -> float:
    """How long a call may wait for a peer that is silent, if it may wait for `stall_s` otherwise."""
    return stall_s if spec.skip_after_seconds is None else min(stall_s, max(SHORTEST_S, spec.skip_after_seconds))


class Silence:
    """Of all parameter servers, by index."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}
        self._ask_at: dict[int, float] = {}

    def __repr__(self) -> str:
        return f"<Silence of {sorted(self._ask_at)}>"

    def answered(self, index: int) -> None:
        since = self._since.pop(index, None)
        if self._ask_at.pop(index, None) is not None and since is not None:
            log.info("pserver_answers_again", pserver=index, seconds=round(clock.monotonic() - since, 1))

    def failed(self, index: int, error: PeerError, skip_after_s: float | None) -> bool:
        """After a call that failed: whether that pserver is left out from now on."""
        now = clock.monotonic()
        since = self._since.setdefault(index, now - float(error.details.get("silent_s", 0.0)))
        if skip_after_s is None or now - since < skip_after_s - ROUNDING_S:
            return False
        if index not in self._ask_at:
            log.warning("pserver_silent", pserver=index, seconds=round(now - since, 1), cause=str(error))
        self._ask_at[index] = now + SHARE * ASK_S
        return True

    def holds(self, index: int) -> bool:
        """Whether it is left out."""
        return index in self._ask_at

    def is_due(self, index: int) -> bool:
        """Whether it is to be asked again."""
        return clock.monotonic() >= self._ask_at[index]
