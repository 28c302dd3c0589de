"""A write that lands once at most, though answers get lost.

txn(fence, writes) --landed--> its revision
   ^        |
   |        +--refused: read back--> an earlier attempt had landed: its revision; else what was read: the caller decides
   +--------+--no answer: pause, then send the very same again

Repeating is safe because the write changes what its fence compares: of all attempts, one lands at most.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from trireme_shared.platform.etcd.client import TIMEOUT_S, Etcd
from trireme_shared.platform.etcd.operations import Compare, Delete, Get, Put
from trireme_shared.platform.etcd.results import TxnResult
from trireme_shared.platform.runtime import clock, ids, telemetry
from trireme_shared.platform.runtime.waiting import Notices
from trireme_shared.protocol.errors import PeerError

log = telemetry.logger("etcd.fenced_write")


@dataclass(frozen=True, slots=True)
class FencedWrite:
    """`landed(what `reads` found)` answers the revision at which an earlier attempt landed, or 0.

    `on_error` is told why there is no answer yet; without it the log is, at first and then ever more rarely. `reads` are part of the
    transaction, taken when it is refused; with `read_apart` they are a second one after a refusal, so that the write itself stays
    as small as it can be.
    """

    etcd: Etcd
    fence: Sequence[Compare]
    writes: Sequence[Put | Delete]
    reads: Sequence[Get]
    landed: Callable[[TxnResult], Awaitable[int]]
    timeout_s: float = TIMEOUT_S
    read_apart: bool = False
    on_error: Callable[[PeerError], None] | None = None

    async def attempt(self) -> int | TxnResult:
        """The revision at which it landed, or what was read. Raises OutcomeUnknown, Retryable: attempt it again."""
        return await self._outcome(await self._send())

    async def until_answered(self, check: Callable[[], None], pause_s: float) -> int | TxnResult:
        """As `attempt`, repeated until there is an answer. `check` raises when it must not be sent any more."""
        failures, notices = 0, Notices()
        while True:
            check()
            try:
                result = await self._send()
            except PeerError as error:
                failures += 1
                if self.on_error is not None:
                    self.on_error(error)
                elif notices.due(clock.monotonic()):
                    log.warning("write_unanswered", cause=str(error), attempts=failures)
                await asyncio.sleep(ids.jitter(pause_s))
                continue
            if notices.over():
                log.info("write_answered", attempts=failures + 1)
            return await self._outcome(result)

    async def _send(self) -> TxnResult:
        if not self.read_apart:
            return await self.etcd.txn(self.fence, self.writes, self.reads, self.timeout_s)
        result = await self.etcd.txn(self.fence, self.writes, timeout_s=self.timeout_s)
        if result.succeeded:
            return result
        return replace(await self.etcd.txn((), self.reads, timeout_s=self.timeout_s), succeeded=False)

    async def _outcome(self, result: TxnResult) -> int | TxnResult:
        return result.revision if result.succeeded else await self.landed(result) or result
