"""Random histories of a cluster: jobs come and end, members come and vanish, host agents follow late. The
rules hold at every step."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from master_service.core.decisions.scheduling.schedule import Schedule, schedule
from master_service.core.state.cluster import (
    ClusterState,
    DropAssignment,
    DropDrain,
    Place,
    PutAssignment,
    PutDrain,
    PutJob,
)
from tests.master_service.core.cluster_jobs import job_of, member_of, preempted, state_of
from trireme_shared.protocol.records.cluster import ClusterJob, Drain, Standing

REBALANCE_S = 30.0
NAMES = st.integers(0, 7)


def needs(job: ClusterJob) -> dict[str, int]:
    return {"pserver": job.pservers_wanted, "trainer": job.least_trainers}


class Cluster(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.state = state_of()
        self.now = 0.0
        self.count = 0
        self.lost: set[Place] = set()  # members that vanished with their process
        self.taken: dict[Place, float] = {}  # when the place was given to the job that holds it

    # ------------------------------------------------------------ what happens

    @initialize(trainers=st.integers(0, 8), pservers=st.integers(0, 8), hosts=st.integers(1, 3))
    def begin(self, trainers, pservers, hosts):
        for number in range(trainers):
            self.join("trainer", number, number % hosts)
        for number in range(pservers):
            self.join("pserver", number, number % hosts)

    @rule(
        pservers=st.integers(1, 3),
        least=st.integers(1, 3),
        more=st.integers(0, 4),
        priority=st.sampled_from([10, 50, 90]),
        weight=st.sampled_from([1.0, 2.0, 3.0]),
        preemptible=st.booleans(),
    )
    def submit(self, pservers, least, more, priority, weight, preemptible):
        self.count += 1
        job = job_of(
            f"j{self.count}",
            self.count,
            pservers=pservers,
            min_trainers=least,
            max_trainers=least + more,
            priority=priority,
            weight=weight,
            preemptible=preemptible,
        )
        self.state.apply(PutJob(job), self.now)

    @rule(
        number=NAMES,
        standing=st.sampled_from([Standing.COMPLETED, Standing.FAILED, Standing.PAUSED, Standing.QUEUED]),
    )
    def end(self, number, standing):
        """Also what executes a preemption does."""
        for job in list(self.state.jobs.values())[number : number + 1]:
            if job.standing is Standing.ACTIVE:
                ended = {"standing": standing, "preempted_by": "", "wanted": "run"}
                self.state.apply(PutJob(job.model_copy(update=ended)), self.now)

    @rule(number=NAMES, wanted=st.sampled_from(["pause", "cancel", "run"]))
    def ask(self, number, wanted):
        for job in list(self.state.jobs.values())[number : number + 1]:
            if job.standing is Standing.ACTIVE:
                self.state.apply(PutJob(job.model_copy(update={"wanted": wanted})), self.now)

    @rule(kind=st.sampled_from(["trainer", "pserver"]), number=NAMES, host=st.integers(0, 2))
    def join(self, kind, number, host):
        if (kind, f"m{number}") not in self.state.members:
            self.count += 1
            member = member_of(kind, f"m{number}", f"h{host}").model_copy(
                update={"incarnation": f"i{self.count}"}
            )
            self.state.see((kind, f"m{number}"), member, self.now)

    @rule(kind=st.sampled_from(["trainer", "pserver"]), number=NAMES, with_process=st.booleans())
    def vanish(self, kind, number, with_process):
        place = (kind, f"m{number}")
        self.state.see(place, None, self.now)
        (self.lost.add if with_process else self.lost.discard)(place)

    def made(self) -> Schedule:
        self.lost &= self.state.assignments.keys() - self.state.members.keys()
        made = schedule(self.state, self.now, 0.0, REBALANCE_S, self.lost)
        assert made == schedule(self.unsettled(), self.now, 0.0, REBALANCE_S, self.lost), (
            "what earlier looks have found is not so any more"
        )
        return made

    def unsettled(self) -> ClusterState:
        """The same, without what earlier looks have found."""
        state = self.state
        found = replace(state, assignments={}, moved={}, gone_since={})
        for place, held in state.assignments.items():
            found.apply(PutAssignment(place, held), self.now)
        found.moved, found.gone_since = dict(state.moved), dict(state.gone_since)
        return found

    @rule(number=NAMES, fields=st.sampled_from([{"draining": True}, {"trouble": "no"}, {"ended": True}]))
    def spoil(self, number, fields):
        for place in (("trainer", f"m{number}"), ("pserver", f"m{number}")):
            if (member := self.state.members.get(place)) and member.running:
                self.state.see(place, member.model_copy(update=fields), self.now)

    @rule(kind=st.sampled_from(["trainer", "pserver"]), number=NAMES, drained=st.booleans())
    def drain(self, kind, number, drained):
        change = PutDrain((kind, f"m{number}"), Drain()) if drained else DropDrain((kind, f"m{number}"))
        self.state.apply(change, self.now)

    @rule(places=st.sets(st.tuples(st.sampled_from(["trainer", "pserver"]), NAMES)))
    def follow(self, places):
        """Some host agents do what their assignments say."""
        for kind, number in places:
            self._follow((kind, f"m{number}"))

    @rule(seconds=st.sampled_from([1.0, 12.0, 31.0]))
    def wait(self, seconds):
        self.now += seconds

    def _follow(self, place: Place) -> None:
        member, held = self.state.members.get(place), self.state.assignments.get(place)
        if member is None:
            return
        held = held if held and held.incarnation == member.incarnation else None
        if held and (member.running, member.epoch) == (held.job, held.epoch):
            return
        running = {"running": held.job, "epoch": held.epoch} if held else {"running": "", "epoch": 0}
        self.state.see(place, member.model_copy(update={**running, "trouble": "", "ended": False}), self.now)

    # ------------------------------------------------------------ what must hold

    @precondition(lambda self: self.state.jobs)
    @rule()
    def look(self):
        state = self.state
        before = dict(state.assignments)
        jobs = dict(state.jobs)
        made = self.made()
        self._check_order_of_places(made)
        for change in made.changes:
            state.apply(change, self.now)
        assert self.made().changes == (), "not a fixed point"
        started = [job for job in state.jobs.values() if job.epoch > jobs[job.job].epoch]
        for job in started:
            for kind, count in needs(job).items():
                assert len(state.assigned_to(job.job, kind)) >= count, "started without its minimum"
        for job in state.jobs.values():
            held = len(state.assigned_to(job.job, "trainer"))
            assert job.standing is Standing.ACTIVE or not held
            assert job.leaving or held <= max(job.most_trainers, self._gone(job)), "more than is of use"
        self._check_minimum_before_fairness()
        self._check_priority(started)
        self._check_preempted()
        self._check_damping(made, before, bool(started))
        for change in made.changes:
            if isinstance(change, PutAssignment):
                self.taken[change.place] = self.now

    def _gone(self, job: ClusterJob) -> int:
        return sum(place not in self.state.members for place in self.state.assigned_to(job.job, "trainer"))

    def _check_order_of_places(self, made: Schedule) -> None:
        """A place is given only if nothing of another job runs there, and the job wanted it."""
        jobs = {change.job.job: change.job for change in made.changes if isinstance(change, PutJob)}
        places = [change.place for change in made.changes if not isinstance(change, PutJob)]
        assert len(places) == len(set(places)), "two words about one place"
        for change in made.changes:
            if isinstance(change, PutAssignment):
                member = self.state.members[change.place]
                renewed = self.state.assignments.get(change.place)
                same = renewed is not None and (renewed.job, renewed.epoch) == (
                    change.assignment.job,
                    change.assignment.epoch,
                )
                assert self.state.takes_work(change.place)
                assert not member.running or same, "its old process still runs"
                job = jobs.get(change.assignment.job) or self.state.jobs[change.assignment.job]
                assert (job.standing, job.epoch) == (Standing.ACTIVE, change.assignment.epoch)
                assert self.state.fits(change.place, job)

    def _free(self, kind: str) -> int:
        """Idle, or idle soon."""
        return sum(
            self.state.takes_work(place) and place not in self.state.assignments
            for place in self.state.members
            if place[0] == kind
        )

    def _staying(self) -> list[ClusterJob]:
        return [
            job for job in self.state.jobs.values() if job.standing is Standing.ACTIVE and not job.leaving
        ]

    def _surplus(self, job: ClusterJob) -> int:
        held = [place for place in self.state.assigned_to(job.job, "trainer") if place in self.state.members]
        return len(held) - job.least_trainers

    def _check_minimum_before_fairness(self) -> None:
        lacks = sum(
            max(0, job.least_trainers - len(self.state.assigned_to(job.job, "trainer")))
            for job in self._staying()
        )
        leaving = [job.job for job in self.state.jobs.values() if job.leaving]
        soon = sum(len(self.state.assigned_to(job, "trainer")) for job in leaving)
        if lacks > self._free("trainer") + soon and not self.state.unfit:
            assert all(self._surplus(job) <= self._gone(job) for job in self._staying()), (
                "a job lacks what others have above"
            )

    def _check_priority(self, started: list[ClusterJob]) -> None:
        usable = {
            kind: sum(place[0] == kind and self.state.takes_work(place) for place in self.state.members)
            for kind in ("trainer", "pserver")
        }
        for job in self.state.jobs.values():
            if job.standing is not Standing.QUEUED or any(
                usable[kind] < count for kind, count in needs(job).items()
            ):
                continue
            for other in started:
                later = (-other.scheduling.priority, other.number) > (-job.scheduling.priority, job.number)
                yields = other.scheduling.preemptible and other.scheduling.priority < job.scheduling.priority
                admitted = "at once" in job.reason  # its members are on their way to it
                assert not later or yields or admitted, f"{other.job} overtook {job.job}"

    def _check_preempted(self) -> None:
        for name in preempted(self.state):
            job = self.state.jobs[name]
            assert job.scheduling.preemptible
            assert self.state.jobs[job.preempted_by].scheduling.priority > job.scheduling.priority

    def _check_damping(self, made: Schedule, before: dict, started: bool) -> None:
        waits = any("at once" in job.reason for job in self.state.jobs.values())
        short = any(job.reason.startswith("lacks") for job in self.state.jobs.values())
        ended = any(
            (job := self.state.jobs.get(held.job)) is None
            or job.standing is not Standing.ACTIVE
            or job.epoch != held.epoch
            for held in before.values()
        )
        for change in made.changes:
            if not isinstance(change, DropAssignment) or started or waits or ended or short:
                continue
            job = self.state.jobs[before[change.place].job]
            useless = not self.state.takes_work(change.place) or not self.state.fits(change.place, job)
            many = (
                sum(held.job == job.job for place, held in before.items() if place[0] == "trainer")
                > job.most_trainers
            )
            fresh = self.now - self.taken.get(change.place, -100.0) < REBALANCE_S
            # it was below its minimum before
            given = any(isinstance(put, PutAssignment) for put in made.changes)
            assert useless or many or given or not fresh, "moved twice"

    def teardown(self) -> None:
        """Agents follow and nothing else happens: the cluster comes to rest, and everything that can run
        does."""
        for _ in range(12):
            self.now += 40.0
            made = self.made()
            for change in made.changes:
                self.state.apply(change, self.now)
            for place in list(self.state.members):
                self._follow(place)
            for name in preempted(self.state):
                job = self.state.jobs[name]
                self.state.apply(
                    PutJob(job.model_copy(update={"standing": Standing.QUEUED, "preempted_by": ""})), self.now
                )
        assert not self.made().changes
        kept = any(job.leaving or "at once" in job.reason for job in self.state.jobs.values())
        if self.state.unfit or kept:  # what is idle may be kept for a job that waits for a leaving one
            return
        staying = self._staying()
        for job in staying:
            most = len(self.state.assigned_to(job.job, "trainer")) == job.most_trainers
            lower = [other for other in staying if other.scheduling.priority < job.scheduling.priority]
            equal = [other for other in staying if other.scheduling.priority == job.scheduling.priority]
            if not most:
                assert all(self._surplus(other) <= 0 for other in lower), "the higher priority lacks trainers"
                assert not self._free("trainer"), "idle trainers are of use"
                mine = len(self.state.assigned_to(job.job, "trainer"))
                for other in equal:
                    theirs = len(self.state.assigned_to(other.job, "trainer"))
                    fair = (theirs - 1) / other.scheduling.weight <= mine / job.scheduling.weight
                    assert self._surplus(other) <= 0 or fair, "not a fair share"


TestCluster = Cluster.TestCase
TestCluster.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
