"""The records of checkpoints: those in etcd while a checkpoint is made, and the manifest that describes a
complete one.

started (leased) -> part -> ... all parts there -> manifest (a file) -> latest (etcd)

A part is whole, or it has of embedding tables only what changed since an earlier part of the same parameter
server: a chain leads from it back to a whole one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pydantic import Field

from trireme_shared.protocol.records.assignments import SlotMap
from trireme_shared.protocol.records.job import Paused
from trireme_shared.protocol.records.job_choices import Mode
from trireme_shared.protocol.records.layout import Layout
from trireme_shared.protocol.records.record import Record
from trireme_shared.protocol.records.step import StepRecord


def saved_point(mode: Mode, step: int) -> str:
    """For people: `step 40`; `checkpoint 3` of an asynchronous job, which has no common step."""
    return f"{'step' if mode is Mode.SYNC else 'checkpoint'} {step}"


class CheckpointPlace(Record):
    """The checkpoint of the job that a key belongs to."""

    step: int
    timeline: int


class CheckpointStarted(CheckpointPlace):
    """A pserver writes its part of version `step`. `error`: why it could not. `on`: the checkpoint that the
    part may build on, so it has to be kept meanwhile; "": none. `slots`: version of the map of slots by which
    the blocks are shared. `evaluation`: number of the evaluation that is due at that version; 0: none."""

    pserver: int
    incarnation: str
    error: str = ""
    on: str = ""
    slots: int = 0
    evaluation: int = 0


class CheckpointCut(CheckpointPlace):
    """Asynchronous: no trainer trained from this key until all parameters were `copied`. `trainers`: those
    that had paused. `operation`: the one that requested it, or was running. `evaluation`: number of the
    evaluation that is due at the cut (0: none), and `minibatches`: how many the job had trained by then, as
    far as its leader knew."""

    trainers: tuple[str, ...] = ()
    copied: bool = False
    operation: str = ""
    evaluation: int = 0
    minibatches: int = 0


class PartLink(Record):
    """A part of an earlier checkpoint, on which a delta builds; see CheckpointPart."""

    uuid: str
    step: int
    file: str
    checksum: str
    bytes: int


class CheckpointPart(CheckpointPlace):
    """A part that is written. `file`: its name in the checkpoint's folder. `checksum`: of all its bytes, with
    the checksum's name before it (`xxh3-128:…`, `md5:…`, `sha256:…`), which readers compare. `rows_version`:
    by which its rows of embedding tables are stamped; None: the step. `chain`: what it builds on, the whole
    part first; empty: it is whole."""

    pserver: int
    incarnation: str
    file: str
    checksum: str
    bytes: int
    timestamp: str = ""
    rows_version: int | None = None
    chain: tuple[PartLink, ...] = ()

    def link(self, uuid: str) -> PartLink:
        """For parts that build on it. `uuid`: of its checkpoint."""
        return PartLink(uuid=uuid, step=self.step, file=self.file, checksum=self.checksum, bytes=self.bytes)


class CheckpointRef(Record):
    """A committed checkpoint. `manifest`: name of the file in its folder. `origin`: uuid of the checkpoint
    its timeline began with ("": the timeline began with the start of training). `asked`: it was requested, so
    scheduled checkpoints do not replace it. `evaluation`: number of the evaluation that is due at its
    version; 0: none. `evaluated_before`: how many are due at versions before it; None: the job's result does
    not depend on evaluations. `minibatches`: of an asynchronous job, see CheckpointCut. `on`: uuids of the
    checkpoints that its parts build on; none: all are whole."""

    uuid: str
    step: int
    timeline: int
    manifest: str
    origin: str = ""
    asked: bool = False
    evaluation: int = 0
    evaluated_before: int | None = None
    minibatches: int = 0
    on: tuple[str, ...] = ()

    def leads_to(self, evaluation: int) -> bool:
        """Whether who goes on from it makes the version of that evaluation, and all before that are over."""
        return self.evaluated_before is not None and self.evaluated_before < evaluation

    @property
    def evaluated_step(self) -> int:
        """By which people know the version that is evaluated: the step, or (asynchronous) how many
        minibatches were trained."""
        return self.minibatches or self.step


def history(kept: Sequence[CheckpointRef], timeline: int, origin: str) -> tuple[CheckpointRef, ...]:
    """The checkpoints in `kept` that lie on the way to `timeline`, newest first: its own, those of the
    timeline of `origin` (the checkpoint it began with) up to `origin`, and so on back to the start of
    training."""
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
    """The newest committed checkpoint. `kept`: all checkpoints that may be loaded: first its `history`,
    newest first, beginning with itself; then those that the job left behind when it went back to an older
    one. `operation`: the one that requested it, or was running. `final`: of the last version, after which
    there is nothing to train."""

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

    def covers(self, timeline: int, step: int) -> bool:
        """Whether it is of that version, or of a newer one."""
        return (self.timeline, self.step) >= (timeline, step)


class OwnCheckpoints(Record):
    """`checkpoints/pservers/<index>`: independent checkpoints of one pserver that may be loaded, newest
    first."""

    pserver: int
    incarnation: str
    timestamp: str
    checksum: str
    kept: tuple[CheckpointRef, ...]


class Manifest(Record):
    """`step`: the version. `record`: the readers' positions and the scheduler at that version.

    Asynchronous: `step` is the number of the checkpoint in the job. `queue`: the keys below `tasks/` in etcd
    at the cut (name -> value). `readers`: position of each trainer's reader. `evaluation`: number of the one
    that was due at the cut. The ledgers are in the parts."""

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
    evaluation: int = 0

    @property
    def on(self) -> tuple[str, ...]:
        """See CheckpointRef."""
        return built_on(self.parts)

    @property
    def bases(self) -> tuple[str, ...]:
        """The whole checkpoints that its parts begin with; none: it is whole."""
        return tuple(sorted({part.chain[0].uuid for part in self.parts if part.chain}))

    @property
    def deltas(self) -> int:
        """Of the part with the longest chain, itself included."""
        return max((len(part.chain) for part in self.parts), default=0)

    @property
    def files(self) -> dict[tuple[str, str], int]:
        """Bytes of all files that are needed to load it, by (checkpoint, name)."""
        own = {(self.uuid, part.file): part.bytes for part in self.parts}
        return own | {(link.uuid, link.file): link.bytes for part in self.parts for link in part.chain}


def built_on(parts: Iterable[CheckpointPart]) -> tuple[str, ...]:
    """The checkpoints that these parts build on directly."""
    return tuple(sorted({part.chain[-1].uuid for part in parts if part.chain}))
