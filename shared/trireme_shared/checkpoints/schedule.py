"""Which versions become checkpoints, which of two checkpoints is the newer one, and which are kept.

All owners of blocks decide by the same record, so they copy the same versions unless one of them is too slow.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from trireme_shared.protocol.evaluations import evaluation_of, results_count
from trireme_shared.protocol.records import JobSpec
from trireme_shared.protocol.records.checkpoints import CheckpointLatest, CheckpointRef, history
from trireme_shared.protocol.records.step import StepRecord

_EPOCHS = 1 << 16
_ALWAYS = 1 << 32
EVALUATED_RANK = 1 << 33  # of two of these neither is left out
EVALUATED = 2  # training does not get beyond one that is evaluated while the evaluation before it is not over


@dataclass(frozen=True, slots=True)
class Schedule:
    """From the job's spec. Always due are the first version, the last one, one that was asked for, and those
    that are evaluated."""

    every_steps: int | None
    every_epochs: int | None
    epochs: int
    evaluate_every: int | str | None = None

    @classmethod
    def of(cls, spec: JobSpec) -> Schedule:
        return cls(
            spec.checkpoint_every_steps, spec.checkpoint_every_epochs, spec.epochs, spec.evaluate_every
        )

    def rank(self, record: StepRecord) -> int | None:
        """None: no checkpoint of this version. If two cannot both be written, the one of the higher rank is
        kept.

        Epochs rank above steps. The n-th checkpoint ranks by the power of two that divides n, so parameter
        servers that are too slow by any factor still agree on every 2nd, 4th, ... of them.
        """
        ranks = [0]
        if record.version == 0 or (record.asked is not None and record.asked.version == record.version):
            ranks.append(_ALWAYS)
        if evaluation_of(record, self.evaluate_every, self.epochs) is not None:
            ranks.append(EVALUATED_RANK)
        if self.every_steps and record.version % self.every_steps == 0:
            ranks.append(_twos(record.version // self.every_steps))
        if record.positions and all(position.exhausted for position in record.positions):
            done = max(position.epoch for position in record.positions) + 1
            if is_final(record, self.epochs):
                ranks.append(_ALWAYS)
            if self.every_epochs and done % self.every_epochs == 0:
                ranks.append(_EPOCHS + _twos(done // self.every_epochs))
        return max(ranks) or None


def is_final(record: StepRecord, epochs: int) -> bool:
    """Whether nothing is left to train after this version."""
    over = bool(record.positions) and all(position.exhausted for position in record.positions)
    return over and max(position.epoch for position in record.positions) + 1 >= epochs


def _twos(number: int) -> int:
    """1 + the exponent of the largest power of two that divides `number`; 0 for 0."""
    return (number & -number).bit_length()


def kept_after(
    latest: CheckpointLatest | None,
    new: CheckpointRef,
    damaged: Collection[str],
    count: int,
    needed: Collection[str] = (),
) -> tuple[CheckpointRef, ...]:
    """The checkpoints that are kept once `new` is the latest, newest first: of its history the last `count`,
    the last `count` that have no file in common, the last `count` that were asked for, those of the last
    EVALUATED evaluations; then the last `count` outside its history, which rollbacks left; those `needed`,
    and all that these build on. None of the damaged ones, nor what builds on them."""
    kept = _whole((new, *(latest.kept if latest is not None else ())), damaged)
    chains = {ref.uuid: chain_of(ref, kept) for ref in kept}
    mine = history(kept, new.timeline, new.origin)
    left = [ref for ref in kept if ref not in mine]
    stay = [*mine[:count], *_apart(mine, chains)[:count], *left[:count]]
    stay += [ref for ref in mine if ref.asked][:count]
    stay += _evaluated(new, mine)
    stay += [ref for ref in kept if ref.uuid in needed]
    uuids = {uuid for ref in stay for uuid in chains[ref.uuid]}
    return tuple(ref for ref in (*mine, *left) if ref.uuid in uuids)


def _evaluated(new: CheckpointRef, mine: Sequence[CheckpointRef]) -> list[CheckpointRef]:
    """Those of the last EVALUATED evaluations, which may all be to come, and on the way to them the ones that
    the job went back to: without these they would not be in its history. A version that it went back to is
    saved again and has the same number."""
    due = [*{ref.evaluation: ref for ref in mine if ref.evaluation}.values()][:EVALUATED]
    by_uuid, origin = {ref.uuid: ref for ref in mine}, new.origin
    way: list[CheckpointRef] = []
    while due and (back := by_uuid.get(origin)) is not None and back.timeline >= due[-1].timeline:
        way.append(back)
        origin = back.origin
    return due + way


def way_back(
    spec: JobSpec,
    evaluation: int,
    kept: Sequence[CheckpointRef],
    newest: CheckpointRef,
    damaged: Collection[str],
) -> CheckpointRef | None:
    """The newest checkpoint from which the version of that evaluation can be made again, if the job's result
    depends on it (None: it does not, or none is kept)."""
    if not results_count(spec):
        return None
    mine = history(_whole(kept, damaged), newest.timeline, newest.origin)
    return next((ref for ref in mine if ref.leads_to(evaluation)), None)


def is_kept(uuid: str, latest: CheckpointLatest | None, damaged: Collection[str]) -> bool:
    """Whether that checkpoint's files are there to build on."""
    return latest is not None and uuid not in damaged and any(ref.uuid == uuid for ref in latest.kept)


def _whole(refs: Sequence[CheckpointRef], damaged: Collection[str]) -> list[CheckpointRef]:
    """Those that are not damaged, and build on none that is."""
    lost = {*damaged}
    for ref in sorted(refs, key=lambda ref: (ref.timeline, ref.step)):
        if not lost.isdisjoint(ref.on):
            lost.add(ref.uuid)
    return [ref for ref in refs if ref.uuid not in lost]


def chain_of(ref: CheckpointRef, refs: Sequence[CheckpointRef]) -> set[str]:
    """The uuids of all checkpoints that it needs, and its own."""
    by_uuid, found, ahead = {each.uuid: each for each in refs}, set(), [ref.uuid]
    while ahead:
        uuid = ahead.pop()
        if uuid not in found:
            found.add(uuid)
            ahead += by_uuid[uuid].on if uuid in by_uuid else ()
    return found


def _apart(refs: Sequence[CheckpointRef], chains: Mapping[str, set[str]]) -> list[CheckpointRef]:
    """The newest one, the newest one that needs none of its checkpoints, and so on: one damaged file makes
    one of them unusable."""
    found: list[CheckpointRef] = []
    used: set[str] = set()
    for ref in refs:
        if used.isdisjoint(chains[ref.uuid]):
            found.append(ref)
            used |= chains[ref.uuid]
    return found


def is_newer(ref: CheckpointRef, latest: CheckpointLatest | None) -> bool:
    """Versions repeat after a rollback, so the timeline counts first."""
    return latest is None or (ref.timeline, ref.step) > (latest.timeline, latest.step)
