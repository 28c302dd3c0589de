"""A step that is torn is told in ps/<index>: the master sends the job back to a checkpoint (see core/history.py)."""

from __future__ import annotations

import asyncio

from pserver_service.membership.index import Registration
from pserver_service.pserver import Pserver
from shared.errors import PeerError
from shared.etcd import LeaseLost
from shared.runtime import ids, telemetry

PAUSE_S = 0.5

log = telemetry.logger("pserver.tearing")


class Tearing:
    def __init__(self, pserver: Pserver, registration: Registration) -> None:
        self._pserver, self._registration = pserver, registration

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._pserver.torn_seen.wait()
            self._pserver.torn_seen.clear()
            try:
                await self._registration.tell(torn=self._pserver.torn)
            except (PeerError, LeaseLost) as error:
                log.warning("etcd_away", index=self._pserver.index, cause=str(error))
                await asyncio.sleep(ids.jitter(PAUSE_S))
                self._pserver.torn_seen.set()
