"""What writing parts of checkpoints (parts.py) and committing them (commit.py) have in common: the process
that owns the blocks, a checkpoint in the making with its cut, and what is told when the storage cannot be
written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from trireme_shared.checkpoints import stored
from trireme_shared.checkpoints.writer import Offload
from trireme_shared.platform.etcd import Compacted, Etcd, KeyValue
from trireme_shared.platform.etcd.reading import must_read, read_at, read_record
from trireme_shared.platform.membership.directory import Directory, OwnKey
from trireme_shared.platform.runtime import telemetry
from trireme_shared.protocol.errors import InvalidArgument
from trireme_shared.protocol.evaluations import evaluation_of, evaluations_before, results_count
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import JobSpec, Mode, SlotMap, TrainerMember
from trireme_shared.protocol.records.checkpoints import CheckpointCut, CheckpointPart, Manifest
from trireme_shared.protocol.records.job import Paused
from trireme_shared.protocol.records.layout import Layout
from trireme_shared.protocol.records.step import StepRecord


class PartOwner(Protocol):
    """`name`: for people. `timeline`: of its parameters. `term`: the highest it has seen. `checkpoint_error`:
    why its checkpoints cannot be written now, for people; "" if they can."""

    @property
    def name(self) -> str: ...

    @property
    def incarnation(self) -> str: ...

    @property
    def timeline(self) -> int: ...

    @property
    def term(self) -> int: ...

    checkpoint_error: str


class Living(Protocol):
    """The owners by that slot map that live, as far as this process knows: their names by their indices."""

    def __call__(self, slots: SlotMap) -> Mapping[int, str]: ...


@dataclass(frozen=True, slots=True)
class SavingContext:
    """`own_key`: every write proves that the process still holds it. `offload` runs what blocks. `slots_of`:
    the slot map of that version; None: this process does not know it any more."""

    etcd: Etcd
    directory: Directory
    owner: PartOwner
    own_key: OwnKey[Any]
    offload: Offload
    living: Living
    slots_of: Callable[[int], SlotMap | None]

    @property
    def name(self) -> str:
        return self.owner.name

    @property
    def keys(self) -> Keys:
        return self.directory.keys

    @property
    def spec(self) -> JobSpec:
        assert self.directory.spec is not None, "nothing is owned before the spec is known"
        return self.directory.spec


log = telemetry.logger("checkpoints.storage")


def advice_for(error: Exception) -> str:
    """What to do about a checkpoint that could not be written because of `error`."""
    given = error.hint if isinstance(error, InvalidArgument) else ""
    remedy = given or "make room or give the job a storage that can be written"
    return f"training goes on and the checkpoints before it stay; {remedy}"


class StorageProblem:
    """Tells why checkpoints cannot be written, once when that begins and once when it is over.

    part or commit fails ─► begin ─► log, the own key (the master makes it an event)
    works again ─► end ─► the same

    `begin` and `end` are called for each checkpoint; only changes are reported. `what`: "part" or "commit".

    `tell` gets the first message of a problem, not those that follow, and "" when the problem is over.
    """

    def __init__(self, owner: PartOwner, tell: Callable[[str], None]) -> None:
        self._owner, self._tell = owner, tell
        self._current: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"<StorageProblem of {self._owner.name}: {self._current or 'none'}>"

    def begin(self, what: str, message: str) -> None:
        if what in self._current:
            log.debug("checkpoint_failed_again", owner=self._owner.name, cause=message)
        else:
            log.error("checkpoint_failed", owner=self._owner.name, message=message)
        self._change({**self._current, what: message})

    def end(self, what: str) -> None:
        if what in self._current:
            log.info("checkpoint_works_again", owner=self._owner.name)
            self._change({name: message for name, message in self._current.items() if name != what})

    def _change(self, current: dict[str, str]) -> None:
        before, self._current = self._current, current
        self._owner.checkpoint_error = next(iter(current.values()), "")
        if bool(before) != bool(current):
            self._tell(self._owner.checkpoint_error)


@dataclass(frozen=True, slots=True)
class PendingCheckpoint:
    """A checkpoint with this process's part, which `index` names, and what its manifest says beside the
    parts. `cut`: of a paused one."""

    uuid: str
    index: int
    file: str
    timeline: int
    slots: SlotMap
    layout: Layout
    mode: Mode
    lanes: int
    record: StepRecord
    restored: str
    cut: Cut | None = None

    @property
    def order(self) -> tuple[int, int]:
        return self.timeline, self.record.version

    @property
    def operation(self) -> str:
        """The operation that asked for it, or was under way; "" if there was none."""
        if self.cut is not None:
            return self.cut.operation
        return self.record.asked.operation if self.record.asked is not None else ""

    def evaluation(self, spec: JobSpec) -> int:
        """Number of the evaluation that is due at its version; 0: none."""
        if self.cut is not None:
            return self.cut.evaluation
        return evaluation_of(self.record, spec.evaluate_every, spec.epochs) or 0

    def evaluated_before(self, spec: JobSpec) -> int | None:
        """How many evaluations are due at versions before it, if the job's result depends on them; else
        None."""
        return evaluations_before(self.record, spec.evaluate_every) if results_count(spec) else None

    def manifest(
        self,
        job: str,
        spec: JobSpec,
        parts: Iterable[CheckpointPart],
        *,
        term: int,
        generation: int,
        timestamp: str,
    ) -> Manifest:
        return Manifest(
            job=job,
            uuid=self.uuid,
            step=self.record.version,
            timeline=self.timeline,
            term=term,
            generation=generation,
            mode=self.mode,
            lanes=self.lanes,
            seed=spec.seed,
            spec_digest=stored.spec_digest(spec),
            timestamp=timestamp,
            slots=self.slots,
            layout=self.layout,
            record=self.record,
            parts=tuple(parts),
            queue=self.cut.queue if self.cut is not None else {},
            readers=self.cut.readers if self.cut is not None else {},
            evaluation=self.cut.evaluation if self.cut is not None else 0,
        )


class GivenUp(Exception):
    """A checkpoint cannot be finished: its index, a part, its cut or its timeline is gone."""


@dataclass(frozen=True, slots=True)
class Cut:
    """What a paused checkpoint has beside the parameters: the queue and the readers' positions at the cut.

    The master writes `checkpoints/<uuid>/cut` in a transaction after which nobody trains, so the keys of that
    revision match the pservers' copies: no task is done there whose updates a copy could lack.

    `queue`: the values below `tasks/`, by name; `readers`: trainer -> where it paused; `operation`: the one
    that asked for it; `evaluation`, `minibatches`: see CheckpointCut.
    """

    queue: dict[str, str] = field(default_factory=dict)
    readers: dict[str, Paused] = field(default_factory=dict)
    operation: str = ""
    evaluation: int = 0
    minibatches: int = 0


async def read_cut(etcd: Etcd, keys: Keys, uuid: str) -> Cut:
    """At the revision of the checkpoint's cut. Raises GivenUp if the cut is gone, PeerError."""
    found = await etcd.get(keys.checkpoint_cut(uuid))
    if found is None:
        raise GivenUp(f"the pause of checkpoint {uuid} was given up")
    cut = must_read(CheckpointCut, found.key, found.value)
    queue = await cut_at(etcd, keys, found.create_revision)
    return replace(queue, operation=cut.operation, evaluation=cut.evaluation, minibatches=cut.minibatches)


async def cut_at(etcd: Etcd, keys: Keys, revision: int) -> Cut:
    """At that revision (0: now). Raises GivenUp if etcd has compacted it, PeerError."""
    try:
        tasks, revision = await read_at(etcd, keys.tasks, revision)
        members, _ = await read_at(etcd, keys.trainers, revision)
    except Compacted as error:
        raise GivenUp(f"etcd has compacted revision {revision}, that of the queue: {error}") from error
    queue = {
        key.removeprefix(keys.tasks): kv.value.decode(errors="replace")
        for key, kv in tasks.items()
        if key != keys.commit
    }
    return Cut(queue, dict(pair for kv in members.values() if (pair := _reader(keys, kv)) is not None))


def _reader(keys: Keys, kv: KeyValue) -> tuple[str, Paused] | None:
    if not keys.is_trainer(kv.key):
        return None
    member = read_record(TrainerMember, kv.key, kv.value)
    return (
        (member.trainer, member.paused)
        if member and member.paused is not None and member.paused.task_id
        else None
    )
