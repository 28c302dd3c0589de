"""Who holds the next version up. Nothing fails at a trainer that is frozen: its connections stay, and it gives no answer. So who waits for it tells the master.

waiting for longer than usual ─► the owners of lanes that the own share lacks; it lacks none: the owners whose mean gradients have not come
      ─► `suspect` ─► the master looks at their leases (master_service/control/evictions.py): a slow trainer renews its own, and stays

At most `TELLERS` trainers tell about one: those that follow it in the list.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from statistics import median

from trainer_agent.collective.groups import Group
from trainer_agent.data_plane.fleet_client import Suspect
from trireme_shared.platform.runtime import clock

TELLERS = 3
FIRST, AGAIN = 0.25, 0.5  # of the lease's time; the master has to see when a second of it is left
LONGER = 2.0  # than the median of the last waits
REMEMBERED = 8


class LateMembers:
    """`suspect(name, cause)` tells the master."""

    def __init__(self, suspect: Suspect, lease_ttl_s: float) -> None:
        self._suspect, self._lease_ttl_s = suspect, lease_ttl_s
        self._waits: deque[float] = deque(maxlen=REMEMBERED)

    def __repr__(self) -> str:
        return f"<LateMembers after {self._late_s():g} s>"

    @contextmanager
    def watching(self, group: Group, late: Callable[[], Iterable[int]]) -> Iterator[None]:
        """While the block waits for a version. `late`: places of those that it waits for by then."""
        began, loop = clock.monotonic(), asyncio.get_running_loop()
        timer: asyncio.TimerHandle

        def tell() -> None:
            nonlocal timer
            for place in set(late()):
                if follows(group, place) and (member := group.members.get(place)) is not None:
                    self._suspect(member.incarnation, f"waited {clock.monotonic() - began:.2f} s for it")
            timer = loop.call_later(AGAIN * self._lease_ttl_s, tell)

        timer = loop.call_later(self._late_s(), tell)
        try:
            yield
        finally:
            timer.cancel()
        self._waits.append(clock.monotonic() - began)

    def _late_s(self) -> float:
        return max(FIRST * self._lease_ttl_s, LONGER * (median(self._waits) if self._waits else 0.0))


def follows(group: Group, place: int) -> bool:
    """Whether this trainer is one of those that tell about the one at `place`."""
    count = group.trainers.owner_count
    return group.owns and place < count and 0 < (group.place - place) % count <= TELLERS
