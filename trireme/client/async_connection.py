"""The connection of a typed client to whichever master leads, and the sending of its calls. asynchronous.py has the calls.

call ──► attempts at whichever master leads ──► record, or the TriremeError that the master answered
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self, TypeVar

import httpx
from pydantic import BaseModel

from trireme.client.exchange import AGENT, Attempts, Call, Listing, Masters, given_token
from trireme_shared.platform.runtime import clock
from trireme_shared.platform.security.tls import Tls
from trireme_shared.protocol.errors import TriremeError

TIMEOUT_S = 15.0

R = TypeVar("R", bound=BaseModel)
P = TypeVar("P", bound=BaseModel)
T = TypeVar("T")


class AsyncConnection:
    """The arguments are those of AsyncClient."""

    def __init__(
        self,
        urls: str,
        *,
        token: str | None = None,
        timeout_s: float = TIMEOUT_S,
        tls: Tls | None = None,
        wait_for_leader: bool = True,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._masters = Masters(urls)
        self._timeout_s = timeout_s
        self._wait_for_leader = wait_for_leader
        given = given_token() if token is None else token
        headers = {"User-Agent": AGENT} | ({"Authorization": f"Bearer {given}"} if given else {})
        trusted = (tls or Tls.from_environment()).client() or True
        self._http = httpx.AsyncClient(headers=headers, verify=trusted, trust_env=False, transport=transport)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.url}>"

    @property
    def url(self) -> str:
        """The address that calls go to now."""
        return self._masters.url

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._http.aclose()

    async def _list(self, listing: Listing[P, T]) -> AsyncIterator[T]:
        token = ""
        while True:
            items, token = listing.split(await self._send(listing.call(token)))
            for item in items:
                yield item
            if not token:
                return

    async def _send(self, call: Call[R]) -> R:
        now = clock.monotonic()
        attempts = Attempts(self._masters, call, self._timeout_s, now, wait_for_leader=self._wait_for_leader)
        while True:
            try:
                return call.read(await self._http.send(attempts.request(self._http, clock.monotonic())))
            except httpx.TransportError as error:
                told = attempts.told(error)
                told.__cause__ = error
            except TriremeError as error:
                told = error
            await asyncio.sleep(attempts.failed(told, clock.monotonic()))
