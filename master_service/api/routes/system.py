"""Version, logins of browsers, metrics and health.

Prometheus metrics are made from the jobs at each scrape: nothing is counted twice, nothing is kept from one
term to the next. Their names: `trireme_`, base units at the end, `_total` for what only grows; no rates
(Prometheus makes them). Labels have few values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from fastapi import APIRouter, Request, Response
from prometheus_client import ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from master_service.api.logins import VALID_S, LoginCodes
from master_service.api.routes.dependencies import JobsOf
from master_service.cluster.leader import ClusterMaster, JobsLed
from master_service.core.state.cluster import ClusterState, Place
from master_service.leadership.master import Master, Term
from trireme_shared import __version__
from trireme_shared.platform.runtime import clock, telemetry
from trireme_shared.platform.security.access import CALLER, bearer_in
from trireme_shared.platform.security.tokens import Role
from trireme_shared.protocol.errors import TriremeError
from trireme_shared.protocol.records.cluster import Standing
from trireme_shared.protocol.records.state_schema import SCHEMA
from trireme_shared.protocol.rest import Health, Login, LoginCode, TokenAccess, Version

router = APIRouter(tags=["system"])
open_router = APIRouter(tags=["system"])

log = telemetry.logger("logins")


@router.get("/v1/version", operation_id="getVersion")
async def get_version(jobs: JobsOf) -> Version:
    """Of the program, and of its API; what the members run that it leads. A standby answers too, and leads
    nobody."""
    members: Counter[str] = Counter()
    for led in (each.current_term.job.members for each in jobs.masters() if each.current_term is not None):
        members.update(trainer.trireme_version for trainer in led.trainers.values())
        members.update(pserver.trireme_version for pserver in led.pservers.values())
    pool = jobs.current_term.state.members if isinstance(jobs, ClusterMaster) and jobs.current_term else {}
    return Version(
        name="trireme-master",
        version=__version__,
        api="v1",
        state_schema=SCHEMA,
        members=members,
        places=Counter(place.trireme_version for place in pool.values()),
    )


@router.get("/v1/access", operation_id="getAccess")
async def get_access(request: Request) -> TokenAccess:
    """What the token of this request may do. A standby answers too."""
    caller = getattr(request.state, "caller", None)
    return TokenAccess(role=caller.role if caller is not None else Role.ADMIN)


@router.post("/v1/login-codes", operation_id="createLoginCode")
async def create_login_code(request: Request) -> LoginCode:
    """A code that a browser exchanges for the token of this request within `valid_s` seconds, once. It is a
    secret until then. A standby answers too. No Idempotency-Key: each request makes another code."""
    logins: LoginCodes = request.app.state.logins
    code = logins.create(bearer_in(request.headers.get("Authorization", "")), clock.monotonic())
    log.info("login_code_made", caller=str(CALLER.get() or ""))
    return LoginCode(code=code, valid_s=VALID_S)


@open_router.post("/v1/logins", operation_id="createLogin")
async def create_login(request: Request) -> Login:
    """The token that a code was made with. The code is the bearer token of this request, which needs no other
    one and has no body. It is refused from then on, and by every process but that which made it. A standby
    answers too."""
    logins: LoginCodes = request.app.state.logins
    token = logins.use(bearer_in(request.headers.get("Authorization", "")), clock.monotonic())
    log.info("login_code_used", peer=request.client.host if request.client else "")
    return Login(token=token)


@router.get("/metrics", operation_id="scrapeMetrics", response_class=Response)
async def scrape_metrics(jobs: JobsOf) -> Response:
    """Prometheus text. A standby answers too: trireme_master_leading is 0."""
    return Response(exposition(jobs), media_type=CONTENT_TYPE_LATEST)


@open_router.get("/healthz", operation_id="checkHealth")
async def check_health() -> Health:
    """The process lives."""
    return Health(status="ok")


@open_router.get("/readyz", operation_id="checkReadiness")
async def check_readiness(jobs: JobsOf) -> Health:
    """`ok`: it leads and can answer. `standby`: another master leads, and this one could take over. Else
    NOT_LEADER (it has lost etcd, say) or NOT_READY."""
    return Health(status="ok" if jobs.check_ready() else "standby")


def exposition(jobs: JobsLed) -> bytes:
    return generate_latest(_Collector(jobs))


class _Collector:
    """Each sample of a job has the label `job`."""

    def __init__(self, jobs: JobsLed) -> None:
        self._jobs = jobs

    def collect(self) -> Iterator[Metric]:
        yield from ProcessCollector(registry=None).collect()
        try:
            self._jobs.check_leading()
        except TriremeError:
            yield GaugeMetricFamily("trireme_master_leading", "1 on the leader", value=0)
            return
        yield GaugeMetricFamily("trireme_master_leading", "1 on the leader", value=1)
        if isinstance(self._jobs, ClusterMaster):
            yield from _cluster(self._jobs.state)
        families = _Families()
        for master in self._jobs.masters():
            if master.current_term is not None:
                _samples(families, master, master.current_term)
        yield from families.found.values()


def _cluster(state: ClusterState) -> Iterator[Metric]:
    jobs = GaugeMetricFamily(
        "trireme_cluster_jobs", "jobs of the cluster, those that have ended too", labels=["standing"]
    )
    standings = Counter(job.standing for job in state.jobs.values())
    for standing in Standing:
        jobs.add_metric([standing.lower()], standings[standing])
    yield jobs
    pool = GaugeMetricFamily(
        "trireme_pool_members", "registered members of the pool", labels=["kind", "state"]
    )
    members = Counter((place[0], _state_of(state, place)) for place in state.members)
    for kind in ("trainer", "pserver"):
        for name in ("idle", "assigned", "draining"):
            pool.add_metric([kind, name], members[kind, name])
    yield pool


def _state_of(state: ClusterState, place: Place) -> str:
    if not state.takes_work(place):
        return "draining"
    return "assigned" if place in state.assignments or state.members[place].running else "idle"


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
    if (loss := metrics.loss) is not None:
        to.gauge("trireme_epoch_loss", "mean loss of the epoch under way, of what this master was told", loss)
    missed = "asynchronous: of closed tasks, never applied at that parameter server"
    for cause, counts in (("lost", job.losses.lost), ("skipped", job.losses.skipped)):
        for index, count in counts.items():
            to.counter("trireme_missed_minibatches", missed, count, pserver=index, cause=cause)
    phase, stage = str(job.state.phase), str(job.state.stage)
    to.gauge("trireme_phase", "1 for the job's phase and stage", 1, phase=phase, stage=stage)
    for kind, queue in job.queues.items():
        for state, number in zip(("todo", "pending", "done", "discarded"), queue.counts, strict=True):
            to.gauge("trireme_tasks", "tasks of the current epoch", number, kind=str(kind), state=state)
