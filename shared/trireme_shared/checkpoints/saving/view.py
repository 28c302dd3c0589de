"""What one process knows of `checkpoints/` in etcd: whose parts are there, what failed, which one is latest."""

from __future__ import annotations

from dataclasses import dataclass, field

from trireme_shared.platform.etcd.reading import read_record
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records.checkpoints import CheckpointCut, CheckpointLatest, CheckpointStarted


@dataclass(slots=True)
class CheckpointView:
    """By uuid: `begun`, what its files are of, as long as there may be some; `parts`, the pservers whose part is finished; `copied`, paused checkpoints that all pservers have copied;
    `failed`, the pservers whose part could not be written. `holder` of the finish lock, "" if there is none."""

    keys: Keys
    begun: dict[str, CheckpointStarted] = field(default_factory=dict)
    parts: dict[str, set[int]] = field(default_factory=dict)
    copied: set[str] = field(default_factory=set)
    failed: dict[str, set[int]] = field(default_factory=dict)
    holder: str = ""
    latest: CheckpointLatest | None = None

    def take(self, key: str, value: bytes | None) -> None:
        """In place. None: the key was deleted."""
        if key == self.keys.finish_lock:
            self.holder = (value or b"").decode(errors="replace")
        elif key == self.keys.latest:
            self.latest = read_record(CheckpointLatest, key, value)
        elif key.endswith("/cut"):
            self._take_cut(key, value)
        elif key.endswith("/begun"):
            uuid = key.removeprefix(self.keys.checkpoints).removesuffix("/begun")
            started = read_record(CheckpointStarted, key, value)
            if started is not None:
                self.begun[uuid] = started
            else:
                self.begun.pop(uuid, None)
        elif part := self.keys.part_in(key):
            uuid, index = part
            parts = self.parts.setdefault(uuid, set())
            if value is None:
                parts.discard(index)
                if not parts:
                    del self.parts[uuid]
            else:
                parts.add(index)
        elif begun := self.keys.started_in(key):
            self._take_started(*begun, read_record(CheckpointStarted, key, value))

    def _take_started(self, uuid: str, index: int, started: CheckpointStarted | None) -> None:
        """A pserver whose part is finished deletes its own key: that says nothing about the parts of others."""
        failed = self.failed.setdefault(uuid, set())
        if started is not None and started.error:
            failed.add(index)
        else:
            failed.discard(index)
        if not failed:
            del self.failed[uuid]

    def _take_cut(self, key: str, value: bytes | None) -> None:
        """A paused checkpoint counts once the master has confirmed that all pservers copied before anybody trained again."""
        uuid = key.removeprefix(self.keys.checkpoints).removesuffix("/cut")
        cut = read_record(CheckpointCut, key, value)
        if cut is None:
            self.copied.discard(uuid)
        elif cut.copied:
            self.copied.add(uuid)
