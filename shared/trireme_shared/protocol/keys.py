"""The names of all etcd keys. Values, leases, writers and fences:

    key                      value              lease      writer                fence
    master/lock              MasterLock         master's   candidates            create = 0; gives the term
    master/addr              MasterAddress      master's   master                lock
    job/spec job/state       JobSpec ...        -          master                lock
    job/schema               StateSchema        -          master                lock
    job/failures             FailureCounts      -          master                lock
    job/checkpoint           CheckpointRequest  -          master                lock
    job/evaluation           EvaluationStatus   -          master                lock; members follow it
    evaluations/<number>     Evaluation         -          master                lock: what evaluations while
                                                                                 training gave
    job/plan                 EpochPlan          -          master                lock; members follow it
    job/migration            Migration          -          master                lock; parameter servers
                                                                                 follow it
    job/given                GivenNumbers       -          master                lock: the numbers of members
                                                                                 in the spec that masters are
                                                                                 given
    operations/<id>          Operation          -          master                lock
    answers/<digest>         KeptAnswer         -          master                lock; requests with an
                                                                                 Idempotency-Key
    events/<first id>        EventChunk         -          master                lock: what one transaction
                                                                                 told
    ps_desired               int                -          master                lock
    ps/<index>               PserverMember      pserver's  pserver               create = 0, own
                                                                                 create_revision
    trainers/<id>            TrainerMember      trainer's  trainer               create = 0
    starting/<id>            text               trainer's  trainer               none: a trainer that fails
                                                                                 before it is registered
    slots                    SlotMap            -          master                lock
    generation/trainers      TrainerList        -          master                lock; members read it once
    job/trainers             TrainersChange     -          master                lock; members follow it: what
                                                                                 changed in the list
    layout                   Layout             -          initialising trainer  create = 0
    init_ps/lock|done        text               trainer|-  initialising trainer  create = 0
    sweep/lock               MasterLock         sweeper's  trainers (masterless) create = 0; gives the term
    tasks/meta               TaskMeta           -          master                lock
    tasks/cursor/<stream>    int                -          master                lock + mod_revision
    tasks/pending/<task>     PendingTask        -          master                lock + mod_revision
    tasks/requeued/<task>    RequeuedTask       -          master                lock + mod_revision
    tasks/discarded/<task>   DiscardedTask      -          master                lock + mod_revision
    tasks/evaluation         EvaluationSums     -          master                lock
    tasks/validation         ValidationSums     -          master                lock: of the evaluation that
                                                                                 runs while training
    tasks/commit             text               -          master                lock + its own value (the
                                                                                 name before)
    tasks/progress/<id>      TrainerProgress    trainer's  trainer (masterless)  none: information
    tasks/losses             Losses             -          master                lock
    trainers/pause           Pause              master's   master                lock
    checkpoints/<uuid>/<ps>          CheckpointStarted   pserver's  pserver      own create_revision
    checkpoints/<uuid>/begun         CheckpointStarted   -          pserver      own create_revision
    checkpoints/<uuid>/finished/<ps> CheckpointPart      -          pserver      own create_revision
    checkpoints/<uuid>/cut           CheckpointCut       -          master       lock
    checkpoints/pservers/<ps>        OwnCheckpoints      -          pserver      own create_revision
    checkpoints/latest/files/<id>    Paused              -          finish_lock  as latest
    checkpoints/finish_lock          text                holder's   pserver      create = 0
    checkpoints/latest               CheckpointLatest    -          finish_lock  lock + all parts + state +
                                                                                 own mod_revision
    exchange/<generation>/<attempt>/...  NativeStatement, bytes  trainer's  trainers with lanes
                                         none: each writes its own, and a generation never repeats
    collective/members/<id>    CommunicatorMember member's   member              create = 0
    collective/lock            CommunicatorMember member's   members             create = 0; gives the term
    collective/epoch           Epoch              -          holder of that lock lock + own mod_revision,
                                                                                 which is the epoch's id
    collective/troubles/<id>   Trouble            member's   member              own create_revision
    collective/unreached/<id>  Unreached          member's   member              own create_revision
    collective/left_out/<id>   LeftOut            decider's  holder of that lock create_revision of
                                                                                 collective/lock
    collective/<epoch>/...     Statement, bytes   member's   its members         mod_revision of
                                                                                 collective/epoch = the
                                                                                 epoch's id

A key that gives the term: its create_revision is the term.

Values are UTF-8 JSON of the records in shared/trireme_shared/protocol/records (integers as decimal text).

In a masterless job (`dispatch: etcd`) there is no master/*. Any trainer writes the keys of "master" under
tasks/, job/failures, and job/state where the end of a task changes it; the fence is the mod_revision of
tasks/commit alone. The holder of sweep/lock writes all other keys of "master", and every change that follows
from members and time; its fence is that lock's create_revision as well (docs/masterless.md).
"""

