"""The trainers of a collective job as one trainer reaches them, generation by generation: who serves which
blocks, where, and who of them is late.

    etcd: state and trainers of a generation
        ─► Group: the owners of lanes share the slots, by their places in the list
    trainers' own keys, read when a name is new ─► addresses

A group looks to the data plane like parameter servers: the trainer at place i is the one with index i, and
the generation is the version of the slot map. A generation never comes twice, so nothing of an earlier one
can be taken for this one's.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from statistics import median

from trainer_agent.data_plane.fleet_client import Suspect
from trainer_agent.waiting import retry
from trireme_shared.platform.etcd import Etcd
from trireme_shared.platform.etcd.reading import read_record
from trireme_shared.platform.membership.directory import Directory
from trireme_shared.platform.runtime import clock
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import (
    JobState,
    MasterAddress,
    PserverMember,
    SlotMap,
    TrainerList,
    TrainerMember,
)
from trireme_shared.protocol.records.assignments import Migration, spread
from trireme_shared.protocol.wire.messages import PserverInfo

TELLERS = 3
FIRST, AGAIN = 0.25, 0.5  # of the lease's time; the master has to see when a second of it is left
LONGER = 2.0  # than the median of the last waits
REMEMBERED = 8


class Group:
    """The trainers of one generation. `place`: this trainer's, -1: it is not listed. `newest`: the highest
    version that one of them has, `givers`: the places of those that this trainer can get it from,
    `other_records`: this trainer's version is made of other records than that one; known once it is `formed`:
    then this trainer has the newest version, too. `members`: the others whose address is known."""

    def __init__(self, trainers: TrainerList, me: str, slot_count: int) -> None:
        self.trainers, self.generation = trainers, trainers.generation
        self.place = trainers.places.get(me, -1)
        self.slots = shared_out(trainers, slot_count)
        self.members: dict[int, PserverMember] = {}
        self.newest = -1
        self.givers: list[int] = []
        self.other_records = False
        self.formed = asyncio.Event()

    def __repr__(self) -> str:
        state = f"formed at version {self.newest}" if self.formed.is_set() else "not formed"
        return f"<Group of {len(self.trainers.names)} in generation {self.generation}, {state}>"

    @cached_property
    def others(self) -> dict[int, str]:
        """The other trainers in the list, by place."""
        return {place: name for place, name in enumerate(self.trainers.names) if place != self.place}

    @property
    def owns(self) -> bool:
        """Whether this trainer has lanes, and a share of the blocks."""
        return 0 <= self.place < self.trainers.owner_count

    def learn(self, infos: Iterable[PserverInfo], own: PserverInfo) -> None:
        """What the others have, and this one, which counts if it is listed. Versions of one number are not
        always the same: a trainer that was frozen may have one of which the others have made the step again,
        and a record was discarded meanwhile. Then that of the first in the list holds. Who can give the
        version after this trainer's own also says what that one is made of."""
        said = {info.index: info for info in infos}
        listed = {**said, self.place: own} if self.place >= 0 else said
        self.newest = max((info.highest for info in listed.values()), default=-1)
        basis = next((info for _, info in sorted(listed.items()) if info.highest == self.newest), own)
        made_of = _made_of(basis, self.newest)
        having = {place: info for place, info in said.items() if info.highest == self.newest}
        same = {place: info for place, info in having.items() if _made_of(info, self.newest) == made_of}
        able = [
            place for place, info in same.items() if info.kept is not None and info.kept <= own.highest + 1
        ]
        self.givers = sorted(able or same)
        mine = _made_of(own, own.highest)
        known = [_made_of(info, own.highest) or mine for info in (basis, *same.values())]
        self.other_records = any(each != mine for each in known)


