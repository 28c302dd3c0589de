"""Who takes part in a job: master, parameter servers, trainers, as each says of itself in its own key."""

from __future__ import annotations

from pydantic import Field

from shared.records.pauses import Paused, Torn
from shared.records.record import Record


class MasterLock(Record):
    """`lease` lets a peer that proved this process dead revoke it."""

    master: str
    url: str
    lease: int = 0


class MasterAddress(Record):
    url: str
    term: int


class Restored(Record):
    """What a pserver did about a roll-back: it serves `checkpoint` in `timeline`, or cannot (`error` says why).

    `superseded`: it is not kept any more, since a newer one became the latest before the roll-back began: no damage.
    `rejoined`: it came back alone, the others went on; `positions`: of the tasks that were open at that checkpoint the
    minibatches that all its `blocks` have (-1: all); `damaged`: what is wrong with newer checkpoints."""

    timeline: int
    checkpoint: str
    error: str = ""
    superseded: bool = False
    rejoined: bool = False
    positions: dict[str, int] = Field(default_factory=dict)
    blocks: int = 0
    damaged: str = ""


class PserverMember(Record):
    """`uds`: path of the UNIX socket beside `url`, empty if none. `lease`: see MasterLock. `restored`: its answer to the
    last roll-back it took part in. One that never did holds parameters only if its key is older than `layout`. `copied`:
    the last paused checkpoint it has copied. `draining`: asked to leave, it would like a checkpoint of this version or later
    first. `trouble`, `waits`: why it cannot write, or load, checkpoints now. `torn`: why its parameters are of no use."""

    index: int
    url: str
    incarnation: str
    host: str
    pid: int
    lease: int = 0
    uds: str = ""
    restored: Restored | None = None
    copied: str = ""
    draining: int | None = None
    trouble: str = ""
    waits: str = ""
    torn: Torn | None = None


class TrainerMember(Record):
    """`url` answers /healthz: the probe that tells a dead trainer from a slow one. `paused`: see Paused."""

    trainer: str
    url: str
    incarnation: str
    host: str
    pid: int
    lease: int = 0
    paused: Paused | None = None
