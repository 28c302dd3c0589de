"""Prometheus metrics, made from the jobs at each scrape: nothing is counted twice, nothing is kept from one term to the next."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from master_service.leadership.jobs_led import JobsLed
from master_service.leadership.master import Master
from master_service.leadership.term import Term
from shared.errors import TriremeError
from shared.runtime import clock


def exposition(jobs: JobsLed) -> bytes:
    return generate_latest(_Collector(jobs))


class _Collector:
    """Each sample has the label `job`."""

    def __init__(self, jobs: JobsLed) -> None:
        self._jobs = jobs

    def collect(self) -> Iterator[Metric]:
        try:
            self._jobs.check_leading()
        except TriremeError:
            yield GaugeMetricFamily("trireme_master_leading", "1 on the leader", value=0)
            return
        yield GaugeMetricFamily("trireme_master_leading", "1 on the leader", value=1)
        families = _Families()
        for master in self._jobs.masters():
            if master.current_term is not None:
                _samples(families, master, master.current_term)
        yield from families.found.values()


class _Families:
    """Metric families by name, made when their first sample comes."""

    def __init__(self) -> None:
        self.found: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        self.job = ""

    def gauge(self, name: str, text: str, value: float, **labels: str) -> None:
        self._add(GaugeMetricFamily, name, text, value, labels)

    def counter(self, name: str, text: str, value: float, **labels: str) -> None:
        self._add(CounterMetricFamily, name, text, value, labels)

    def _add(
        self,
        kind: type[GaugeMetricFamily | CounterMetricFamily],
        name: str,
        text: str,
        value: float,
        labels: dict[str, str],
    ) -> None:
        family = self.found.get(name)
        if family is None:
            family = self.found[name] = kind(name, text, labels=["job", *labels])
        family.add_metric([self.job, *labels.values()], value)


def _samples(to: _Families, master: Master, term: Term) -> None:
    metrics = master.metrics
    job, to.job = term.job, master.keys.job
    to.gauge("trireme_master_term", "etcd revision of the master lock", term.number)
    to.counter("trireme_master_commits", "transactions written", term.writer.commits)
    to.gauge("trireme_generation", "current membership", job.state.generation)
    to.gauge("trireme_trainers", "registered trainers", len(job.members.trainers))
    to.gauge("trireme_pservers", "registered pservers", len(job.members.pservers))
    to.gauge("trireme_epoch", "epoch under way", job.training.current)
    to.gauge("trireme_step", "steps done", metrics.step or 0)
    to.counter("trireme_trained_records", "records reported as trained", metrics.records)
    skipped = "records left out: their loss or gradient was not finite"
    to.counter("trireme_skipped_records", skipped, metrics.skipped)
    to.gauge("trireme_records_per_second", "over 15 s", metrics.rate(clock.monotonic()))
    missed = "asynchronous: of closed tasks, never applied at that parameter server"
    for cause, counts in (("lost", job.losses.lost), ("skipped", job.losses.skipped)):
        for index, count in counts.items():
            to.gauge("trireme_missed_minibatches", missed, count, pserver=index, cause=cause)
    phase, stage = str(job.state.phase), str(job.state.stage)
    to.gauge("trireme_phase", "1 for the job's phase and stage", 1, phase=phase, stage=stage)
    for kind, queue in job.queues.items():
        for state, number in zip(("todo", "pending", "done", "discarded"), queue.counts, strict=True):
            to.gauge("trireme_tasks", "tasks of the current epoch", number, kind=str(kind), state=state)
