"""A trainer's registration: `trainers/<id>` in etcd, under a lease, and what may keep it from renewing that.

    register (create = 0) ─► hold ... revoked or deleted ─► lost: exit, come back under a new name

If etcd is silent for longer than the lease, the trainer waits before its next push or pull (`certain`). Its key is its own: it is
created again if the lease ran out meanwhile. While etcd is down (connections are refused) training goes on.

Code of the user that keeps Python's interpreter holds up the event loop, which then cannot renew the lease (Life):

    the loop runs ─► sign of life (trireme_shared.platform.membership.life_sign)
    held up for longer than the lease, which is gone ─► the master is told
        of which records: counted as a death there (they are discarded, after some)     of nothing on record: a failure of the user's code
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from trainer_agent.tasks.master import MasterPort
from trainer_agent.waiting import retry
from trireme_shared.platform.etcd import Etcd
from trireme_shared.platform.membership.directory import OwnKey
from trireme_shared.platform.membership.life_sign import WORKS_FROM, LifeFile
from trireme_shared.platform.runtime import begun, clock, telemetry
from trireme_shared.protocol.errors import PeerError, TriremeError
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import FailTask, TrainerMember, UserFailure
from trireme_shared.protocol.records.tasks import BegunWork

log = telemetry.logger("membership")
BEAT_S = 0.25
REPORT_S = 30.0
KEPT = "InterpreterKept"
WHAT_TO_DO = (
    "let that code release the interpreter (read or parse in smaller parts, or with a library that does), make it once in dataset(), "
    "or raise lease_ttl_s"
)


class Membership(OwnKey[TrainerMember]):
    """The trainer's own key."""

    _listed = False

    def follow(self, *, listed: bool) -> None:
        """After each change of the view: whether this trainer is among those that the job counts on. One that is no more may have lost its key."""
        before, self._listed = self._listed, listed
        if before and not listed:
            self.look()

    def created_again(self) -> None:
        """Collective: others may have gone on, further than this trainer can follow. It is no member before it knows."""
        if self.record.holds is not None:
            self._say_doubt(doubted=True)

    def without_doubt(self) -> None:
        """Collective: it has what the others have, or gets it."""
        if self.record.holds is not None and self.record.holds.doubted:
            self._say_doubt(doubted=False)

    def _say_doubt(self, *, doubted: bool) -> None:
        assert self.record.holds is not None
        self.set(holds=self.record.holds.with_fields(doubted=doubted))

    @property
    def lease_id(self) -> int:
        return self._lease.id if self._lease else 0

    async def register(self, keys: Keys, ttl_s: float) -> None:
        """Raises DeadlineExceeded."""
        await retry(lambda: self.try_register(keys, ttl_s), "registering in etcd")
        log.info("registered", trainer=self.record.trainer, lease=f"{self.lease_id:x}")

    async def try_register(self, keys: Keys, ttl_s: float) -> None:
        """Raises PeerError."""
        key = keys.trainer(self.record.trainer)
        if not await self.claim(key, ttl_s):
            raise PeerError(f"{key} is taken: by a registration whose answer was lost; its lease runs out")

    async def leave(self, *, asked: bool = False) -> None:
        """Release the key at once, unless the lease is over already. `asked`: see `release`."""
        if self.lease.alive:
            await self.release(asked=asked)


@dataclass(frozen=True, slots=True)
class HeldUp:
    """The event loop did not run for `seconds`, while this process used `processor_s` of processor time, at `works`."""

    seconds: float
    processor_s: float
    works: tuple[bytes, ...]

    @property
    def by_code(self) -> bool:
        return self.processor_s >= WORKS_FROM * self.seconds

    def __str__(self) -> str:
        named = [str(work) for work in map(BegunWork.from_bytes, self.works) if work is not None]
        where = f" while it {' and '.join(named)}" if named else ""
        return f"its Python interpreter was kept for {self.seconds:.0f} s{where}"


class Life:
    """The signs of life of one trainer. Run `run`; close it at the end."""

    def __init__(self, etcd: Etcd, trainer: str, master: MasterPort) -> None:
        self._etcd, self._trainer, self._master = etcd, trainer, master
        self._file = LifeFile()

    def __repr__(self) -> str:
        return f"<Life of {self._trainer}>"

    def close(self) -> None:
        self._file.close()

    async def run(self, membership: Membership) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            before, used = clock.monotonic(), clock.process_seconds()
            while True:
                lease = membership.lease
                if lease.alive:
                    self._file.write(lease.id, lease.ttl_s)
                await asyncio.sleep(BEAT_S)
                now, used_now = clock.monotonic(), clock.process_seconds()
                seconds = now - before - BEAT_S
                if seconds > lease.ttl_s / 2:
                    held_up = HeldUp(seconds, used_now - used, begun.overlapping(seconds))
                    log.warning("held_up", cause=str(held_up), processor_s=round(held_up.processor_s, 1))
                    if seconds > lease.ttl_s and held_up.by_code:
                        group.create_task(self._report(held_up, lease.id))
                before, used = now, used_now

    async def _is_gone(self, lease: int) -> bool:
        """Whether etcd has ended the lease; its supervisor may have renewed it."""
        try:
            return await self._etcd.time_to_live(lease) < 0
        except TriremeError:
            return False

    async def _report(self, held_up: HeldUp, lease: int) -> None:
        """If the lease was lost by it."""
        if not await self._is_gone(lease):
            return
        name = self._trainer.rpartition("-")[0] or self._trainer
        message = f"{name} lost its lease: {held_up}; {WHAT_TO_DO}"
        works = [work for work in map(BegunWork.from_bytes, held_up.works) if work is not None]
        try:
            for work in works:
                failure = UserFailure(error_type=KEPT, message=message, task=f"task {work.task}", trainer=self._trainer)
                by = f"{self._trainer} {lease:x}"  # each loss counts
                failed = FailTask(trainer=by, attempt=0, failure=failure, epoch=work.epoch, died_at=work.minibatch)
                await self._until_told(work.task, failed)
            if not works:
                failure = UserFailure(error_type=KEPT, message=message, trainer=self._trainer)
                await retry(
                    lambda: self._master.report_failure(self._trainer, failure), "reporting a failure", REPORT_S
                )
        except TriremeError as error:
            log.warning("loss_unreported", cause=str(error))

    async def _until_told(self, task: str, failed: FailTask) -> None:
        await retry(lambda: self._master.fail_task(task, failed), "reporting a lost lease", REPORT_S)
