"""The leases of children: those of dead processes are revoked, and a living process that has lost its own is
ended.

a process is dead ─► its leases are revoked, so that no member waits until they expire
registered ─► its key is gone, and etcd answers ─► still gone after the grace
    ─► overdue: the launcher ends the process
                 `── it registers again, or ends by itself
etcd does not answer: nothing counts, since nobody can renew a lease or come back then
a trainer that works, by its processor time, has a longer grace: it is only late, and others compute its lanes

A standby master holds no key and a spare parameter server has none yet: only who was registered can lose it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from trireme.launch.processes import Child, HeldLeases, held_leases
from trireme_shared.platform.etcd import Etcd
from trireme_shared.platform.membership.life_sign import FILE, LifeSign, ProcessorUse, processor_use, read
from trireme_shared.platform.runtime import clock, telemetry
from trireme_shared.protocol.errors import TriremeError
from trireme_shared.protocol.keys import Keys

LOOK_S = 1.0
ANSWER_S = 2.0
LEAST_GRACE_S = 3.0  # who wakes up needs some attempts to reach etcd
# Of a trainer that works: its loop is busy, or the machine is. It registers again by itself, and a new one
# would take even more processor time. Bounded, because its loop may never be free again.
WORKING_GRACE_S = 60.0
VOUCH_S = WORKING_GRACE_S  # for so long the lease of a child that is held up is renewed
VOUCH_LOOK_S = 0.25
VOUCH_ANSWER_S = 1.0

log = telemetry.logger("leases")


@dataclass(frozen=True, slots=True)
class Absence:
    """Of a process whose key is gone. `gone_s`: for how long; `idle_s`: since it last worked; `use`: by the
    last look."""

    gone_s: float = 0.0
    idle_s: float = 0.0
    use: ProcessorUse | None = None

    def longer(self, elapsed_s: float, use: ProcessorUse | None) -> Absence:
        """After one more look. What is more than two looks does not count: this process itself was frozen
        then."""
        counted_s = min(elapsed_s, 2 * LOOK_S)
        works = use is not None and use.works(self.use, elapsed_s)
        return Absence(self.gone_s + counted_s, 0.0 if works else self.idle_s + counted_s, use)

    def is_overdue(self, child: str, grace_s: float) -> bool:
        """A job stands still without a parameter server or a leader, so their work does not count."""
        if not child.startswith("trainer-"):
            return self.gone_s > grace_s
        return self.idle_s > grace_s or self.gone_s > max(grace_s, WORKING_GRACE_S)

    def worked(self, grace_s: float) -> bool:
        """Not only before its key was gone, and of late."""
        return self.idle_s < self.gone_s and self.idle_s <= grace_s


@dataclass(frozen=True, slots=True)
class LostLease:
    """`silent_s`: since it was last renewed. `worked`: its process did work without it. `stopped`: it was
    stopped by a signal."""

    silent_s: float
    worked: bool = False
    stopped: bool = False

    def __str__(self) -> str:
        what = "working without a lease" if self.worked else "frozen or cut off"
        return f"{what} for {self.silent_s:.0f} s"


class LostLeases:
    """`use_of`: a process by its pid. `etcd_silent_s`: for how long etcd has not answered, by the last look;
    0 if it answers."""

    def __init__(
        self, lease_ttl_s: float, use_of: Callable[[int], ProcessorUse | None] = processor_use
    ) -> None:
        self.grace_s = max(lease_ttl_s, LEAST_GRACE_S)
        self.etcd_silent_s = 0.0
        self._ttl_s, self._use_of = lease_ttl_s, use_of
        self._registered: set[int] = set()
        self._absent: dict[int, Absence] = {}  # by pid; time without etcd is left out

    def __repr__(self) -> str:
        return f"<LostLeases: {len(self._registered)} registered, {self._absent}>"

    async def follow(
        self,
        etcd: Etcd,
        keys: Keys,
        alive: Callable[[], Mapping[str, int]],
        end: Callable[[str], object],
        named: str = "",
    ) -> None:
        """Look again and again, and call `end` with the name of each child that is overdue, until cancelled.
        `alive`: name -> pid. `named`: see held_leases."""
        before = clock.monotonic()
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                held = await held_leases(etcd, keys, ANSWER_S, named)
                self.etcd_silent_s = 0.0
                overdue = self.observe(held, alive(), clock.monotonic() - before)
                if overdue and (await etcd.space(timeout_s=ANSWER_S)).full:
                    self._absent.clear()  # nobody can register again
                    continue
                for name in overdue:
                    end(name)
            except TriremeError:
                self.etcd_silent_s += clock.monotonic() - before
                self._absent.clear()
            finally:
                before = clock.monotonic()

    def observe(self, held: HeldLeases, alive: Mapping[str, int], elapsed_s: float) -> list[str]:
        """The names of those that are overdue. `elapsed_s`: since the last look."""
        overdue = []
        for name, pid in alive.items():
            if held.of(name, pid):
                self._registered.add(pid)
                self._absent.pop(pid, None)
            elif name.startswith("master-") and held.master is not None:
                self._registered.discard(pid)  # another master leads, this one stands by
                self._absent.pop(pid, None)
            elif pid in self._registered:
                self._absent[pid] = self._absent.get(pid, Absence()).longer(elapsed_s, self._use_of(pid))
                if self._absent[pid].is_overdue(name, self.grace_s):
                    overdue.append(name)
        return overdue

    def ended(self, pid: int) -> LostLease | None:
        """Forget that process. None if it had not lost its lease."""
        self._registered.discard(pid)
        absent = self._absent.pop(pid, None)
        if absent is None:
            return None
        stopped = absent.use is not None and absent.use.stopped
        return LostLease(self._ttl_s + absent.gone_s, absent.worked(self.grace_s), stopped)


class Vouching:
    """Renews the leases of children whose event loop is held up, because code of the user keeps Python's
    interpreter.

        sign of life is fresh ─► nothing: the child renews its own lease, or etcd does not answer it
        sign is old, the process runs, for VOUCH_S at most ─► its lease is renewed here
        the process is stopped (SIGSTOP), has ended, or is held up for longer ─► its lease runs out

    `tell`: gets the name of a child, its pid and a sentence, once each time that one is held up. `use_of`: a
    process by its pid."""

    def __init__(
        self,
        etcd: Etcd,
        tell: Callable[[str, int, str], object] = lambda *_: None,
        use_of: Callable[[int], ProcessorUse | None] = processor_use,
    ) -> None:
        self._etcd, self._use_of, self._tell = etcd, use_of, tell
        self._renewed: dict[int, float] = {}  # by pid, when its lease was renewed here last
        self._told: set[tuple[int, bool]] = set()  # pids that were told of; for too long

    def __repr__(self) -> str:
        return f"<Vouching for {sorted(self._renewed)}>"

    async def run(self, children: Callable[[], Mapping[str, Child]]) -> None:
        """Until cancelled. `children`: those that live, by name."""
        while True:
            there = {
                name: (child.pid, Path(child.environment.get(FILE, ""))) for name, child in children().items()
            }
            pids = {pid for pid, _ in there.values()}
            self._told = {each for each in self._told if each[0] in pids}
            self._renewed = {pid: at for pid, at in self._renewed.items() if pid in pids}
            await asyncio.gather(*(self._look(name, *each) for name, each in there.items()))
            await asyncio.sleep(VOUCH_LOOK_S)

    async def _look(self, name: str, pid: int, path: Path) -> None:
        sign = read(path)
        if sign is None or sign.pid != pid or not sign.is_late:
            self._renewed.pop(pid, None)
            self._told.discard((pid, False))
            self._told.discard((pid, True))
            return
        over, use = sign.silent_s > VOUCH_S, self._use_of(pid)
        if use is None or use.stopped:
            return
        if sign.silent_s > sign.ttl_s and (pid, over) not in self._told:
            self._told.add((pid, over))
            self._say(name, sign, over=over)
        if not over and clock.monotonic() - self._renewed.get(pid, float("-inf")) >= sign.ttl_s / 3:
            self._renewed[pid] = clock.monotonic()
            await self._renew(name, sign)

    async def _renew(self, name: str, sign: LifeSign) -> None:
        try:
            await self._etcd.renew(sign.lease, timeout_s=min(VOUCH_ANSWER_S, sign.ttl_s / 4))
        except TriremeError as error:
            log.warning("not_renewed", member=name, lease=f"{sign.lease:x}", cause=str(error))

    def _say(self, name: str, sign: LifeSign, *, over: bool) -> None:
        then = "its lease runs out" if over else f"its lease is renewed for it, until {VOUCH_S:g} s are over"
        cause = f"code of the user keeps Python's interpreter for {sign.silent_s:.0f} s now: {then}"
        log.warning("held_up", member=name, pid=sign.pid, cause=cause)
        self._tell(name, sign.pid, cause)
