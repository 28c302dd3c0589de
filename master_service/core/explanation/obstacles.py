"""What stands in the way of a job that trains nothing: it is over, nobody decides, parameters or members are
not there; and failures that trainers reported. Each rule is (situation) -> the cause, or None."""

from __future__ import annotations

from master_service.core.decisions import pause_checkpoint, recovery
from master_service.core.decisions.collective import still_loading, storage_waits
from master_service.core.explanation.situation import NAMED, Reported, Situation, listed, seconds
from master_service.core.state.job import Job
from trireme_shared.protocol.errors import InvalidArgument, LayoutMismatch
from trireme_shared.protocol.explanations import Cause, Code
from trireme_shared.protocol.records import FailureCause, JobState, Phase
from trireme_shared.protocol.records.members import pserver_names


def completed(now: Situation) -> Cause | None:
    state = now.job.state
    if state.phase is not Phase.COMPLETED:
        return None
    result = state.result
    details = [f"{result.trained_records:,} records were trained in {now.job.spec.epochs} epochs."]
    if result.discarded_tasks:
        details.append(
            f"{result.discarded_tasks} tasks with {result.discarded_records:,} records were discarded."
        )
    details += [f"The model ({kind}) is {path}." for kind, path in result.exports.items()]
    return Cause(
        code=Code.JOB_COMPLETED,
        summary=f"Job {now.job.spec.job} is completed: nothing is left to do.",
        details=tuple(details),
        hints=(f"trireme status {now.option}", "trireme run SCRIPT --fresh trains it again"),
    )


def failed(now: Situation) -> Cause | None:
    job, state = now.job, now.job.state
    if state.phase is not Phase.FAILED:
        return None
    details = [f"The cause is {state.cause or 'not recorded'}."]
    details += failure_details(state)
    resumable = state.cause not in (None, FailureCause.SCRIPT) and _has_checkpoint(job)
    if resumable:
        details.append("It is resumable: started again, it goes on from its newest checkpoint.")
        hints = ("trireme run SCRIPT (the same command as before)", f"trireme checkpoint list {now.option}")
    else:
        details.append("It is not resumable: started again, it starts from the beginning.")
        hints = (
            "correct the cause, then trireme run SCRIPT (the same command)",
            f"trireme status {now.option}",
        )
    return Cause(
        code=Code.JOB_FAILED,
        summary=f"Job {job.spec.job} has failed: {state.reason}",
        details=tuple(details),
        hints=hints,
    )


def failure_details(state: JobState) -> list[str]:
    """The script's error with its traceback, and what was left out, of a job that has failed."""
    details: list[str] = []
    if (failure := state.failure) is not None:
        where = f" in {failure.task}" if failure.task else ""
        who = f" at {failure.trainer}" if failure.trainer else ""
        details.append(f"The error{where}{who}: {failure.error_type}: {failure.message}")
        details += [failure.traceback.rstrip()] if failure.traceback else []
    if state.result.discarded_tasks:
        left_out = f"{state.result.discarded_tasks} tasks with {state.result.discarded_records:,} records"
        details.append(f"{left_out} were left out.")
    return details


def _has_checkpoint(job: Job) -> bool:
    return job.members.latest is not None or bool(job.members.own)


def etcd_full(now: Situation) -> Cause | None:
    if not now.etcd_full:
        return None
    return Cause(
        code=Code.ETCD_OUT_OF_SPACE,
        summary="etcd has used up its space and takes no writes, so no task can be given out.",
        details=(now.etcd_full,),
        hints=(
            "etcdctl endpoint status; etcdctl compact REVISION; etcdctl defrag; etcdctl alarm disarm",
            "trireme doctor",
        ),
    )


def etcd_silent(now: Situation) -> Cause | None:
    if not now.etcd_silent_s:
        return None
    ttl_s = now.job.spec.lease_ttl_s
    return Cause(
        code=Code.ETCD_SILENT,
        summary=f"etcd has not answered for {seconds(now.etcd_silent_s)}; nothing can be decided without it.",
        details=(
            (
                f"Members wait once their leases ({ttl_s:g} s) may have run out, and go on where they "
                "are when etcd answers."
            ),
        ),
        hints=("etcdctl endpoint health, or start etcd again", "trireme doctor"),
    )


