"""What communicators of a job keep in etcd: who is there, which epoch they are in, and what each has done so far."""

from __future__ import annotations

from trireme_shared.protocol.records.record import Id, Int64, Message, Name, Record


class EpochMember(Record):
    member: Id
    incarnation: Id


class Epoch(Record):
    """The members by rank; rank 0 is the oldest. Its id is the revision at which it was written, so none repeats."""

    members: tuple[EpochMember, ...]


class Trouble(Record):
    """A member's group of that epoch is of no use any more, though its members may all live."""

    epoch: Int64
    cause: Message


class Unreached(Record):
    """`by` has not been able to connect to these members of its epoch for as long as a lease lasts, though their leases go on."""

    by: EpochMember
    members: tuple[EpochMember, ...]


class LeftOut(Record):
    """What a member is told whose lease is revoked because it and `members` do not reach each other."""

    incarnation: Id
    members: tuple[Id, ...]


class Done(Record):
    """One operation of the group's history: its number, and the epoch in which it was done. Two members that name the same have the
    same result of it, and of all before."""

    number: Int64
    epoch: Int64


class Statement(Record):
    """What a member says before the first operation of an epoch. `manifest`: what has to be equal in all members. `last`, `before`: its
    last two operations. `gives`: it has the result of `last` still. `has_state`: its model is the group's. `listener`: host and port at
    which its group accepts connections."""

    manifest: dict[Name, Name]
    last: Done
    before: Done
    gives: bool
    has_state: bool
    listener: tuple[Name, int] | None = None
    network: str = ""
