"""A lease that fences itself: `alive` and `lost` follow the local clock, not only etcd's answers.

    granted --keep_alive: renewed every TTL/3--> alive ... no renewal until the deadline, or etcd says it is gone --> lost

The deadline is the time *before* the last successful renewal was sent + TTL - margin, so it lies before any moment at
which etcd may give the role to another process. A lost lease stays lost: a new role needs a new lease. Time during which the
machine is suspended counts, as it does in etcd on another machine. `revoked`: etcd ended it before its time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from trireme_shared.platform.etcd.errors import LeaseLost, Refused
from trireme_shared.platform.etcd.transport import KEEP_ALIVE, Transport
from trireme_shared.platform.runtime import clock, ids, telemetry
from trireme_shared.platform.runtime.waiting import event_within
from trireme_shared.protocol.errors import TriremeError

MARGIN = 0.1  # of the TTL: clock rates differ, and the holder needs time to stop
ATTEMPT_LIMIT_S = 2.0
HELD_UP_S = 1.0

log = telemetry.logger("etcd.lease")


class Lease:
    """Made by `Etcd.grant`. Run `keep_alive()` in a TaskGroup; end the role when `lost` is set. `on_silence` is called when a renewal
    was left unanswered."""

    def __init__(
        self,
        transport: Transport,
        revoke: Callable[[int], Awaitable[None]],
        lease_id: int,
        ttl_s: float,
        sent: float,
        on_silence: Callable[[], None],
    ) -> None:
        self.id = lease_id
        self.ttl_s = ttl_s
        self.lost = asyncio.Event()
        self.revoked = False
        self._on_silence = on_silence
        self._transport = transport
        self._revoke = revoke
        self._sent = sent
        self._deadline = sent
        self._timer: asyncio.TimerHandle | None = None
        self._renewed(sent, ttl_s)

    def __repr__(self) -> str:
        state = f"alive for {self.remaining_s:.1f} s" if self.alive else "lost"
        return f"<Lease {self.id:x}: ttl {self.ttl_s:g} s, {state}>"

    @property
    def alive(self) -> bool:
        """Whether the holder may still act on it, by the local clock."""
        return not self.lost.is_set() and clock.since_boot() < self._deadline

    @property
    def remaining_s(self) -> float:
        return 0.0 if self.lost.is_set() else max(0.0, self._deadline - clock.since_boot())

    @property
    def held_s(self) -> float:
        """So long etcd may still keep what depends on it, if it is not renewed any more: others wait for that."""
        return 0.0 if self.revoked else max(0.0, self._sent + self.ttl_s - clock.since_boot())

    @property
    def unrenewed_s(self) -> float:
        """Since the last successful renewal was sent."""
        return clock.since_boot() - self._sent

    def check(self) -> None:
        """Raises LeaseLost unless alive: call it right before acting on the role."""
        if not self.alive:
            msg = f"lease {self.id:x} (ttl {self.ttl_s:g} s) is lost; the role it carried is over, register again"
            raise LeaseLost(msg)

    async def keep_alive(self) -> None:
        """Renew until the lease is lost, then return. Errors do not end it."""
        attempt_s = min(ATTEMPT_LIMIT_S, self.ttl_s / 4)
        due = self._sent + self.ttl_s / 3
        while not self.lost.is_set():
            if (left_s := due - clock.since_boot()) > 0:
                await event_within(self.lost, left_s)
            if self.lost.is_set():
                return
            sent = clock.since_boot()
            try:
                answer = await self._transport.call(KEEP_ALIVE, {"ID": self.id}, attempt_s)
            except LeaseLost as error:
                self._note_revoked()
                self._lose(f"etcd does not know it: {error}")
                return
            except TriremeError as error:
                if not isinstance(error, Refused):
                    self._on_silence()
                log.warning("renewal_failed", lease=f"{self.id:x}", cause=str(error), remaining_s=self.remaining_s)
                due = clock.since_boot() + ids.jitter(min(0.5, self.ttl_s / 10))
                continue
            except Exception:
                log.exception("renewal_failed", lease=f"{self.id:x}", remaining_s=self.remaining_s)
                due = clock.since_boot() + ids.jitter(min(0.5, self.ttl_s / 10))
                continue
            ttl_s = answer.get("TTL", 0)
            if ttl_s <= 0:
                self._note_revoked()
                self._lose("etcd did not renew it: it expired or was revoked")
            elif not self.lost.is_set():
                self._renewed(sent, ttl_s)
            due = sent + self.ttl_s / 3

    async def revoke(self) -> None:
        """End the role at once: etcd deletes the keys of the lease. Sets `lost`; does no harm if it is lost already."""
        self._end()
        await self._revoke(self.id)

    def _renewed(self, sent: float, ttl_s: float) -> None:
        self._sent = sent
        self._deadline = sent + ttl_s * (1 - MARGIN)
        if self._timer is None:
            self._set_timer()

    def _on_deadline(self) -> None:
        """The timer is set once and moved only when it fires, so renewals cost nothing."""
        self._timer = None
        if self.lost.is_set():
            return
        if clock.since_boot() < self._deadline:
            self._set_timer()
        else:
            self._on_silence()
            cause = f"no renewal succeeded within {self.ttl_s * (1 - MARGIN):g} s"
            if (late_s := clock.since_boot() - self._deadline) > HELD_UP_S:
                cause += f"; this process did not run for {late_s:.0f} s at least: it was frozen, or a call kept Python's interpreter"
            self._lose(cause)

    def _set_timer(self) -> None:
        at = self._deadline - clock.suspended_s()
        self._timer = asyncio.get_running_loop().call_at(at, self._on_deadline)

    def _note_revoked(self) -> None:
        """etcd does not have it, although it is not over by the local clock."""
        self.revoked = self.alive

    def _lose(self, cause: str) -> None:
        if not self.lost.is_set():
            log.error("lease_lost", lease=f"{self.id:x}", ttl_s=self.ttl_s, cause=cause)
            self._end()

    def _end(self) -> None:
        self.lost.set()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
