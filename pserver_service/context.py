"""What checkpoints, recovery and drain of one pserver work with, and how they follow the job's state.

OwnIndex is its place in the job: the key `ps/<index>` in etcd, under a lease.

    wait for ps_desired and a free index, its own if it can be --> claim (create = 0) --> hold ...
        |-- revoked or another's --> lost: stop serving, exit
        `-- fewer are desired --> release it, exit

When the lease is over by the local clock, the pserver answers no call until it has asked etcd: another
process may have its index. If the lease ran out and nobody has the index, it takes it again with its
parameters, unless the job has left their timeline. While etcd is down (connections are refused) it goes on
serving: nobody can take an index. While etcd is silent leases run out without their holders' fault: who waits
for a free index leaves it to its holder for a while then.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pserver_service.handoff_client import Connect, HttpHandoff
from trireme_shared.checkpoints.writer import Offload
from trireme_shared.platform.etcd import Compare, Etcd, Refused
from trireme_shared.platform.etcd.reading import must_read
from trireme_shared.platform.membership.directory import Directory, OwnKey, may_return_s
from trireme_shared.platform.runtime import clock, telemetry
from trireme_shared.protocol.errors import DeadlineExceeded, PeerError
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import JobSpec, JobState, PserverMember
from trireme_shared.serving.pserver import Pserver

LOOK_S = 5.0
PAUSE_S = 0.5
ASK_S, ASK_LIMIT_S = 0.5, 0.5  # shorter together than the shortest lease: no silence that ends one is missed
log = telemetry.logger("pserver.index")
_OWN = re.compile(r"-(\d+)$")


@dataclass(frozen=True, slots=True)
class PserverContext:
    """`offload` runs what blocks. `connect`: to another parameter server, to hand blocks over."""

    etcd: Etcd
    directory: Directory
    pserver: Pserver
    own_index: OwnIndex
    offload: Offload
    connect: Connect = HttpHandoff

    @property
    def keys(self) -> Keys:
        return self.directory.keys

    @property
    def spec(self) -> JobSpec:
        assert self.directory.spec is not None, "the index is claimed only with the spec known"
        return self.directory.spec


class StateFollower:
    """Answers each state of the job that `is_due`, once."""

    def __init__(self, context: PserverContext) -> None:
        self.context, self._directory = context, context.directory
        self._pserver, self._own_index = context.pserver, context.own_index

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            revision, state = self._directory.revision, self._directory.state
            if state is not None and self.is_due(state):
                await self.answer(state)
            else:
                await self._directory.changed(revision, LOOK_S)

    def is_due(self, state: JobState) -> bool:
        """Whether the state is still to be answered."""
        raise NotImplementedError

    async def answer(self, state: JobState) -> None:
        raise NotImplementedError


def own_number(name: str) -> int | None:
    """The index that a process is called after: 1 of `pserver-1`."""
    found = _OWN.search(name)
    return int(found[1]) if found else None


def free_index(desired: int, taken: Mapping[int, PserverMember], own: int | None = None) -> int | None:
    """`own` if it is free, so that a process and its index have one name; else the lowest."""
    free = [index for index in range(desired) if index not in taken]
    return own if own in free else next(iter(free), None)


class OwnIndex(OwnKey[PserverMember]):
    """The pserver's own key; the index is filled in by `claim_index`, if it can be by `own`. Run `directory`
    beside it. `fits` answers whether what this process has is of the job's state: else it may not take its
    index back; None: it has nothing."""

    def __init__(
        self,
        etcd: Etcd,
        directory: Directory,
        record: PserverMember,
        own: int | None = None,
        fits: Callable[[JobState], bool] | None = None,
    ) -> None:
        super().__init__(etcd, record)
        self._directory, self._own, self._fits = directory, own, fits

    async def claim_index(self, wait_s: float) -> int:
        """Claim a free index (`free_index`). Raises DeadlineExceeded after `wait_s`."""
        deadline = clock.monotonic() + wait_s
        while True:
            await self._directory.wait_for(
                lambda seen: seen.spec is not None and seen.pservers_desired is not None,
                deadline - clock.monotonic(),
                "job/spec and ps_desired",
            )
            index = await self._free_place(deadline)
            if await self._claim(index):
                log.info("index_claimed", index=index, url=self.record.url, uds=self.record.uds)
                return index
            await self._directory.changed(self._directory.revision, PAUSE_S)
            if clock.monotonic() >= deadline:
                desired = self._directory.pservers_desired
                msg = (
                    f"waited {wait_s:g} s for a free place among {desired} pservers: others were "
                    "faster each time"
                )
                raise DeadlineExceeded(msg)

    async def _free_place(self, deadline: float) -> int:
        """Wait for an index that is free and will stay so: after a silence of etcd its holder may come back.
        Raises DeadlineExceeded."""
        silent_at = -math.inf
        began = clock.monotonic()
        while True:
            seen = self._directory
            assert seen.spec is not None
            revision, index = seen.revision, free_index(seen.pservers_desired or 0, seen.pservers, self._own)
            left_s = may_return_s(silent_at, seen.spec.lease_ttl_s)
            if index is not None and left_s <= 0:
                return index
            if clock.monotonic() >= deadline:
                msg = (
                    f"waited {deadline - began:.0f} s for a free place among {seen.pservers_desired} pservers"
                )
                raise DeadlineExceeded(msg)
            if await self._is_silent():
                silent_at = clock.since_boot()
            await seen.changed(revision, min(ASK_S, max(0.0, deadline - clock.monotonic())))

    async def _is_silent(self) -> bool:
        try:
            await self._etcd.get(self._directory.keys.pservers_desired, timeout_s=ASK_LIMIT_S)
        except Refused:  # it is down, and no lease runs out
            return False
        except PeerError:
            return True
        return False

    async def _claim(self, index: int) -> bool:
        assert self._directory.spec is not None
        return await self.claim(
            self._directory.keys.pserver(index), self._directory.spec.lease_ttl_s, index=index
        )

    async def _place_is_kept(self) -> Sequence[Compare] | None:
        key = self._directory.keys.state
        found = await self._etcd.get(key)
        if found is None or not (self._fits is None or self._fits(must_read(JobState, key, found.value))):
            return None
        self.record = self.record.with_fields(since=self._claimed)
        return [self._is_free(), Compare.mod(key, "==", found.mod_revision)]

    def follow(self) -> None:
        """After each change of the directory's view."""
        seen = self._directory
        holder = seen.pservers.get(self.record.index)
        mine = holder is not None and holder.incarnation == self.record.incarnation
        if not mine and seen.revision >= self._created:
            self.look()

    @property
    def is_wanted(self) -> bool:
        desired = self._directory.pservers_desired
        return desired is None or self.record.index < desired

    async def unwanted(self) -> None:
        """Returns when the job does not want this index any more: it has fewer parameter servers now, or was
        started again with fewer after this one had claimed its index. A lower index may be free."""
        while self.is_wanted:
            await self._directory.changed(self._directory.revision, LOOK_S)
        log.warning("index_not_wanted", index=self.record.index, desired=self._directory.pservers_desired)
