"""The part of a paused checkpoint beside the parameters: the queue and the readers' positions at the cut.

The master writes `checkpoints/<uuid>/cut` in a transaction after which nobody trains, so the keys of that revision match the
pservers' copies: no task is done there whose updates a copy could lack.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from trireme_shared.platform.etcd import Compacted, Etcd, KeyValue
from trireme_shared.platform.etcd.reading import must_read, read_record
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import TrainerMember
from trireme_shared.protocol.records.checkpoints import CheckpointCut
from trireme_shared.protocol.records.pauses import Paused

PAGE = 500


class GivenUp(Exception):
    """A checkpoint cannot be finished: its index, a part, its cut or its timeline is gone."""


@dataclass(frozen=True, slots=True)
class Cut:
    """`queue`: the values below `tasks/`, by name; `readers`: trainer -> where it paused; `operation`: the one that asked for it;
    `evaluation`, `minibatches`: see CheckpointCut."""

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
        tasks, revision = await _range(etcd, keys.tasks, revision)
        members, _ = await _range(etcd, keys.trainers, revision)
    except Compacted as error:
        raise GivenUp(f"etcd has compacted revision {revision}, that of the queue: {error}") from error
    queue = {
        kv.key.removeprefix(keys.tasks): kv.value.decode(errors="replace") for kv in tasks if kv.key != keys.commit
    }
    return Cut(queue, dict(pair for kv in members if (pair := _reader(keys, kv)) is not None))


async def _range(etcd: Etcd, prefix: str, revision: int) -> tuple[list[KeyValue], int]:
    found: list[KeyValue] = []
    first, end = prefix, prefix[:-1] + "0"  # "0" follows "/"
    while True:
        page = await etcd.range(first, end, limit=PAGE, revision=revision)
        revision = revision or page.revision
        found += page.kvs
        if not page.more:
            return found, revision
        first = page.kvs[-1].key + "\0"


def _reader(keys: Keys, kv: KeyValue) -> tuple[str, Paused] | None:
    if not keys.is_trainer(kv.key):
        return None
    member = read_record(TrainerMember, kv.key, kv.value)
    return (member.trainer, member.paused) if member and member.paused is not None and member.paused.task_id else None
