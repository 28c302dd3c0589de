"""Members of the pool that get no work: drained by their users, until these take it back. Decisions only.

drain ─► its assignment goes with the next schedule ─► its process leaves in order ─► drained         undrain ─► idle
"""

from __future__ import annotations

from master_service.core.changes import Decision, Event
from master_service.core.state.cluster import ClusterDecision, ClusterState, DropDrain, Place, PutDrain
from trireme_shared.protocol.errors import Conflict
from trireme_shared.protocol.records.cluster import Drain

MAX_DRAINS = 10_000  # of places that may have no member any more


def drain(state: ClusterState, member: str, stamp: str) -> ClusterDecision[Place]:
    """Draining it again changes nothing. Raises NotFound, Conflict."""
    place = state.place(member)
    if place in state.drains:
        return Decision(place)
    if len(state.drains) >= MAX_DRAINS:
        msg = f"{len(state.drains)} members are drained, at most {MAX_DRAINS} are kept"
        raise Conflict(msg, hint="`trireme pool undrain` those that are gone for good")
    held = state.assignments.get(place)
    leaves = f": it leaves job {held.job}" if held else ""
    event = Event("member_drained", f"{place[0]} {member} is drained{leaves}", {"member": member})
    return Decision(place, (PutDrain(place, Drain(ask_time=stamp)),), (event,))


def undrain(state: ClusterState, member: str) -> ClusterDecision[Place]:
    """Also of a member that is gone. Raises NotFound."""
    place = state.place(member)
    if place not in state.drains:
        return Decision(place)
    event = Event("member_undrained", f"{place[0]} {member} may get work again", {"member": member})
    return Decision(place, (DropDrain(place),), (event,))
