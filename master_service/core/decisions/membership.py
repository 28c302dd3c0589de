"""Members and generations: what follows when the members change.

WAITING    all pservers -> slot map;  parameters initialised + a trainer -> RUNNING, generation 1
RUNNING    a trainer joined or died -> generation + 1 (and new lanes)
           a pserver died -> ROLLING_BACK (recovery.py)
           asynchronous: a pserver died -> absent (recovery.py)
           asynchronous: a checkpoint is due -> CHECKPOINTING (pause_checkpoint.py)
           collective: collective.py
"""

from __future__ import annotations

from collections.abc import Iterator

from master_service.core import placement
from master_service.core.changes import Change, Decision, Event, Fields
from master_service.core.decisions import pause_checkpoint, recovery
from master_service.core.placement import WORTH_MOVING, LaneSeconds, expected_s, new_list, step_s
from master_service.core.state import phases
from master_service.core.state.job import Job, Members
from trireme_shared.protocol.records import (
    JobSpec,
    JobState,
    Mode,
    Phase,
    PserverMember,
    SlotMap,
    Stage,
    TrainerList,
    TrainerMember,
)


def storage_events(before: Members, now: Members) -> tuple[Event, ...]:
    """Which pservers (collective: trainers) can no longer write checkpoints, which can again, and which wait
    for the storage to load one."""
    events: list[Event] = []
    for index, server in sorted(now.pservers.items()):
        events += _storage_events(f"pserver-{index}", before.pservers.get(index), server, {"pserver": index})
    for name, trainer in now.trainers.items():
        events += _storage_events(name, before.trainers.get(name), trainer, {"trainer": name})
    return tuple(events)


def _storage_events(
    name: str,
    before: PserverMember | TrainerMember | None,
    now: PserverMember | TrainerMember,
    fields: Fields,
) -> Iterator[Event]:
    if now.waits and not (before and before.waits):
        yield Event("storage_away", now.waits, fields)
    if now.trouble and not (before and before.trouble):
        yield Event("checkpoint_failed", now.trouble, fields)
    if before and before.trouble and not now.trouble:
        yield Event("checkpoint_works_again", f"{name} writes checkpoints again", fields)


def missing(spec: JobSpec, listed: TrainerList, slots: SlotMap | None, members: Members) -> list[str]:
    """Names of the members that the job counts on and etcd does not have."""
    pservers = [
        f"pserver-{index}" for index in placement.holders(spec, slots) if index not in members.pservers
    ]
    trainers = [trainer for trainer in listed.names if trainer not in members.trainers]
    return (pservers if members.init_done else []) + trainers


def reconcile(
    spec: JobSpec,
    state: JobState,
    trainers: TrainerList,
    slots: SlotMap | None,
    members: Members,
    lane_s: LaneSeconds | None = None,
) -> Decision[None]:
    """Bring the job in line with its members. Idempotent: applied once, the same members change nothing more.
    `lane_s`: see new_list."""
    if state.phase.final:
        return Decision(None)
    if state.phase is Phase.ROLLING_BACK:
        return recovery.supervise(spec, state, slots, members)
    if state.phase is Phase.CHECKPOINTING:
        return pause_checkpoint.supervise(spec, state, trainers, slots, members)
    if spec.mode is Mode.ASYNC:
        missed = recovery.handle_missing(spec, state, trainers, slots, members)
        if missed.changes:
            return missed
    elif members.init_done and (why := recovery.why_incomplete(spec, state, slots, members, trainers)):
        return recovery.go_back(spec, state, slots, members, why)
    missing = [index for index in range(spec.pservers) if index not in members.pservers]
    changes: tuple[Change, ...] = ()
    if not missing and (slots is None or not placement.slots_fit(slots, spec)):
        changes = (placement.fresh_map(spec, slots),)
    now = tuple(members.trainers)
    if state.phase is Phase.WAITING:
        obstacle = _obstacle(spec, members, missing)
        if obstacle:
            return Decision(None, changes) + _wait(state, obstacle, members)
    elif set(now) == trainers.places.keys():
        return Decision(None, changes)
    return Decision(None, changes) + regroup(spec, state, trainers, members, now, lane_s)


