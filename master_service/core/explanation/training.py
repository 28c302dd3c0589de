"""A job that runs: who is waited for, how fast it is, and what somebody should know about it.

Each rule is (situation) -> the cause, or None.
"""

from __future__ import annotations

from itertools import islice

from master_service.core.decisions import operations, resize
from master_service.core.explanation.situation import NAMED, Situation, listed, seconds
from master_service.core.queue.task_queue import TaskQueue
from trireme_shared.protocol.explanations import Cause, Code
from trireme_shared.protocol.records import Mode, Stage, TaskKind
from trireme_shared.protocol.records.members import pserver_names
from trireme_shared.protocol.records.operations import OperationKind

# ------------------------------------------------------------------ progress


def progress(now: Situation) -> Cause:
    job, spec = now.job, now.job.spec
    training = job.training
    total = spec.epochs * training.streams.records
    details = [
        (
            f"Epoch {min(training.current + 1, spec.epochs)} of {spec.epochs}, {job.records_done:,} of "
            f"{total:,} records."
        )
    ]
    if job.state.stage is not Stage.TRAIN:
        done = f"stage {job.state.stage} is under way"
        if job.due is not None:
            _, pending, finished, _ = job.due.counts
            details.append(f"{finished} of {job.due.total} tasks are done, {pending} are under way.")
    elif now.records_per_s:
        steps = (
            f" ({now.records_per_s / spec.global_batch_size:.3g} steps/s)" if spec.mode is Mode.SYNC else ""
        )
        left_s = (total - job.records_done) / now.records_per_s
        done = f"{now.records_per_s:,.0f} records/s{steps}, {seconds(left_s)} left"
    else:
        done = "its speed is not known yet"
    if now.step is not None:
        details.append(f"{now.step} steps are done.")
    return Cause(
        code=Code.PROGRESS_IS_FINE,
        summary=f"Job {spec.job} makes progress: {done}.",
        details=tuple(details),
        hints=(f"trireme status {now.option}",),
    )


def no_progress(now: Situation) -> Cause:
    """Nothing else explains it."""
    servers = "" if now.collective else f" and {len(now.job.members.pservers)} parameter servers"
    return Cause(
        code=Code.NO_PROGRESS,
        summary=f"No minibatch was finished for {seconds(now.still_s)}, and every member is there and "
        "renews its lease.",
        details=(
            f"{len(now.job.trainers.names)} trainers{servers} are registered.",
            f"The job's state: {now.job.state.phase}, {now.job.state.reason or 'no reason given'}.",
        ),
        hints=(
            "read logs/trainer-*.log of the run",
            "trireme doctor",
            f"trireme tasks --state pending {now.option}",
        ),
    )


# ------------------------------------------------------------------ who is waited for


def silent_member(now: Situation) -> Cause | None:
    if not now.silent:
        return None
    names = sorted(now.silent, key=lambda name: -now.silent[name])
    ttl_s = now.job.spec.lease_ttl_s
    return Cause(
        code=Code.MEMBER_SILENT,
        summary=f"{listed(names)} {'has' if len(names) == 1 else 'have'} not been heard for "
        f"{seconds(now.silent[names[0]])}: frozen, cut off, or gone.",
        details=(
            (
                f"A member renews its lease every {ttl_s / 3:.1f} s; after {ttl_s:g} s without a "
                "renewal it counts as gone."
            ),
            f"Silent: {now.named(names)}.",
        ),
        hints=(
            f"wait {seconds(ttl_s)}: its lease runs out, and others take its place",
            "kill the process if it is frozen (trireme run does that by itself)",
            f"trireme members {now.option}",
        ),
    )


