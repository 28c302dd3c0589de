"""Whether parameters of a job are lost: the parameter servers that it needs, and which of them have its parameters.

A parameter server says in its own key which checkpoint it has loaded, in which timeline. In a timeline without a checkpoint those that
were there when the parameters got their first values have them.
"""

from __future__ import annotations

from dataclasses import dataclass

from master_service.core.state.job import Members
from trireme_shared.protocol.records import JobSpec, JobState, Phase, PserverMember, SlotMap, Strategy, TrainerList


@dataclass(frozen=True, slots=True)
class MissingParameters:
    """Why parameters are missing."""

    cause: str
    #: Nothing has failed: the members that had the parameters were told to leave.
    asked: bool = False


def why_incomplete(
    spec: JobSpec, state: JobState, slots: SlotMap | None, members: Members, listed: TrainerList | None = None
) -> MissingParameters | None:
    """Return why parameters of the job are missing, or None if none are. `listed` are the trainers of the last generation: they tell a
    job that goes on with other members from a job that lost some of its members."""
    if slots is not None and not slots_fit(slots, spec):
        return another_number(spec, slots)
    if listed is not None and all_ended(spec, state, listed, slots, members):
        return MissingParameters("all previous members have left", asked=True)
    for index in holders(spec, slots):
        if not has_parameters(state, members, index):
            return who_is_missing(members, index)
        torn = members.pservers[index].torn
        if torn is not None and torn.timeline == state.timeline:
            return MissingParameters(torn.cause)
    return None


def another_number(spec: JobSpec, slots: SlotMap) -> MissingParameters:
    """The job wants another number of parameter servers than its slot map was made for."""
    return MissingParameters(f"the job has {spec.pservers} parameter servers now instead of {slots.wanted}")


def who_is_missing(members: Members, index: int) -> MissingParameters:
    """A pserver without the job's parameters, whether another one has its index already or not."""
    name = f"pserver-{index}"
    if name in members.left or index not in members.pservers:
        return MissingParameters(members.absence(name), asked=name in members.left)
    return MissingParameters(f"{name} was replaced by an empty one")


def all_ended(spec: JobSpec, state: JobState, listed: TrainerList, slots: SlotMap | None, members: Members) -> bool:
    """Whether all previous members have left: the job was paused, or its cluster ended."""
    holding = any(has_parameters(state, members, index) for index in holders(spec, slots))
    return not holding and not any(name in members.trainers for name in listed.names)


def holders(spec: JobSpec, slots: SlotMap | None) -> tuple[int, ...]:
    """The parameter servers that the job needs: those that have slots. While a resize moves slots, others come or go beside them."""
    if spec.strategy is Strategy.COLLECTIVE:
        return ()  # a slot map may be left of a run with parameter servers
    return slots.serving if slots is not None else tuple(range(spec.pservers))


def has_parameters(state: JobState, members: Members, index: int) -> bool:
    """Whether that pserver has the parameters of the job's timeline, by its own key in etcd."""
    member = members.pservers.get(index)
    if member is None:
        return False
    if state.joined.get(str(index)) == member.incarnation:
        return True
    restored = member.restored
    if restored is not None and restored.rejoined and restored.timeline == state.timeline:
        return state.mends.get(str(index)) == member.incarnation and not restored.error
    if state.checkpoint:
        return (
            restored is not None
            and not restored.error
            and (restored.timeline, restored.checkpoint) == (state.timeline, state.checkpoint)
        )
    registered = member.since or members.pserver_revisions.get(index, 0)
    registered_after_layout = (
        0 < members.layout_revision < registered
    )  # it was not there when the first values were pushed
    return not registered_after_layout


def slots_fit(slots: SlotMap, spec: JobSpec) -> bool:
    return slots.wanted == spec.pservers


def survivors(spec: JobSpec, state: JobState, slots: SlotMap | None, members: Members) -> list[PserverMember]:
    """Pservers that still hold parameters while others lost theirs and no checkpoint exists. They have to leave, so that all
    start empty."""
    placed = slots if slots is not None and slots_fit(slots, spec) else None
    lost = members.init_done and bool(why_incomplete(spec, state, placed, members))
    saved = state.checkpoint or members.latest is not None or members.own
    if state.phase.final or state.phase is Phase.CHECKPOINTING or saved or not lost:
        return []  # a checkpoint that is being made may still become the first one
    return [members.pservers[index] for index in sorted(members.pservers) if has_parameters(state, members, index)]
