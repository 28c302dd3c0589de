"""Connections that nobody vouches for: they are cut after a while, and each peer may have few of them.

connect ──► waits ──a request with a good token──► admitted: its own time limits hold (data_plane/http.py, stream.py)
              └── `patience_s` over, or more than `per_peer` of its address: cut

Idle connections and half requests cost a file and some KiB each; a peer without a token must not be able to hold them for long.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from aiohttp import web

from trireme_shared.platform.runtime import clock, telemetry

LOOK_S = 1.0

log = telemetry.logger("connections")


@dataclass(eq=False, repr=False)
class Arrivals:
    """Of one server. `admit` names a connection whose request had a good token."""

    patience_s: float = 10.0
    per_peer: int = 256
    _since: dict[asyncio.Transport, float] = field(default_factory=dict)
    _admitted: set[asyncio.Transport] = field(default_factory=set)
    _held: Counter[str] = field(default_factory=Counter)

    def __repr__(self) -> str:
        return f"<Arrivals: {len(self._since)} not admitted yet, {len(self._admitted)} admitted>"

    @property
    def waiting(self) -> int:
        """Connections that were not admitted when it last looked, and are open."""
        return sum(not each.is_closing() for each in self._since)

    def held(self, peer: str) -> int:
        """How many of them `peer` had when it last looked."""
        return self._held[peer]

    def admit(self, transport: asyncio.Transport | None) -> None:
        if transport is not None:
            self._admitted.add(transport)

    async def run(self, server: web.Server) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look([handler.transport for handler in server.connections if handler.transport is not None])

    def look(self, open_now: Iterable[asyncio.Transport]) -> None:
        """Cut what has waited too long, and what a peer has too many of, the youngest first."""
        now, found = clock.monotonic(), set(open_now)
        self._admitted &= found
        self._since = {each: self._since.get(each, now) for each in found - self._admitted}
        held = self._held = Counter()
        cut: Counter[str] = Counter()
        for transport, since in sorted(self._since.items(), key=lambda item: item[1]):
            address = transport.get_extra_info("peername")
            peer = str(address[0]) if isinstance(address, tuple) else "the UNIX socket"
            held[peer] += 1
            if held[peer] > self.per_peer or now - since >= self.patience_s:
                transport.abort()
                cut[peer] += 1
        for peer, count in cut.items():
            log.warning("connections_cut", peer=peer, count=count, cause="no request with a good token came on them")
