"""What a name in etcd is used for. One etcd may hold a cluster, runs (`trireme run --etcd`) and
communicators: a name is of one kind at a time, and nobody deletes keys of another kind.

jobs/<name>                   a job of the cluster, whose keys are <name>/...
<name>/job/spec alone         a run
<name>/collective/members/... a communicator, also one in the script of that job
"""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum

from trireme_shared.platform.etcd import Compare, Delete, Etcd, Get
from trireme_shared.platform.etcd.client import TIMEOUT_S
from trireme_shared.platform.etcd.errors import Fatal
from trireme_shared.protocol.errors import Conflict
from trireme_shared.protocol.keys import ClusterKeys, Keys


class NameUse(StrEnum):
    """The value is how messages say it."""

    CLUSTER = "a job of the cluster in this etcd"
    RUN = "a run"
    COMMUNICATOR = "a communicator that has members now"


async def uses_of(etcd: Etcd, keys: Keys, *, timeout_s: float = TIMEOUT_S) -> frozenset[NameUse]:
    """Empty: the name is free. Raises PeerError; CallerError: no right to read the name's keys."""
    looks = [
        Get(keys.spec, keys_only=True),
        Get(keys.collective_members, prefix=True, limit=1, keys_only=True),
    ]
    found = await etcd.txn([], looks, timeout_s=timeout_s)
    spec, members = (bool(found.range(index).kvs) for index in range(len(looks)))
    job = ClusterKeys(keys.root).job(keys.job)
    try:
        in_cluster = bool((await etcd.range(job, keys_only=True, timeout_s=timeout_s)).kvs)
    except Fatal:  # who may read the name's own keys alone shares etcd with no cluster
        in_cluster = False
    uses = {NameUse.CLUSTER: in_cluster, NameUse.RUN: spec and not in_cluster, NameUse.COMMUNICATOR: members}
    return frozenset(use for use, there in uses.items() if there)


def check_free(name: str, uses: Collection[NameUse], wanted: NameUse, hint: str) -> None:
    """Raises Conflict if another kind than `wanted` uses the name. `hint`: how to give another one."""
    for use in sorted(use for use in uses if use is not wanted):
        raise Conflict(f"the name {name} is in use: it is {use}", hint=hint, job=name)


async def forget_communicator(etcd: Etcd, keys: Keys, *, timeout_s: float = TIMEOUT_S) -> None:
    """Delete what a communicator without members has left. Raises PeerError."""
    nobody = [Compare.create(keys.collective_lock, "==", 0)]
    await etcd.txn(nobody, [Delete(keys.collective_epoch)], timeout_s=timeout_s)


def deletion_of_job(keys: Keys) -> tuple[Delete, Delete]:
    """All keys of a job but those of communicators with its name."""
    first, after = keys.collective, keys.collective[:-1] + "0"  # "0" follows "/"
    return Delete(keys.prefix, first), Delete(after, keys.prefix[:-1] + "0")
