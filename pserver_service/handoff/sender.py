"""A pserver hands groups of its blocks over to others, one after the other, as the job's migration says.

group due -> target: memory is there -> between two steps -> values sent while it is served
             -> each block freezes at its next version -> the rest sent -> target: HAVE
             (asynchronous: rows sent while it is served -> all of it freezes at once -> the rest sent)
          -> `handed` in ps/<index> -> the leader writes the slot map -> forgotten (follower.py)
             `-> the leader plans another migration, or none -> thawed

A frozen group takes no push until one of the two happens: only the leader knows whether the target has become
its owner.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from pserver_service.checkpoints import ledger_text
from pserver_service.context import LOOK_S, PserverContext
from pserver_service.handoff.follower import places
from pserver_service.handoff_client import HandoffPort, Parts
from trireme_shared.platform.runtime import clock, ids, telemetry
from trireme_shared.platform.runtime.clock import event_within
from trireme_shared.protocol.errors import TriremeError
from trireme_shared.protocol.records import Mode
from trireme_shared.protocol.records.assignments import Group, Handed, Migration
from trireme_shared.protocol.wire.messages import HandoffHeader, HandoffPart
from trireme_shared.serving.core.moving import LEDGER_BYTES, LeavingBlocks, in_pieces
from trireme_shared.serving.core.store import Store

if TYPE_CHECKING:
    from trireme_shared.serving.core.table.moving import LeavingRows

IDLE_S = 1.0  # without a step a group freezes as it is
PAUSE_S = 0.1
LEAST_TOLD_BYTES = 1 << 16
FAILED_S = 10.0  # until the leader hears that a group cannot be sent

log = telemetry.logger("pserver.handoff")


@dataclass(slots=True)
class _Moving:
    """A group on its way. `bytes`: sent. `frozen_at`: when its first block froze."""

    migration: Migration
    group: Group
    store: Store
    blocks: LeavingBlocks
    bytes: int = 0
    frozen_at: float | None = None
    port: HandoffPort | None = None

    async def disconnect(self) -> None:
        if self.port is not None:
            await self.port.close()
            self.port = None


class HandOver:
    """The source's end of a migration."""

    def __init__(self, context: PserverContext) -> None:
        self._context, self._directory, self._own_index = context, context.directory, context.own_index
        self._pserver = context.pserver

    def __repr__(self) -> str:
        return f"<HandOver of pserver-{self._pserver.index}: {self._own_index.record.handed!r}>"

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            revision, due = self._directory.revision, self._due()
            self._tell_rows()
            if due is None:
                await self._directory.changed(revision, LOOK_S)
            else:
                await self._hand_over(*due)

    def _tell_rows(self) -> None:
        """So that groups of slots are planned with the bytes of their rows. Small changes are not worth a
        write."""
        store, known = self._pserver.store, self._own_index.record.rows_bytes
        size = store.rows.handed_bytes if store is not None and store.rows is not None else 0
        if abs(size - known) > max(LEAST_TOLD_BYTES, known // 8):
            self._own_index.set(rows_bytes=size)

    def _due(self) -> tuple[Migration, Group, Store] | None:
        """The next group that this process has to hand over."""
        migration, store, index = self._directory.migration, self._pserver.store, self._pserver.index
        if (
            migration is None
            or store is None
            or store.slots is None
            or not self._is_current(migration, store)
        ):
            return None
        handed = self._own_index.record.handed
        done = handed.groups if handed is not None and handed.migration == migration.id else ()
        for group in migration.groups:
            mine = group.source == index and group.number not in done
            if mine and all(store.slots.owners[slot] == index for slot in group.slots):
                return migration, group, store
        return None

    def _is_current(self, migration: Migration, store: Store) -> bool:
        state, now = self._directory.state, self._directory.migration
        mine = migration.members.get(str(self._pserver.index)) == self._pserver.incarnation
        same = now is not None and now.id == migration.id and self._pserver.store is store and mine
        return same and state is not None and migration.timeline == state.timeline == self._pserver.timeline

    async def _hand_over(self, migration: Migration, group: Group, store: Store) -> None:
        """Returns when the group is forgotten, or stays because the migration is over."""
        assert store.slots is not None
        numbers = [number for number in places(store.layout, store.slots, group) if number in store.blocks]
        moving = _Moving(migration, group, store, LeavingBlocks(store, numbers, _rows(store, group)))
        self._pserver.refused_at = None
        handing = asyncio.ensure_future(self._send_all(moving))
        over = asyncio.ensure_future(self._over(moving))
        try:
            await asyncio.wait((handing, over), return_when=asyncio.FIRST_COMPLETED)
            if handing.done():
                handing.result()  # a bug in it must not be lost
                await over
        finally:
            for task in (handing, over):
                task.cancel()
            await asyncio.wait((handing, over))
            self._pserver.hands_over = False
            self._end(moving)
            await moving.disconnect()

    async def _over(self, moving: _Moving) -> None:
        """Returns when the slot map gives the group to another one, or the migration is over."""
        while self._is_current(moving.migration, moving.store) and not self._is_forgotten(moving):
            await self._directory.changed(self._directory.revision, LOOK_S)

    def _is_forgotten(self, moving: _Moving) -> bool:
        slots = moving.store.slots
        return slots is not None and slots.owners[moving.group.slots[0]] != self._pserver.index

    def _end(self, moving: _Moving) -> None:
        if not self._is_forgotten(moving):
            moving.blocks.thaw()
            log.info(
                "group_stays", index=self._pserver.index, group=moving.group.number, id=moving.migration.id
            )
            return
        moving.blocks.release()
        handed = self._handed(moving)
        frozen_s, paused_s = _seconds_since(moving.frozen_at), _seconds_since(self._pserver.refused_at)
        longest = max(handed.longest_pause_s, round(paused_s, 6))
        done = handed.with_fields(forgotten=handed.forgotten + 1, longest_pause_s=longest)
        self._own_index.set(handed=done)
        log.info(
            "group_moved",
            index=self._pserver.index,
            group=moving.group.number,
            frozen_s=round(frozen_s, 4),
            paused_s=round(paused_s, 4),
        )

    def _handed(self, moving: _Moving) -> Handed:
        """What is on record of this migration."""
        handed = self._own_index.record.handed
        if handed is None or handed.migration != moving.migration.id:
            return Handed(migration=moving.migration.id)
        return handed

    # ------------------------------------------------------------ sending

    async def _send_all(self, moving: _Moving) -> None:
        """Returns when the target has everything."""
        await self._send(moving, lambda: iter(()), coming=moving.blocks.coming())
        await self._until_even(moving)
        moving.blocks.begin()
        await self._send(moving, moving.blocks.early)
        if moving.store.mode is Mode.ASYNC:
            moving.blocks.freeze()
        await self._until_frozen(moving)
        self._pserver.hands_over = True
        await self._send(moving, moving.blocks.rest, whole=True)
        handed = self._handed(moving)
        groups = (*handed.groups, moving.group.number)
        self._own_index.set(
            handed=handed.with_fields(groups=groups, bytes=handed.bytes + moving.bytes, failed="")
        )

    async def _until_even(self, moving: _Moving) -> None:
        """A step that has begun becomes whole, or the job goes back to a checkpoint and the migration is
        over."""
        while not moving.blocks.even:
            if not await self._step():
                log.info(
                    "handoff_waits",
                    index=self._pserver.index,
                    group=moving.group.number,
                    cause="a step is not whole",
                )

    async def _until_frozen(self, moving: _Moving) -> None:
        """At most IDLE_S after the last step there is, unless one has begun that is not whole."""
        while not moving.blocks.frozen:
            if not await self._step():
                moving.blocks.freeze_idle()
            if moving.frozen_at is None and moving.blocks.any_frozen:
                moving.frozen_at = clock.monotonic()
        moving.frozen_at = moving.frozen_at or clock.monotonic()

    async def _step(self) -> bool:
        """Wait until a block has a new version; False: none had for IDLE_S."""
        self._pserver.block_stepped.clear()
        return await event_within(self._pserver.block_stepped, IDLE_S)

    async def _send(
        self,
        moving: _Moving,
        parts: Callable[[], Parts],
        *,
        coming: tuple[HandoffPart, ...] = (),
        whole: bool = False,
    ) -> None:
        """Again until the target has taken it; nothing is sent twice except after an error, and only then it
        connects again."""
        began, told = clock.monotonic(), False
        while True:
            try:
                moving.port = moving.port or self._port(moving)
                if moving.port is not None:
                    header, ledger = apart(self._header(moving, coming=coming, whole=whole))
                    answer = await moving.port.hand_over(header, chain(_counted(moving, parts()), ledger))
                    if answer.have or not whole:
                        return
                cause = "the target is not registered, or does not have everything"
            except TriremeError as error:
                cause = error.message
            await moving.disconnect()
            log.warning("handoff_delayed", index=self._pserver.index, group=moving.group.number, cause=cause)
            if not told and clock.monotonic() - began > FAILED_S:
                told = True
                msg = (
                    f"pserver-{self._pserver.index} could not hand group {moving.group.number} over: {cause}"
                )
                self._own_index.set(handed=self._handed(moving).with_fields(failed=msg))
            await asyncio.sleep(ids.jitter(PAUSE_S))

    def _port(self, moving: _Moving) -> HandoffPort | None:
        member = self._directory.pservers.get(moving.group.target)
        if member is None or moving.migration.members.get(str(member.index)) != member.incarnation:
            return None
        return self._context.connect(member)

    def _header(self, moving: _Moving, *, coming: tuple[HandoffPart, ...], whole: bool) -> HandoffHeader:
        pserver, master = self._pserver, self._directory.master
        header = HandoffHeader(
            job=pserver.job,
            term=master.term if master is not None else 0,
            generation=pserver.generation,
            migration=moving.migration.id,
            group=moving.group.number,
            source=pserver.index,
            timeline=moving.migration.timeline,
            coming=coming,
        )
        if not whole:
            return header
        blocks, ledger = moving.blocks.described(), ""
        if moving.store.mode is Mode.ASYNC:
            ledger = ledger_text.to_text(moving.blocks.ledger(), [moved.block for moved in blocks])
        history = moving.store.history.handed()
        tables, rows_version = moving.blocks.described_tables()
        return header.with_fields(
            whole=True,
            blocks=blocks,
            history=history,
            ledger=ledger,
            tables=tables,
            rows_version=rows_version,
        )


def _rows(store: Store, group: Group) -> LeavingRows | None:
    """None: the model has no tables."""
    if store.rows is None:
        return None
    # loads numba
    from trireme_shared.serving.core.table.moving import LeavingOnArrival, LeavingRows  # noqa: PLC0415

    return (LeavingOnArrival if store.mode is Mode.ASYNC else LeavingRows)(store.rows, group.slots)


def apart(header: HandoffHeader) -> tuple[HandoffHeader, Parts]:
    """A header of bounded size, and the pieces of its ledger if that is large: millions of tasks in an
    epoch."""
    if len(header.ledger) <= LEDGER_BYTES:
        return header, iter(())
    return header.with_fields(ledger=""), in_pieces(header.ledger)


def _seconds_since(moment: float | None) -> float:
    return clock.monotonic() - moment if moment is not None else 0.0


def _counted(moving: _Moving, parts: Parts) -> Parts:
    for part, payload in parts:
        moving.bytes += payload.nbytes
        yield part, payload
