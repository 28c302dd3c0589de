"""The jobs of a cluster as JSON, rendered once for all who list them.

a job is listed ─► what it shows is as before ─► the same bytes
              └─► it has changed, or it trains and was rendered SHOWN_S ago ─► rendered

the pool is asked for ─► as it was SHOWN_S ago at most, unless the leader has decided something since

A thousand jobs take tenths of a second to render, and each dashboard asks every two seconds. Other requests
get their turns after every AT_ONCE jobs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from master_service.cluster.term import ClusterTerm
from trireme_shared.platform.runtime import clock
from trireme_shared.protocol.records.cluster import ClusterJob
from trireme_shared.protocol.records.record import Record
from trireme_shared.protocol.rest import MasterView

SHOWN_S = 0.5
AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class _Rendered:
    """`of`: what the job is shown by; these never change in place."""

    of: tuple[object, ...]
    trains: bool
    at: float
    content: bytes

    def is_still(self, of: tuple[object, ...], now: float) -> bool:
        same = all(one is other for one, other in zip(self.of, of, strict=True))
        return same and not (self.trains and now - self.at >= SHOWN_S)


class RenderedPool:
    """What many ask of the pool with the same words."""

    def __init__(self) -> None:
        self._of: tuple[ClusterTerm, int] | None = None
        self._made: dict[object, tuple[float, bytes]] = {}

    def content(self, term: ClusterTerm, asked: object, make: Callable[[], Record]) -> bytes:
        """As JSON."""
        now, of = clock.monotonic(), (term, term.state.decided)
        if of != self._of:
            self._of, self._made = of, {}
        if asked not in self._made or now - self._made[asked][0] >= SHOWN_S:
            self._made = {key: each for key, each in self._made.items() if now - each[0] < SHOWN_S}
            self._made[asked] = now, make().model_dump_json().encode()
        return self._made[asked][1]


class RenderedJobs:
    """`view`: what a list shows of a job, and of the leader, which is the same during a term."""

    def __init__(self, view: Callable[[ClusterTerm, ClusterJob, MasterView], Record]) -> None:
        self._view = view
        self._term: ClusterTerm | None = None
        self._rendered: dict[str, _Rendered] = {}

    async def page(
        self, term: ClusterTerm, leader: MasterView, jobs: Sequence[ClusterJob], next_page_token: str
    ) -> bytes:
        """A JobPage."""
        if term is not self._term or len(self._rendered) > len(term.state.jobs):
            known = self._rendered if term is self._term else {}
            self._term = term
            self._rendered = {name: each for name, each in known.items() if name in term.state.jobs}
        contents, made = [], 0
        for job in jobs:
            before = self._rendered.get(job.job)
            found = self._rendered_now(term, leader, job, before)
            contents.append(found.content)
            made += found is not before
            if made == AT_ONCE:
                made = 0
                await asyncio.sleep(0)
        return b'{"jobs":[%b],"next_page_token":"%b"}' % (b",".join(contents), next_page_token.encode())

    def _rendered_now(
        self, term: ClusterTerm, leader: MasterView, job: ClusterJob, before: _Rendered | None
    ) -> _Rendered:
        led = term.jobs.get(job.job)
        leading = led.master.current_term if led is not None else None
        state, members = (leading.job.state, leading.job.members) if leading is not None else (None, None)
        of = (job, term.state.revision_of(job.job), led, state, members)
        now = clock.monotonic()
        if before is not None and before.is_still(of, now):
            return before
        content = self._view(term, job, leader).model_dump_json().encode()
        found = self._rendered[job.job] = _Rendered(of, leading is not None, now, content)
        return found
