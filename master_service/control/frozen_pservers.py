"""Which parameter servers are silent in a pause, so that a frozen one does not stretch it, and when they answer again.

pause, cut -> copied, or another number of blocks copied, in time                                          -> they answer
           -> neither for `limit_s` -> the pause is given up, the limit doubles -> it renewed its lease since -> the next pause

Silence cannot tell a frozen server from a slow one. So after each pause that was given up for it, servers get twice the time, and
after a copy at least twice the time that it took.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from trireme_shared.platform.etcd import Etcd
from trireme_shared.platform.runtime import clock
from trireme_shared.protocol.errors import TriremeError
from trireme_shared.protocol.records import PserverMember

SILENT_S = 1.5  # for so long training stands still at most for a parameter server that gives no sign of life
AFTER_CUT = 1 / 3  # of that, it has at least after the cut, however late that came
LONGEST_S = 60.0
TTL_LIMIT_S = 1.0


class FrozenPservers:
    """Of one term."""

    def __init__(self, etcd: Etcd, lease_ttl_s: float) -> None:
        self.limit_s = SILENT_S
        self._etcd, self._lease_ttl_s = etcd, lease_ttl_s
        self._begun = self._cut = 0.0
        self._copying: dict[int, tuple[int, float]] = {}  # by index: blocks copied, and when that was heard
        self._silent: dict[int, int] = {}  # by index: the lease under which it was silent
        self._given_up = 0.0

    def __repr__(self) -> str:
        return f"<FrozenPservers: {sorted(self._silent)} were silent, the limit is {self.limit_s:g} s>"

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
        """Whether each that was silent has renewed its lease since, or is another process: the next pause need not wait for them.
        One question to etcd at most if not."""
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
