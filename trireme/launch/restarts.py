"""When a dead child is started again, when it is given up, and how its death is told.

A child that was killed or told to stop from outside (SIGKILL, SIGTERM: preemption, out of memory, chaos) is always started
again. So is one that had started up and later lost its lease: its host froze or was cut off. A child that ends by itself right
after its start MAX_EARLY_ENDS times is given up: one more start would not help.
A child that was never ready is given up after MAX_FAILED_STARTS such ends: it cannot start here (a missing package, say).
A job's restart_policy and restart_delay_s say otherwise for its trainers and parameter servers: fewer starts, and later ones.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

from trireme.launch.child import Exit
from trireme.launch.leases import LostLease
from trireme.view.child_events import ChildEvent
from trireme_shared.platform.runtime import begun
from trireme_shared.platform.runtime.service import LEASE_LOST
from trireme_shared.protocol.records import JobSpec
from trireme_shared.protocol.records.job_choices import RestartPolicy as Kind
from trireme_shared.protocol.records.tasks import BegunWork

EARLY_S = 30.0
MAX_EARLY_ENDS = 5
MAX_FAILED_STARTS = 2
FIRST_DELAY_S = 0.1
MAX_DELAY_S = 3.0
_FROM_OUTSIDE = {0, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP}  # 0: it was told to stop


@dataclass(slots=True)
class RestartPolicy:
    """Counts the deaths of one child; a life of `EARLY_S` seconds clears the counts. `when`, `least_s`: the job's restart_policy and
    restart_delay_s."""

    when: Kind = "always"
    least_s: float = 0.0
    deaths: int = 0
    own_ends: int = 0

    @classmethod
    def of(cls, spec: JobSpec) -> RestartPolicy:
        """Of the job's trainers and parameter servers."""
        return cls(spec.restart_policy, spec.restart_delay_s)

    def starts_again(self, code: int) -> bool:
        """Whether the job wants a child that ended with `code` to be started again at all."""
        return self.when == "always" or (self.when == "on_failure" and code != 0)

    def delay_s(self, code: int, lived_s: float, *, was_ready: bool = True, at_work: bool = False) -> float | None:
        """Seconds until the next start after an end with `code` (as of subprocess); None: give up.

        `was_ready`: whether the child has ever finished its start-up. `at_work`: it has ended in the middle of a minibatch, so that is what
        its death counts against, and not its start.
        """
        if lived_s >= EARLY_S:
            self.deaths = self.own_ends = 0
        self.deaths += 1
        by_itself = code not in _FROM_OUTSIDE and not at_work
        self.own_ends += by_itself and not (was_ready and code == LEASE_LOST)
        if self.own_ends >= (MAX_EARLY_ENDS if was_ready else MAX_FAILED_STARTS):
            return None
        return max(self.least_s, min(FIRST_DELAY_S * 2.0 ** (self.deaths - 1), MAX_DELAY_S))


def death_event(
    name: str, end: Exit, lost: LostLease | None, *, given_up: bool, left: begun.Left | None = None
) -> ChildEvent:
    """`lost`: the lease that it had lost, if so. `left`: what it had begun."""
    cause, what = f"{end}{_at_work(left)}", "given_up" if given_up else "died"
    if end.code == LEASE_LOST or (lost is not None and end.code == -signal.SIGKILL):
        what = what if given_up else "lost_lease"
        cause = str(lost) if lost is not None else cause
    return ChildEvent(name, what, cause, end.pid)


def _at_work(left: begun.Left | None) -> str:
    works = [] if left is None else list(filter(None, map(BegunWork.from_bytes, left.works)))
    return f" while it {' and '.join(map(str, works))}" if works else ""