def lanes_not_started(now: Situation) -> Cause | None:
    """Synchronous: a trainer owns lanes and computes none of their tasks, so no step can be completed."""
    job, queue = now.job, now.job.training
    if job.spec.mode is not Mode.SYNC or job.state.stage is not Stage.TRAIN or not now.is_still:
        return None
    late = []
    for trainer in job.trainers.names[: job.spec.lanes]:
        first, last = job.trainers.lanes_of(trainer)
        idle = [lane for lane in range(first, last) if not _is_computed(now, trainer, lane)]
        if idle:
            late.append((trainer, idle))
    if not late or (not queue.pending and not any(queue.cursors.values())):
        return _nobody_began(now) if late else None
    refused = {each.failure.trainer: each for each in now.reported if not each.task_id}
    details = [
        f"{now.named([trainer])} owns lane{'s' if len(idle) > 1 else ''} {listed(map(str, idle))}"
        " and has not asked for their next task: it is joining, or its model was refused."
        for trainer, idle in late[:NAMED]
    ]
    details += [
        f"{trainer} reported {refused[trainer].failure.error_type}: {refused[trainer].failure.message}"
        for trainer, _ in late
        if trainer in refused
    ]
    return Cause(
        code=Code.LANES_NOT_STARTED,
        summary=f"A step needs every lane, and {listed(trainer for trainer, _ in late)} has not begun with "
        "its own.",
        details=tuple(details),
        hints=(
            f"trireme members {now.option}",
            "read the log of that trainer; if it cannot join, end it, and its lanes go to the others",
        ),
    )


def _nobody_began(now: Situation) -> Cause:
    return Cause(
        code=Code.LANES_NOT_STARTED,
        summary=f"No trainer has asked for a task yet, {seconds(now.still_s)} after the job began to run.",
        details=(
            f"Registered: {now.named(now.job.trainers.names)}; they load parameters or cannot join.",
            *_addresses(now),
        ),
        hints=(
            "read logs/trainer-*.log of the run",
            f"trireme members {now.option}",
            "where members cannot look up or reach these addresses: TRIREME_ADVERTISE of whoever has them",
        ),
    )


def _addresses(now: Situation) -> list[str]:
    """Where members say that they are, each host once: one that nobody reaches looks like any other here."""
    members = now.job.members
    urls = [server.url for server in members.pservers.values()]
    urls += [trainer.url for trainer in members.trainers.values()]
    places = [url.partition("://")[2].partition("/")[0] for url in urls]
    hosts = dict.fromkeys(place.rpartition(":")[0] or place for place in places)
    return [f"They must reach each other and the master at {listed(hosts)}."] if hosts else []


def _is_computed(now: Situation, trainer: str, lane: int) -> bool:
    """Whether the trainer has a task of the lane, or the lane has none left in this epoch."""
    queue = now.job.training
    name = queue.streams.name(lane)
    open_tasks = queue.open_of.get(name, ())
    if any(
        task_id in queue.pending and queue.pending[task_id].record.trainer == trainer
        for task_id in open_tasks
    ):
        return True
    return not open_tasks and queue.cursors.get(name, 0) == queue.streams.length(lane)


def late_tasks(now: Situation) -> Cause | None:
    """Every task is taken and some trainers have none."""
    job, queue = now.job, now.job.due
    trainers = len(job.trainers.names)
    if (
        queue is None
        or queue.by_lane
        or queue.kind is TaskKind.EXPORT
        or queue.finished
        or queue.requeued
        or queue.dispatched < queue.total
    ):
        return None
    idle = trainers - len({held.record.trainer for held in queue.pending.values()})
    if not queue.pending or idle <= 0:
        return None
    latest = sorted(queue.pending, key=lambda task_id: queue.pending[task_id].last_sign)
    details = [
        f"{queue.streams.describe(task_id)} at {now.named([held.record.trainer])}: "
        f"{_minibatches(held.minibatches)} done, "
        f"last sign {seconds(now.now - held.last_sign)} ago, "
        f"{seconds(max(0.0, held.deadline - now.now))} until it is given again."
        for task_id in latest[:NAMED]
        for held in (queue.pending[task_id],)
    ]
    if queue.total < trainers:
        details.append(
            f"There are {queue.total} {queue.kind} tasks for {trainers} trainers: set a smaller "
            "records_per_task."
        )
    return Cause(
        code=Code.LATE_TASKS,
        summary=f"All {queue.total} tasks of this epoch are taken; {idle} of {trainers} trainers wait for "
        "the last "
        f"{len(queue.pending)}.",
        details=tuple(details),
        hints=(
            f"trireme tasks --state pending {now.option}",
            "more, smaller tasks: --set records_per_task=N",
        ),
    )


