"""The lessor of the simulated etcd: who may live until when, and the one timer that ends them.

As in etcd: a TTL is at least 2 s, expiry comes up to 0.5 s late, a restart gives every lease its full TTL
back, and a renewal of an expired lease is answered without a TTL.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from dataclasses import dataclass

from tests.equipment.etcd.store import Store
from trireme_shared.platform.etcd.operations import Body
from trireme_shared.platform.runtime import clock

MINIMUM_TTL_S = 2
EXPIRY_LATE_S = 0.5


@dataclass
class _Term:
    ttl_s: int
    deadline: float
    late_s: float


class Lessor:
    """`expired` is called after leases ran out. Runs between `resume` and `pause`."""

    def __init__(self, store: Store, context: contextvars.Context, expired: Callable[[], None]) -> None:
        self._store = store
        self._context = context  # the timer belongs to etcd's process, not to that of a client
        self._expired = expired
        self._terms: dict[int, _Term] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._running = True

    def grant(self, lease: int, ttl_s: int, lateness: float) -> Body:
        """`lateness` in [0, 1) says how late it will expire."""
        ttl_s = max(MINIMUM_TTL_S, ttl_s)
        self._store.grant(lease)
        self._terms[lease] = _Term(ttl_s, clock.monotonic() + ttl_s, EXPIRY_LATE_S * lateness)
        self._schedule()
        return {"ID": lease, "TTL": ttl_s}

    def keep_alive(self, lease: int) -> Body:
        term, now = self._terms.get(lease), clock.monotonic()
        if term is None or now >= term.deadline:
            return {"ID": lease}
        term.deadline = now + term.ttl_s
        return {"ID": lease, "TTL": term.ttl_s}

    def time_to_live(self, lease: int) -> Body:
        term = self._terms.get(lease)
        if term is None:
            return {"ID": lease, "TTL": -1}
        return {"ID": lease, "TTL": int(term.deadline - clock.monotonic()), "grantedTTL": term.ttl_s}

    def revoke(self, lease: int) -> Body:
        self._store.revoke(lease)
        del self._terms[lease]
        return {}

    def refresh(self) -> None:
        """Every lease has its full TTL again: a restart, or a new leader."""
        now = clock.monotonic()
        for term in self._terms.values():
            term.deadline = now + term.ttl_s

    def pause(self) -> None:
        """Nothing expires until `resume`."""
        self._running = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def resume(self) -> None:
        """Expire what ran out meanwhile, and go on."""
        self._running = True
        self._expire()

    def _schedule(self) -> None:
        """One timer for the earliest deadline; a renewal leaves it alone and costs nothing, a shorter lease
        moves it."""
        if not self._running or not self._terms:
            return
        due = min(term.deadline + term.late_s for term in self._terms.values())
        if self._timer is not None:
            if self._timer.when() <= due:
                return
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(due, self._on_timer, context=self._context)

    def _on_timer(self) -> None:
        self._timer = None
        self._expire()

    def _expire(self) -> None:
        now = clock.monotonic()
        due = sorted(lease for lease, term in self._terms.items() if now >= term.deadline + term.late_s)
        for lease in due:
            self.revoke(lease)
        if due:
            self._expired()
        self._schedule()
