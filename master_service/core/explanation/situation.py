"""What an explanation is made from: the job, and what its leader has observed beside it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from master_service.core import placement
from master_service.core.decisions import recovery
from master_service.core.state.job import Job
from trireme_shared.protocol.records import Strategy, UserFailure
from trireme_shared.protocol.records.checkpoints import saved_point
from trireme_shared.protocol.records.cluster import Kind

STILL_S = 3.0  # after so many seconds without a finished minibatch a job stands still
NAMED = 4  # members or tasks that a sentence names


@dataclass(frozen=True, slots=True)
class Reported:
    """A failure of the user's code that a trainer reported `ago_s` ago. `task_id` empty: outside of tasks."""

    failure: UserFailure
    ago_s: float
    task_id: str = ""


@dataclass(frozen=True, slots=True)
class Situation:
    """Durations in seconds. `phase_s`: in its phase, as far as this leader knows. `still_s`: since any
    minibatch or task was finished. `records_per_s`: 0 while unknown. `silent`: members that have not renewed
    their leases for so long. `etcd_silent_s`: 0 if etcd answers. `etcd_full`, `storage_away`: why nothing can
    be written or read, or "". `initialiser`: who holds the lock to initialise the parameters. `reported`: the
    newest comes last. `given`: trainers that a cluster gives the job now; without one, as many as its spec
    says are wanted. `why_fewer`: by kind of member, who has those of the cluster's pool that the job could
    use."""

    job: Job
    now: float
    phase_s: float = 0.0
    still_s: float = 0.0
    records_per_s: float = 0.0
    step: int | None = None
    silent: Mapping[str, float] = field(default_factory=dict)
    etcd_silent_s: float = 0.0
    etcd_full: str = ""
    storage_away: str = ""
    initialiser: str = ""
    reported: Sequence[Reported] = ()
    given: int | None = None
    why_fewer: Mapping[Kind, str] = field(default_factory=dict)

    @property
    def trainers_wanted(self) -> int:
        return self.job.spec.trainers if self.given is None else self.given

    @property
    def is_still(self) -> bool:
        return self.still_s >= STILL_S

    @property
    def option(self) -> str:
        """That names the job on the command line."""
        return f"--job {self.job.spec.job}"

    def named(self, names: Iterable[str]) -> str:
        """For people: at most NAMED members, with how long each is silent."""
        every = list(names)
        shown = [
            f"{name} (silent for {self.silent[name]:.0f} s)" if name in self.silent else name
            for name in every
        ]
        return listed(shown)

    def missing_pservers(self) -> list[int]:
        needed = placement.holders(self.job.spec, self.job.slots)
        return [index for index in needed if index not in self.job.members.pservers]

    @property
    def rollback_point(self) -> str:
        """Where the job goes back to."""
        state = self.job.state
        ref = recovery.ref_of(self.job.members.latest, state.checkpoint)
        if ref is not None:
            return f"{saved_point(self.job.spec.mode, ref.step)} (checkpoint {ref.uuid[:8]})"
        return f"checkpoint {state.checkpoint[:8]}" if state.checkpoint else "the beginning"

    @property
    def collective(self) -> bool:
        return self.job.spec.strategy is Strategy.COLLECTIVE


def listed(items: Iterable[str]) -> str:
    """`a, b, c, d and 3 more`."""
    every = list(items)
    rest = len(every) - NAMED
    return ", ".join(every[:NAMED]) + (f" and {rest} more" if rest > 0 else "")


def seconds(duration_s: float) -> str:
    """`8 s`, `2 min 5 s`, `3 h 0 min`."""
    whole = round(duration_s)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
