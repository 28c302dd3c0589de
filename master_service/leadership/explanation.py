"""`explainJob` at a master: one that leads observes its job; one that is taking over says what it is busy
with."""

from __future__ import annotations

from master_service.control.observation import ANSWER_S, Movement
from master_service.core.decisions.scheduling.admission import KINDS
from master_service.core.explanation.explain import explain
from master_service.core.explanation.situation import seconds
from master_service.leadership.master import Master
from trireme_shared.platform.etcd import Get
from trireme_shared.platform.etcd.reading import read_record
from trireme_shared.platform.runtime import clock
from trireme_shared.protocol.errors import NotLeader, NotReady, PeerError, StorageUnreachable
from trireme_shared.protocol.explanations import Cause, Code, Explanation, explanation_of
from trireme_shared.protocol.records import JobSpec


async def explain_job(master: Master, given: int | None = None) -> Explanation:
    """`given`: trainers that a cluster gives the job. Raises NotLeader."""
    try:
        term = master.term
    except (NotReady, NotLeader) as error:
        if isinstance(master.setback, StorageUnreachable):
            return explanation_of(master.keys.job, _storage_away(master.setback))
        if isinstance(error, NotLeader):
            raise
        return await _taking_over(master)
    metrics = master.metrics
    movement = Movement(metrics.moved_at, metrics.rate(clock.monotonic()), metrics.step)
    return explain(
        await term.observer.observe(
            term.job,
            movement,
            unrenewed_s=term.lease.unrenewed_s,
            storage_away=term.storage_away,
            reported=tuple(master.reported),
            given=given,
            why_fewer={kind: master.why_fewer(kind) for kind in KINDS},
        )
    )


async def _taking_over(master: Master) -> Explanation:
    keys, lasted = master.keys, seconds(clock.monotonic() - master.candidate.since)
    try:
        found = await master.etcd.txn([], [Get(keys.spec), Get(keys.task_meta)], timeout_s=ANSWER_S)
    except PeerError as error:
        silent = Cause(
            code=Code.ETCD_SILENT,
            summary=f"{master.name} takes over the job, and etcd does not answer it.",
            details=(f"It has the lock for {lasted}; etcd: {error.message}",),
            hints=("etcdctl endpoint health, or start etcd again", "trireme doctor"),
        )
        return explanation_of(keys.job, silent)
    stored = found.range(0).first
    spec = read_record(JobSpec, keys.spec, stored.value if stored else None) or master.spec
    if found.range(1).first is None and spec is not None:
        return explanation_of(keys.job, _counting(spec, lasted))
    return explanation_of(
        keys.job,
        Cause(
            code=Code.MASTER_TAKING_OVER,
            summary=f"{master.name} takes over the job: it reads the task queue and the counted dataset.",
            details=(f"It has the lock for {lasted}.",),
            hints=("wait: it takes seconds, unless the storage is slow", "read logs/master-*.log of the run"),
        ),
    )


def _storage_away(error: StorageUnreachable) -> Cause:
    return Cause(
        code=Code.STORAGE_UNREACHABLE,
        summary="No master can take the job over, because its storage or its dataset cannot be reached.",
        details=(error.message, "Nothing is decided meanwhile; the master tries again by itself."),
        hints=(error.hint or "make it reachable", "read logs/master-*.log of the run"),
    )


def _counting(spec: JobSpec, lasted: str) -> Cause:
    sources = [*spec.dataset.urls, *(spec.evaluation_dataset.urls if spec.evaluation_dataset else ())]
    return Cause(
        code=Code.COUNTING_DATASET,
        summary=f"The master counts the dataset's records, for {lasted} so far; no task can be given out "
        "before.",
        details=(
            f"The dataset: {', '.join(sources)}.",
            "Counts are kept: a master that follows goes on with them.",
        ),
        hints=("wait: Parquet and NumPy files count at once, lines and CSV are read in full",),
    )
