"""Asynchronous: a parameter server is gone and the others continue. It returns from its newest checkpoint; its losses are recorded.

complete --pserver gone--> absent --back, with a checkpoint's ledger--> counted: generation + 1, its losses on record
         |                   |-- the same process, whose lease had run out: it has everything, nothing is lost
         |                   `-- no checkpoint of its own (independent), or away too long: FAILED
         `-- no pserver left, nothing saved, or training is over: the whole job goes back, nothing is lost (rollback.py)
"""

from __future__ import annotations

from master_service.core.changes import Decision, Event, Fields
from master_service.core.decisions.lifecycle import fail
from master_service.core.decisions.recovery.lost import (
    another_number,
    has_parameters,
    holders,
    slots_fit,
    who_is_missing,
    why_incomplete,
)
from master_service.core.decisions.recovery.rollback import go_back
from master_service.core.state.job import Job, Members
from trireme_shared.protocol.records import FailureCause, JobSpec, JobState, PserverMember, SlotMap, Stage, TrainerList


def handle_missing(
    spec: JobSpec, state: JobState, listed: TrainerList, slots: SlotMap | None, members: Members
) -> Decision[None]:
    """Record missing parameter servers as absent, or go back, or fail. Nothing more once they are recorded."""
    if not members.init_done:
        return Decision(None)
    independent = spec.checkpoint_kind == "independent"
    if slots is not None and not slots_fit(slots, spec):
        why = another_number(spec, slots)
        if independent:
            return fail(
                state,
                f"{why.cause}, and independent checkpoints load only with as many; start it with as many as before",
                FailureCause.MEMBERS,
            )
        return go_back(spec, state, slots, members, why)
    needed = holders(spec, slots)
    away = [index for index in needed if not has_parameters(state, members, index)]
    if whole := [index for index in state.absent if index in needed and index not in away]:
        return _back_whole(state, whole)
    if not away:
        return Decision(None)
    why = why_incomplete(spec, state, slots, members, listed) or who_is_missing(members, away[0])
    if members.latest is None and not any(index in members.own for index in needed):
        return go_back(spec, state, slots, members, why)
    for index in away:
        member = members.pservers.get(index)
        if member is not None and member.restored is not None and member.restored.error and is_back(state, member):
            return fail(state, f"pserver-{index} cannot come back: {member.restored.error}", FailureCause.STORAGE)
    over = state.stage is not Stage.TRAIN and members.latest is not None  # evaluation must see one set of parameters
    if not independent and (over or len(away) == len(needed)):
        return go_back(spec, state, slots, members, why)
    if independent and (without := [index for index in away if index not in members.own]):
        return fail(
            state,
            f"{members.absence(f'pserver-{without[0]}')} and no checkpoint of it exists yet; start the job again",
            FailureCause.MEMBERS,
        )
    new = [index for index in away if index not in state.absent]
    if not new:
        return Decision(None)
    absent = tuple(sorted({*state.absent, *new}))
    returns = "its successor loads" if f"pserver-{new[0]}" in members.left else "it comes back from"
    message = f"{members.absence(f'pserver-{new[0]}')}; {returns} its newest checkpoint, the others go on"
    event = Event("pserver_lost", message, {"pserver": new[0], "absent": len(absent)})
    return Decision(None, (state.with_fields(absent=absent, reason=message),), (event,))


def _back_whole(state: JobState, whole: list[int]) -> Decision[None]:
    """Absent parameter servers that were never gone: only their leases had run out."""
    absent = tuple(index for index in state.absent if index not in whole)
    message = f"pserver-{whole[0]} is back with its parameters: its lease had run out, nothing is lost"
    event = Event("pserver_back", message, {"pserver": whole[0], "lost_minibatches": 0, "absent": len(absent)})
    return Decision(None, (state.with_fields(absent=absent, reason=message),), (event,))


def is_back(state: JobState, member: PserverMember) -> bool:
    """Whether it wrote in this timeline that it rejoined, or could not, and that is not on record yet."""
    restored = member.restored
    return (
        restored is not None
        and restored.rejoined
        and restored.timeline == state.timeline
        and state.mends.get(str(member.index)) != member.incarnation
    )


def returned(state: JobState, members: Members) -> list[PserverMember]:
    """Pservers that have loaded a checkpoint and serve once their losses are on record."""
    restored = [
        member for member in members.pservers.values() if member.restored is not None and not member.restored.error
    ]
    return [member for member in restored if is_back(state, member)]


def is_outdated(state: JobState, generation: int | None) -> bool:
    """Whether a task whose first push was in `generation` may be missing at a pserver that came back since. Then it is given
    again. The pserver takes pushes once its losses are on record, so what was done before that was counted."""
    return generation is not None and generation < state.mended


def record_return(job: Job, member: PserverMember, lost: int, before: tuple[int, int]) -> Decision[bool]:
    """Record what `member` lacks. `lost`: minibatches since its checkpoint; `before`: (lost, skipped) at the checkpoint."""
    state, restored = job.state, member.restored
    if restored is None or job.members.pservers.get(member.index) != member or not is_back(state, member):
        return Decision(False)
    generation = state.generation + 1
    absent = tuple(index for index in state.absent if index != member.index)
    message = f"pserver-{member.index} is back from checkpoint {restored.checkpoint[:8]}: it lacks {lost:,} minibatches of closed tasks"
    back = state.with_fields(
        generation=generation,
        mended=generation,
        mends={**state.mends, str(member.index): member.incarnation},
        absent=absent,
        reason=message,
    )
    losses = job.losses.with_lost(member.index, before[0] + lost, before[1])
    fields: Fields = {"pserver": member.index, "lost_minibatches": lost}
    events = [Event("pserver_back", message, {**fields, "checkpoint": restored.checkpoint, "generation": generation})]
    if restored.damaged:
        events.insert(0, Event("checkpoint_unusable", restored.damaged, {"pserver": member.index}))
    return Decision(True, (back, losses), tuple(events))
