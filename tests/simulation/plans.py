"""Seeded plans: the job, its members, the network's conditions, and what goes wrong when. The same seed is
the same run.

0 ... window_s  faults, bad conditions        then  all faults end, and the job must end within `bound_s`
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from enum import StrEnum

from tests.equipment.cluster.network import STEADY, Conditions, conditions_of
from tests.simulation.compute import Speed
from tests.simulation.failing_storage import StorageFault
from trireme_shared.protocol.records import Dispatch, Mode, Strategy
from trireme_shared.protocol.records.job_choices import Transported
from trireme_shared.protocol.records.operations import ResizePhase

SLOWEST_STORAGE_S = 6.0  # of a trainer of a collective job
SLOWNESS = (1.0, 1.0, 3.0)  # of trainers: one of them is drawn for each
EQUALLY_FAST = (1.0,)


class FaultKind(StrEnum):
    KILL_TRAINER = "kill trainer"
    KILL_TRAINERS = "kill every trainer"
    KILL_PSERVER = "kill pserver"
    JOIN_TRAINER = "join trainer"
    FREEZE_TRAINER = "freeze trainer"
    CUT_TRAINER = "cut trainer off"
    KILL_MASTER = "kill master"
    FREEZE_MASTER = "freeze master"
    CUT_MASTER = "cut master off"
    HAND_OVER = "terminate master"
    FREEZE_PSERVER = "freeze pserver"
    RESTART_ETCD = "restart etcd"
    SILENCE_ETCD = "silence etcd"
    RESTART_ALL = "kill everything, go on with other members"
    KILL_EVERYBODY = "kill everybody"
    TRAINERS_LEAVE = "every trainer leaves"
    PAUSE = "the job is paused"

    @property
    def victim(self) -> str:
        return "pserver" if "pserver" in self else "trainer" if "trainer" in self else "master"


class Peer(StrEnum):
    """From whom a partition separates its victim."""

    ETCD = "etcd"
    MASTER = "master"
    PSERVERS = "pservers"
    ALL = "all"


@dataclass(frozen=True)
class Fault:
    """`pick` in [0, 1) chooses among those alive when it happens; `lasts_s`: of a freeze, a cut, an outage,
    or until the restart (None: never restarted); `noticed`: the launcher reports the death at once;
    `members`: pservers and trainers from then on."""

    at_s: float
    kind: FaultKind
    pick: float = 0.0
    lasts_s: float | None = None
    peer: Peer = Peer.ALL
    noticed: bool = False
    members: tuple[int, int] = (0, 0)

    def __str__(self) -> str:
        tail = f" for {self.lasts_s:.2f} s" if self.lasts_s is not None else ""
        tail += f" from {self.peer}" if self.kind in {FaultKind.CUT_TRAINER, FaultKind.CUT_MASTER} else ""
        return f"{self.at_s:7.3f} {self.kind}{tail}{' (noticed)' if self.noticed else ''}"


class RequestKind(StrEnum):
    CHECKPOINT = "checkpoint"
    RESTORE = "restore"
    TRAINER_LEAVES = "trainer leaves"
    PSERVER_LEAVES = "pserver leaves"
    RESIZE = "resize"


@dataclass(frozen=True)
class OperatorRequest:
    """`pick` in [0, 1) chooses among the checkpoints or members there are. `members`: parameter servers and
    trainers from then on; `restart`: by a checkpoint."""

    at_s: float
    kind: RequestKind
    pick: float = 0.0
    members: tuple[int, int] = (0, 0)
    restart: bool = False

    def __str__(self) -> str:
        return f"{self.at_s:7.3f} request: {self.kind}"


class Victim(StrEnum):
    SOURCE = "source"
    TARGET = "target"
    LEADER = "leader"
    TRAINER = "trainer"


@dataclass(frozen=True)
class ResizeKill:
    """In the first resize that reaches `phase` with `moved` groups, `delay_s` later. It is started again
    after `away_s`."""

    phase: ResizePhase
    victim: Victim
    moved: int = 0
    delay_s: float = 0.0
    away_s: float = 1.0


class Moment(StrEnum):
    """Of a job, at which something may fail, see drawn.py."""

    FIRST_STEP = "first step"
    LAST_STEPS = "the last task is given"
    AFTER_TRAINING = "training is over"
    EXPORT = "export"
    COMPLETED = "the job is completed"
    EVALUATION = "an evaluation runs"
    EVALUATED = "an evaluation is over"
    STOPS = "training is to end early"
    CHECKPOINTING = "a checkpoint is written"
    COMMITTED = "a checkpoint is there"
    ROLLING_BACK = "rolling back"
    ROLLED_BACK = "rolled back"


@dataclass(frozen=True)
class MomentFault:
    """`delay_s` after the job has come to `moment` for the first time, all of these at once."""

    moment: Moment
    delay_s: float
    faults: tuple[Fault, ...]
    requests: tuple[OperatorRequest, ...] = ()

    def __str__(self) -> str:
        return f"{self.moment} + {self.delay_s:g} s: {'; '.join(map(str, (*self.faults, *self.requests)))}"


@dataclass(frozen=True)
class Job:
    """What the trained parameters depend on. `files`: records of each file. `schedule`: none, epoch or
    plateau; that follows evaluations, one each `evaluated_every`. `tables`: see rows.py. `trainers_hold`:
    parameters do not travel. `skips`: see nonfinite.py."""

    mode: Mode
    files: tuple[int, ...]
    task_records: int
    minibatch: int
    lanes: int
    epochs: int
    seed: int
    push_every: int = 1
    travels_as: Transported = "float32"
    clip_grad_norm: float | None = None
    schedule: str = "none"
    evaluated_every: int | str | None = None
    tables: bool = False
    trainers_hold: bool = False
    skips: bool = False

    @property
    def parameters_travel_as(self) -> Transported:
        return "float32" if self.trainers_hold else self.travels_as

    @property
    def minibatches(self) -> int:
        """Of the whole job."""
        tasks = [
            min(self.task_records, n - first) for n in self.files for first in range(0, n, self.task_records)
        ]
        return self.epochs * sum(-(-count // self.minibatch) for count in tasks)


@dataclass(frozen=True)
class Plan:
    """Everything a run depends on. `slow`: trainer-0 needs so many times longer for a minibatch; for each of
    the others one factor of `slowness` is drawn. `varied`: settings of a collective job were drawn, too;
    `failing`: see collective_failures.py; `restored`: see restores.py. `storage_s`: how long work on the
    storage waits at parameter servers, so that training goes on before a checkpoint's part is written.
    `first_epochs`: that the job has until everything is killed."""

    seed: int
    job: Job
    pull_every: int
    evaluate: bool
    trainers: int
    pservers: int
    masters: int
    speed: Speed
    checkpoint_every: int | None = None
    keep_checkpoints: int = 2
    checkpoint_every_s: float | None = None
    skip_after_s: float | None = None
    independent: bool = False
    dispatch: Dispatch = Dispatch.MASTER
    strategy: Strategy = Strategy.PARAMETER_SERVER
    conditions: Conditions = STEADY
    faults: tuple[Fault, ...] = ()
    requests: tuple[OperatorRequest, ...] = ()
    kills: tuple[ResizeKill, ...] = ()
    moments: tuple[MomentFault, ...] = ()
    stragglers: bool = True
    rebalance_s: float = 2.0
    slow: float = 1.0
    slowness: tuple[float, ...] = SLOWNESS
    storage_s: float = 0.0
    evaluate_every: int | str | None = None
    keep_best: str | None = None
    stop_early: str | None = None
    max_staleness: int | None = None
    first_epochs: int | None = None
    min_members: int = 1
    varied: bool = False
    failing: bool = False
    restored: bool = False
    storage_faults: tuple[StorageFault, ...] = ()

    def undisturbed(self) -> Plan:
        return replace(self, conditions=STEADY, faults=(), requests=())

    @property
    def work_s(self) -> float:
        """Seconds of computing if one trainer does it all."""
        return self.job.minibatches * (3 * self.speed.high_s + self.speed.stall * self.speed.stall_s)

    @property
    def window_s(self) -> float:
        """While this lasts the network is bad and faults happen."""
        return 2.0 + min(25.0, 0.4 * self.work_s)

    @property
    def bound_s(self) -> float:
        """After the last fault the job must end within this: all leases and task deadlines expire one after
        the other, all members join again, and one trainer does all the work, twice."""
        restores = sum(
            request.kind in {RequestKind.RESTORE, RequestKind.PSERVER_LEAVES} for request in self.requests
        )
        restores += sum(fault.kind is FaultKind.RESTART_ALL for fault in self.faults)
        restores += sum(1 + len(moment.faults) for moment in self.moments) + len(self.storage_faults)
        return 90.0 + (2 + restores) * (self.work_s + self.evaluations_s) * max(1.0, self.slow / 3)

    @property
    def evaluations_s(self) -> float:
        """Seconds of evaluating while the job trains if one trainer does it all, and training waits for each
        checkpoint: part, manifest, clean-up."""
        if self.evaluate_every is None:
            return 0.0
        job = self.job
        often = job.epochs if self.evaluate_every == "epoch" else job.minibatches // int(self.evaluate_every)
        saving_s = 3 * (SLOWEST_STORAGE_S if self.strategy is Strategy.COLLECTIVE else self.storage_s)
        computing_s = (
            job.minibatches / job.epochs * (3 * self.speed.high_s + self.speed.stall * self.speed.stall_s)
        )
        return often * (saving_s + computing_s)

    def __str__(self) -> str:
        head = (
            f"seed {self.seed} {self.job}\n  dispatch {self.dispatch}, {self.masters} masters, "
            f"{self.pservers} pservers, "
            f"{self.trainers} trainers, pull_every {self.pull_every}, evaluate {self.evaluate}, "
            "checkpoint_every "
            f"{self.checkpoint_every or self.checkpoint_every_s} and keep {self.keep_checkpoints}, "
            "skip_after "
            f"{self.skip_after_s}, independent {self.independent}, trainer-0 {self.slow:g} times "
            f"slower, storage takes {self.storage_s:g} s\n  {self.speed}\n  {self.conditions}"
        )
        return "\n".join(
            [
                head,
                *(
                    f"  {event}"
                    for event in (*self.faults, *self.storage_faults, *self.requests, *self.moments)
                ),
            ]
        )


JOBS: tuple[tuple[tuple[int, ...], int, int, int], ...] = (
    # files, records per task, minibatch, lanes
    ((7, 1, 16, 5), 4, 2, 4),
    ((12, 12), 4, 2, 8),  # fewer tasks than lanes: lanes without data
    ((9, 0, 13, 2), 8, 4, 2),
    ((24,), 6, 4, 4),  # a short last minibatch in each task
    ((3, 3, 3, 3, 3), 3, 3, 4),
    ((20, 11), 5, 5, 1),
)


SLOWEST_S = 2.4  # a trainer that needs more for a minibatch is taken to hang


CLIP = 1.5  # many gradients are longer
DTYPES: tuple[Transported, ...] = ("float32", "float32", "bfloat16", "float16")


TABLES = 0.3
"""Of the jobs have an embedding table; none of those that leave silent parameter servers out."""


def plan_of(seed: int, mode: Mode, dispatch: Dispatch = Dispatch.MASTER) -> Plan:
    masterless = dispatch is Dispatch.ETCD
    rng = random.Random(f"{mode}-{seed}{'-masterless' if masterless else ''}")
    files, task_records, minibatch, lanes = JOBS[rng.randrange(len(JOBS))]
    slowness = rng.choice([0.05, 0.3, 0.8])
    speed = Speed(slowness / 2, slowness, stall=rng.choice([0.0, 0.0, 0.05]), stall_s=rng.choice([2.0, 7.0]))
    job = Job(
        mode=mode,
        files=files,
        task_records=task_records,
        minibatch=minibatch,
        lanes=lanes if mode is Mode.SYNC else 1,
        epochs=rng.choice([1, 2, 3]),
        seed=rng.randrange(3),
        push_every=rng.choice([1, 1, 2]) if mode is Mode.ASYNC else 1,
        travels_as=random.Random(f"dtype-{seed}").choice(DTYPES) if mode is Mode.SYNC else "float32",
        clip_grad_norm=random.Random(f"clip-{seed}").choice([None, None, CLIP])
        if mode is Mode.SYNC
        else None,
        tables=random.Random(f"tables-{seed}").random() < TABLES,
        schedule=random.Random(f"schedule-{seed}").choice(["none", "none", "epoch"])
        if mode is Mode.SYNC
        else "none",
    )
    plan = Plan(
        seed=seed,
        job=job,
        pull_every=rng.choice([1, 2, 3]) if mode is Mode.ASYNC else 1,
        evaluate=rng.random() < 0.5,
        trainers=rng.choice([1, 2, 3, 4]),
        pservers=rng.choice([1, 2, 3]),
        masters=0 if masterless else rng.choice([1, 2, 2]),
        speed=speed,
        checkpoint_every=rng.choice([None, 1, 3]) if mode is Mode.SYNC else None,
        checkpoint_every_s=rng.choice([None, 1.0, 4.0]) if mode is Mode.ASYNC else None,
        skip_after_s=rng.choice([None, None, None, 0.5]) if mode is Mode.ASYNC else None,
        independent=mode is Mode.ASYNC and rng.random() < 0.25,
        dispatch=dispatch,
        conditions=conditions_of(rng),
    )
    if plan.skip_after_s is not None:
        plan = replace(plan, job=replace(job, tables=False))
    faults = [
        _fault(rng, rng.choice(kinds), plan.window_s, mode)
        for kinds in [_kinds(rng, mode, dispatch)]
        for _ in range(rng.choice([0, 3, 6, 12]))
    ]
    requests = () if plan.independent else _requests(seed, mode, plan.window_s)  # those are refused there
    plan = replace(plan, keep_checkpoints=random.Random(f"keep-{seed}").choice([1, 2]))
    slow = random.Random(f"slow-{mode}-{seed}").choice([1.0, 1.0, 1.0, 4.0, 8.0])
    plan = replace(plan, slow=min(slow, SLOWEST_S / speed.high_s))
    if job.tables:
        plan = replace(plan, storage_s=random.Random(f"storage-{seed}").choice([0.0, 0.2, 1.0]))
    if random.Random(f"doubling-{mode}-{seed}").random() < 0.1:
        plan = replace(plan, conditions=replace(plan.conditions, double=0.2))
    faults += _restarts(random.Random(f"restarts-{mode}-{seed}"), plan)
    return replace(plan, faults=tuple(sorted(faults, key=lambda fault: fault.at_s)), requests=requests)


def _requests(seed: int, mode: Mode, window_s: float) -> tuple[OperatorRequest, ...]:
    """At most one restore: each may repeat all the work. Seed strings never change, so that a seed stays the
    same run."""
    rng = random.Random(f"wishes-{mode}-{seed}")
    count = rng.choice([0, 0, 1, 2, 4])
    kinds = [
        RequestKind.CHECKPOINT,
        RequestKind.CHECKPOINT,
        RequestKind.TRAINER_LEAVES,
        RequestKind.PSERVER_LEAVES,
    ]
    found = [
        OperatorRequest(rng.uniform(0.5, window_s), rng.choice(kinds), rng.random()) for _ in range(count)
    ]
    if rng.random() < 0.25:
        found.append(OperatorRequest(rng.uniform(1.0, window_s), RequestKind.RESTORE, rng.random()))
    return tuple(sorted(found, key=lambda request: request.at_s))


def _restarts(rng: random.Random, plan: Plan) -> list[Fault]:
    """Of a job that goes on from its checkpoints; drawn apart, so that the other faults of a seed stay what
    they are."""
    return [
        Fault(
            rng.uniform(0.0, 1.5 * plan.window_s),
            FaultKind.RESTART_ALL,
            lasts_s=rng.choice([0.1, 2.0, 20.0]),
            members=(rng.choice([1, 2, 3, 4]), rng.choice([1, 2, 3, 4])),
        )
        for _ in range(rng.choice([0, 0, 0, 1, 2]))
    ]


def _kinds(rng: random.Random, mode: Mode, dispatch: Dispatch) -> list[FaultKind]:
    """Some runs concentrate on two kinds."""
    apart = {FaultKind.RESTART_ALL, FaultKind.SILENCE_ETCD, FaultKind.TRAINERS_LEAVE, FaultKind.PAUSE}
    if mode is Mode.SYNC:
        apart.add(FaultKind.KILL_EVERYBODY)
    kinds = [kind for kind in FaultKind if kind not in apart]
    if dispatch is Dispatch.ETCD:
        kinds = [kind for kind in kinds if kind.victim != "master" or kind is FaultKind.RESTART_ETCD]
    return rng.sample(kinds, 2) if rng.random() < 0.4 else kinds


def _fault(rng: random.Random, kind: FaultKind, window_s: float, mode: Mode) -> Fault:
    at, pick = window_s * rng.random() ** rng.choice([1, 2]), rng.random()
    match kind:
        case FaultKind.KILL_PSERVER:
            return Fault(at, kind, pick, rng.choice([0.1, 1.0, 4.0]), noticed=rng.random() < 0.5)
        case FaultKind.KILL_EVERYBODY:
            return Fault(at, kind, pick, rng.choice([0.1, 1.0, 6.0]))
        case FaultKind.KILL_TRAINER | FaultKind.KILL_TRAINERS | FaultKind.KILL_MASTER:
            lasts = rng.choice([0.1, 1.0, 4.0])
            return Fault(at, kind, pick, lasts, noticed=rng.random() < 0.5)
        case FaultKind.JOIN_TRAINER | FaultKind.HAND_OVER:
            return Fault(at, kind, pick, 0.1)
        case FaultKind.FREEZE_TRAINER | FaultKind.FREEZE_MASTER:
            return Fault(at, kind, pick, rng.choice([0.5, 3.0, 8.0, 15.0]))
        case FaultKind.CUT_TRAINER:
            return Fault(at, kind, pick, rng.choice([0.5, 3.0, 9.0, 14.0]), peer=rng.choice(list(Peer)))
        case FaultKind.CUT_MASTER:
            return Fault(
                at,
                kind,
                pick,
                rng.choice([0.5, 3.0, 6.0, 9.0]),
                peer=rng.choice([Peer.ETCD, Peer.ETCD, Peer.ALL]),
            )
        case FaultKind.FREEZE_PSERVER:
            longer = [8.0, 15.0] if mode is Mode.SYNC else []  # than its lease: the job rolls back
            return Fault(at, kind, pick, rng.choice([0.2, 1.0, *longer]))
        case FaultKind.RESTART_ETCD | FaultKind.SILENCE_ETCD:
            return Fault(at, kind, pick, rng.choice([0.3, 1.5, 8.0]))
