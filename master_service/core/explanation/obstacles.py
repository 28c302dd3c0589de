"""What keeps a job from training at all: it is over, nothing can be decided, or parameters or members are not there.

Each rule is (situation) -> the cause, or None.
"""

from __future__ import annotations

from master_service.core.decisions import pause_checkpoint, recovery
from master_service.core.decisions.collective import storage_waits
from master_service.core.explanation.cause import Cause, Code
from master_service.core.explanation.reports import refusals, start_failures
from master_service.core.explanation.situation import Situation, listed, seconds
from master_service.core.state.job import Job
from trireme_shared.protocol.records import FailureCause, JobState, Phase
from trireme_shared.protocol.records.members import pserver_names


def completed(now: Situation) -> Cause | None:
    state = now.job.state
    if state.phase is not Phase.COMPLETED:
        return None
    result = state.result
    details = [f"{result.trained_records:,} records were trained in {now.job.spec.epochs} epochs."]
    if result.discarded_tasks:
        details.append(f"{result.discarded_tasks} tasks with {result.discarded_records:,} records were discarded.")
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
        hints = ("correct the cause, then trireme run SCRIPT (the same command)", f"trireme status {now.option}")
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
            f"Members wait once their leases ({ttl_s:g} s) may have run out, and go on where they are when etcd answers.",
        ),
        hints=("etcdctl endpoint health, or start etcd again", "trireme doctor"),
    )


def storage_away(now: Situation) -> Cause | None:
    job = now.job
    waiting = {f"pserver-{index}": member.waits for index, member in job.members.pservers.items() if member.waits}
    waiting |= storage_waits(job.members)
    if job.state.phase.final or not (now.storage_away or waiting):
        return None
    details = [f"{name}: {waits}" for name, waits in waiting.items()]
    if now.storage_away:
        details.append(f"The master: {now.storage_away}")
    limit_s = job.spec.recovery_timeout_s
    details.append(
        f"It has waited for {seconds(now.phase_s)}; after recovery_timeout_s {limit_s:g} the job fails, and can be resumed."
    )
    return Cause(
        code=Code.STORAGE_UNREACHABLE,
        summary=f"The job's storage {job.spec.storage} cannot be reached, so no checkpoint can be loaded from it.",
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
    details = [f"The reason: {state.reason}.", f"It began {seconds(now.phase_s)} ago, in timeline {state.timeline}."]
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
    details.append(f"After recovery_timeout_s {job.spec.recovery_timeout_s:g} the job fails, and can be resumed.")
    hints = [f"trireme members {now.option}"]
    if absent:
        hints.insert(0, _start("pserver", job, absent))
    return Cause(
        code=Code.ROLLING_BACK,
        summary=f"The job goes back to {now.rollback_point}; training continues once every parameter server has loaded it.",
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
    details = [f"{there} of {wanted} are registered; missing: {now.named(f'pserver-{index}' for index in absent)}."]
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
        hints=(_start("pserver", job, absent), f"trireme members {now.option}", "read logs/pserver-*.log of the run"),
    )


def no_trainer(now: Situation) -> Cause | None:
    job = now.job
    if job.members.trainers or job.state.phase not in {Phase.WAITING, Phase.RUNNING, Phase.CHECKPOINTING}:
        return None
    return Cause(
        code=Code.NO_TRAINER,
        summary="No trainer is registered, so nobody computes.",
        details=(
            f"0 of {now.trainers_wanted} wanted trainers are there; the job has waited for {seconds(now.phase_s)}.",
        ),
        hints=(_start("trainer", job), "read logs/trainer-*.log of the run"),
    )


def initialising(now: Situation) -> Cause | None:
    job = now.job
    if job.state.phase is not Phase.WAITING or job.members.init_done:
        return None
    if now.initialiser:
        summary = f"{now.initialiser} gives {'the parameters' if now.collective else 'the parameter servers'} their first values."
        details = [f"The others compare their model with its layout; this phase has lasted {seconds(now.phase_s)}."]
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
