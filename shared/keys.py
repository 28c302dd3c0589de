"""Every etcd key is spelled here. Writers, leases and fences:

    key                     value           lease      writer                        fence
    master/lock             MasterLock      master's   candidates                    create = 0; its create_revision is the term
    master/addr             MasterAddress   master's   master                        lock
    job/spec job/state      JobSpec ...     -          master                        lock
    ps_desired              int             -          master                        lock
    ps/<index>              PserverMember   pserver's  pserver                       create = 0, own create_revision
    trainers/<id>           TrainerMember   trainer's  trainer                       create = 0
    slots lanes             SlotMap LaneMap -          master                        lock
    layout                  Layout          -          initialising trainer          create = 0
    init_ps/lock|done       text            trainer|-  initialising trainer          create = 0
    tasks/meta              TaskMeta        -          master                        lock
    tasks/cursor/<stream>   int             -          master                        lock + mod_revision
    tasks/pending/<task>    PendingTask     -          master                        lock + mod_revision
    tasks/requeued/<task>   RequeuedTask    -          master                        lock + mod_revision
    tasks/discarded/<task>  DiscardedTask   -          master                        lock + mod_revision
    tasks/evaluation        EvaluationSums  -          master                        lock
    tasks/commit            text            -          master                        lock + mod_revision
    trainers/re-fetch       Refetch         -          master                        lock
    checkpoints/<uuid>/<ps>          CheckpointStarted  pserver's  pserver           own create_revision
    checkpoints/<uuid>/begun         CheckpointStarted  -          pserver           own create_revision
    checkpoints/<uuid>/finished/<ps> CheckpointPart     -          pserver           own create_revision
    checkpoints/finish_lock          text               holder's   pserver           create = 0
    checkpoints/latest               CheckpointLatest   -          finish_lock       lock + all parts + state + own mod_revision

Values are UTF-8 JSON of the records in records.py (integers as decimal text).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one job; `Keys("ctr").pserver(0)` is `/trireme/ctr/ps/0`."""

    job: str
    root: str = "trireme"

    @property
    def prefix(self) -> str:
        return f"/{self.root}/{self.job}/"

    def _of(self, *parts: str | int) -> str:
        return self.prefix + "/".join(str(part) for part in parts)

    @property
    def master_lock(self) -> str:
        return self._of("master", "lock")

    @property
    def master_address(self) -> str:
        return self._of("master", "addr")

    @property
    def spec(self) -> str:
        return self._of("job", "spec")

    @property
    def state(self) -> str:
        return self._of("job", "state")

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
    def refetch(self) -> str:
        """Among the trainers' keys: tells observers that everybody reads the parameters again."""
        return self._of("trainers", "re-fetch")

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

    def checkpoint(self, uuid: str) -> str:
        """Prefix of one checkpoint's keys."""
        return self._of("checkpoints", uuid, "")

    def checkpoint_started(self, uuid: str, index: int) -> str:
        return self._of("checkpoints", uuid, index)

    def checkpoint_begun(self, uuid: str) -> str:
        """Stays until the checkpoint's files are deleted, so that no crash leaves files that nobody knows of."""
        return self._of("checkpoints", uuid, "begun")

    def checkpoint_parts(self, uuid: str) -> str:
        """Prefix of one checkpoint's finished parts."""
        return self._of("checkpoints", uuid, "finished", "")

    def checkpoint_part(self, uuid: str, index: int) -> str:
        return self._of("checkpoints", uuid, "finished", index)

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
        """Name of the master's last transaction: its mod_revision orders them, its value tells whether one landed."""
        return self._of("tasks", "commit")

    def cursor(self, stream: str | int) -> str:
        return self._of("tasks", "cursor", stream)

    def pending(self, task_id: str) -> str:
        return self._of("tasks", "pending", task_id)

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
