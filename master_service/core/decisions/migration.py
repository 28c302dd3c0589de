"""Groups of slots on their way from source to target: what counts of what was handed over, and the slot map that follows from it.

source: `handed` in ps/<index> --the same migration, timeline and processes--> a new slot map: the target owns the group
"""

from __future__ import annotations

from master_service.core.changes import Change, Decision, DesirePservers
from master_service.core.placement import slot_moves as moves
from master_service.core.state.job import Job
from trireme_shared.protocol.records import SlotMap
from trireme_shared.protocol.records.assignments import Group, Handed, Migration
from trireme_shared.protocol.records.job import Losses
from trireme_shared.protocol.records.operations import Operation, Resize


def rows_bytes(job: Job) -> dict[int, int]:
    """Of embedding tables, by parameter server: about so many would be sent."""
    return {index: member.rows_bytes for index, member in job.members.pservers.items()}


def move(job: Job, operation: Operation, due: list[Group], handed: dict[int, Handed]) -> Decision[None]:
    """One new slot map."""
    slots, resize = job.slots, operation.resize
    assert slots is not None
    assert resize is not None
    owners = list(slots.owners)
    losses = job.losses
    for group in due:
        for slot in group.slots:
            owners[slot] = group.target
        losses = _inherited(losses, group)
    grown = operation.with_fields(
        resize=measured(resize, handed).with_fields(groups_moved=resize.groups_moved + len(due))
    )
    inherited = (losses,) if losses != job.losses else ()
    new = slots.with_fields(version=slots.version + 1, owners=tuple(owners))
    return Decision(None, (new, grown, *inherited))


def _inherited(losses: Losses, group: Group) -> Losses:
    """Blocks bring what they lack along: each block of the target lacks at most as much as the worse of both."""
    source, target = str(group.source), str(group.target)
    lost, skipped = losses.lost, losses.skipped
    if source not in lost and source not in skipped:
        return losses
    return losses.with_lost(
        group.target,
        max(lost.get(target, 0), lost.get(source, 0)),
        max(skipped.get(target, 0), skipped.get(source, 0)),
    )


def obstacle(job: Job, migration: Migration) -> str:
    """Why what is handed over does not count any more, or ""."""
    if migration.timeline != job.state.timeline:
        return "the job went back to a checkpoint"
    for name, incarnation in migration.members.items():
        member = job.members.pservers.get(int(name))
        if member is None or member.incarnation != incarnation:
            pserver = f"pserver-{name}"
            return job.members.absence(pserver) if member is None else f"{pserver} was replaced"
        if member.handed is not None and member.handed.migration == migration.id and member.handed.failed:
            return member.handed.failed
    return ""


def handed_of(job: Job, migration: Migration, index: int) -> Handed:
    member = job.members.pservers.get(index)
    known = member.handed if member is not None else None
    return known if known is not None and known.migration == migration.id else Handed(migration=migration.id)


def measured(resize: Resize, handed: dict[int, Handed]) -> Resize:
    """`resize` with what this migration has measured so far; attempts before it count, too."""
    sent = sum(each.bytes for each in handed.values())
    longest = max([resize.longest_pause_s, *(each.longest_pause_s for each in handed.values())])
    return resize.with_fields(bytes_moved=resize.bytes_before + sent, longest_pause_s=longest)


def placed(slots: SlotMap, owners: tuple[int, ...], pservers: int) -> tuple[Change, ...]:
    """A new version of the map, and as many indices as it and the target number need."""
    new = SlotMap(version=slots.version + 1, owners=owners, pservers=pservers)
    return new, DesirePservers(max(pservers, max(owners) + 1))


def planned(job: Job, pservers: int) -> tuple[Group, ...]:
    """What has to move from where the slots are now to `pservers` parameter servers."""
    layout, slots = job.members.layout, job.slots
    if layout is None or slots is None or not job.members.init_done or not pservers:
        return ()
    return moves.planned_groups(layout, job.spec.mode, slots, pservers, rows_bytes(job))


def unclaimed(job: Job, resize: Resize) -> list[int]:
    """Indices of parameter servers that nobody has claimed."""
    return [index for index in range(resize.pservers) if index not in job.members.pservers]


def trainers_there(job: Job, resize: Resize) -> bool:
    """Whether as many train as it asks for."""
    count = len(job.trainers.names)
    if resize.trainers == resize.before_trainers:
        return count == resize.trainers or not resize.trainers_asked
    return count >= resize.trainers if resize.trainers > resize.before_trainers else count <= resize.trainers
