"""The members of a job: master, parameter servers, trainers. Each writes its record into its own key."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import Field

from trireme_shared.protocol.records.assignments import Handed
from trireme_shared.protocol.records.job import Paused, Torn
from trireme_shared.protocol.records.record import Id, Message, Name, Record


class MasterLock(Record):
    """`lease`: a peer that has proved this process dead can revoke it. `network`: where a loopback address in
    `url` means this process (shared/trireme_shared/platform/runtime/http.py)."""

    master: str
    url: str
    lease: int = 0
    network: str = ""


class MasterAddress(Record):
    url: str
    term: int


class Restored(Record):
    """A pserver's answer to a rollback: it serves `checkpoint` in `timeline`, or cannot (`error` says why).

    `superseded`: the checkpoint is not kept any more, because a newer one became the latest before the
    rollback began; it is not damaged. `rejoined`: the pserver came back alone, the others went on.
    `positions`: for each task that was open at the checkpoint, the minibatches that all its `blocks` (rows
    count as one) have (-1: all). `damaged`: what is wrong with newer checkpoints."""

    timeline: int
    checkpoint: str
    error: Message = ""
    superseded: bool = False
    rejoined: bool = False
    positions: dict[str, int] = Field(default_factory=dict)
    blocks: int = 0
    damaged: Message = ""


class PserverMember(Record):
    """`uds`: path of the UNIX socket beside `url`, or empty. `lease`, `network`: see MasterLock. `restored`:
    its answer to the last rollback it took part in; a pserver without one holds parameters only if its key is
    older than `layout`. `copied`: the last paused checkpoint it has copied. `copying`: how many blocks it has
    copied of the one under way, written now and then during a long copy, so that it is not taken for frozen.
    `draining`: it was told to leave and first wants a checkpoint of this version or later. `trouble`: why it
    cannot write checkpoints now. `waits`: why it cannot load one now. `torn`: why its parameters cannot be
    used. `since`: the revision at which etcd first created the key, if this process had to create it again
    after its lease ran out. `handed`: what it has handed over in the job's migration. `rows_bytes`: about so
    many bytes its rows of embedding tables would have on their way to others. `leaving`: the last it says
    before it gives its key up, if it was told to leave. `trireme_version`: of the program; empty: of an
    earlier one, which does not say."""

    index: int
    url: str
    incarnation: str
    host: str
    pid: int
    lease: int = 0
    network: str = ""
    uds: str = ""
    restored: Restored | None = None
    copied: str = ""
    copying: int = 0
    draining: int | None = None
    trouble: Message = ""
    waits: Message = ""
    torn: Torn | None = None
    since: int = 0
    handed: Handed | None = None
    rows_bytes: int = 0
    leaving: bool = False
    trireme_version: Name = ""

    @property
    def name(self) -> str:
        """For people."""
        return f"pserver-{self.index}" if self.index >= 0 else self.incarnation


def pserver_names(indices: Iterable[int]) -> str:
    """For people: `pserver-0, pserver-2`."""
    return ", ".join(f"pserver-{index}" for index in indices)


class Exchange(Record):
    """Where a trainer of a collective job serves its share of the gradients. `uds`: see PserverMember."""

    url: str
    uds: str = ""


class Holding(Record):
    """What a trainer of a collective job has: parameters and optimizer of `version` at the time it said so
    (it may be further by now), in `timeline`, which began with `checkpoint` (see JobState). `error`: why it
    could not load that checkpoint; then it has nothing. `superseded`: see Restored. `doubted`: the trainer's
    key was gone for a while, so others may have made versions since that it cannot get any more."""

    timeline: int
    checkpoint: str = ""
    version: int = 0
    error: Message = ""
    superseded: bool = False
    doubted: bool = False


class TrainerMember(Record):
    """`url` answers /healthz, which tells a dead trainer from a slow one. `lease`, `network`: see MasterLock.
    `paused`: see Paused. `leaving`, `torn`, `trouble`, `waits`, `trireme_version`: see PserverMember.
    `exchange`, `holds`: of a collective job; a trainer without `holds` still fetches the parameters."""

    trainer: str
    url: str
    incarnation: str
    host: str
    pid: int
    lease: int = 0
    network: str = ""
    paused: Paused | None = None
    leaving: bool = False
    exchange: Exchange | None = None
    holds: Holding | None = None
    torn: Torn | None = None
    trouble: Message = ""
    waits: Message = ""
    trireme_version: Name = ""


class CommunicatorMember(Record):
    """A process that calls a trireme.CollectiveCommunicator. `address`: host:port of the lifeline, whose
    refusal proves it dead. `lease`, `network`: see MasterLock."""

    member: Id
    incarnation: Id
    host: Name
    pid: int
    address: Name
    lease: int = 0
    network: str = ""
    leaving: bool = False
