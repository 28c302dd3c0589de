"""Members of a collective job: trainers have the parameters, and there are no parameter servers.

WAITING       layout published, and min_members trainers have the parameters -> RUNNING, generation + 1
RUNNING       a listed trainer is gone or has them no more, or another one has them, too
                  -> generation + 1 (and new lanes)
              fewer than min_members have them -> WAITING, generation + 1, nobody is listed
              nobody has them, or a step is torn
                  -> ROLLING_BACK to a checkpoint; without one, WAITING from the very start
              training is over, and all that have them were gone: they may lack the last steps, which nobody
              makes again -> the same
ROLLING_BACK  a trainer has loaded the checkpoint -> the queue goes back (control/recovery.py)
                  -> RUNNING with those that have it
              all that are there say that they cannot -> the checkpoint before

A trainer says in its own key what it has (`holds`): the parameters of this timeline, which began with this
checkpoint. Who does not say so is no member: it still fetches them from the others. Who was gone for a while,
because its lease ran out, doubts what it has until it knows how far the others are.
"""

from __future__ import annotations

from master_service.core.changes import Change, Decision, Event, Fields
from master_service.core.decisions import membership, recovery
from master_service.core.decisions.lifecycle import fail
from master_service.core.decisions.recovery import MissingParameters
from master_service.core.placement import LaneSeconds, new_list
from master_service.core.state import phases
from master_service.core.state.job import Members
from trireme_shared.protocol.records import FailureCause, JobSpec, JobState, Phase, Stage, TrainerList


def reconcile(
    spec: JobSpec, state: JobState, listed: TrainerList, members: Members, lane_s: LaneSeconds | None = None
) -> Decision[None]:
    """Bring the job in line with its members. Idempotent."""
    if state.phase.final:
        return Decision(None)
    if state.phase is Phase.ROLLING_BACK:
        return _supervise(spec, state, members)
    if members.init_done and (why := why_lost(state, listed, members)):
        return recovery.go_back(spec, state, None, members, why)
    if obstacle := why_waiting(spec, state, members):
        return _wait(spec, state, listed, members, obstacle)
    having = _without_doubted(spec, listed, members, members.holding(state.timeline, state.checkpoint))
    if state.phase is Phase.RUNNING and set(having) == listed.places.keys():
        return Decision(None)
    return membership.regroup(spec, state, listed, members, having, lane_s)


def why_lost(state: JobState, listed: TrainerList, members: Members) -> MissingParameters | None:
    """Why the parameters of the timeline cannot be used; None: they can, or are about to be there."""
    for member in members.trainers.values():
        if member.torn is not None and member.torn.timeline == state.timeline:
            return MissingParameters(member.torn.cause)
    if having := members.holding(state.timeline, state.checkpoint):
        if state.stage is Stage.TRAIN or _certain(listed, members, having):
            return None
        return MissingParameters(
            "who is left was gone when training ended, and may not have the last version"
        )
    if state.generation == state.timeline and not state.checkpoint:  # it has not run yet
        if members.initialiser in members.trainers:
            return None
        return MissingParameters(
            f"{members.absence(members.initialiser)}, which gave the parameters their first values"
        )
    if listed.names and not any(name in members.trainers for name in listed.names):
        return MissingParameters("all previous members have left", asked=True)
    return MissingParameters("no trainer has the parameters any more")


def why_waiting(spec: JobSpec, state: JobState, members: Members) -> str:
    """What a job whose parameters are not lost waits for before it can run, or ""."""
    if not members.trainers:
        return "waiting for a trainer"
    if not members.init_done:
        return "waiting for a trainer to initialise the parameters"
    having = len(members.holding(state.timeline, state.checkpoint))
    if not having:
        return f"waiting for {members.initialiser} to say that it has the parameters"
    if having < spec.min_members:
        return (
            f"waiting for {spec.min_members} trainers that have the parameters (min_members), {having} "
            f"of {len(members.trainers)} have them"
        )
    return ""


