"""The records of checkpoints: what stands in etcd while one is made, and the manifest that describes a whole one.

started (leased) -> part -> ... all parts there -> manifest (a file) -> latest (etcd)
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from shared.records.assignments import SlotMap
from shared.records.job_spec import Mode
from shared.records.layout import Layout
from shared.records.pauses import Paused
from shared.records.record import Record
from shared.records.step import StepRecord


class CheckpointPlace(Record):
    """Which checkpoint of the job a key belongs to."""

    step: int
    timeline: int


class CheckpointStarted(CheckpointPlace):
    """A pserver writes its part of version `step`; `error`: it could not, and why."""

    pserver: int
    incarnation: str
    error: str = ""


class CheckpointCut(CheckpointPlace):
    """Asynchronous: nobody trained from here until all were `copied`. `trainers`: who had paused. `operation`: the one that
    asked for it, or was under way."""

    trainers: tuple[str, ...] = ()
    copied: bool = False
    operation: str = ""


class CheckpointPart(CheckpointPlace):
    """A part that is written: `file` lies in the checkpoint's folder."""

    pserver: int
    incarnation: str
    file: str
    checksum: str
    bytes: int
    timestamp: str = ""


class CheckpointRef(Record):
    """A committed checkpoint. `manifest`: name of the file in its folder. `origin`: uuid of the one its timeline began
    with ("": training began there). `asked`: somebody asked for it, so the schedule's do not push it out."""

    uuid: str
    step: int
    timeline: int
    manifest: str
    origin: str = ""
    asked: bool = False


def history(kept: Sequence[CheckpointRef], timeline: int, origin: str) -> tuple[CheckpointRef, ...]:
    """Those of `kept` that the parameters of a timeline which began with `origin` come from, newest first."""
    refs = {ref.uuid: ref for ref in kept}
    found: list[CheckpointRef] = []
    highest: int | None = None
    while True:
        mine = [ref for ref in kept if ref.timeline == timeline and (highest is None or ref.step <= highest)]
        found += sorted(mine, key=lambda ref: ref.step, reverse=True)
        before = refs.get(origin)
        if before is None or before.timeline >= timeline:
            return tuple(found)
        timeline, origin, highest = before.timeline, before.origin, before.step


class CheckpointLatest(Record):
    """The newest committed checkpoint. `kept`: all that may be loaded; first its `history`, newest first, this one at the
    head, then those that the job left by going back to an older one. `operation`: the
    one that asked for it, or was under way. `final`: of the last version, after which there is nothing to train."""

    uuid: str
    step: int
    timeline: int
    term: int
    timestamp: str
    manifest: str
    slots: SlotMap
    kept: tuple[CheckpointRef, ...]
    operation: str = ""
    final: bool = False


class OwnCheckpoints(Record):
    """`checkpoints/pservers/<index>`: independent checkpoints of one pserver that may be loaded, newest first."""

    pserver: int
    incarnation: str
    timestamp: str
    checksum: str
    kept: tuple[CheckpointRef, ...]


class Manifest(Record):
    """`step`: the version. `record`: the readers' positions and the scheduler at that version.

    Asynchronous: `step` is the number of the checkpoint in the job; `queue`: what stood below `tasks/` in etcd at the
    cut (name -> value), `readers`: where each trainer's reader stood. The ledgers are in the parts."""

    job: str
    uuid: str
    step: int
    timeline: int
    term: int
    generation: int
    mode: Mode
    lanes: int
    seed: int
    spec_digest: str
    timestamp: str
    slots: SlotMap
    layout: Layout
    record: StepRecord
    parts: tuple[CheckpointPart, ...]
    queue: dict[str, str] = Field(default_factory=dict)
    readers: dict[str, Paused] = Field(default_factory=dict)
