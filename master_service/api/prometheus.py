"""Prometheus metrics, made from the job at each scrape: nothing is counted twice, nothing is kept from one term to the next."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from master_service.leadership.master import Master
from shared.errors import TriremeError
from shared.runtime import clock


def exposition(master: Master) -> bytes:
    return generate_latest(_Collector(master))


class _Collector:
    def __init__(self, master: Master) -> None:
        self._master = master

    def collect(self) -> Iterator[Metric]:
        master = self._master
        try:
            term = master.term
        except TriremeError:
            yield GaugeMetricFamily("trireme_master_leading", "1 on the leader", value=0)
            return
        job, metrics = term.job, master.metrics
        yield GaugeMetricFamily("trireme_master_leading", "1 on the leader", value=1)
        yield GaugeMetricFamily("trireme_master_term", "etcd revision of the master lock", value=term.number)
        yield CounterMetricFamily("trireme_master_commits", "transactions written", value=term.writer.commits)
        yield GaugeMetricFamily("trireme_generation", "current membership", value=job.state.generation)
        yield GaugeMetricFamily("trireme_trainers", "registered trainers", value=len(job.members.trainers))
        yield GaugeMetricFamily("trireme_pservers", "registered pservers", value=len(job.members.pservers))
        yield GaugeMetricFamily("trireme_epoch", "epoch under way", value=job.training.current)
        yield GaugeMetricFamily("trireme_step", "steps done", value=metrics.step or 0)
        yield CounterMetricFamily("trireme_trained_records", "records reported as trained", value=metrics.records)
        yield CounterMetricFamily(
            "trireme_skipped_records", "records left out: their loss or gradient was not finite", value=metrics.skipped
        )
        yield GaugeMetricFamily("trireme_records_per_second", "over 15 s", value=metrics.rate(clock.monotonic()))
        missed = GaugeMetricFamily(
            "trireme_missed_minibatches",
            "asynchronous: of closed tasks, never applied at that parameter server",
            labels=["pserver", "cause"],
        )
        for cause, counts in (("lost", job.losses.lost), ("skipped", job.losses.skipped)):
            for index, count in counts.items():
                missed.add_metric([index, cause], count)
        yield missed
        phase = GaugeMetricFamily("trireme_phase", "1 for the job's phase and stage", labels=["phase", "stage"])
        phase.add_metric([str(job.state.phase), str(job.state.stage)], 1)
        yield phase
        tasks = GaugeMetricFamily("trireme_tasks", "tasks of the current epoch", labels=["kind", "state"])
        for kind, queue in job.queues.items():
            for state, count in zip(("todo", "pending", "done", "discarded"), queue.counts, strict=True):
                tasks.add_metric([str(kind), state], count)
        yield tasks