def storage_away(now: Situation) -> Cause | None:
    job = now.job
    waiting = {
        f"pserver-{index}": member.waits for index, member in job.members.pservers.items() if member.waits
    }
    waiting |= storage_waits(job.members)
    if job.state.phase.final or not (now.storage_away or waiting):
        return None
    details = [f"{name}: {waits}" for name, waits in waiting.items()]
    if now.storage_away:
        details.append(f"The master: {now.storage_away}")
    limit_s = job.spec.recovery_timeout_s
    details.append(
        f"It has waited for {seconds(now.phase_s)}; after recovery_timeout_s {limit_s:g} the job "
        "fails, and can be resumed."
    )
    return Cause(
        code=Code.STORAGE_UNREACHABLE,
        summary=f"The job's storage {job.spec.storage} cannot be reached, so no checkpoint can be loaded "
        "from it.",
        details=tuple(details),
        hints=(
            "make the storage reachable: it is tried again by itself",
            f"trireme checkpoint list {now.option}",
        ),
    )


def nobody_can_start(now: Situation) -> Cause | None:
    """No trainer is there, and those that came could not start."""
    if now.job.members.trainers or now.job.state.phase is Phase.ROLLING_BACK:
        return None
    return refusals(now) or start_failures(now)


def rolling_back(now: Situation) -> Cause | None:
    job, state = now.job, now.job.state
    if state.phase is not Phase.ROLLING_BACK or now.collective:
        return None
    details = [
        f"The reason: {state.reason}.",
        f"It began {seconds(now.phase_s)} ago, in timeline {state.timeline}.",
    ]
    absent = now.missing_pservers()
    if absent:
        details.append(f"Not registered: {now.named(f'pserver-{index}' for index in absent)}.")
    loading = [
        f"pserver-{index}"
        for index in sorted(job.members.pservers)
        if index < job.spec.pservers and not recovery.has_parameters(state, job.members, index)
    ]
    if loading:
        details.append(f"Registered and not loaded yet: {now.named(loading)}.")
    if not absent and not loading:
        details.append("Every parameter server has loaded it; the task queue is being restored.")
    details.append(
        f"After recovery_timeout_s {job.spec.recovery_timeout_s:g} the job fails, and can be resumed."
    )
    hints = [f"trireme members {now.option}"]
    if absent:
        hints.insert(0, _start("pserver", job, absent))
    return Cause(
        code=Code.ROLLING_BACK,
        summary=f"The job goes back to {now.rollback_point}; training continues once every parameter "
        "server has loaded it.",
        details=tuple(details),
        hints=tuple(hints),
    )


def pservers_missing(now: Situation) -> Cause | None:
    job = now.job
    absent = now.missing_pservers()
    others_go_on = bool(job.state.absent) and len(absent) < job.spec.pservers
    if not absent or job.state.phase is Phase.ROLLING_BACK or others_go_on:
        return None
    there, wanted = len(job.members.pservers), job.spec.pservers
    none = not there
    details = [
        f"{there} of {wanted} are registered; missing: {now.named(f'pserver-{index}' for index in absent)}."
    ]
    if job.members.init_done:
        details.append(
            "If they do not come back within the time of a lease, the job goes back to its newest checkpoint."
        )
    return Cause(
        code=Code.NO_PARAMETER_SERVER if none else Code.FEWER_PARAMETER_SERVERS,
        summary="No parameter server is registered, so nobody holds the parameters."
        if none
        else f"The job waits for {wanted - there} of its {wanted} parameter servers.",
        details=tuple(details),
        hints=(
            _start("pserver", job, absent),
            f"trireme members {now.option}",
            "read logs/pserver-*.log of the run",
        ),
    )


def no_trainer(now: Situation) -> Cause | None:
    job = now.job
    if job.members.trainers or job.state.phase not in {Phase.WAITING, Phase.RUNNING, Phase.CHECKPOINTING}:
        return None
    return Cause(
        code=Code.NO_TRAINER,
        summary="No trainer is registered, so nobody computes.",
        details=(
            (
                f"0 of {now.trainers_wanted} wanted trainers are there; the job has waited for "
                f"{seconds(now.phase_s)}."
            ),
        ),
        hints=(_start("trainer", job), "read logs/trainer-*.log of the run"),
    )


