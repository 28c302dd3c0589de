"""What a trainer of a collective job does for its state beside the loops: it gets it, keeps up with it as a
spare, and saves the last version.

no version of the job's timeline, others have one ─► catching_up ─► `holds`
    ─► a spare: each version that the others make ─► lanes: the loop goes on
ROLLING_BACK: Restorer in checkpoints.py
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from trainer_agent.collective.exchange import CollectiveGroup
from trainer_agent.collective.state.catching_up import CatchingUp, Donor
from trainer_agent.collective.state.checkpoints import ShareCopies
from trainer_agent.collective.state.giving import StepIn, at_once
from trainer_agent.collective.state.messages import Portion, StateRequest
from trainer_agent.model.compute import Compute
from trainer_agent.waiting import end_tasks
from trireme_shared.platform.etcd import Etcd
from trireme_shared.platform.etcd.reading import read_record
from trireme_shared.platform.membership.directory import Directory, OwnKey
from trireme_shared.platform.runtime import clock, ids, telemetry
from trireme_shared.protocol.errors import Gone, PeerError, StaleGeneration
from trireme_shared.protocol.records import Holding, JobState, Phase, TrainerMember

LOOK_S = 0.5
PAUSE_S = 0.3

T = TypeVar("T")
log = telemetry.logger("collective.following")


class Following:
    """Run it beside the loops. `connect`: to a trainer that gives its state."""

    def __init__(
        self,
        etcd: Etcd,
        directory: Directory,
        own_key: OwnKey[TrainerMember],
        compute: Compute,
        versions: CollectiveGroup,
        copies: ShareCopies,
        connect: Callable[[TrainerMember], Donor],
        step_in: StepIn = at_once,
    ) -> None:
        self._etcd, self._directory, self._own_key = etcd, directory, own_key
        self._compute, self._versions, self._copies = compute, versions, copies
        self._replica, self._connect, self._step_in = versions.replica, connect, step_in
        self._me = own_key.record.trainer

    def __repr__(self) -> str:
        return f"<Following of {self._me}: {self._replica!r}>"

    async def run(self) -> None:
        """Until cancelled. Who has the first values itself must not fetch them meanwhile: they would be put
        into use when training has gone on."""
        await self._versions.begun.wait()
        while True:
            revision, state = self._directory.revision, self._directory.state
            stands = state is None or state.phase.final or state.phase is Phase.ROLLING_BACK
            if state is None or stands or not self._directory.init_done or self._versions.means.lost:
                await self._directory.changed(revision, LOOK_S)
            elif not self._has_version(state):
                await self._catch_up(state)
            elif self._copies.ends_unsaved:
                await self._save_last()
                await self._directory.changed(revision, LOOK_S)
            elif self._is_spare():
                await self._keep_up(state)
            else:
                await self._directory.changed(revision, LOOK_S)

    def _has_version(self, state: JobState) -> bool:
        there = self._replica.timeline, self._replica.checkpoint
        return self._replica.record is not None and there == (state.timeline, state.checkpoint)

    def _is_spare(self) -> bool:
        listed = self._versions.means.listed()
        return listed is not None and not 0 <= listed.places.get(self._me, -1) < listed.owner_count

    async def _save_last(self) -> None:
        """The last version, in each generation anew."""
        async with self._versions.in_use:
            if self._copies.ends_unsaved:
                await self._versions.reached()

    # ------------------------------------------------------------ a spare

    async def _keep_up(self, state: JobState) -> None:
        """One more version, or until this trainer is no spare any more. The parameters are not held while it
        waits: others may wait for this trainer's lanes. If it has got lanes, the group that it forms decides
        whether it can go on (exchange.py)."""
        version = self._replica.version
        assert version is not None
        try:
            if self._versions.means.has <= version:
                wait = self._versions.means.wait(version + 1)
                await while_true(
                    self._directory,
                    lambda: self._has_version(state) and self._is_current(state) and self._is_spare(),
                    wait,
                )
            async with self._versions.in_use:
                stands = self._replica.version == version and self._has_version(state) and self._is_spare()
                if stands and self._versions.means.has > version:
                    await self._versions.step_to(version + 1)
        except Gone as error:
            log.warning("too_far_behind", version=version, cause=error.message)
            if self._versions.means.lost:
                return
            async with self._versions.in_use:
                if self._replica.version == version and self._has_version(state) and self._is_spare():
                    self._forget()
        except StaleGeneration:
            await self._directory.changed(self._directory.revision, LOOK_S)

    def _forget(self) -> None:
        self._versions.means.stop()
        self._replica.forget()
        self._own_key.set(holds=None)

    # ------------------------------------------------------------ a trainer without state

    async def _catch_up(self, state: JobState) -> None:
        """One attempt. Not while the Restorer loads a checkpoint: that has the same versions, and begins them
        anew when it is there."""
        async with self._versions.in_use:
            if self._has_version(state) or not self._is_current(state):
                return
        donors: list[Donor] = []
        for member in await self._givers(state):
            try:
                donors.append(self._donor(member))
            except PeerError as error:
                log.warning("not_connected", donor=member.trainer, cause=error.message)
        if not donors:
            await self._directory.changed(self._directory.revision, LOOK_S)
            return
        place = self._replica.factor, self._step_in
        attempt = CatchingUp(
            self._compute,
            # not all ask the same one first
            sorted(donors, key=lambda donor: ids.named_uuid(self._me, donor.name)),
            self._versions.means,
            self._versions.means.fleet.envelope,
            state.timeline,
            state.checkpoint,
            *place,
        )
        began = clock.monotonic()
        log.info("catching_up", donors=len(donors), timeline=state.timeline)
        try:
            await while_true(self._directory, lambda: self._is_current(state), attempt.run())
        except (Gone, PeerError, StaleGeneration) as error:
            log.warning("not_caught_up", cause=error.message, state=repr(attempt))
            await asyncio.sleep(ids.jitter(PAUSE_S))
            return
        finally:
            for donor in donors:
                await donor.close()
        if not attempt.whole or not self._is_current(state):
            return
        async with self._versions.in_use, self._versions.swapping:
            if self._has_version(state) or not self._is_current(state) or self._versions.means.lost:
                return  # whoever held it has changed that
            attempt.hand_over(self._replica)
            self._versions.handed_over()
        seconds = {"copying_s": round(attempt.copying_s, 3), "seconds": round(clock.monotonic() - began, 3)}
        log.info(
            "caught_up", version=self._replica.version, late=attempt.late, damaged=attempt.damaged, **seconds
        )
        self._own_key.set(
            holds=Holding(timeline=state.timeline, checkpoint=state.checkpoint, version=self._replica.version)
        )

    def _donor(self, member: TrainerMember) -> Donor:
        """Raises PeerError."""
        donor = self._connect(member)
        if member.trainer in self._directory.trainers:
            return ListedDonor(donor, member.trainer, self._directory)
        return donor

    async def _givers(self, state: JobState) -> Sequence[TrainerMember]:
        """Other trainers that have the parameters, those with lanes if there are some. None while etcd is
        away."""
        prefix = self._directory.keys.trainers
        try:
            found = (await self._etcd.range(prefix, prefix=True)).kvs
        except PeerError as error:
            log.warning("etcd_away", cause=error.message)
            return ()
        members = [
            read_record(TrainerMember, kv.key, kv.value)
            for kv in found
            if self._directory.keys.is_trainer(kv.key)
        ]
        place = state.timeline, state.checkpoint
        there = [
            member
            for member in members
            if member is not None
            and member.trainer != self._me
            and member.exchange is not None
            and member.holds is not None
            and not member.holds.error
            and (member.holds.timeline, member.holds.checkpoint) == place
        ]
        listed = [member for member in there if member.trainer in self._directory.trainers.owners]
        return listed or there

    # ------------------------------------------------------------ the job changes

    def _is_current(self, state: JobState) -> bool:
        now = self._directory.state
        return (
            now is not None
            and now.phase is not Phase.ROLLING_BACK
            and (now.timeline, now.checkpoint) == (state.timeline, state.checkpoint)
        )


class ListedDonor:
    """A Donor that is given up once its trainer, which is in the job's list, is left out of it: one that is
    frozen answers nothing, and its connection stays."""

    def __init__(self, donor: Donor, trainer: str, directory: Directory) -> None:
        self._donor, self._trainer, self._directory = donor, trainer, directory

    def __repr__(self) -> str:
        return f"<ListedDonor {self._trainer}: {self._donor!r}>"

    @property
    def name(self) -> str:
        return self._donor.name

    async def state(self, request: StateRequest) -> Portion:
        found = await while_true(
            self._directory, lambda: self._trainer in self._directory.trainers, self._donor.state(request)
        )
        if found is None:
            raise PeerError(f"{self._trainer} is no trainer of this job any more")
        return found

    async def close(self) -> None:
        await self._donor.close()


async def while_true(
    directory: Directory, holds: Callable[[], bool], work: Coroutine[Any, Any, T]
) -> T | None:
    """What it returns; None: that holds no more."""
    doing = asyncio.ensure_future(work)
    try:
        while not doing.done() and holds():
            looking = asyncio.ensure_future(directory.changed(directory.revision, LOOK_S))
            await asyncio.wait([doing, looking], return_when=asyncio.FIRST_COMPLETED)
            await end_tasks([looking])
        return doing.result() if doing.done() else None
    finally:
        await end_tasks([doing])
