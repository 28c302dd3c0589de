"""A trainer's registration: `trainers/<id>` in etcd, under a lease.

    register (create = 0) ─► hold ... revoked or deleted ─► lost: exit, come back under a new name

If etcd is silent for longer than the lease, the trainer waits before its next push or pull (`certain`). Its key is its own: it is
created again if the lease ran out meanwhile. While etcd is down (connections are refused) training goes on.
"""

from __future__ import annotations

from trainer_agent.waiting import retry
from trireme_shared.platform.membership.own_key import OwnKey
from trireme_shared.platform.runtime import telemetry
from trireme_shared.protocol.errors import PeerError
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import TrainerMember

log = telemetry.logger("membership")


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
