"""A trainer's answer to a pause: when all its pushes are acknowledged, it writes its position into its own
key.

CHECKPOINTING seen ─► no new push begins (AsyncLoop) ─► no push is open ─► reports sent
    ─► `paused` in trainers/<id>
the pause's key is gone, or the pause takes too long
    ─► lifted: the process that began it is dead, training goes on
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager

from trainer_agent.membership.lease import Membership
from trireme_shared.platform.etcd import Etcd, LeaseLost
from trireme_shared.platform.etcd.reading import read_record
from trireme_shared.platform.membership.directory import Directory
from trireme_shared.platform.runtime import clock, ids, telemetry
from trireme_shared.platform.runtime.clock import event_within
from trireme_shared.platform.runtime.containment import LongLivedGroup
from trireme_shared.protocol.errors import PeerError
from trireme_shared.protocol.records import Phase
from trireme_shared.protocol.records.job import Pause, Paused, Saving

LOOK_S = 0.5
PAUSE_S = 0.2
LIMIT_S = 180.0  # longer than any master waits, so a pause ends even if etcd is away

log = telemetry.logger("pause")


class PauseResponder:
    """Of an asynchronous trainer. `position`: of its reader; `flush` sends its reports, for a limited
    time."""

    def __init__(
        self,
        etcd: Etcd,
        directory: Directory,
        membership: Membership,
        position: Callable[[], Paused],
        flush: Callable[[], Awaitable[None]],
    ) -> None:
        self._etcd, self._directory, self._membership = etcd, directory, membership
        self._position, self._flush = position, flush
        self._all_acknowledged = asyncio.Event()
        self._all_acknowledged.set()
        self._key = ""  # the checkpoint whose pause key exists
        self._gone = ""  # the last checkpoint whose pause key was deleted
        self._since: tuple[str, float] = ("", 0.0)

    def __repr__(self) -> str:
        return (
            f"<PauseResponder: {'all acknowledged' if self._all_acknowledged.is_set() else 'pushing'}, "
            f"pause of {self._key or 'nothing'}>"
        )

    @contextmanager
    def pushing(self) -> Iterator[None]:
        """Inside this block a push may be unacknowledged."""
        self._all_acknowledged.clear()
        try:
            yield
        finally:
            self._all_acknowledged.set()

    @property
    def lifted(self) -> bool:
        """Whether the pause in the job's state is over although the state still names it."""
        saving = self._saving
        if saving is None:
            return False
        began = self._since[1] if self._since[0] == saving.uuid else clock.monotonic()
        return self._gone == saving.uuid or clock.monotonic() - began > LIMIT_S

    async def run(self) -> None:
        """Until cancelled."""
        async with LongLivedGroup() as group:
            group.create_task(self._watch_pause())
            group.create_task(self._answer())

    async def _watch_pause(self) -> None:
        key = self._directory.keys.pause
        async with aclosing(self._etcd.watch(key)) as batches:
            async for batch in batches:
                if batch.reset:
                    self._take(batch.kvs[0].value if batch.kvs else None)
                for event in batch.events:
                    self._take(event.kv.value if event.type == "put" else None)

    def _take(self, value: bytes | None) -> None:
        if value is None:
            self._key, self._gone = "", self._key or self._gone
            return
        pause = read_record(Pause, self._directory.keys.pause, value)
        if pause is not None:
            self._key = pause.uuid

    async def _answer(self) -> None:
        answered = ""
        while True:
            revision, saving = self._directory.revision, self._saving
            if saving is not None and saving.uuid != self._since[0]:
                self._since = saving.uuid, clock.monotonic()
            if saving is None or saving.uuid == answered or self.lifted:
                await self._directory.changed(revision, LOOK_S)
            elif self._all_acknowledged.is_set():
                answered = await self._write_answer(saving)
            else:
                await event_within(self._all_acknowledged, LOOK_S)

    async def _write_answer(self, saving: Saving) -> str:
        """The checkpoint that was answered, "" if the answer was not written."""
        await self._flush()
        try:
            await self._membership.write(paused=self._position().with_fields(uuid=saving.uuid))
        except (PeerError, LeaseLost) as error:
            log.warning("etcd_away", cause=str(error))
            await asyncio.sleep(ids.jitter(PAUSE_S))
            return ""
        log.info("paused", step=saving.step)
        return saving.uuid

    @property
    def _saving(self) -> Saving | None:
        state = self._directory.state
        return state.saving if state is not None and state.phase is Phase.CHECKPOINTING else None
