"""`trireme run --etcd URL`: an etcd that is there already takes the place of the one that a run starts for
itself.

settings ─► access ─► checked: it answers, the user may write there
    ─► the job's keys: of this run, of another one, of nobody
A run never continues, replaces or deletes the keys of another run, unless --fresh says so and nobody runs
that one.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from trireme.launch.processes import held_leases
from trireme.settings import Setting, UsageError
from trireme_shared.platform.etcd import Compare, Etcd, Get, NoSpace, Put, Unauthenticated
from trireme_shared.platform.etcd.reading import read_record
from trireme_shared.platform.membership.etcd_access import PASSWORD, EtcdAccess, split
from trireme_shared.platform.membership.names import (
    NameUse,
    check_free,
    deletion_of_job,
    forget_communicator,
    uses_of,
)
from trireme_shared.platform.runtime import clock
from trireme_shared.protocol.errors import CallerError, Conflict, PeerError, TriremeError, Unauthorized
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import JobSpec, MasterLock, PserverMember, TrainerMember

ANSWER_S = 3.0
GONE_S = 8.0  # the leases of an earlier run's members have expired by then
LOOK_S = 0.25
NEVER = 1 << 62  # no key has this revision

_FILES = ("password_file", "ca", "cert", "key")


def access_of(
    settings: Mapping[str, Setting], environment: Mapping[str, str] = os.environ
) -> EtcdAccess | None:
    """None: the run starts an etcd of its own. Raises UsageError."""
    given = {name: settings[f"etcd_{name}"] for name in ("user", *_FILES) if f"etcd_{name}" in settings}
    if "etcd" not in settings:
        if given:
            name, setting = next(iter(given.items()))
            msg = f"{setting.origin} is of an etcd that is there already: give its address with --etcd URL"
            raise UsageError(msg)
        return None
    value, origin = settings["etcd"].value, settings["etcd"].origin
    urls = tuple(map(str, value)) if isinstance(value, list | tuple) else split(str(value))
    if not urls:
        raise UsageError(
            f"{origin} names no address; write it as http://host:2379, with commas between several"
        )
    values = {name: str(setting.value) for name, setting in given.items()}
    for name in _FILES:
        if name in values:
            values[name] = str(Path(values[name]).absolute())
            if not Path(values[name]).is_file():
                raise UsageError(f"{given[name].origin} = {given[name].value}: there is no such file")
    password = environment.get(PASSWORD, "")
    if (password or "password_file" in values) and "user" not in values:
        raise UsageError(
            f"a password for etcd is given ({PASSWORD} or a file), but no user: give --etcd-user NAME"
        )
    return EtcdAccess(urls, password=password, **values)


async def check(access: EtcdAccess, keys: Keys) -> None:
    """Within some seconds. Raises PeerError (not reachable, out of space), Unauthorized, InvalidArgument."""
    etcd = access.connect()
    try:
        # etcd checks the right to write also for the branch that is not taken
        await etcd.txn(
            [Compare.mod(keys.state, "==", NEVER)],
            [Put(keys.state, b"")],
            [Get(keys.prefix, prefix=True, limit=1)],
            timeout_s=ANSWER_S,
        )
        space = await etcd.space(timeout_s=ANSWER_S)
    except TriremeError as error:
        raise _told(access, keys, error) from error
    finally:
        await etcd.close()
    if space.full:
        raise NoSpace.told(str(access))


def _told(access: EtcdAccess, keys: Keys, error: TriremeError) -> TriremeError:
    who = f"user {access.user}" if access.user else "no user"
    if isinstance(error, Unauthenticated):
        message = f"etcd at {access} refused {who}: {error.message}"
        return Unauthorized(
            message, hint=f"give --etcd-user, and the password in {PASSWORD} or --etcd-password-file"
        )
    if isinstance(error, CallerError):
        message = f"{who} may not read and write {keys.prefix} in etcd at {access}: {error.message}"
        return Unauthorized(
            message, hint=f"grant the user a role with readwrite for the prefix /{keys.root}/"
        )
    return PeerError(
        f"etcd at {access} cannot be used: {error.message}",
        hint="is it running, and is the address right? https needs --etcd-ca for an authority of your "
        "own; without --etcd the run starts its own etcd",
    )


@dataclass(frozen=True, slots=True)
class Claim:
    """What a run wants with the keys of its job. `folder`: of the run. `previous`: the spec of the run that
    the folder holds. `resumes`: it continues that one; else it starts from the beginning, in place of any
    other if `fresh`."""

    folder: Path
    previous: JobSpec | None
    resumes: bool
    fresh: bool


async def claim(access: EtcdAccess, keys: Keys, wanted: Claim) -> None:
    """The keys are those of the run that is resumed, or there are none. Raises Conflict, PeerError."""
    etcd = access.connect()
    try:
        stored = await etcd.get(keys.spec, timeout_s=ANSWER_S)
        known = read_record(JobSpec, keys.spec, stored.value if stored else None)
        deletion = deletion_of_job(keys)
        looks = [Get(part.key, part.end, limit=1, keys_only=True) for part in deletion]
        there = await etcd.txn([], looks, timeout_s=ANSWER_S)
        some = any(there.range(index).kvs for index in range(len(looks)))
        if not wanted.resumes:  # the script of the run that is resumed may have a communicator
            uses = await uses_of(etcd, keys, timeout_s=ANSWER_S)
            check_free(keys.job, uses, NameUse.RUN, "use another name: --job NAME")
        _check_owner(access, keys, known, wanted, some=some)
        if not some:
            return
        await _revoke_dead(etcd, keys)
        await _wait_until_nobody_runs(etcd, access, keys)
        if not wanted.resumes:
            await forget_communicator(etcd, keys, timeout_s=ANSWER_S)
            await etcd.txn([], deletion, timeout_s=ANSWER_S)
    except Conflict:
        raise
    except TriremeError as error:
        raise _told(access, keys, error) from error
    finally:
        await etcd.close()


def _check_owner(access: EtcdAccess, keys: Keys, known: JobSpec | None, wanted: Claim, *, some: bool) -> None:
    """Raises Conflict."""
    mine = known is not None and wanted.previous is not None and known.storage == wanted.previous.storage
    if wanted.resumes and not mine:
        there = f"holds another run of it, with storage {known.storage}" if known else "knows nothing of it"
        msg = (
            f"job {keys.job} in {wanted.folder} is unfinished, and etcd at {access} {there}: its task "
            "queue is elsewhere"
        )
        raise Conflict(
            msg, hint="give the etcd that the run began with, or --fresh to start from the beginning"
        )
    if some and not mine and not wanted.resumes and not wanted.fresh:
        where = f", with storage {known.storage}" if known else ""
        msg = f"etcd at {access} holds a job {keys.job} of another run{where}"
        raise Conflict(
            msg, hint="use another name (--job NAME); --fresh deletes its keys and starts from the beginning"
        )


async def _revoke_dead(etcd: Etcd, keys: Keys) -> None:
    """The leases of members of this host whose processes are gone: their launcher was killed."""
    held = await held_leases(etcd, keys, ANSWER_S)
    members: list[TrainerMember | PserverMember] = [*held.trainers, *held.pservers]
    for member in members:
        if member.lease and member.host == socket.gethostname() and not psutil.pid_exists(member.pid):
            await etcd.revoke(member.lease, timeout_s=ANSWER_S)


async def _wait_until_nobody_runs(etcd: Etcd, access: EtcdAccess, keys: Keys) -> None:
    """Raises Conflict if a member renews its lease: after GONE_S those of a killed run are gone."""
    deadline = clock.monotonic() + GONE_S
    while alive := [kv for kv in (await etcd.range(keys.prefix, prefix=True)).kvs if kv.lease]:
        if clock.monotonic() > deadline:
            holders = [
                read_record(MasterLock, kv.key, kv.value)
                for kv in alive
                if kv.key in (keys.master_lock, keys.sweep_lock)
            ]
            who = (
                f"{holders[0].master} at {holders[0].url} leads it"
                if holders and holders[0]
                else f"{alive[0].key} is held"
            )
            msg = f"job {keys.job} is run by somebody else in etcd at {access}: {who}"
            raise Conflict(msg, hint="wait for its end, or use another name: --job NAME")
        await asyncio.sleep(LOOK_S)


def check_same_kind(facts: Mapping[str, Any] | None, folder: Path, job: str) -> None:
    """For a run that starts its own etcd and resumes one whose `facts` name another. Raises Conflict."""
    if facts is not None:
        msg = f"job {job} in {folder} is unfinished, and its task queue is in etcd at {facts['etcd']}"
        raise Conflict(msg, hint=f"give --etcd {facts['etcd']}, or --fresh to start from the beginning")
