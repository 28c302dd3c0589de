"""A trainer that has no lanes follows the others from what it has, or gets what they have."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from tests.trainer_agent.collective.test_replica import begun, record
from trainer_agent.collective.state import following as following_module
from trainer_agent.collective.state.following import Following
from trireme_shared.platform.membership.directory import Directory
from trireme_shared.protocol.errors import Gone
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import Exchange, Holding, JobState, Phase, TrainerList, TrainerMember


class Asked:
    """etcd, in which these trainers have the parameters."""

    def __init__(self, *having: str) -> None:
        self.ranged = asyncio.Event()
        self._members = [
            TrainerMember(
                trainer=name,
                url="",
                incarnation=name,
                host="h",
                pid=1,
                exchange=Exchange(url=""),
                holds=Holding(timeline=0),
            )
            for name in having
        ]

    async def range(self, *_: Any, **__: Any) -> Any:
        self.ranged.set()
        prefix = Keys("job").trainers
        return SimpleNamespace(
            kvs=[SimpleNamespace(key=prefix + each.trainer, value=each.to_bytes()) for each in self._members]
        )


class Waiting:
    """The versions, and the mean gradients, of a trainer whose group is never formed, since it serves nothing
    yet."""

    lost, has = "", -1

    def __init__(self, replica: Any) -> None:
        self.means = self
        self.replica, self.in_use, self.waits = replica, asyncio.Lock(), asyncio.Event()
        self.swapping = asyncio.Lock()
        self.begun = asyncio.Event()
        self.begun.set()

    def listed(self) -> TrainerList:
        return TrainerList(generation=1, lanes=1, names=("other",))

    async def wait(self, version: int) -> None:
        self.waits.set()
        await asyncio.Event().wait()

    def handed_over(self) -> None:
        assert self.in_use.locked()


def following_in(state: JobState, compute: Any, versions: Any, etcd: Any) -> asyncio.Task[None]:
    """In a job whose first values are known; it would connect to nobody."""
    directory = Directory(etcd, Keys("job"))
    directory.state, directory.init_done = state, True
    own: Any = SimpleNamespace(record=SimpleNamespace(trainer="late"), set=lambda **_: None)
    copies: Any = SimpleNamespace(ends_unsaved=False)
    connect: Any = None
    return asyncio.ensure_future(Following(etcd, directory, own, compute, versions, copies, connect).run())


async def test_first_values_that_are_given_up_are_fetched():
    """A trainer makes its own first values; then it learns that the job has gone on from them without it."""
    compute, replica = begun()
    versions, etcd = Waiting(replica), Asked()
    following = following_in(JobState(phase=Phase.RUNNING, generation=1), compute, versions, etcd)
    try:
        async with asyncio.timeout(5):
            await versions.waits.wait()
            assert not etcd.ranged.is_set()
            replica.forget()
            await etcd.ranged.wait()
    finally:
        following.cancel()


async def test_first_values_are_not_fetched_before_it_is_known_whether_the_own_ones_are_those_of_the_job():
    """The job started over. Fetched values would be handed over when the trainer has gone on from its own."""
    compute, replica = begun()
    versions, etcd = Waiting(replica), Asked()
    versions.begun.clear()
    following = following_in(JobState(phase=Phase.WAITING, generation=2, timeline=2), compute, versions, etcd)
    try:
        await asyncio.sleep(0.05)
        assert not etcd.ranged.is_set()
        replica.timeline = 2  # they are
        versions.begun.set()
        async with asyncio.timeout(5):
            await versions.waits.wait()
        assert not etcd.ranged.is_set()
    finally:
        following.cancel()


class TooFarBehind(Waiting):
    """A spare that cannot get the next version any more."""

    lanes = 1

    def __init__(self, replica: Any) -> None:
        super().__init__(replica)
        self.listed_names: tuple[str, ...] = ("other", "late")
        self.stopped = 0

    def listed(self) -> TrainerList:
        return TrainerList(generation=1, lanes=1, names=self.listed_names)

    async def wait(self, version: int) -> None:
        self.waits.set()
        raise Gone(f"nobody gives version {version}")

    def stop(self) -> None:
        self.stopped += 1


@pytest.mark.parametrize("meanwhile", ["lanes", "checkpoint", None])
async def test_a_spare_that_cannot_follow_forgets_what_it_has_unless_that_is_in_use_or_another_version(
    meanwhile: str | None,
):
    compute, replica = begun()
    versions, etcd = TooFarBehind(replica), Asked()
    await versions.in_use.acquire()
    following = following_in(JobState(phase=Phase.RUNNING, generation=1), compute, versions, etcd)
    try:
        async with asyncio.timeout(5):
            await versions.waits.wait()
            await asyncio.sleep(0)
            if meanwhile == "lanes":
                versions.listed_names = ("late", "other")
            elif meanwhile == "checkpoint":
                replica.loaded(record(0), 3, "c")
            versions.in_use.release()
            async with asyncio.timeout(0.05 if meanwhile else 5):
                with suppress(TimeoutError):
                    await etcd.ranged.wait()
    except TimeoutError:
        pass
    finally:
        following.cancel()
    assert versions.stopped == (0 if meanwhile else 1)
    assert (replica.version is None) == (meanwhile is None)


async def test_nothing_is_fetched_while_the_checkpoint_is_being_loaded():
    """The others went on from it, since it is read more slowly here. Both would begin the versions behind it
    anew."""
    compute, replica = begun()
    replica.forget()
    versions, etcd = Waiting(replica), Asked()
    await versions.in_use.acquire()
    state = JobState(phase=Phase.RUNNING, generation=3, timeline=3, checkpoint="c")
    following = following_in(state, compute, versions, etcd)
    try:
        await asyncio.sleep(0.05)
        assert not etcd.ranged.is_set()
        replica.loaded(record(0), 3, "c")
        versions.in_use.release()
        async with asyncio.timeout(5):
            await versions.waits.wait()
        assert not etcd.ranged.is_set()
    finally:
        following.cancel()


class Attempt:
    """A CatchingUp that has everything at once."""

    whole, late, damaged, copying_s = True, 0, 0, 0.0

    def __init__(self, handed: list[Any], meanwhile: Callable[[], Awaitable[None]]) -> None:
        self._handed, self._meanwhile = handed, meanwhile

    async def run(self) -> None:
        await self._meanwhile()

    def hand_over(self, replica: Any) -> None:
        self._handed.append(replica)
        replica.loaded(record(0), 0, "")


@pytest.mark.parametrize("meanwhile", ["loaded", "gone back", "lost", "evaluates", None])
async def test_what_was_fetched_is_not_handed_over_if_there_is_another_version_meanwhile(
    meanwhile: str | None, monkeypatch: pytest.MonkeyPatch
):
    compute, replica = begun()
    replica.forget()
    versions: Any = Waiting(replica)
    versions.fleet = SimpleNamespace(envelope=dict)
    handed, said = list[Any](), list[Any]()
    etcd: Any = Asked("other")
    directory = Directory(etcd, Keys("job"))
    directory.state = JobState(phase=Phase.RUNNING, generation=1)
    directory.init_done = True

    async def hold() -> None:
        await versions.in_use.acquire()

    monkeypatch.setattr(following_module, "CatchingUp", lambda *_: Attempt(handed, hold))
    own: Any = SimpleNamespace(
        record=SimpleNamespace(trainer="late"), set=lambda **fields: said.append(fields)
    )
    copies: Any = SimpleNamespace(ends_unsaved=False)
    made: Any = lambda member: Frozen(member, [])  # noqa: E731
    following = asyncio.ensure_future(Following(etcd, directory, own, compute, versions, copies, made).run())
    try:
        async with asyncio.timeout(5):
            await etcd.ranged.wait()
            while not versions.in_use.locked():
                await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        assert not handed
        if meanwhile == "loaded":
            replica.loaded(record(0), 0, "")
        elif meanwhile == "gone back":
            directory.state = JobState(phase=Phase.ROLLING_BACK, generation=2, timeline=2, checkpoint="c")
        elif meanwhile == "lost":
            versions.lost = "nobody has its version"
        elif meanwhile == "evaluates":  # in a thread, which uses the parameters
            await versions.swapping.acquire()
        versions.in_use.release()
        await asyncio.sleep(0.05)
    finally:
        following.cancel()
        await asyncio.wait([following])
    assert len(handed) == len(said) == (0 if meanwhile else 1)


class Frozen:
    """A Donor whose process is stopped: it answers nothing, and its connection stays."""

    def __init__(self, member: TrainerMember, asked: list[str]) -> None:
        self.name, self._asked = member.incarnation, asked

    async def state(self, request: Any) -> Any:
        self._asked.append(self.name)
        await asyncio.Event().wait()

    async def close(self) -> None:
        self._asked.append(f"{self.name} is closed")


async def test_a_donor_that_is_left_out_of_the_job_is_not_waited_for():
    """One that is frozen would be waited for half a minute, once for each of its connections."""
    compute, replica = begun()
    replica.forget()
    asked: list[str] = []
    etcd: Any = Asked("a", "b")
    versions: Any = Waiting(replica)
    versions.fleet = SimpleNamespace(envelope=lambda: {"job": "job", "generation": 1})
    directory = Directory(etcd, Keys("job"))
    directory.state, directory.init_done = JobState(phase=Phase.RUNNING, generation=1), True
    directory.trainers = TrainerList(generation=1, lanes=2, names=("a", "b"))
    own: Any = SimpleNamespace(record=SimpleNamespace(trainer="late"), set=lambda **_: None)
    copies: Any = SimpleNamespace(ends_unsaved=False)
    following = asyncio.ensure_future(
        Following(etcd, directory, own, compute, versions, copies, lambda member: Frozen(member, asked)).run()
    )
    try:
        async with asyncio.timeout(5):
            while not asked:
                await asyncio.sleep(0.01)
            (first,) = asked
            other = {"a": "b", "b": "a"}[first]
            directory.trainers = TrainerList(generation=2, lanes=2, names=(other,))
            while other not in asked:
                await asyncio.sleep(0.01)
            directory.trainers = TrainerList(generation=3, lanes=2, names=())
            while f"{other} is closed" not in asked:
                await asyncio.sleep(0.01)
    finally:
        following.cancel()
        await asyncio.wait([following])