def rebalance(job: Job) -> Decision[None]:
    """Other shares of lanes, in a new generation, if they make steps WORTH_MOVING times faster by what
    trainers reported."""
    spec, state, listed = job.spec, job.state, job.trainers
    running = (
        state.phase is Phase.RUNNING and state.stage is Stage.TRAIN and listed.generation == state.generation
    )
    if spec.mode is not Mode.SYNC or spec.stragglers == "off" or not running or not listed.names:
        return Decision(None)
    generation = state.generation + 1
    better = new_list(spec, listed, generation, listed.names, job.speeds.lane_s)
    expected = expected_s(listed.names, job.speeds.lane_s)
    if not expected or step_s(listed, expected) <= WORTH_MOVING * step_s(better, expected):
        return Decision(None)
    before_s, after_s = step_s(listed, expected), step_s(better, expected)
    reason = (
        f"lanes follow the measured speed: a step takes about {after_s:.3g} s instead of {before_s:.3g} s"
    )
    fields: Fields = {"generation": generation, "before_s": round(before_s, 6), "after_s": round(after_s, 6)}
    moved = state.with_fields(generation=generation, reason=reason)
    return Decision(None, (better, moved), (Event("lanes_moved", reason, fields),))


def only_joins(state: JobState, trainers: TrainerList, decision: Decision[None]) -> bool:
    """Whether `decision` only counts trainers in, or says what a waiting job waits for: nothing is lost if it
    is taken a little later, together with what comes until then."""
    found = [change for change in decision.changes if isinstance(change, JobState)]
    if not found or any(not isinstance(change, JobState | TrainerList) for change in decision.changes):
        return False
    after = found[-1]
    if after.phase is Phase.WAITING:
        return after == state.with_fields(reason=after.reason)
    same = state.phase is after.phase is Phase.RUNNING and after.timeline == state.timeline
    listed = [change for change in decision.changes if isinstance(change, TrainerList)]
    return (
        same and bool(trainers.names) and bool(listed) and listed[-1].places.keys() > trainers.places.keys()
    )


def _obstacle(spec: JobSpec, members: Members, missing: list[int]) -> str:
    """What the job waits for before it can run, or ""."""
    if missing:
        return f"waiting for {len(missing)} of {spec.pservers} parameter servers to register"
    if not members.trainers:
        return "waiting for a trainer"
    return "" if members.init_done else "waiting for a trainer to initialise the parameters"


def _wait(state: JobState, reason: str, members: Members) -> Decision[None]:
    if reason == state.reason:
        return Decision(None)
    event = Event(
        "job_waiting", reason, {"pservers": len(members.pservers), "trainers": len(members.trainers)}
    )
    return Decision(None, (state.with_fields(reason=reason),), (event,))


def regroup(
    spec: JobSpec,
    state: JobState,
    before: TrainerList,
    members: Members,
    now: tuple[str, ...],
    lane_s: LaneSeconds | None,
) -> Decision[None]:
    """A new generation, with the trainers `now` in place of those of `before`."""
    generation = state.generation + 1
    joined = [t for t in now if t not in before]
    away = [t for t in before.names if t not in now]
    parts = [f"{t} joined" for t in joined]
    parts += [
        f"{t} has the parameters no more" if t in members.trainers else members.absence(t) for t in away
    ]
    reason = "; ".join(parts[:4]) + (f" and {len(parts) - 4} more" if len(parts) > 4 else "")
    if not now:
        reason += "; waiting for a trainer"
    grown = phases.regrouped(state, reason)
    changes: tuple[Change, ...] = (new_list(spec, before, generation, now, lane_s), grown)
    name = "generation_changed" if state.phase is Phase.RUNNING else "job_running"
    fields: Fields = {"generation": generation, "trainers": len(now), "cause": reason}
    return Decision(None, changes, (Event(name, reason, fields),))