from __future__ import annotations

from dataclasses import dataclass, field


class _Key:
    """A key, or a prefix of keys, by its path below the job's prefix."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __get__(self, keys: Keys | ClusterKeys, _: type[Keys | ClusterKeys] | None = None) -> str:
        return keys.prefix + self._path


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one job; `Keys("ctr").pserver(0)` is `/trireme/ctr/ps/0`. A path that ends with `/` is a
    prefix."""

    job: str
    root: str = "trireme"
    prefix: str = field(init=False, repr=False, compare=False)

    master_lock = _Key("master/lock")
    master_address = _Key("master/addr")
    # of a masterless job: its holder reacts to members and time as a master would
    sweep_lock = _Key("sweep/lock")
    spec = _Key("job/spec")
    state = _Key("job/state")
    schema = _Key("job/schema")
    failures = _Key("job/failures")
    # members follow it: trainers carry the request into a version
    checkpoint_request = _Key("job/checkpoint")
    evaluation_status = _Key("job/evaluation")  # members follow it
    plan = _Key("job/plan")  # members follow it
    migration = _Key("job/migration")
    given = _Key("job/given")
    operations = _Key("operations/")
    answers = _Key("answers/")
    events = _Key("events/")  # outside of `directory`: members do not follow it
    pservers_desired = _Key("ps_desired")
    pservers = _Key("ps/")
    trainers = _Key("trainers/")
    # below the trainers' keys: while it exists, asynchronous training is paused
    pause = _Key("trainers/pause")
    checkpoints = _Key("checkpoints/")  # all keys about checkpoints
    latest = _Key("checkpoints/latest")
    finish_lock = _Key("checkpoints/finish_lock")
    latest_files = _Key("checkpoints/latest/files/")  # the positions of the trainers' readers at `latest`
    own_prefix = _Key("checkpoints/pservers/")  # all independent checkpoints
    slots = _Key("slots")
    trainer_list = _Key(
        "generation/trainers"
    )  # outside of `directory`, so that it is not sent to every member at each change
    trainers_change = _Key("job/trainers")
    layout = _Key("layout")
    init_lock = _Key("init_ps/lock")
    init_done = _Key("init_ps/done")
    tasks = _Key("tasks/")  # the whole queue state
    task_meta = _Key("tasks/meta")
    evaluation = _Key("tasks/evaluation")
    validation = _Key("tasks/validation")
    evaluations = _Key("evaluations/")
    # name of the last transaction. The next transaction compares it (masterless: its mod_revision); after a
    # lost answer it tells whether the transaction was applied
    commit = _Key("tasks/commit")
    progresses = _Key("tasks/progress/")
    losses = _Key("tasks/losses")
    collective = _Key("collective/")  # all keys of communicators
    collective_members = _Key("collective/members/")
    collective_lock = _Key("collective/lock")
    collective_epoch = _Key("collective/epoch")
    collective_troubles = _Key("collective/troubles/")
    collective_unreached = _Key("collective/unreached/")

    def __post_init__(self) -> None:
        object.__setattr__(self, "prefix", f"/{self.root}/{self.job}/")

    def _of(self, *parts: str | int) -> str:
        return self.prefix + "/".join(map(str, parts))

    def operation(self, operation_id: str) -> str:
        return self._of("operations", operation_id)

    def answer(self, digest: str) -> str:
        """To the request whose Idempotency-Key has that digest."""
        return self._of("answers", digest)

    def evaluation_result(self, number: int) -> str:
        """In the order of the numbers."""
        return f"{self.evaluations}{number:020}"

    def event_chunk(self, first_id: int) -> str:
        """In the order of the ids."""
        return f"{self.events}{first_id:020}"

    def pserver(self, index: int) -> str:
        return self._of("ps", index)

    def trainer(self, trainer_id: str) -> str:
        return self._of("trainers", trainer_id)

    def starting(self, trainer_id: str) -> str:
        """Written by a trainer that reports a failure without being registered: it shows that it belongs to
        the job."""
        return self._of("starting", trainer_id)

    def is_trainer(self, key: str) -> bool:
        """Whether `key` is a `trainers/<id>`, not `pause`, which has the same prefix."""
        return (
            key.startswith(self.trainers) and "/" not in key.removeprefix(self.trainers) and key != self.pause
        )

    def latest_file(self, trainer_id: str) -> str:
        return self._of("checkpoints", "latest", "files", trainer_id)

    def own_checkpoints(self, index: int) -> str:
        """Independent checkpoints of one pserver."""
        return self._of("checkpoints", "pservers", index)

    def checkpoint(self, uuid: str) -> str:
        """Prefix of one checkpoint's keys."""
        return self._of("checkpoints", uuid, "")

    def checkpoint_started(self, uuid: str, index: int) -> str:
        return self._of("checkpoints", uuid, index)

    def started_in(self, key: str) -> tuple[str, int] | None:
        """(uuid, index) if `key` is a `checkpoint_started`, else None."""
        uuid, _, index = key.removeprefix(self.checkpoints).partition("/")
        return (uuid, int(index)) if index.isdecimal() and uuid != "pservers" else None

    def checkpoint_begun(self, uuid: str) -> str:
        """Exists until the checkpoint's files are deleted, so that no crash leaves unknown files."""
        return self._of("checkpoints", uuid, "begun")

    def checkpoint_cut(self, uuid: str) -> str:
        """Written when all trainers have paused: the queue at this key's revision belongs to the
        checkpoint."""
        return self._of("checkpoints", uuid, "cut")

    def checkpoint_parts(self, uuid: str) -> str:
        """Prefix of one checkpoint's finished parts."""
        return self._of("checkpoints", uuid, "finished", "")

    def checkpoint_part(self, uuid: str, index: int) -> str:
        return self._of("checkpoints", uuid, "finished", index)

    def part_in(self, key: str) -> tuple[str, int] | None:
        """(uuid, index) if `key` is a `checkpoint_part`, else None."""
        uuid, _, rest = key.removeprefix(self.checkpoints).partition("/")
        kind, _, index = rest.partition("/")
        return (uuid, int(index)) if kind == "finished" and index.isdecimal() else None

    def progress(self, trainer_id: str) -> str:
        """Tasks and loss of a trainer of a masterless job; with a master a trainer reports them by REST."""
        return self._of("tasks", "progress", trainer_id)

    def cursor(self, stream: str | int) -> str:
        return self._of("tasks", "cursor", stream)

    def pending(self, task_id: str) -> str:
        return f"{self.prefix}tasks/pending/{task_id}"

    def requeued(self, task_id: str) -> str:
        return self._of("tasks", "requeued", task_id)

    def discarded(self, task_id: str) -> str:
        return self._of("tasks", "discarded", task_id)

    def collective_member(self, member: str) -> str:
        return self._of("collective", "members", member)

    def collective_trouble(self, member: str) -> str:
        return self._of("collective", "troubles", member)

    def collective_unreached_by(self, member: str) -> str:
        return self._of("collective", "unreached", member)

    def collective_left_out(self, member: str) -> str:
        return self._of("collective", "left_out", member)

    def collective_of(self, epoch: int) -> str:
        """Prefix of what the members of one epoch tell each other."""
        return self._of("collective", epoch, "")

    def exchange_of(self, generation: int) -> str:
        """Prefix of what the trainers of a collective job tell each other to build a native group."""
        return self._of("exchange", generation, "")

    def directory(self) -> tuple[str, str]:
        """[start, end) of the keys that members follow (init_ps … slots), without `tasks/` and `trainers/`,
        which change often."""
        return self._of("init_ps"), self._of("tasks")

    def name_of(self, key: str) -> str:
        """The last part: `0` of `…/ps/0`."""
        return key.rsplit("/", 1)[-1]


