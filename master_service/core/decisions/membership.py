"""Members and generations: what follows when the members change.

WAITING    all pservers -> slot map;  parameters initialised + a trainer -> RUNNING, generation 1
RUNNING    a trainer joined or died -> generation + 1 (and new lanes);  a pserver died -> ROLLING_BACK (rollback.py)
           asynchronous: a pserver died -> absent (pserver_return.py);  a checkpoint is due -> CHECKPOINTING (pause_checkpoint.py)
"""

from __future__ import annotations

from master_service.core.changes import Change, Decision, Event, Fields
from master_service.core.decisions import pause_checkpoint, pserver_return, rollback
from master_service.core.decisions.lane_placement import new_lanes
from master_service.core.state.members import Members
from shared.records import JobSpec, JobState, LaneMap, Mode, Phase, SlotMap
from shared.slots import spread


def storage_events(before: Members, now: Members) -> tuple[Event, ...]:
    """Which pservers can no longer write checkpoints, which can again, and which wait for the storage to load one."""
    events = []
    for index, member in sorted(now.pservers.items()):
        known = before.pservers[index].trouble if index in before.pservers else ""
        if member.waits and not (index in before.pservers and before.pservers[index].waits):
            events.append(Event("storage_away", member.waits, {"pserver": index}))
        if member.trouble and not known:
            events.append(Event("checkpoint_failed", member.trouble, {"pserver": index}))
        if known and not member.trouble:
            events.append(
                Event("checkpoint_works_again", f"pserver {index} writes checkpoints again", {"pserver": index})
            )
    return tuple(events)


def reconcile(
    spec: JobSpec, state: JobState, lanes: LaneMap | None, slots: SlotMap | None, members: Members
) -> Decision[None]:
    """Bring the job in line with its members. Idempotent: applied once, the same members change nothing more."""
    if state.phase.final:
        return Decision(None)
    if state.phase is Phase.ROLLING_BACK:
        return rollback.supervise(spec, state, slots, members)
    if state.phase is Phase.CHECKPOINTING:
        return pause_checkpoint.supervise(spec, state, members)
    if spec.mode is Mode.ASYNC:
        missed = pserver_return.handle_missing(spec, state, slots, members)
        if missed.changes:
            return missed
    elif members.init_done and (cause := rollback.why_incomplete(spec, state, slots, members)):
        return rollback.go_back(spec, state, slots, members, cause)
    missing = [index for index in range(spec.pservers) if index not in members.pservers]
    changes: tuple[Change, ...] = ()
    if not missing and (slots is None or not rollback.slots_fit(slots, spec)):
        version = slots.version + 1 if slots else 1
        changes = (SlotMap(version=version, owners=spread(spec.slot_count, spec.pservers)),)
    now = tuple(members.trainers)
    if state.phase is Phase.WAITING:
        obstacle = _obstacle(spec, members, missing)
        if obstacle:
            return Decision(None, changes) + _wait(state, obstacle, members)
    elif set(now) == set(state.trainers):
        return Decision(None, changes)
    return Decision(None, changes) + _regroup(spec, state, lanes, now)


def _obstacle(spec: JobSpec, members: Members, missing: list[int]) -> str:
    """What the job waits for before it can run, or ""."""
    if missing:
        return f"waiting for {len(missing)} of {spec.pservers} parameter servers"
    if not members.trainers:
        return "waiting for a trainer"
    return "" if members.init_done else "waiting for a trainer to initialise the parameters"


def _wait(state: JobState, reason: str, members: Members) -> Decision[None]:
    if reason == state.reason:
        return Decision(None)
    event = Event("job_waiting", reason, {"pservers": len(members.pservers), "trainers": len(members.trainers)})
    return Decision(None, (state.model_copy(update={"reason": reason}),), (event,))


def _regroup(spec: JobSpec, state: JobState, lanes: LaneMap | None, trainers: tuple[str, ...]) -> Decision[None]:
    generation = state.generation + 1
    joined = [t for t in trainers if t not in state.trainers]
    left = [t for t in state.trainers if t not in trainers]
    parts = [f"{t} joined" for t in joined] + [f"{t} is gone" for t in left]
    reason = "; ".join(parts[:4]) + (f" and {len(parts) - 4} more" if len(parts) > 4 else "")
    if not trainers:
        reason += "; waiting for a trainer"
    grown = state.model_copy(
        update={"phase": Phase.RUNNING, "generation": generation, "reason": reason, "trainers": trainers}
    )
    changes: tuple[Change, ...] = (grown, *new_lanes(spec, lanes, generation, trainers))
    name = "generation_changed" if state.phase is Phase.RUNNING else "job_running"
    fields: Fields = {"generation": generation, "trainers": len(trainers), "cause": reason}
    return Decision(None, changes, (Event(name, f"generation {generation}: {reason}", fields),))
