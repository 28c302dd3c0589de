"""AsyncConnection without its awaits, for notebooks and scripts. `make clients` derives this file from async_connection.py: change that."""

from __future__ import annotations

from collections.abc import Iterator
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


class Connection:
    """The arguments are those of Client."""

    def __init__(
        self,
        urls: str,
        *,
        token: str | None = None,
        timeout_s: float = TIMEOUT_S,
        tls: Tls | None = None,
        wait_for_leader: bool = True,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._masters = Masters(urls)
        self._timeout_s = timeout_s
        self._wait_for_leader = wait_for_leader
        given = given_token() if token is None else token
        headers = {"User-Agent": AGENT} | ({"Authorization": f"Bearer {given}"} if given else {})
        trusted = (tls or Tls.from_environment()).client() or True
        self._http = httpx.Client(headers=headers, verify=trusted, trust_env=False, transport=transport)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.url}>"

    @property
    def url(self) -> str:
        """The address that calls go to now."""
        return self._masters.url

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def _list(self, listing: Listing[P, T]) -> Iterator[T]:
        token = ""
        while True:
            items, token = listing.split(self._send(listing.call(token)))
            yield from items
            if not token:
                return

    def _send(self, call: Call[R]) -> R:
        now = clock.monotonic()
        attempts = Attempts(self._masters, call, self._timeout_s, now, wait_for_leader=self._wait_for_leader)
        while True:
            try:
                return call.read(self._http.send(attempts.request(self._http, clock.monotonic())))
            except httpx.TransportError as error:
                told = attempts.told(error)
                told.__cause__ = error
            except TriremeError as error:
                told = error
            clock.sleep(attempts.failed(told, clock.monotonic()))
