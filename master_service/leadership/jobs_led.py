"""Which jobs a process leads: one, or those of a cluster. REST finds the Master of a job here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from master_service.leadership.master import Master


class JobsLed(Protocol):
    """A Master is one: it leads a single job."""

    def find(self, job: str | None) -> Master:
        """None: the only one. Raises NotFound; Conflict if there are several, or if nobody leads that job now (it is queued, say);
        NotLeader, NotReady on a process that leads none."""
        ...

    def check_leading(self) -> None:
        """Raises NotLeader (with the leader's url), NotReady."""
        ...

    def check_ready(self) -> bool:
        """Whether it leads and can answer; False: it stands by for a leader that it knows. Raises NotLeader, NotReady: neither."""
        ...

    def masters(self) -> Iterable[Master]:
        """Of all jobs, led or stood by for."""
        ...