def initialising(now: Situation) -> Cause | None:
    job = now.job
    if job.state.phase is not Phase.WAITING or job.members.init_done:
        return None
    if now.initialiser:
        summary = (
            f"{now.initialiser} gives "
            f"{'the parameters' if now.collective else 'the parameter servers'} their first values."
        )
        details = [
            f"The others compare their model with its layout; this phase has lasted {seconds(now.phase_s)}."
        ]
    else:
        summary = "The parameters are not initialised yet, and no trainer has begun to."
        details = [
            f"{len(job.members.trainers)} trainers are registered: {now.named(job.members.trainers)}.",
            f"This phase has lasted {seconds(now.phase_s)}.",
        ]
    silent = [name for name in (now.initialiser,) if name in now.silent]
    if silent:
        details.append(f"{now.named(silent)}: when its lease runs out another trainer takes over.")
    return Cause(
        code=Code.INITIALISING_PARAMETERS,
        summary=summary,
        details=tuple(details),
        hints=("wait: large models take a while", f"trireme members {now.option}"),
    )


def pause(now: Situation) -> Cause | None:
    job, state = now.job, now.job.state
    saving = state.saving
    if state.phase is not Phase.CHECKPOINTING or saving is None:
        return None
    if not saving.cut:
        late = pause_checkpoint.still_training(state, job.trainers, job.members)
        waits = f"{now.named(late)} to pause" if late else "the cut to be written"
    else:
        copying = pause_checkpoint.still_copying(job)
        waits = f"{pserver_names(copying)} to copy the parameters" if copying else "training to be released"
    details = [f"The reason: {state.reason}.", f"The pause has lasted {seconds(now.phase_s)}."]
    if saving.left_out:
        details.append(f"Left out, because they did not pause in time: {listed(saving.left_out)}.")
    return Cause(
        code=Code.CHECKPOINT_PAUSE,
        summary=f"Training pauses for checkpoint {saving.step}: it waits for {waits}.",
        details=tuple(details),
        hints=("wait: trainers that do not pause in time are left out", f"trireme members {now.option}"),
    )


def waiting(now: Situation) -> Cause | None:
    """Members are there; the job is about to run."""
    job = now.job
    if job.state.phase is not Phase.WAITING or not job.members.init_done:
        return None
    return Cause(
        code=Code.NO_PROGRESS,
        summary=f"The job waits: {job.state.reason or 'its members have just arrived'}.",
        details=(f"It has waited for {seconds(now.phase_s)}.",),
        hints=(f"trireme status {now.option}",),
    )


def _start(kind: str, job: Job, indices: list[int] | None = None) -> str:
    """The command that starts such a member by hand."""
    module = {"trainer": "trainer_agent", "pserver": "pserver_service"}[kind]
    count = f" ({len(indices)} of them)" if indices and len(indices) > 1 else ""
    return f"TRIREME_JOB={job.spec.job} TRIREME_ETCD=URL python -m {module}{count}"


# ---------------------------------------------- collective: who has the parameters, who loads or fetches them