def awaited_evaluation(now: Situation) -> Cause | None:
    """Training has come to the next version that is evaluated, and the evaluation before it is not over."""
    job, running = now.job, now.job.evaluation.running
    if job.awaited is not None:
        number, since = job.awaited
        limit_s = job.spec.recovery_timeout_s
        return Cause(
            code=Code.EVALUATION_AWAITED,
            summary=f"Training waits for evaluation {number}, whose checkpoint is not written yet.",
            details=(
                (
                    f"It has waited {seconds(now.now - since)}; after {seconds(limit_s)} training goes "
                    "on without it."
                ),
            ),
            hints=(f"trireme checkpoint list {now.option}",),
        )
    if running is None or not now.is_still or job.spec.mode is Mode.ASYNC:
        return None  # asynchronous training waits for none
    queue = job.queues[TaskKind.VALIDATE]
    _, pending, done, _ = queue.counts
    return Cause(
        code=Code.EVALUATION_AWAITED,
        summary=f"Evaluation {running.number} (step {running.ref.step}) is under way; training waits for "
        "it at the next one.",
        details=(f"{done} of {queue.total} tasks are done, {pending} are under way.",),
        hints=(
            f"trireme tasks --state pending {now.option}",
            "evaluate less often (evaluate_every), or with more trainers than lanes: the spare ones evaluate",
        ),
    )


def awaited_slower_trainer(now: Situation) -> Cause | None:
    """Asynchronous: trainers wait because of `max_staleness`, as they said last."""
    queue = now.job.due
    waiting = (
        {}
        if queue is None or queue.by_lane
        else {held.record.trainer: held.waits_for for held in queue.pending.values() if held.waits_for}
    )
    if not waiting:
        return None
    return Cause(
        code=Code.SLOWER_TRAINER_AWAITED,
        summary=f"{len(waiting)} of {len(now.job.trainers.names)} trainers waited for a slower one when "
        "they reported last (max_staleness).",
        details=tuple(f"{name}: {told}." for name, told in sorted(waiting.items())[:NAMED]),
        hints=("raise max_staleness, or find out why that trainer is slow", f"trireme members {now.option}"),
    )


def slow_minibatch(now: Situation) -> Cause | None:
    """Of a trainer that is there and is to train: a task may wait for an owner while its last one is gone."""
    job, queue = now.job, now.job.due
    if queue is None or not now.is_still:
        return None
    if queue.kind is TaskKind.EXPORT:
        return _long_export(now, queue)
    training = job.members.trainers.keys() & set(job.trainers.names)
    held = [task_id for task_id, pending in queue.pending.items() if pending.record.trainer in training]
    if not held:
        return None
    oldest = sorted(held, key=lambda task_id: queue.pending[task_id].last_sign)
    first = queue.pending[oldest[0]]
    return Cause(
        code=Code.SLOW_MINIBATCH,
        summary=f"{first.record.trainer} has worked for {seconds(now.now - first.last_sign)} on "
        f"{queue.streams.describe(oldest[0])} without a finished minibatch, or waits for another trainer's.",
        details=tuple(
            f"{queue.streams.describe(task_id)} at {now.named([held.record.trainer])}: "
            f"{_minibatches(held.minibatches)} done, last "
            f"sign {seconds(now.now - held.last_sign)} ago, given again in "
            f"{seconds(max(0.0, held.deadline - now.now))}."
            for task_id in oldest[:NAMED]
            for held in (queue.pending[task_id],)
        ),
        hints=(
            f"trireme tasks --state pending {now.option}",
            "py-spy dump --pid PID shows where a trainer is",
        ),
    )


def _long_export(now: Situation, queue: TaskQueue) -> Cause | None:
    held = next(iter(queue.pending.values()), None)
    if held is None:
        return None
    return Cause(
        code=Code.SLOW_MINIBATCH,
        summary=f"{held.record.trainer} has been exporting the model for {seconds(now.now - held.since)}.",
        details=(
            (
                f"It said {seconds(now.now - held.last_sign)} ago that it works on it; it may take as "
                "long as it does."
            ),
        ),
        hints=("py-spy dump --pid PID shows where a trainer is", "end that trainer, and another one exports"),
    )


# ------------------------------------------------------------------ what somebody should know


def absent_pservers(now: Situation) -> Cause | None:
    """Asynchronous: some parameter servers are away, and the others go on."""
    state = now.job.state
    if not state.absent:
        return None
    limit_s = now.job.spec.recovery_timeout_s
    return Cause(
        code=Code.PARAMETER_SERVER_AWAY,
        summary=f"{pserver_names(state.absent)} {'is' if len(state.absent) == 1 else 'are'} away; the "
        "others go on.",
        details=(
            state.reason,
            (
                "It comes back from its newest checkpoint; if it does not within recovery_timeout_s "
                f"{limit_s:g}, the job fails."
            ),
        ),
        hints=(f"trireme members {now.option}", "read logs/pserver-*.log of the run"),
    )