class GroupView:
    """What the data plane sees of the job in place of a Directory. `slot_count`: of the layout."""

    migration: Migration | None = None

    def __init__(self, directory: Directory, etcd: Etcd, me: str, slot_count: int) -> None:
        self.directory, self._etcd = directory, etcd
        self._me, self._slot_count = me, slot_count
        #: None: the trainers of the state's generation are not known
        self.group: Group | None = None
        self.generation = -1
        self._seen = (-1, False)
        #: called for each generation, before anybody who waits for `next_group` sees it
        self.observers: list[Callable[[], None]] = []
        self._addresses: dict[str, PserverMember] = {}
        self._changed = asyncio.Event()
        directory.observers.append(self.follow)

    def __repr__(self) -> str:
        return f"<GroupView of {self._me}: {self.group!r}>"

    def follow(self) -> None:
        """After each change of the directory. In place: another generation is another group."""
        state, trainers = self.directory.state, self.directory.trainers
        generation = state.generation if state is not None else -1
        seen = generation, trainers.generation == generation
        if seen == self._seen:
            return
        self._seen = seen
        self.generation, self.group = generation, None
        if trainers.generation == generation and trainers.names:
            self.group = Group(trainers, self._me, self._slot_count)
        self._addresses = {name: there for name, there in self._addresses.items() if name in trainers}
        for observer in self.observers:
            observer()
        self._changed.set()
        self._changed = asyncio.Event()

    def begin_again(self) -> None:
        """This trainer has other versions than it had: the group of the present generation is formed anew."""
        self._seen = (-1, False)
        self.follow()

    @property
    def next_group(self) -> asyncio.Event:
        """Is set once there is another one, or none."""
        return self._changed

    async def learn_addresses(self, group: Group) -> None:
        """In place: of the other trainers, as far as their keys exist."""
        if not self._addresses.keys() >= set(group.others.values()):
            prefix = self.keys.trainers
            found = await retry(
                lambda: self._etcd.range(prefix, prefix=True), "the addresses of the trainers"
            )
            members = (
                read_record(TrainerMember, kv.key, kv.value) for kv in found.kvs if kv.key != self.keys.pause
            )
            for member in members:
                if member is not None and member.exchange is not None and member.trainer in group.trainers:
                    self._addresses[member.trainer] = pserver_of(member)
        known = self._addresses
        group.members = {place: known[name] for place, name in group.others.items() if name in known}

    # ------------------------------------------------------------ as the data plane sees it

    @property
    def slots(self) -> SlotMap | None:
        return self.group.slots if self.group is not None else None

    @property
    def pservers(self) -> dict[int, PserverMember]:
        return self.group.members if self.group is not None else {}

    @property
    def state(self) -> JobState | None:
        return self.directory.state

    @property
    def master(self) -> MasterAddress | None:
        return self.directory.master

    @property
    def keys(self) -> Keys:
        return self.directory.keys

    @property
    def revision(self) -> int:
        return self.directory.revision

    async def changed(self, after_revision: int, timeout_s: float) -> bool:
        return await self.directory.changed(after_revision, timeout_s)

    async def wait_for(self, predicate: Callable[[Directory], bool], timeout_s: float, what: str) -> None:
        await self.directory.wait_for(predicate, timeout_s, what)


def shared_out(trainers: TrainerList, slot_count: int) -> SlotMap:
    """Who owns which slots in the generation of that list: its owners of lanes, by their places."""
    return SlotMap(version=trainers.generation, owners=spread(slot_count, max(1, trainers.owner_count)))


def pserver_of(member: TrainerMember) -> PserverMember:
    """As the data plane reaches it. Its index is its place, which each generation says anew."""
    assert member.exchange is not None
    return PserverMember(
        index=-1,
        url=member.exchange.url,
        incarnation=member.incarnation,
        host=member.host,
        pid=member.pid,
        network=member.network,
        uds=member.exchange.uds,
    )


def _made_of(info: PserverInfo, version: int) -> str | None:
    """The digest that it says of that version; None: it says nothing of it."""
    return next((digest for each, digest in reversed(info.made_of) if each == version), None)


class LateMembers:
    """Tells the master who holds the next version up. Nothing fails at a trainer that is frozen: its
    connections stay, and it gives no answer.

        waiting for longer than usual ─► the owners of lanes that the own share lacks
                                         it lacks none: the owners whose mean gradients have not come
            ─► `suspect` ─► the master looks at their leases (master_service/control/evictions.py)
                            a slow trainer renews its own, and stays

    At most `TELLERS` trainers tell about one: those that follow it in the list. `suspect(name, cause)` tells
    the master."""

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
