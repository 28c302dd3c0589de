"""A job whose trainers have the parameters: who has them, who loads or fetches them.

Each rule is (situation) -> the cause, or None.
"""

from __future__ import annotations

from master_service.core.decisions.collective import still_loading
from master_service.core.explanation.cause import Cause, Code
from master_service.core.explanation.situation import Situation, listed, seconds
from trireme_shared.protocol.records import Phase


def rolling_back(now: Situation) -> Cause | None:
    job, state = now.job, now.job.state
    if not now.collective or state.phase is not Phase.ROLLING_BACK:
        return None
    loaded, loading = _having(now), still_loading(state, job.members)
    details = [f"The reason: {state.reason}.", f"It began {seconds(now.phase_s)} ago, in timeline {state.timeline}."]
    if loaded:
        details.append(f"Loaded by {now.named(loaded)}; at least {job.spec.min_members} must (min_members).")
    if loading:
        details.append(f"Registered and not loaded yet: {now.named(loading)}.")
    details += [
        f"{name} cannot load it: {member.holds.error}"
        for name, member in job.members.trainers.items()
        if member.holds is not None and member.holds.error and name not in loading
    ]
    if not job.members.trainers:
        details.append("No trainer is registered.")
    details.append(f"After recovery_timeout_s {job.spec.recovery_timeout_s:g} the job fails, and can be resumed.")
    return Cause(
        code=Code.ROLLING_BACK,
        summary=f"The job goes back to {now.rollback_point}; training continues once trainers have loaded it.",
        details=tuple(details),
        hints=(f"trireme members {now.option}", "read logs/trainer-*.log of the run"),
    )


def fewer_than_min_members(now: Situation) -> Cause | None:
    job, having = now.job, _having(now)
    waits = job.state.phase is Phase.WAITING and job.members.init_done and len(having) < job.spec.min_members
    if not now.collective or not waits or not job.members.trainers:
        return None
    details = [f"They have them: {now.named(having)}."] if having else []
    if fetching := _fetching(now):
        details.append(f"Registered without them: {now.named(fetching)}.")
    return Cause(
        code=Code.FEWER_THAN_MIN_MEMBERS,
        summary=f"{len(having)} trainers have the parameters, the job trains only with {job.spec.min_members} (min_members).",
        details=(*details, f"It has waited for {seconds(now.phase_s)}; nothing is lost meanwhile."),
        hints=(
            "start more trainers, or start the job again with a lower --min-members",
            f"trireme members {now.option}",
        ),
    )


def fetching(now: Situation) -> Cause | None:
    """They are registered and no members yet."""
    late = _fetching(now) if now.collective and now.job.state.phase is Phase.RUNNING else []
    if not late:
        return None
    failed = {name: member.holds.error for name in late if (member := now.job.members.trainers[name]).holds is not None}
    return Cause(
        code=Code.TRAINERS_FETCH_PARAMETERS,
        summary=f"{listed(late)} {'fetches' if len(late) == 1 else 'fetch'} parameters and optimizer from the other trainers, and will join then.",
        details=tuple(f"{name} said: {error}" for name, error in failed.items() if error),
        hints=("wait: large models take a while", f"trireme members {now.option}"),
    )


def _having(now: Situation) -> list[str]:
    state = now.job.state
    return list(now.job.members.holding(state.timeline, state.checkpoint))


def _fetching(now: Situation) -> list[str]:
    having = set(_having(now))
    return [name for name in now.job.members.trainers if name not in having]