def failing_checkpoints(now: Situation) -> Cause | None:
    members = now.job.members
    troubled = {
        f"pserver-{index}": each.trouble for index, each in sorted(members.pservers.items()) if each.trouble
    }
    troubled |= {name: each.trouble for name, each in members.trainers.items() if each.trouble}
    if not troubled:
        return None
    return Cause(
        code=Code.CHECKPOINTS_FAIL,
        summary=f"{listed(troubled)} cannot write checkpoints.",
        details=tuple(islice((f"{name}: {trouble}" for name, trouble in troubled.items()), NAMED)),
        hints=(
            f"make the storage {now.job.spec.storage} writable: it is tried again by itself",
            f"trireme checkpoint list {now.option}",
        ),
    )


def waiting_operations(now: Situation) -> Cause | None:
    running = now.job.operations.running()
    if not running:
        return None
    kinds = [kind for each in running if (kind := resize.lacking(now.job, each))]
    resizes = running[0].kind is OperationKind.RESIZE
    return Cause(
        code=Code.OPERATION_WAITS,
        summary=f"{running[0].kind} {running[0].operation_id} waits for "
        f"{operations.waits_for(now.job, running[0])}.",
        details=tuple(
            f"{each.operation_id} ({each.cause or 'no cause given'}) waits for "
            f"{operations.waits_for(now.job, each)}, "
            f"for at most {each.limit_s:g} s."
            for each in running[:NAMED]
        )
        + tuple(f"{why[0].upper()}{why[1:]}." for kind in kinds if (why := now.why_fewer.get(kind, ""))),
        hints=("trireme pool", "trireme jobs")
        if kinds and now.why_fewer.get(kinds[0])
        else (f"trireme {'members' if resizes else 'checkpoint list'} {now.option}",),
    )


def discarded_tasks(now: Situation) -> Cause | None:
    queue = now.job.training
    if not queue.discarded:
        return None
    lost = sum(put.records for (epoch, _), put in queue.discarded.items() if epoch == queue.current)
    allowed = now.job.spec.max_discarded_fraction
    newest = list(islice(reversed(queue.discarded.items()), NAMED))
    details = [
        f"{queue.streams.describe(task_id)} of epoch {epoch}: {put.task.failures} failures, the "
        f"last: {put.task.cause}"
        for (epoch, task_id), put in newest
    ]
    details.append(
        f"{lost:,} of {queue.streams.records:,} records of this epoch; above "
        f"max_discarded_fraction {allowed:g} the job fails."
    )
    return Cause(
        code=Code.TASK_DISCARDED,
        summary=f"{len(queue.discarded)} task{'s were' if len(queue.discarded) > 1 else ' was'} discarded; "
        "training goes on without their records.",
        details=tuple(details),
        hints=(f"trireme tasks --state discarded {now.option}",),
    )


def trainers_without_lanes(now: Situation) -> Cause | None:
    spec, names = now.job.spec, now.job.trainers.names
    if spec.mode is not Mode.SYNC or len(names) <= spec.lanes:
        return None
    spares = names[spec.lanes :]
    return Cause(
        code=Code.TRAINERS_WITHOUT_LANES,
        summary=f"{len(names)} trainers share {spec.lanes} lanes: {len(spares)} "
        f"{'has' if len(spares) == 1 else 'have'} nothing to compute.",
        details=(f"Hot spares, which take over at once when another trainer is gone: {now.named(spares)}.",),
        hints=(f"use at most {spec.lanes} trainers, or start a new job with more --lanes (a power of two)",),
    )


def fewer_trainers(now: Situation) -> Cause | None:
    there, wanted = len(now.job.members.trainers), now.trainers_wanted
    if not 0 < there < wanted:
        return None
    return Cause(
        code=Code.FEWER_TRAINERS,
        summary=f"{there} of {wanted} trainers are there; the others' work is done by these.",
        details=(f"Registered: {now.named(now.job.members.trainers)}.",),
        hints=(f"trireme members {now.option}", "read logs/trainer-*.log of the run"),
    )


def _minibatches(count: int) -> str:
    return f"{count} minibatch{'' if count == 1 else 'es'}"
