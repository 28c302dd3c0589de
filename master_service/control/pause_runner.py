"""When the checkpoints of an asynchronous job are taken, and the steps of each pause; which parameter servers
are silent in one.

due: the first one, every so many seconds, an epoch is over, training is over, one was asked for
(decisions/operations.py), an evaluation is due: the next cut is evaluated

pause -> all paused, or ANSWER_S are over -> cut -> all copied -> finish
                                               `-- silent (FrozenPservers), too slow, or begun by another
                                                   master: given up

So what a parameter server loses that dies is bounded: `seconds_between`, and the time in which the checkpoint
is written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping

from master_service.core.changes import Decision
from master_service.core.decisions import evaluation, operations, pause_checkpoint
from master_service.core.state.job import Job
from master_service.store.writer import Writer
from trireme_shared.checkpoints import stored
from trireme_shared.platform.etcd import Etcd, Lease
from trireme_shared.platform.runtime import clock
from trireme_shared.platform.runtime.clock import event_within
from trireme_shared.protocol.errors import TriremeError
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import Phase, PserverMember, Stage
from trireme_shared.protocol.records.job import Saving
from trireme_shared.protocol.records.members import pserver_names

SILENT_S = 1.5  # for so long training stands still at most for a parameter server that gives no sign of life
AFTER_CUT = 1 / 3  # of that, it has at least after the cut, however late that came
LONGEST_S = 60.0
TTL_LIMIT_S = 1.0


class FrozenPservers:
    """Which parameter servers are silent in a pause, so that a frozen one does not stretch it, and when they
    answer again. Of one term.

    pause, cut -> copied, or another number of blocks copied, in time -> they answer
               -> neither for `limit_s` -> the pause is given up, the limit doubles
                  -> it renewed its lease since -> the next pause

    Silence cannot tell a frozen server from a slow one. So after each pause that was given up for it, servers
    get twice the time, and after a copy at least twice the time that it took.
    """

    def __init__(self, etcd: Etcd, lease_ttl_s: float) -> None:
        self.limit_s = SILENT_S
        self._etcd, self._lease_ttl_s = etcd, lease_ttl_s
        self._begun = self._cut = 0.0
        self._copying: dict[int, tuple[int, float]] = {}  # by index: blocks copied, and when that was heard
        self._silent: dict[int, int] = {}  # by index: the lease under which it was silent
        self._given_up = 0.0

    def __repr__(self) -> str:
        return f"<FrozenPservers: {sorted(self._silent)} were silent, the limit is {self.limit_s:g} s>"

    @property
    def are_silent(self) -> bool:
        """Whether the next pause waits for one that was silent in the last one."""
        return bool(self._silent)

    def begin(self, pservers: Mapping[int, PserverMember], now: float) -> None:
        """A pause begins."""
        self._begun = self._cut = now
        self._copying = {index: (member.copying, now) for index, member in pservers.items()}

    def cut(self, now: float) -> None:
        """The cut is in etcd: from now on parameter servers copy."""
        self._cut = now

    def hear(self, pservers: Mapping[int, PserverMember], now: float) -> None:
        """What they say now: another number of blocks is a sign of life."""
        for index, member in pservers.items():
            if self._copying.get(index, (-1, 0.0))[0] != member.copying:
                self._copying[index] = member.copying, now

    def deadline(self, index: int) -> float:
        """Until when that server, which has not copied yet, has to give a sign of life."""
        heard = self._copying[index][1] if index in self._copying else self._begun
        return max(heard + self.limit_s, self._cut + AFTER_CUT * self.limit_s)

    def gave_up(self, silent: Iterable[PserverMember], now: float) -> None:
        """The pause is over because of these."""
        self._silent, self._given_up = {member.index: member.lease for member in silent}, now
        self.limit_s = min(LONGEST_S, 2 * self.limit_s)

    def copied(self, now: float) -> None:
        """All have copied."""
        self.limit_s = min(LONGEST_S, max(SILENT_S, 2 * (now - self._cut)))

    async def answer_again(self, pservers: Mapping[int, PserverMember]) -> bool:
        """Whether each that was silent has renewed its lease since, or is another process: the next pause
        need not wait for them. One question to etcd at most if not."""
        for index, lease in list(self._silent.items()):
            member = pservers.get(index)
            if member is not None and member.lease == lease:
                now = clock.monotonic()
                try:
                    left_s = await self._etcd.time_to_live(lease, timeout_s=TTL_LIMIT_S)
                except TriremeError:
                    return False
                if now + left_s <= self._given_up + self._lease_ttl_s:
                    return False
            del self._silent[index]
        return True


LOOK_S = 0.25
# while the job trains and nothing is due: a leader has many jobs. An evaluation is due without an event
QUIET_S, EVALUATING_S = 5.0, 1.0
ANSWER_S = 1.0  # trainers that have not paused by then are left out of the pause
COPY_LIMIT_S = 60.0  # of those that say that they are copying: it takes as long as memory does
SOON_S = 0.01
# a checkpoint that is to be evaluated is taken to be lost if it is not committed by then: another one is
# taken
PINNED_S = 30.0
SHARE = 9.0  # of checkpoints nobody asked for: after a pause, training runs at least so many times as long


def seconds_between(every_s: float, copy_s: float = 0.0, frozen_s: float = 0.0) -> float:
    """How far two checkpoints are apart at most, if no parameter server fails in between. `copy_s`: to copy
    one in memory. `frozen_s`: one of them is frozen in a pause, and has renewed its lease so long after that
    pause was given up."""
    pause_s = ANSWER_S + LOOK_S + copy_s
    given_up_s = SILENT_S + LOOK_S + copy_s
    waited_s = given_up_s + max(SHARE * given_up_s, frozen_s) + LOOK_S if frozen_s else 0.0
    return max(every_s, (1 + SHARE) * pause_s) + waited_s + pause_s + LOOK_S


class PauseRunner:
    """Of one term. `look_again` after each change of the members and each event. `on_end` is called after
    each pause: changes of the members during the pause are not handled yet."""

    def __init__(
        self, etcd: Etcd, keys: Keys, writer: Writer, lease: Lease, on_end: Callable[[], None]
    ) -> None:
        self._keys, self._writer, self._lease, self._on_end = keys, writer, lease, on_end
        self._frozen = FrozenPservers(etcd, writer.job.spec.lease_ttl_s)
        self._changed = asyncio.Event()
        self._begun: Saving | None = None
        self._since = 0.0
        self._last = clock.monotonic()  # when the last pause began, as far as this master knows
        self._not_before = 0.0
        self._epoch = writer.job.training.epoch
        self._final = False
        self._owed = ""  # the cause of a checkpoint that was given up, and is still to be taken
        # the last evaluation whose version was copied (timeline, number), and when
        self._pinned = (0, 0), 0.0

    def __repr__(self) -> str:
        return (
            f"<PauseRunner: {f'checkpoint {self._begun.step}' if self._begun else 'no checkpoint'} under way>"
        )

    def look_again(self) -> None:
        self._changed.set()

    async def run(self) -> None:
        """Until the writer's term ends (raises NotLeader) or cancelled."""
        if not pause_checkpoint.is_paused_kind(self._job.spec):
            return
        while True:
            await self._advance()
            await event_within(self._changed, self._look_s())
            self._changed.clear()

    @property
    def _job(self) -> Job:
        return self._writer.job

    async def _advance(self) -> None:
        state = self._job.state
        if state.phase is Phase.RUNNING:
            self._begun = None
            if (cause := self._due()) and await self._frozen.answer_again(self._job.members.pservers):
                await self._begin(cause)
        elif state.phase is Phase.CHECKPOINTING and state.saving is not None:
            await self._step(state.saving)

    def _look_s(self) -> float:
        """Until the next look: a pause waits no longer for anybody than it has to."""
        state, now = self._job.state, clock.monotonic()
        saving = state.saving
        if self._begun is None or saving is None:
            waits = state.phase is not Phase.RUNNING or self._frozen.are_silent
            return LOOK_S if waits else self._quiet_s(now)
        waiting = pause_checkpoint.still_copying(self._job)
        due = [self._frozen.deadline(index) for index in waiting] if saving.cut else [self._since + ANSWER_S]
        return max(SOON_S, min([LOOK_S, *(at - now for at in due)]))

    def _quiet_s(self, now: float) -> float:
        """Until time alone makes a checkpoint due."""
        spec = self._job.spec
        every_s, quiet_s = spec.checkpoint_every_seconds, EVALUATING_S if spec.evaluate_every else QUIET_S
        times = [self._not_before, self._last + every_s if every_s else 0.0]
        return min([quiet_s, *(at - now for at in times if at > now)])

    def _due(self) -> str:
        """Why a checkpoint is to be taken now, or ""."""
        spec, job, now = self._job.spec, self._job, clock.monotonic()
        if not pause_checkpoint.can_begin(job):
            return ""
        if asked := operations.not_begun(job):
            return asked[0].cause
        if job.state.stage is not Stage.TRAIN and not self._final:
            return "training is over"
        if now < self._not_before:
            return ""
        if self._owed or job.state.stage is not Stage.TRAIN:
            return self._owed
        if job.members.latest is None and job.state.saved == 0:
            return "the first one"
        epoch, every = job.training.epoch, spec.checkpoint_every_epochs
        if every and epoch // every > self._epoch // every:
            return f"epoch {epoch - 1} is done"
        number, (pinned, at) = evaluation.due(job), self._pinned
        if number and ((job.state.timeline, number) != pinned or now - at > PINNED_S):
            return f"evaluation {number} is due"
        every_s = spec.checkpoint_every_seconds
        return f"{every_s:g} s have passed" if every_s and now - self._last >= every_s else ""

    async def _begin(self, cause: str) -> None:
        job = self._job
        assert job.slots is not None
        number, timeline = job.state.saved + 1, job.state.timeline
        uuid = stored.checkpoint_uuid(self._keys.job, timeline, job.slots.version, number)

        def begin(job: Job, _now: float) -> Decision[Saving | None]:
            if (job.state.saved + 1, job.state.timeline) != (number, timeline):
                return Decision(None)
            decision = pause_checkpoint.begin(job, uuid, self._lease.id, cause)
            return decision + operations.mark_begun(job, number) if decision.answer else decision

        epoch, final = job.training.epoch, job.state.stage is not Stage.TRAIN
        begun = await self._writer.decide(begin)
        if begun is None:
            return
        self._begun, self._since = begun, clock.monotonic()
        self._last, self._epoch, self._final, self._owed = self._since, epoch, final, cause
        self._frozen.begin(self._job.members.pservers, self._since)

    async def _step(self, under_way: Saving) -> None:
        """The next step of the pause, if it can be done."""
        job = self._job
        if self._begun is None or self._begun.uuid != under_way.uuid:
            self._owed = "one was given up"
            await self._end(
                lambda job, _: pause_checkpoint.give_up(
                    job.state, job.trainers, job.members, "the master that began it is gone"
                )
            )
            return
        now = clock.monotonic()
        spent = now - self._since
        self._frozen.hear(job.members.pservers, now)
        if not under_way.cut:
            late = spent >= ANSWER_S
            if await self._writer.decide(lambda job, _: pause_checkpoint.cut(job, without_late=late)):
                self._frozen.cut(clock.monotonic())
                self._changed.set()
        elif waiting := pause_checkpoint.still_copying(job):
            pservers = job.members.pservers
            silent = [pservers[index] for index in waiting if now >= self._frozen.deadline(index)]
            if silent:
                names = pserver_names(member.index for member in silent)
                why = f"{names} gave no sign of life for {self._frozen.limit_s:g} s"
            elif spent > COPY_LIMIT_S:
                why = f"{pserver_names(waiting)} did not copy within {COPY_LIMIT_S:g} s"
            else:
                return
            gave_up = await self._end(
                lambda job, _: pause_checkpoint.give_up(job.state, job.trainers, job.members, why)
            )
            if gave_up and silent:
                self._frozen.gave_up(silent, clock.monotonic())
        elif await self._end(lambda job, _: pause_checkpoint.finish(job, spent)):
            self._owed = ""
            if under_way.evaluation:
                self._pinned = (job.state.timeline, under_way.evaluation), now
            self._frozen.copied(now)

    async def _end(self, decision: Callable[[Job, float], Decision[bool]]) -> bool:
        """The pause is over, if `decision` says so: training continues, with later deadlines."""
        over = await self._writer.decide(decision)
        if over:
            now = clock.monotonic()
            stood_s = now - self._since if self._begun else 0.0
            self._not_before = now + SHARE * stood_s
            self._begun = None
            self._job.training.extend(stood_s)
            self._on_end()
        return over
