"""Why a job is where it is, as sentences with both numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from master_service.core.decisions.scheduling.admission import KINDS, Admission, in_turn, need
from master_service.core.decisions.scheduling.pool_view import PoolView
from master_service.core.decisions.scheduling.readiness import named
from master_service.core.state.cluster import ClusterState
from trireme_shared.protocol.records.cluster import ClusterJob, Kind, in_words

NUMBERED = (
    20  # of the jobs that wait, so many have numbers in their reason: these change often, and each change is written
)
LACKS = "lacks "
HOLDERS = 4  # that a sentence names


def of_waiting(view: PoolView, admission: Admission) -> Iterator[tuple[ClusterJob, str]]:
    """Jobs that cannot start before others end, or members join."""
    others = [job.job for job in (*admission.running, *admission.starting)]
    first: ClusterJob | None = None  # that waits for members which the pool has
    for number, job in enumerate(admission.waiting):
        if too_many := [kind for kind in KINDS if need(job)[kind] > view.usable[kind]]:
            kind = too_many[0]
            yield job, f"needs {in_words(kind, need(job)[kind])}; the pool has {view.usable[kind]}: more must join it"
        elif number >= NUMBERED:
            yield job, f"waits behind more than {NUMBERED} jobs that come first"
        else:
            yield job, _lacks(job, view, admission, others) or _behind(job, first, view, admission)
            first = first or job


def of_starting(job: ClusterJob, view: PoolView) -> str:
    """The pool has enough for it, but some still work for others."""
    lacking = [kind for kind in KINDS if len(view.idle[kind]) < need(job)[kind]]
    kind = lacking[0] if lacking else KINDS[-1]
    ending = sorted(view.ending[kind])
    by = f"; processes of {named(ending)} end" if ending else ""
    return f"waits for {in_words(kind, need(job)[kind])}; {len(view.idle[kind])} of {view.usable[kind]} can be had at once{by}"


def of_short(job: ClusterJob, view: PoolView) -> str:
    """An ACTIVE job has less than its minimum. Empty: it has it."""
    for kind in KINDS:
        lacks = need(job)[kind] - len(view.holds(kind, job.job))
        if lacks > 0:
            idle = len(view.idle[kind])
            of = f"{idle} of {view.usable[kind]} in the pool {'is' if idle == 1 else 'are'} idle"
            return f"{LACKS}{lacks} of {in_words(kind, need(job)[kind])}; {of}"
    return ""


def who_has(state: ClusterState, name: str, kind: Kind) -> str:
    """Why a job has fewer members than it could use: how many the pool has, and which jobs have them. Empty: it has all places that it
    may have; then their processes are starting."""
    job = state.jobs.get(name)
    if job is None:
        return ""
    wants = job.most_trainers if kind == "trainer" else job.pservers_wanted
    if len(state.assigned_to(name, kind)) >= wants:
        return ""
    there = [place for place in state.members if place[0] == kind]
    drained = sum(place in state.drains for place in there)
    of = f", {drained} of them drained" if drained else ""
    missing = ": more must join it" if len(there) - drained < wants else ""
    pool = f"the pool has {in_words(kind, len(there))}{of}{missing}"
    held = Counter(held.job for place, held in state.assignments.items() if place[0] == kind and held.job != name)
    others = sorted((state.jobs[other] for other in held if other in state.jobs), key=in_turn)
    mine = job.scheduling.priority
    parts = [f"job {each.job} of {_priority(each, mine)} has {held[each.job]}" for each in others[:HOLDERS]]
    more = [f"other jobs have {sum(held[each.job] for each in others[HOLDERS:])}"] if len(others) > HOLDERS else []
    return "; ".join([pool, *parts, *more])


def _priority(job: ClusterJob, mine: int) -> str:
    level = job.scheduling.priority
    if level == mine:
        return "the same priority"
    return f"a {'higher' if level > mine else 'lower'} priority ({level}, here {mine})"


def _lacks(job: ClusterJob, view: PoolView, admission: Admission, others: list[str]) -> str:
    for kind in KINDS:
        needs, free, there = need(job)[kind], max(0, admission.left[kind]), view.usable[kind]
        if needs > free:
            have = f"{named(others)} {'has' if len(others) == 1 else 'have'} the others"
            words = f"{free} of {there} {'is' if free == 1 else 'are'} free"
            if kind == "trainer":
                words = f"{free} of {there} can be had"
                have = f"{named(others)} {'keeps' if len(others) == 1 else 'keep'} the others as the minimum"
            return f"waits for {in_words(kind, needs)}; {words} ({have})"
    return ""


def _behind(job: ClusterJob, first: ClusterJob | None, view: PoolView, admission: Admission) -> str:
    ahead = f"job {first.job}" if first else "another job"
    kind: Kind = "pserver"
    if not need(job)["pserver"] or (first and need(first)["pserver"] <= max(0, admission.left["pserver"])):
        kind = "trainer"
    free = max(0, admission.left[kind])
    wants = f"which comes first and waits for {in_words(kind, need(first)[kind])}" if first else "which comes first"
    return (
        f"waits for {in_words(kind, need(job)[kind])} behind {ahead}, {wants}; {free} of {view.usable[kind]} can be had"
    )
