"""A trainer that has no lanes follows the others from what it has, or gets what they have."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from shared.keys import Keys
from shared.membership.directory import Directory
from shared.records import JobState, Phase, TrainerList
from tests.trainer_agent.collective.test_replica import begun
from trainer_agent.collective.state.following import Following


class Asked:
    """etcd, in which no trainer has anything."""

    def __init__(self) -> None:
        self.ranged = asyncio.Event()

    async def range(self, *_: Any, **__: Any) -> Any:
        self.ranged.set()
        return SimpleNamespace(kvs=[])


class Waiting:
    """The versions of a trainer whose group is never formed, since it serves nothing yet."""

    lost, has = False, -1

    def __init__(self, replica: Any) -> None:
        self.replica, self.in_use, self.waits = replica, asyncio.Lock(), asyncio.Event()

    def listed(self) -> TrainerList:
        return TrainerList(generation=1, lanes=1, names=("other",))

    async def wait(self, version: int) -> None:
        self.waits.set()
        await asyncio.Event().wait()


async def test_first_values_that_are_given_up_are_fetched():
    """A trainer makes its own first values; then it learns that the job has gone on from them without it."""
    compute, replica = begun()
    versions, etcd = Waiting(replica), Asked()
    ports: Any = etcd, versions
    directory = Directory(ports[0], Keys("job"))
    directory.state, directory.init_done = JobState(phase=Phase.RUNNING, generation=1), True
    own: Any = SimpleNamespace(record=SimpleNamespace(trainer="late"), set=lambda **_: None)
    copies: Any = SimpleNamespace(ends_unsaved=False)
    connect: Any = None
    following = asyncio.ensure_future(Following(ports[0], directory, own, compute, ports[1], copies, connect).run())
    try:
        async with asyncio.timeout(5):
            await versions.waits.wait()
            assert not etcd.ranged.is_set()
            replica.forget()
            await etcd.ranged.wait()
    finally:
        following.cancel()