def loading_checkpoint(now: Situation) -> Cause | None:
    job, state = now.job, now.job.state
    if not now.collective or state.phase is not Phase.ROLLING_BACK:
        return None
    loaded, loading = _having(now), still_loading(state, job.members)
    details = [
        f"The reason: {state.reason}.",
        f"It began {seconds(now.phase_s)} ago, in timeline {state.timeline}.",
    ]
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
    details.append(
        f"After recovery_timeout_s {job.spec.recovery_timeout_s:g} the job fails, and can be resumed."
    )
    return Cause(
        code=Code.ROLLING_BACK,
        summary=(
            f"The job goes back to {now.rollback_point}; training continues once trainers have loaded it."
        ),
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
        summary=f"{len(having)} trainers have the parameters, the job trains only with "
        f"{job.spec.min_members} (min_members).",
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
    failed = {
        name: member.holds.error
        for name in late
        if (member := now.job.members.trainers[name]).holds is not None
    }
    return Cause(
        code=Code.TRAINERS_FETCH_PARAMETERS,
        summary=f"{listed(late)} {'fetches' if len(late) == 1 else 'fetch'} parameters and optimizer from "
        "the other trainers, and will join then.",
        details=tuple(f"{name} said: {error}" for name, error in failed.items() if error),
        hints=("wait: large models take a while", f"trireme members {now.option}"),
    )


def _having(now: Situation) -> list[str]:
    state = now.job.state
    return list(now.job.members.holding(state.timeline, state.checkpoint))


def _fetching(now: Situation) -> list[str]:
    having = set(_having(now))
    return [name for name in now.job.members.trainers if name not in having]


# -------------------------------------------------------------------- failures that trainers reported

RECENT_S = 300.0  # an older failure no longer explains the present

_REFUSED = {LayoutMismatch.code, InvalidArgument.code}


def refusals(now: Situation) -> Cause | None:
    """Trainers whose model, device or settings are not the job's."""
    found = [each for each in _outside(now) if each.failure.error_type in _REFUSED]
    if not found:
        return None
    names = list(dict.fromkeys(each.failure.trainer for each in found))
    return Cause(
        code=Code.TRAINER_REFUSED,
        summary=f"{now.named(names)} came and may not join: {_shortly(found[-1])}",
        details=(
            *_told(found),
            "Another model does not count against the job while others train.",
            _budget(now),
        ),
        hints=(
            "give every trainer the same script, packages and device, or start a new job with --job NAME",
            f"trireme members {now.option}",
        ),
    )


def start_failures(now: Situation) -> Cause | None:
    """The script raises outside of tasks, for example where it builds the model."""
    found = [each for each in _outside(now) if each.failure.error_type not in _REFUSED]
    if not found:
        return None
    return Cause(
        code=Code.USER_CODE_FAILS,
        summary=f"The script fails at {found[-1].failure.trainer}: {_shortly(found[-1])}",
        details=(*_told(found), _budget(now)),
        hints=("correct the script and start the job again", "read logs/trainer-*.log of the run"),
    )


def failing_tasks(now: Situation) -> Cause | None:
    """Tasks that have failed and are tried again."""
    queue = now.job.due
    if queue is None:
        return None
    last = {each.task_id: each for each in now.reported if each.task_id}
    failing = {task_id: back.failures for task_id, back in queue.requeued.items() if back.failures}
    failing |= {
        task_id: held.record.failures for task_id, held in queue.pending.items() if held.record.failures
    }
    if not failing:
        return None
    limit = queue.max_failures
    worst = sorted(failing, key=lambda task_id: -failing[task_id])

    def error(task_id: str) -> str:
        if (back := queue.requeued.get(task_id)) is not None:
            return back.cause
        return (
            _shortly(last[task_id])
            if task_id in last
            else "its error is in the log of the trainer that had it"
        )

    details = [
        f"{queue.streams.describe(task_id)} has failed {failing[task_id]} of {limit} times: {error(task_id)}"
        for task_id in worst[:NAMED]
    ]
    details.append(
        f"After {limit} failures (max_task_failures) a task is discarded, and training goes on without it."
    )
    return Cause(
        code=Code.USER_CODE_FAILS,
        summary=f"{len(failing)} task{'s' if len(failing) > 1 else ''} failed and will be tried again; "
        f"the script raises: {error(worst[0])}",
        details=tuple(details),
        hints=(
            f"trireme tasks --state requeued {now.option}",
            "correct the script or the records, then start again",
        ),
    )


def _outside(now: Situation) -> list[Reported]:
    return [each for each in now.reported if not each.task_id and each.ago_s <= RECENT_S]


def _told(found: list[Reported]) -> list[str]:
    return [
        f"{each.failure.trainer}, {seconds(each.ago_s)} ago"
        + (f", in {each.failure.task}" if each.failure.task else "")
        + f": {each.failure.error_type}: {each.failure.message}"
        for each in found[-NAMED:]
    ]


def _budget(now: Situation) -> str:
    budget = now.job.budget
    return f"{budget.counts.total} of max_user_failures {budget.allowed} are counted; then the job fails."


def _shortly(each: Reported) -> str:
    return f"{each.failure.error_type}: {each.failure.message}"
