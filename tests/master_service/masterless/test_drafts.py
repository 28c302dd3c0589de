"""What is decided on a draft changes the job only once the draft has landed."""

from __future__ import annotations

from master_service.core.changes import DropEvaluationsAfter
from master_service.core.queue.file_table import FileTable, TableFile
from master_service.core.state.job import Job
from master_service.masterless.shared_job import draft_of
from trireme_shared.protocol.evaluations import Evaluation
from trireme_shared.protocol.records import Dispatch, JobSpec
from trireme_shared.protocol.records.datasets import TextLines


def test_an_evaluation_that_is_settled_on_a_draft_is_not_in_the_job():
    dataset, table = TextLines("a.txt"), FileTable((TableFile("a.txt", 8),), 4)
    spec = JobSpec(
        job="j", script="s", storage="d", dataset=dataset, evaluation_dataset=dataset, evaluate_every=1,
        dispatch=Dispatch.ETCD
    )  # fmt: skip
    job = Job.open(spec, table, table)
    first, second = (Evaluation(number=number, step=number, timeline=0, checkpoint="u") for number in (1, 2))
    job.apply(first, 0.0)
    draft = draft_of(job)
    draft.apply(second, 0.0)
    assert (job.evaluations, draft.evaluations) == ({1: first}, {1: first, 2: second})
    draft.apply(DropEvaluationsAfter(0), 0.0)
    assert (job.evaluations, draft.evaluations) == ({1: first}, {})
