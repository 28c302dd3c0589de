"""A trainer copies its share of a version for a generation only once it is known that all of its members have
the same version."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from tests.trainer_agent.collective.test_replica import compute
from trainer_agent.collective.exchange import CollectiveGroup
from trainer_agent.collective.gathering import MeanGradients
from trireme_shared.protocol.records import JobSpec


class Means(MeanGradients):
    """Of a trainer that reaches nobody."""

    def __init__(self, formed: asyncio.Event, store: Any = None) -> None:
        group: Any = SimpleNamespace(formed=formed, trainers="the list")
        view: Any = SimpleNamespace(group=group, next_group=asyncio.Event())
        self.view, self.store, self.native, self._lost = view, store, None, ""
        nobody: Any = SimpleNamespace()
        pulls: Any = SimpleNamespace(want_results=lambda _: None)
        self.fleet, self.pulls = nobody, pulls


def group_of(kind: type[CollectiveGroup], means: Means, replica: Any, at_version: Any) -> CollectiveGroup:
    dataset: Any = {"kind": "text_lines", "urls": ("-",)}
    spec = JobSpec(job="job", script="s.py", storage="s", lanes=1, dataset=dataset)
    copies: Any = SimpleNamespace(at_version=at_version, is_evaluated=False)
    made: Any = compute()
    return kind(means, replica, made, spec, copies)


async def test_nothing_is_copied_for_a_group_that_is_not_formed():
    """It is copied later: before the version is stepped."""
    copied: list[str] = []
    stepped: list[int] = []

    async def at_version(trainers: str, _: int | None) -> None:
        copied.append(trainers)

    class Ready(Means):
        """The mean gradients of the next version are there already."""

        async def gather_to(self, *_: Any) -> None:
            pass

    class Stepped(CollectiveGroup):
        async def _step_to(self, version: int) -> None:
            stepped.append(version)

    formed = asyncio.Event()
    replica: Any = SimpleNamespace(at_rest=True, version=1, stepped=None)
    group = group_of(Stepped, Ready(formed), replica, at_version)
    for each in (group.reached, group.version_stays):
        await each()
    pulling = asyncio.ensure_future(group.pull(2))
    await asyncio.sleep(0.01)
    assert (copied, stepped) == ([], [])
    formed.set()
    await pulling
    await group.pull(2)
    assert (copied, stepped) == (["the list"], [2, 2])
    await group.reached()
    assert copied == ["the list"] * 2


async def test_who_gets_lanes_and_is_behind_copies_its_share_of_the_versions_on_the_way():
    """One of them may be evaluated, and the others may be at it still: its checkpoint would lack this
    trainer's share."""
    copied: list[int] = []

    class Replica:
        """At version 1."""

        timeline, record, version, stepped = 0, "a record", 1, None

        @property
        def at_rest(self) -> bool:
            return self.stepped is None

        def swap(self) -> None:
            self.stepped, self.version = None, self.version + 1

    class Stepping(CollectiveGroup):
        async def pull(self, version: int | None, **_: Any) -> Any:
            vars(self.replica)["stepped"] = version

    async def at_version(*_: object) -> None:
        copied.append(replica.version)

    replica: Any = Replica()
    formed = asyncio.Event()
    formed.set()
    store = SimpleNamespace(has=3, had_in=lambda _: None, forget=lambda: None, in_use=1)
    group = group_of(Stepping, Means(formed, store), replica, at_version)
    async with group.joined(0, None):
        pass
    assert copied == [2, 3, 3]
