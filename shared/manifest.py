"""The records of checkpoints: what stands in etcd while one is made, and the manifest that describes a whole one.

started (leased) -> part -> ... all parts there -> manifest (a file) -> latest (etcd)
"""

from __future__ import annotations

from shared.messages import StepRecord
from shared.records import Mode, Record, SlotMap
from shared.slots import Layout


class CheckpointStarted(Record):
    """A pserver writes its part of version `step`; `error`: it could not, and why."""

    pserver: int
    incarnation: str
    step: int
    timeline: int
    error: str = ""


class CheckpointPart(Record):
    """A part that is written: `file` lies in the checkpoint's folder."""

    pserver: int
    incarnation: str
    step: int
    timeline: int
    file: str
    md5: str
    bytes: int
    timestamp: str = ""


class CheckpointRef(Record):
    """A committed checkpoint. `manifest`: name of the file in its folder."""

    uuid: str
    step: int
    timeline: int
    manifest: str


class CheckpointLatest(Record):
    """The newest committed checkpoint. `kept`: all that may be loaded, newest first, this one at the head."""

    uuid: str
    step: int
    timeline: int
    term: int
    timestamp: str
    manifest: str
    slots: SlotMap
    kept: tuple[CheckpointRef, ...]


class Refetch(Record):
    """`trainers/re-fetch`: the parameters are those of `checkpoint` from `generation` on."""

    generation: int
    timeline: int
    checkpoint: str


class Manifest(Record):
    """`step`: the version. `record`: the readers' positions and the scheduler at that version."""

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
