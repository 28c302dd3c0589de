"""Copies of versions that wait to be written, and what a part holds beside them."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from trireme_shared.blocks.snapshot import Snapshot
from trireme_shared.checkpoints.async_cut import Cut
from trireme_shared.protocol.records import Mode, SlotMap
from trireme_shared.protocol.records.checkpoints import CheckpointLatest, CheckpointPart, PartLink
from trireme_shared.protocol.records.layout import Layout


@dataclass(frozen=True, slots=True)
class Copied:
    """A whole copy; whoever takes it releases the snapshot. `index`: names its part. `slots`: the map that gave these blocks to their owner
    (None: not known). `restored`: the checkpoint that `timeline` began with. `skipped`: how many copies before it were left out."""

    snapshot: Snapshot
    index: int
    timeline: int
    restored: str
    slots: SlotMap | None
    layout: Layout
    mode: Mode
    lanes: int
    skipped: int = 0

    @property
    def version(self) -> int:
        return self.snapshot.version


class Copies:
    """Where copies come from. `ready` is set when there may be one to take."""

    def __init__(self, ready: asyncio.Event | None = None) -> None:
        self.ready = ready or asyncio.Event()

    @property
    def waits(self) -> bool:
        """Whether there is one to take."""
        raise NotImplementedError

    def take(self) -> Copied | None:
        raise NotImplementedError

    def renew(self, copied: Copied) -> bool:
        """Whether the part of a copy that was taken can be written once more. Rows of tables are read from their copy only once: they would have to be copied again."""
        return not copied.snapshot.tables

    def is_of(self, timeline: int) -> bool:
        """Whether this process has parameters of that timeline: else parts of it are given up."""
        raise NotImplementedError

    # ------------------------------------------------------------ beside the blocks of a synchronous job: nothing

    async def cut(self, uuid: str, copied: Copied) -> Cut | None:
        """Of a paused checkpoint. Raises GivenUp; PeerError: ask again."""
        del uuid, copied
        return None

    def may_build_on(self, latest: CheckpointLatest | None) -> str:
        """The checkpoint that the next part may build on; "": it will be whole."""
        del latest
        return ""

    async def chain(
        self, copied: Copied, slots: SlotMap, latest: CheckpointLatest | None, damaged: Collection[str]
    ) -> tuple[PartLink, ...]:
        """What its part builds on; none: the part is whole."""
        del copied, slots, latest, damaged
        return ()

    def metadata(self, snapshot: Snapshot) -> Mapping[str, str]:
        """What its part says beside the usual."""
        del snapshot
        return {}

    def written(self, uuid: str, part: CheckpointPart) -> None:
        """The part of the copy that was taken last is written."""
