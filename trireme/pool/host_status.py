"""What a host agent tells of itself: Prometheus' metrics of its places, and whether their processes live and
are ready.

    /readyz of the agent ─► /readyz of each process      200: ready      503: live, and why it is not ready
                                                         nothing, or no answer in time: not live

A parameter server that loads a checkpoint, and a trainer that builds its model, are live and not ready.
Nobody shows a token for this: it says nothing of a job.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import aiohttp
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from pydantic import BaseModel, ValidationError

from trireme.launch.processes import Child
from trireme.pool.registration import PlaceKeys
from trireme_shared.platform.runtime import clock
from trireme_shared.protocol.records.cluster import Kind, PoolMember
from trireme_shared.protocol.records.record import shortened

STATES = ("idle", "running", "task", "ended", "trouble")
ANSWER_S = 1.0
KEPT_S = 1.0  # whoever asks the agent asks its processes no more often
REASON_CHARACTERS = 300


class WatchedPlace(Protocol):
    """What is told of a place. `child`: its process; None: it is idle. `deaths`: processes that ended before
    their job."""

    kind: Kind
    child: Child | None
    deaths: int

    @property
    def short_name(self) -> str: ...


class HostMetrics:
    """Reads what it tells when somebody asks."""

    def __init__(self) -> None:
        #: What etcd is told of the places.
        self.members: Iterable[PoolMember] = ()
        self.places: Iterable[WatchedPlace] = ()
        #: The keys of the places in etcd; None before etcd has had them for the first time.
        self.registration: PlaceKeys | None = None

    def missing(self) -> str:
        """Why the agent is not ready; "" if it is."""
        if self.registration is None:
            return "no places registered yet"
        return "" if self.registration.alive else "etcd does not answer: the lease of the places is over"

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "trireme_host_ready", "1 while its places are registered", value=int(not self.missing())
        )
        members = list(self.members)
        kinds = sorted({member.kind for member in members})
        found = Counter((member.kind, state_of(member)) for member in members)
        places = GaugeMetricFamily("trireme_host_places", "places by what they do", labels=("kind", "state"))
        for kind in kinds:
            for state in STATES:
                places.add_metric((kind, state), found[kind, state])
        yield places
        died: Counter[str] = Counter()
        for place in self.places:
            died[place.kind] += place.deaths
        deaths = CounterMetricFamily(
            "trireme_host_deaths", "processes of members that ended before their job", labels=("kind",)
        )
        for kind in kinds:
            deaths.add_metric((kind,), died[kind])
        yield deaths


def state_of(member: PoolMember) -> str:
    """One of STATES."""
    if member.trouble:
        return "trouble"
    if not member.running:
        return "idle"
    if member.ended:
        return "ended"
    return "task" if member.task else "running"


class _Readiness(BaseModel):
    reason: str = ""


class ProcessHealth:
    """`places`: all of the host, read when somebody asks."""

    def __init__(self, places: Callable[[], Iterable[WatchedPlace]], client: aiohttp.ClientSession) -> None:
        self._places, self._client = places, client
        self._asking = asyncio.Lock()
        self._found: dict[str, dict[str, Any]] = {}
        self._kept_until = 0.0

    def __repr__(self) -> str:
        return f"<ProcessHealth of {len(self._found)} processes>"

    async def of_all(self) -> dict[str, Any]:
        """`{"processes": {"pserver-0": {"live": true, "ready": false, "reason": "no parameters yet"}}}`, of
        places with a process."""
        async with self._asking:
            if clock.monotonic() >= self._kept_until:
                children = {
                    place.short_name: place.child for place in self._places() if place.child is not None
                }
                answers = await asyncio.gather(*(self._of(child) for child in children.values()))
                self._found = dict(zip(children, answers, strict=True))
                self._kept_until = clock.monotonic() + KEPT_S
        return {"processes": self._found}

    async def _of(self, child: Child) -> dict[str, Any]:
        if not child.alive:
            return {"live": False, "ready": False, "reason": "it has ended"}
        if not (url := child.health_url):
            return {"live": True, "ready": False, "reason": "it starts"}
        try:
            async with asyncio.timeout(ANSWER_S), self._client.get(f"{url}/readyz") as answer:
                ready, text = answer.status == 200, await answer.text()
        except TimeoutError:
            return {"live": False, "ready": False, "reason": f"it has not answered within {ANSWER_S:g} s"}
        except (aiohttp.ClientError, OSError) as error:
            return {"live": False, "ready": False, "reason": shortened(str(error), REASON_CHARACTERS)}
        if ready:
            return {"live": True, "ready": True}
        return {"live": True, "ready": False, "reason": _reason(text)}


def _reason(text: str) -> str:
    try:
        found = _Readiness.model_validate_json(text).reason
    except ValidationError:
        found = text
    return shortened(found, REASON_CHARACTERS)