@dataclass(frozen=True, slots=True)
class ClusterKeys:
    """The keys of a cluster of jobs, beside the jobs' own keys; `ClusterKeys().job("ctr")` is
    `/trireme/jobs/ctr`.

    key                             value         lease     writer       fence
    cluster/lock                    MasterLock    leader's  candidates   create = 0; gives the leader's term
    cluster/addr                    MasterAddress leader's  leader       lock
    cluster/commit                  text          -         leader       lock + its own value
    cluster/schema                  StateSchema   -         leader       lock
    cluster/answers/<digest>        KeptAnswer    -         leader       lock
    cluster/events/<first id>       EventChunk    -         leader       lock
    cluster/operations/<job>/<id>   Operation     -         leader       lock
    jobs/<job>                      ClusterJob    -         leader       lock
    jobs/<job>/tasks/<name>         TaskRun       -         leader       lock
    sources/<digest>                Source        -         leader       lock
    schedules/<name>                JobSchedule   -         leader       lock
    pool/<kind>/<member>            PoolMember    agent's   host agent   create = 0, own create_revision
    pool/<kind>/<member>/assignment Assignment    -         leader       lock
    pool/<kind>/<member>/drain      Drain         -         leader       lock

    A key that gives the term: its create_revision is the term.

    The leader holds the `master/lock` of each job that it leads as well, under the same lease: a job's writes
    compare that one.
    """

    root: str = "trireme"
    prefix: str = field(init=False, repr=False, compare=False)

    lock = _Key("cluster/lock")
    address = _Key("cluster/addr")
    commit = _Key("cluster/commit")
    schema = _Key("cluster/schema")
    answers = _Key("cluster/answers/")
    events = _Key("cluster/events/")
    operations = _Key("cluster/operations/")
    jobs = _Key("jobs/")
    sources = _Key("sources/")
    schedules = _Key("schedules/")
    pool = _Key("pool/")

    def __post_init__(self) -> None:
        object.__setattr__(self, "prefix", f"/{self.root}/")

    def job(self, job: str) -> str:
        return f"{self.prefix}jobs/{job}"

    def answer(self, digest: str) -> str:
        """To the request whose Idempotency-Key has that digest."""
        return f"{self.prefix}cluster/answers/{digest}"

    def operation(self, job: str, operation_id: str) -> str:
        """Not below the job: it outlives it."""
        return f"{self.operations}{job}/{operation_id}"

    def operation_in(self, key: str) -> tuple[str, str]:
        """(job, operation_id) of a key below `operations`."""
        job, _, operation_id = key.removeprefix(self.operations).partition("/")
        return job, operation_id

    def below_job(self, job: str) -> str:
        """Prefix of what the cluster keeps of a job beside its ClusterJob; the job's own keys are
        `keys_of(job)`."""
        return f"{self.prefix}jobs/{job}/"

    def task_run(self, job: str, name: str) -> str:
        return f"{self.prefix}jobs/{job}/tasks/{name}"

    def is_job(self, key: str) -> bool:
        """Whether a key below `jobs` is a ClusterJob."""
        return "/" not in key.removeprefix(self.jobs)

    def event_chunk(self, first_id: int) -> str:
        return f"{self.events}{first_id:020}"

    def source(self, digest: str) -> str:
        return f"{self.prefix}sources/{digest}"

    def schedule(self, name: str) -> str:
        return f"{self.prefix}schedules/{name}"

    def member(self, kind: str, member: str) -> str:
        return f"{self.prefix}pool/{kind}/{member}"

    def assignment(self, kind: str, member: str) -> str:
        return f"{self.prefix}pool/{kind}/{member}/assignment"

    def drain(self, kind: str, member: str) -> str:
        return f"{self.prefix}pool/{kind}/{member}/drain"

    def drained_in(self, key: str) -> tuple[str, str] | None:
        """(kind, member) if `key` is a `drain`, else None."""
        kind, _, rest = key.removeprefix(self.pool).partition("/")
        member, _, last = rest.partition("/")
        return (kind, member) if member and last == "drain" else None

    def member_of(self, key: str) -> tuple[str, str, bool] | None:
        """(kind, member, whether it is its assignment) of a key below `pool`; None: it is neither."""
        kind, _, rest = key.removeprefix(self.pool).partition("/")
        member, _, last = rest.partition("/")
        return (kind, member, bool(last)) if member and last in ("", "assignment") else None

    def keys_of(self, job: str) -> Keys:
        return Keys(job, self.root)
