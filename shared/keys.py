"""The names of all etcd keys. Values, leases, writers and fences:

    key                     value           lease      writer                        fence
    master/lock             MasterLock      master's   candidates                    create = 0; its create_revision is the term
    master/addr             MasterAddress   master's   master                        lock
    job/spec job/state      JobSpec ...     -          master                        lock
    job/failures            FailureCounts   -          master                        lock
    job/checkpoint          CheckpointRequest -        master                        lock
    operations/<id>         Operation       -          master                        lock
    ps_desired              int             -          master                        lock
    ps/<index>              PserverMember   pserver's  pserver                       create = 0, own create_revision
    trainers/<id>           TrainerMember   trainer's  trainer                       create = 0
    slots lanes             SlotMap LaneMap -          master                        lock
    layout                  Layout          -          initialising trainer          create = 0
    init_ps/lock|done       text            trainer|-  initialising trainer          create = 0
    sweep/lock              MasterLock      sweeper's  trainers (masterless)         create = 0; its create_revision is the term
    tasks/meta              TaskMeta        -          master                        lock
    tasks/cursor/<stream>   int             -          master                        lock + mod_revision
    tasks/pending/<task>    PendingTask     -          master                        lock + mod_revision
    tasks/requeued/<task>   RequeuedTask    -          master                        lock + mod_revision
    tasks/discarded/<task>  DiscardedTask   -          master                        lock + mod_revision
    tasks/evaluation        EvaluationSums  -          master                        lock
    tasks/commit            text            -          master                        lock + its own value (the name before)
    tasks/progress/<id>     TrainerProgress trainer's  trainer (masterless)          none: information
    tasks/losses            Losses          -          master                        lock
    trainers/pause          Pause           master's   master                        lock
    checkpoints/<uuid>/<ps>          CheckpointStarted  pserver's  pserver           own create_revision
    checkpoints/<uuid>/begun         CheckpointStarted  -          pserver           own create_revision
    checkpoints/<uuid>/finished/<ps> CheckpointPart     -          pserver           own create_revision
    checkpoints/<uuid>/cut           CheckpointCut      -          master            lock
    checkpoints/pservers/<ps>        OwnCheckpoints     -          pserver           own create_revision
    checkpoints/latest/files/<id>    Paused             -          finish_lock       as latest
    checkpoints/finish_lock          text               holder's   pserver           create = 0
    checkpoints/latest               CheckpointLatest   -          finish_lock       lock + all parts + state + own mod_revision

Values are UTF-8 JSON of the records in shared/records (integers as decimal text).

In a masterless job (`dispatch: etcd`) there is no master/*. Any trainer writes the keys of "master" under tasks/, job/failures, and
job/state where the end of a task changes it; the fence is the mod_revision of tasks/commit alone. The holder of sweep/lock writes all
other keys of "master", and every change that follows from members and time; its fence is that lock's create_revision as well
(docs/masterless.md).
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one job; `Keys("ctr").pserver(0)` is `/trireme/ctr/ps/0`."""

    job: str
    root: str = "trireme"
    prefix: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "prefix", f"/{self.root}/{self.job}/")

    def _of(self, *parts: str | int) -> str:
        return self.prefix + "/".join(map(str, parts))

    @property
    def master_lock(self) -> str:
        return self._of("master", "lock")

    @property
    def master_address(self) -> str:
        return self._of("master", "addr")

    @property
    def sweep_lock(self) -> str:
        """Of a masterless job: its holder reacts to members and time as a master would."""
        return self._of("sweep", "lock")

    @property
    def spec(self) -> str:
        return self._of("job", "spec")

    @property
    def state(self) -> str:
        return self._of("job", "state")

    @property
    def failures(self) -> str:
        return self._of("job", "failures")

    @property
    def checkpoint_request(self) -> str:
        """Members follow it: trainers carry the request into a version."""
        return self._of("job", "checkpoint")

    @property
    def operations(self) -> str:
        """Prefix of all `operations/<id>`."""
        return self._of("operations", "")

    def operation(self, operation_id: str) -> str:
        return self._of("operations", operation_id)

    @property
    def pservers_desired(self) -> str:
        return self._of("ps_desired")

    @property
    def pservers(self) -> str:
        """Prefix of all `ps/<index>`."""
        return self._of("ps", "")

    def pserver(self, index: int) -> str:
        return self._of("ps", index)

    @property
    def trainers(self) -> str:
        """Prefix of all `trainers/<id>`."""
        return self._of("trainers", "")

    def trainer(self, trainer_id: str) -> str:
        return self._of("trainers", trainer_id)

    @property
    def pause(self) -> str:
        """Below the trainers' keys: while it exists, asynchronous training is paused."""
        return self._of("trainers", "pause")

    def is_trainer(self, key: str) -> bool:
        """Whether `key` is a `trainers/<id>`, not `pause`, which has the same prefix."""
        return key.startswith(self.trainers) and "/" not in key.removeprefix(self.trainers) and key != self.pause

    @property
    def checkpoints(self) -> str:
        """Prefix of all keys about checkpoints."""
        return self._of("checkpoints", "")

    @property
    def latest(self) -> str:
        return self._of("checkpoints", "latest")

    @property
    def finish_lock(self) -> str:
        return self._of("checkpoints", "finish_lock")

    @property
    def latest_files(self) -> str:
        """Prefix of the positions of the trainers' readers at `latest`."""
        return self._of("checkpoints", "latest", "files", "")

    def latest_file(self, trainer_id: str) -> str:
        return self._of("checkpoints", "latest", "files", trainer_id)

    @property
    def own_prefix(self) -> str:
        """Prefix of all independent checkpoints."""
        return self._of("checkpoints", "pservers", "")

    def own_checkpoints(self, index: int) -> str:
        """Independent checkpoints of one pserver."""
        return self._of("checkpoints", "pservers", index)

    def checkpoint(self, uuid: str) -> str:
        """Prefix of one checkpoint's keys."""
        return self._of("checkpoints", uuid, "")

    def checkpoint_started(self, uuid: str, index: int) -> str:
        return self._of("checkpoints", uuid, index)

    def started_in(self, key: str) -> str:
        """The uuid if `key` is a `checkpoint_started`, else ""."""
        uuid, _, index = key.removeprefix(self.checkpoints).partition("/")
        return uuid if index.isdecimal() and uuid != "pservers" else ""

    def checkpoint_begun(self, uuid: str) -> str:
        """Exists until the checkpoint's files are deleted, so that no crash leaves unknown files."""
        return self._of("checkpoints", uuid, "begun")

    def checkpoint_cut(self, uuid: str) -> str:
        """Written when all trainers have paused: the queue at this key's revision belongs to the checkpoint."""
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

    @property
    def slots(self) -> str:
        return self._of("slots")

    @property
    def lanes(self) -> str:
        return self._of("lanes")

    @property
    def layout(self) -> str:
        return self._of("layout")

    @property
    def init_lock(self) -> str:
        return self._of("init_ps", "lock")

    @property
    def init_done(self) -> str:
        return self._of("init_ps", "done")

    @property
    def tasks(self) -> str:
        """Prefix of the whole queue state."""
        return self._of("tasks", "")

    @property
    def task_meta(self) -> str:
        return self._of("tasks", "meta")

    @property
    def evaluation(self) -> str:
        return self._of("tasks", "evaluation")

    @property
    def commit(self) -> str:
        """Name of the last transaction. The next transaction compares it (masterless: its mod_revision); after a lost answer it
        tells whether the transaction was applied."""
        return self._of("tasks", "commit")

    @property
    def progresses(self) -> str:
        """Prefix of all `tasks/progress/<trainer>`."""
        return self._of("tasks", "progress", "")

    def progress(self, trainer_id: str) -> str:
        """Tasks and loss of a trainer of a masterless job; with a master a trainer reports them by REST."""
        return self._of("tasks", "progress", trainer_id)

    @property
    def losses(self) -> str:
        return self._of("tasks", "losses")

    def cursor(self, stream: str | int) -> str:
        return self._of("tasks", "cursor", stream)

    def pending(self, task_id: str) -> str:
        return f"{self.prefix}tasks/pending/{task_id}"

    def requeued(self, task_id: str) -> str:
        return self._of("tasks", "requeued", task_id)

    def discarded(self, task_id: str) -> str:
        return self._of("tasks", "discarded", task_id)

    def directory(self) -> tuple[str, str]:
        """[start, end) of the keys that members follow (init_ps … slots), without `tasks/` and `trainers/`, which change often."""
        return self._of("init_ps"), self._of("tasks")

    def name_of(self, key: str) -> str:
        """The last part: `0` of `…/ps/0`."""
        return key.rsplit("/", 1)[-1]
