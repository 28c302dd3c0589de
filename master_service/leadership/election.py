"""Election of the leader: a candidate campaigns for the lock under a lease, and works while the lease lives.

A candidate that finds the holder's port closed revokes the holder's lease, so that a restart need not wait for the TTL. At a
loopback address only a candidate of the same network can find that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

from master_service.control.task_service import Probe
from trireme_shared.platform.etcd import Etcd, KeyValue, Lease, LeaseLost
from trireme_shared.platform.etcd.fenced import acquire
from trireme_shared.platform.etcd.reading import read_record
from trireme_shared.platform.runtime import ids, telemetry
from trireme_shared.platform.runtime.http import tells
from trireme_shared.protocol.errors import PeerError, TriremeError
from trireme_shared.protocol.records import MasterLock

PROBE_EVERY_S = 0.5
PAUSE_S = 0.5
REVOKE_S = 3.0

log = telemetry.logger("election")


async def stand(
    etcd: Etcd,
    ttl_s: float,
    stopping: asyncio.Event,
    work: Callable[[Lease], Coroutine[None, None, None]],
    on_setback: Callable[[PeerError | LeaseLost], None] = lambda _: None,
) -> None:
    """Run `work` under one lease after the other until `stopping`. Raises errors that the next lease would meet again; `on_setback`
    gets the others."""
    while not stopping.is_set():
        try:
            await run_under_lease(etcd, ttl_s, stopping, work)
        except (PeerError, LeaseLost) as error:
            log.warning("stepped_down", cause=error.message)
            on_setback(error)
            await asyncio.sleep(ids.jitter(PAUSE_S))


async def run_under_lease(
    etcd: Etcd, ttl_s: float, stopping: asyncio.Event, work: Callable[[Lease], Coroutine[None, None, None]]
) -> None:
    """Run `work(lease)` from the grant of a lease until it is lost or `stopping` is set; then the lease is revoked at once.

    Raises what `work` raises, out of its exception groups.
    """
    # A task of its own, so that a cancelled caller gets its CancelledError: a TaskGroup whose children fail while it is
    # cancelled raises only their errors.
    term = asyncio.ensure_future(_term(etcd, ttl_s, stopping, work))
    term.add_done_callback(_note_end)
    try:
        await asyncio.wait([term])
    except asyncio.CancelledError:
        term.cancel()
        await asyncio.wait([term])
        raise
    term.result()


def _note_end(term: asyncio.Future[None]) -> None:
    """A caller that is cancelled twice does not read the result: then the error would be reported as never retrieved."""
    if not term.cancelled() and (error := term.exception()) is not None:
        log.debug("term_ended", cause=str(error))


async def _term(
    etcd: Etcd, ttl_s: float, stopping: asyncio.Event, work: Callable[[Lease], Coroutine[None, None, None]]
) -> None:
    lease = await etcd.grant(ttl_s)
    try:
        async with asyncio.TaskGroup() as group:
            keeper = group.create_task(lease.keep_alive())
            ends = [group.create_task(stopping.wait()), group.create_task(lease.lost.wait())]
            working = group.create_task(work(lease))
            await asyncio.wait([working, *ends], return_when=asyncio.FIRST_COMPLETED)
            for task in (working, keeper, *ends):
                task.cancel()
    except* TriremeError as group_of_errors:
        raise _first(group_of_errors) from group_of_errors
    finally:
        await _revoke(lease)


async def campaign(
    etcd: Etcd, key: str, me: MasterLock, lease: Lease, probe: Probe, on_holder: Callable[[MasterLock], None]
) -> int:
    """Wait for the lock `key`. Answers its create_revision, the term. Raises LeaseLost."""

    seen: list[MasterLock] = []

    async def look_at(kv: KeyValue) -> None:
        holder = read_record(MasterLock, kv.key, kv.value)
        if holder is not None:
            seen[:] = [holder]
            on_holder(holder)

    async def revoke_the_dead() -> None:
        while True:
            for holder in seen:
                if holder.lease and tells(holder.url, holder.network, me.network) and await probe(holder.url):
                    log.info("holder_is_dead", holder=holder.master, url=holder.url)
                    await etcd.revoke(holder.lease)
            await asyncio.sleep(PROBE_EVERY_S)

    async with asyncio.TaskGroup() as group:
        probing = group.create_task(revoke_the_dead())
        term = await acquire(etcd, key, me.to_bytes(), lease, on_wait=look_at)
        probing.cancel()
    return term


async def _revoke(lease: Lease) -> None:
    """The next candidate need not wait for the TTL then. Best effort, bounded, also while being cancelled."""

    async def revoke() -> None:
        try:
            async with asyncio.timeout(REVOKE_S):
                await lease.revoke()
        except (TimeoutError, TriremeError) as error:
            log.warning("lease_not_revoked", cause=str(error))

    await asyncio.shield(asyncio.ensure_future(revoke()))


def _first(error: TriremeError | BaseExceptionGroup[TriremeError]) -> TriremeError:
    """The error that caused the others: a caller's error rather than a peer's."""
    if isinstance(error, BaseExceptionGroup):
        return min(map(_first, error.exceptions), key=lambda leaf: leaf.retryable)
    return error
