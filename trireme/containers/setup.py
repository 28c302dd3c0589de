"""`python -m trireme.containers.setup`: turns etcd's users on and makes the bucket, before anything else of
the cluster uses them.

    wait for etcd ─► root's password, users on ─► a user for /<root>/ alone
        ─► log in as that one, write, read, be refused elsewhere
    storage at s3://: wait for it ─► its bucket ─► write and read there

It may run at each start: what is done stays.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from pydantic import Field

from trireme.containers import secrets
from trireme_shared.platform.etcd import Etcd, connect
from trireme_shared.platform.membership.settings import MemberSettings
from trireme_shared.platform.runtime import clock, service, telemetry
from trireme_shared.platform.security import etcd_users
from trireme_shared.platform.storage import files, object_store
from trireme_shared.protocol.errors import (
    CallerError,
    DeadlineExceeded,
    InvalidArgument,
    PeerError,
    Unauthorized,
)

CALL_S = 5.0
LOOK_S = 0.2
BUCKET_LOOK_S = 0.5
HEALTH = "health"  # the user of etcd's health check, and its password: it may log in, and do nothing more

log = telemetry.logger("setup")


class Settings(MemberSettings):
    """`etcd_user`: of Trireme's members. `storage`: of the cluster's jobs. `setup_limit_s`: so long is waited
    for etcd, and for S3."""

    job: str = ""
    etcd_user: str = "trireme"
    storage: str = ""
    setup_limit_s: float = Field(default=60.0, gt=0)


async def turn_on(settings: Settings, root_password: str, password: str) -> None:
    """Raises DeadlineExceeded: etcd did not answer; Unauthorized: its users are on, with another password."""
    urls, prefix = settings.etcd, f"/{settings.root}/"
    async with _client(lambda: connect(urls)) as etcd:
        await _answers(etcd, settings.setup_limit_s)
        await _make(etcd, etcd_users.users(root_password))
    async with _client(lambda: connect(urls, user=etcd_users.ROOT, password=root_password)) as etcd:
        await _make(etcd, etcd_users.member(settings.etcd_user, password, prefix))
        await _make(etcd, etcd_users.nobody(HEALTH, HEALTH))
    async with _client(lambda: connect(urls, user=settings.etcd_user, password=password)) as etcd:
        await _check(etcd, settings, prefix)


@asynccontextmanager
async def _client(made: Callable[[], Etcd]) -> AsyncIterator[Etcd]:
    etcd = made()
    try:
        yield etcd
    finally:
        await etcd.close()


async def _make(etcd: Etcd, calls: etcd_users.Calls) -> None:
    await etcd_users.make(lambda method, body: etcd.transport.call(method, body, CALL_S), calls)


async def _answers(etcd: Etcd, limit_s: float) -> None:
    """Wait until etcd answers, if only with a refusal."""
    deadline = clock.monotonic() + limit_s
    while True:
        try:
            await etcd.get("/", timeout_s=1.0)
            return
        except CallerError:
            return
        except PeerError as error:
            if clock.monotonic() > deadline:
                raise DeadlineExceeded(f"waited {limit_s:g} s for etcd: {error.message}") from error
        await asyncio.sleep(LOOK_S)


async def _check(etcd: Etcd, settings: Settings, prefix: str) -> None:
    """It is as it should be, whatever was done by whom."""
    key = f"{prefix}setup"
    try:
        await etcd.put(key, b"")
        await etcd.delete(key)
    except CallerError as error:
        msg = (
            f"user {settings.etcd_user} cannot use {prefix} in etcd at {settings.etcd_access}: "
            f"{error.message}"
        )
        hint = (
            "etcd's volume and the volumes of secrets belong together: were these removed, and etcd's "
            "was not?"
        )
        raise Unauthorized(msg, hint=hint) from error
    async with _client(lambda: connect(settings.etcd)) as nobody:
        try:
            await nobody.get(key, timeout_s=CALL_S)
        except CallerError:
            return
    raise Unauthorized(f"etcd at {settings.etcd_access} still answers whoever asks: its users are not on")


async def prepare_bucket(url: str, limit_s: float) -> None:
    """Wait until `url` can be written and read. A missing bucket is made, but not at Amazon: the name may be
    mistyped there.

    Raises Unauthorized, InvalidArgument (there is no such bucket), DeadlineExceeded with the last reason.
    """
    deadline = clock.monotonic() + limit_s
    while True:
        try:
            await asyncio.to_thread(files.check_writable, url)
            return
        except object_store.NoBucket as error:
            if not object_store.endpoint():
                raise InvalidArgument(f"the storage cannot be used: {error}") from error
            reason: OSError = error
        except PermissionError as error:
            raise Unauthorized(f"the storage cannot be used: {error}") from error
        except OSError as error:  # it is on its way, or cannot write yet
            reason = error
        if clock.monotonic() > deadline:
            raise DeadlineExceeded(f"waited {limit_s:g} s for the storage: {reason}") from reason
        if isinstance(reason, object_store.NoBucket):
            await asyncio.to_thread(object_store.make_bucket, url)
        else:
            await asyncio.sleep(BUCKET_LOOK_S)


async def _serve(settings: Settings) -> int:
    root = secrets.root_folder()
    root_password, password = (secrets.password(root, folder) for folder in (secrets.ETCD_ROOT, secrets.ETCD))
    await turn_on(settings, root_password, password)
    sys.stdout.write(f"etcd asks for a password; user {settings.etcd_user} may use /{settings.root}/ alone\n")
    if object_store.is_s3(settings.storage):
        await prepare_bucket(settings.storage, settings.setup_limit_s)
        sys.stdout.write(f"{settings.storage} can be written and read\n")
    return 0


def main() -> int:
    argparse.ArgumentParser(
        prog="python -m trireme.containers.setup",
        description="Turn on the users of the etcd at TRIREME_ETCD, with the passwords in TRIREME_SECRETS "
        "(/secrets): root, "
        "TRIREME_ETCD_USER (trireme) for the keys of TRIREME_ROOT alone, and one for health checks "
        "that may do nothing. "
        "Make the bucket of TRIREME_STORAGE if that is at S3.",
    ).parse_args()
    settings = Settings.from_environment()
    telemetry.configure(level=settings.log_level, service="setup", member="setup")
    return service.run(lambda _: _serve(settings))


if __name__ == "__main__":
    sys.exit(main())