def begins_without_some(state: JobState, members: Members, decision: Decision[None]) -> bool:
    """Whether `decision` begins the job while trainers are there that do not say yet that they have the
    parameters: they may in a moment."""
    after = [change for change in decision.changes if isinstance(change, JobState)]
    begins = state.phase is Phase.WAITING and bool(after) and after[-1].phase is Phase.RUNNING
    return begins and len(members.holding(state.timeline, state.checkpoint)) < len(members.trainers)


def still_loading(state: JobState, members: Members) -> list[str]:
    """ROLLING_BACK: trainers that have not said yet whether they have loaded the checkpoint."""
    return [
        name
        for name, member in members.trainers.items()
        if member.holds is None
        or (member.holds.timeline, member.holds.checkpoint) != (state.timeline, state.checkpoint)
    ]


def give_up_loading(spec: JobSpec, state: JobState, members: Members) -> Decision[None]:
    """ROLLING_BACK takes longer than recovery_timeout_s: the job fails if too few trainers have loaded the
    checkpoint."""
    if state.phase is not Phase.ROLLING_BACK or recovery.is_restored(spec, state, None, members):
        return Decision(None)
    having, waits = members.holding(state.timeline, state.checkpoint), storage_waits(members)
    why = f" ({next(iter(waits.values()))})" if waits else ""
    reason = (
        f"{len(having)} of {len(members.trainers)} trainers loaded the checkpoint within "
        f"recovery_timeout_s {spec.recovery_timeout_s:g}, {spec.min_members} must{why}"
    )
    return fail(state, reason, FailureCause.STORAGE if waits else FailureCause.MEMBERS)


def storage_waits(members: Members) -> dict[str, str]:
    """By name: trainers that wait for the storage to load a checkpoint, and why."""
    return {name: member.waits for name, member in members.trainers.items() if member.waits}


# -------------------------------------------------------------------- parts


def _without_doubted(
    spec: JobSpec, listed: TrainerList, members: Members, having: tuple[str, ...]
) -> tuple[str, ...]:
    """Without trainers that come back and do not know yet whether they can follow those that went on. With
    them, if nobody went on, or too few."""
    certain = _certain(listed, members, having)
    went_on = any(name in listed and not _is_doubted(members, name) for name in having)
    return certain if went_on and len(certain) >= spec.min_members else having


def _certain(listed: TrainerList, members: Members, having: tuple[str, ...]) -> tuple[str, ...]:
    """Those that were not gone, or came back before they were missed."""
    return tuple(name for name in having if name in listed or not _is_doubted(members, name))


def _is_doubted(members: Members, name: str) -> bool:
    holds = members.trainers[name].holds
    return holds is not None and holds.doubted


def _supervise(spec: JobSpec, state: JobState, members: Members) -> Decision[None]:
    """While trainers load: another checkpoint if none of them can. One that can is enough: the others get
    everything from it."""
    if not state.checkpoint:
        return recovery.start_over(spec, state, None, state.reason)
    if (
        members.holding(state.timeline, state.checkpoint)
        or not members.trainers
        or still_loading(state, members)
    ):
        return Decision(None)
    said = {name: holds for name, member in members.trainers.items() if (holds := member.holds) is not None}
    if any(holds.superseded for holds in said.values()):
        return recovery.choose_again(spec, state, None, members.latest)
    name, holds = next(iter(said.items()))
    return recovery.fall_back(spec, state, None, members.latest, f"{name}: {holds.error}")


def _wait(
    spec: JobSpec, state: JobState, listed: TrainerList, members: Members, reason: str
) -> Decision[None]:
    if state.phase is Phase.WAITING and reason == state.reason:
        return Decision(None)
    fields: Fields = {"trainers": len(members.trainers), "min_members": spec.min_members}
    event = Event("job_waiting", reason, fields)
    if state.phase is Phase.WAITING:
        return Decision(None, (state.with_fields(reason=reason),), (event,))
    waiting = phases.short_of_members(state, reason)
    nobody: Change = new_list(spec, listed, waiting.generation, ())
    return Decision(None, (nobody, waiting), (event,))
