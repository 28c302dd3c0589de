"""Safeguards of the direct exchange, each of which can be switched off: the simulation must then find a
broken promise (style.md, 17)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterable
from typing import Any

from master_service.core.changes import Decision
from master_service.core.decisions import membership
from tests.equipment.replaced import replaced
from trainer_agent.collective.exchange import CollectiveGroup
from trainer_agent.collective.gathering import MeanGradients
from trainer_agent.collective.groups import Group
from trainer_agent.collective.mean_blocks import Arriving, MeanStore
from trainer_agent.collective.server import ShareServer
from trireme_shared.protocol.errors import NotReady, PeerError, StaleGeneration
from trireme_shared.protocol.records import JobSpec, JobState, Phase, SlotMap
from trireme_shared.protocol.wire.messages import PserverInfo
from trireme_shared.serving.block_server import BlockServer

SILENT_S, AGAIN_S = 0.5, 0.02


def no_kept_means() -> Any:
    """A trainer keeps the mean gradients of its own share alone: nobody can give a dead owner's."""

    def forget(self: MeanStore) -> None:
        for number, block in self.blocks.items():
            kept = number in self.own or block.is_buffer
            block.forget_before(min(self.has - 1, self.in_use + 1) if kept else self.in_use + 1)

    return replaced(MeanStore, "forget", forget)


def no_statements() -> Any:
    """In a new generation each trainer goes on from what it has itself."""

    def learn(self: Group, _: Iterable[PserverInfo], own: PserverInfo) -> None:
        self.newest, self.givers = own.highest, []

    return replaced(Group, "learn", learn)


def no_fence_before_statements() -> Any:
    """What a trainer says that it has counts, although it may still complete a version of the generation
    before."""

    async def ask(self: MeanGradients, group: Group, place: int) -> PserverInfo:
        info = None
        while info is None:
            try:
                info = await self.fleet.port(place).info()
            except NotReady:
                await self.view.learn_addresses(group)
            except PeerError:
                pass
        return info.model_copy(update={"index": place})

    return replaced(MeanGradients, "ask_for_version", ask)


def no_steps_made_again() -> Any:
    """What was acknowledged in an earlier generation counts, although its owner may be gone."""
    return replaced(CollectiveGroup, "makes_steps_again", False)


def no_generation_fence() -> Any:
    """Pushes of generations that are over are applied, and pulls are answered."""
    blocks = contextlib.ExitStack()
    blocks.enter_context(replaced(ShareServer, "check_generation", lambda *_: None))
    blocks.enter_context(replaced(BlockServer, "is_stale", lambda *_: False))
    blocks.enter_context(replaced(MeanStore, "regroup", _own_alone))
    return blocks


def _own_alone(self: MeanStore, slots: SlotMap, own: Collection[int]) -> None:
    self.slots, self.own = slots, frozenset(own)


def no_pulls_thrown_away() -> Any:
    """What came of a pull of a generation that is over counts."""
    return replaced(Arriving, "is_over", property(lambda _: False))


def numbers_that_repeat() -> Any:
    """The master gives a new list of trainers the number that the one before has: nobody sees a new
    generation, and no fence tells them apart."""
    regroup = membership.regroup

    def again(spec: JobSpec, state: JobState, *rest: Any) -> Decision[None]:
        before = max(0, state.generation - 1) if state.phase is Phase.RUNNING else state.generation
        return regroup(spec, state.model_copy(update={"generation": before}), *rest)

    return replaced(membership, "regroup", again)


def no_verdict() -> Any:
    """A trainer that another one does not answer makes the next generation for itself, without waiting for
    the master's."""

    async def ask(self: MeanGradients, group: Group, place: int) -> PserverInfo:
        try:
            async with asyncio.timeout(SILENT_S):
                while True:
                    with contextlib.suppress(PeerError):
                        info = await self.fleet.port(place).info()
                        if info.ready and (info.generation, info.timeline) == (
                            group.generation,
                            self.server.timeline,
                        ):
                            return info.model_copy(update={"index": place})
                    await self.view.learn_addresses(group)
                    await asyncio.sleep(AGAIN_S)
        except TimeoutError:
            directory, number = self.view.directory, group.generation + 1
            if self.view.group is group and directory.state is not None:
                names = tuple(name for name in group.trainers.names if name != group.others[place])
                directory.trainers = group.trainers.model_copy(
                    update={"generation": number, "names": names, "shares": ()}
                )
                directory.state = directory.state.model_copy(update={"generation": number})
                self.view.follow()
            raise StaleGeneration("it has made another one") from None

    return replaced(MeanGradients, "ask_for_version", ask)


ABLATIONS: dict[str, Callable[[], Any]] = {
    "kept means": no_kept_means,
    "statements": no_statements,
    "fence before statements": no_fence_before_statements,
    "steps made again": no_steps_made_again,
    "generation": no_generation_fence,
    "pulls thrown away": no_pulls_thrown_away,
    "numbers never repeat": numbers_that_repeat,
    "verdict before a generation": no_verdict,
}
