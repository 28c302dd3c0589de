"""Why checkpoints cannot be written: told once when it begins and once when it is over, in the log and in ps/<index>.

part or commit fails ─► begin ─► log, ps/<index> (the master makes it an event)      works again ─► end ─► the same
"""

from __future__ import annotations

import asyncio

from pserver_service.membership.index import Registration
from pserver_service.pserver import Pserver
from shared.errors import PeerError
from shared.etcd import LeaseLost
from shared.runtime import ids, telemetry

PAUSE_S = 0.5

log = telemetry.logger("pserver.trouble")


class Trouble:
    """`begin` and `end` are called for each checkpoint; only changes are told. `what`: "part" or "commit"."""

    def __init__(self, pserver: Pserver, registration: Registration) -> None:
        self._pserver, self._registration = pserver, registration
        self._current: dict[str, str] = {}
        self._news = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Trouble of pserver {self._pserver.index}: {self._current or 'none'}>"

    def begin(self, what: str, message: str) -> None:
        if what in self._current:
            log.debug("checkpoint_failed_again", index=self._pserver.index, cause=message)
        else:
            log.error("checkpoint_failed", index=self._pserver.index, message=message)
        self._change({**self._current, what: message})

    def end(self, what: str) -> None:
        if what in self._current:
            log.info("checkpoint_works_again", index=self._pserver.index)
            self._change({name: message for name, message in self._current.items() if name != what})

    async def run(self) -> None:
        """Keep the key true until cancelled: it says the first message of a trouble, not those that follow."""
        while True:
            await self._news.wait()
            self._news.clear()
            if bool(self._registration.member.trouble) == bool(self._current):
                continue
            try:
                await self._registration.tell(trouble=self._pserver.checkpoint_error)
            except (PeerError, LeaseLost) as error:
                log.warning("etcd_away", index=self._pserver.index, cause=str(error))
                await asyncio.sleep(ids.jitter(PAUSE_S))
                self._news.set()

    def _change(self, current: dict[str, str]) -> None:
        self._current = current
        self._pserver.checkpoint_error = next(iter(current.values()), "")
        self._news.set()
