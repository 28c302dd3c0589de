"""The index of a pserver: `ps/<index>` in etcd, under a lease.

    wait for ps_desired and a free index --> claim (create = 0) --> hold ... key gone or another's --> lost: stop serving, exit
                                                                      `---- fewer are desired --> release it, exit

When the lease is over by the local clock, the pserver answers no call until it has asked etcd: it may have slept while another
process took its index. While etcd is away it goes on serving: pushes are fenced by generation, and nobody can take an index.
"""

from __future__ import annotations

from collections.abc import Mapping

from shared.errors import DeadlineExceeded
from shared.etcd import Etcd
from shared.membership.directory import Directory
from shared.membership.own_key import OwnKey
from shared.records import PserverMember
from shared.runtime import clock, telemetry

PAUSE_S = 0.5
LOOK_S = 5.0

log = telemetry.logger("pserver.index")


def lowest_free(desired: int, taken: Mapping[int, PserverMember]) -> int | None:
    return next((index for index in range(desired) if index not in taken), None)


class OwnIndex(OwnKey[PserverMember]):
    """The pserver's own key; the index is filled in by `claim_lowest`. Run `directory` beside it."""

    def __init__(self, etcd: Etcd, directory: Directory, record: PserverMember) -> None:
        super().__init__(etcd, record)
        self._directory = directory

    async def claim_lowest(self, wait_s: float) -> int:
        """Claim the lowest free index. Raises DeadlineExceeded after `wait_s`."""
        deadline = clock.monotonic() + wait_s
        while True:
            await self._directory.wait_for(
                lambda seen: seen.spec is not None and seen.pservers_desired is not None,
                deadline - clock.monotonic(),
                "job/spec and ps_desired",
            )
            desired = self._directory.pservers_desired or 0
            await self._directory.wait_for(
                lambda seen: lowest_free(seen.pservers_desired or 0, seen.pservers) is not None,
                deadline - clock.monotonic(),
                f"a free place among {desired} pservers",
            )
            index = lowest_free(self._directory.pservers_desired or 0, self._directory.pservers)
            if index is not None and await self._claim_index(index):
                log.info("index_claimed", index=index, url=self.record.url, uds=self.record.uds)
                return index
            await self._directory.changed(self._directory.revision, PAUSE_S)
            if clock.monotonic() >= deadline:
                msg = f"waited {wait_s:g} s for a free place among {desired} pservers: others were faster each time"
                raise DeadlineExceeded(msg)

    async def _claim_index(self, index: int) -> bool:
        assert self._directory.spec is not None
        return await self.claim(self._directory.keys.pserver(index), self._directory.spec.lease_ttl_s, index=index)

    async def unwanted(self) -> None:
        """Returns when the job does not want this index any more: it was started again with fewer parameter servers, after this
        one had claimed its index. A lower index may be free."""
        while True:
            revision, desired = self._directory.revision, self._directory.pservers_desired
            if desired is not None and self.record.index >= desired:
                log.warning("index_not_wanted", index=self.record.index, desired=desired)
                return
            await self._directory.changed(revision, LOOK_S)
