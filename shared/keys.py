"""Every etcd key is spelled here. Writers, leases and fences:

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

Values are UTF-8 JSON of the records in records.py (integers as decimal text).

In a masterless job (`dispatch: etcd`) there is no master/*. What "master" writes under tasks/, job/failures, and job/state where
the end of a task entails it, any trainer writes, fenced by the mod_revision of tasks/commit alone; all else, and whatever follows from
members and time, the holder of sweep/lock, fenced by that lock's create_revision as well (docs/masterless.md).
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
        """Of a masterless job: whoever holds it follows members and time as a master would."""
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
        """Among what members follow: trainers carry it into a version (trainer_agent/core/steps.py)."""
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
        """Among the trainers' keys: while it is there, asynchronous training stands still."""
        return self._of("trainers", "pause")

    def is_trainer(self, key: str) -> bool:
        """Whether that is a `trainers/<id>`, and not `pause`, which lies among them."""
        return key.startswith(self.trainers) and "/" not in key.removeprefix(self.trainers) and key != self.pause

    @property
    def checkpoints(self) -> str:
        """Prefix of all about checkpoints."""
        return self._of("checkpoints", "")

    @property
    def latest(self) -> str:
        return self._of("checkpoints", "latest")

    @property
    def finish_lock(self) -> str:
        return self._of("checkpoints", "finish_lock")

    @property
    def latest_files(self) -> str:
        """Prefix of where the trainers' readers stood at `latest`."""
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
        """The checkpoint whose `checkpoint_started` the key is, or ""."""
        uuid, _, index = key.removeprefix(self.checkpoints).partition("/")
        return uuid if index.isdecimal() and uuid != "pservers" else ""

    def checkpoint_begun(self, uuid: str) -> str:
        """Stays until the checkpoint's files are deleted, so that no crash leaves files that nobody knows of."""
        return self._of("checkpoints", uuid, "begun")

    def checkpoint_cut(self, uuid: str) -> str:
        """Written when everybody has paused: the queue of that very revision belongs to the checkpoint."""
        return self._of("checkpoints", uuid, "cut")

    def checkpoint_parts(self, uuid: str) -> str:
        """Prefix of one checkpoint's finished parts."""
        return self._of("checkpoints", uuid, "finished", "")

    def checkpoint_part(self, uuid: str, index: int) -> str:
        return self._of("checkpoints", uuid, "finished", index)

    def part_in(self, key: str) -> tuple[str, int] | None:
        """The (uuid, index) whose `checkpoint_part` the key is, or None."""
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
        """Name of the last transaction: the next one compares it (masterless: its mod_revision), and it tells whether one landed."""
        return self._of("tasks", "commit")

    @property
    def progresses(self) -> str:
        """Prefix of all `tasks/progress/<trainer>`."""
        return self._of("tasks", "progress", "")

    def progress(self, trainer_id: str) -> str:
        """What a trainer of a masterless job tells of its tasks and its loss; a master hears it by REST."""
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
        """[start, end) of all that members follow (init_ps … slots), without the busy `tasks/` and `trainers/`."""
        return self._of("init_ps"), self._of("tasks")

    def name_of(self, key: str) -> str:
        """The last part: `0` of `…/ps/0`."""
        return key.rsplit("/", 1)[-1]
