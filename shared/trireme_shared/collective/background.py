"""What a communicator does beside the user's thread: keep its key, watch the others, decide if it holds the
lock, enter each epoch.

user's thread ◄── condition ── session ◄── entering ◄── epoch ◄── mirror ◄── etcd
              ── trouble, free ──►  event loop of this thread
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from trireme_shared.collective.decider import Decider
from trireme_shared.collective.entering import Entering, Superseded, Unfit
from trireme_shared.collective.reach import Reach, lifeline
from trireme_shared.collective.records import Epoch, EpochMember, Mirror, Settings, Trouble
from trireme_shared.collective.session import Progress, Session
from trireme_shared.platform.etcd import Etcd, LeaseLost, Put
from trireme_shared.platform.etcd.reading import read_record
from trireme_shared.platform.membership.directory import OwnKey
from trireme_shared.platform.membership.etcd_access import EtcdAccess
from trireme_shared.platform.membership.names import NameUse, check_free, uses_of
from trireme_shared.platform.runtime import clock, http, ids, telemetry
from trireme_shared.protocol.errors import InvalidArgument, PeerError, TriremeError, leaves
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records.members import CommunicatorMember

CLOSE_S = 5.0
AGAIN_S = 0.1
CUT_AGAIN_S = 0.25

T = TypeVar("T")
log = telemetry.logger("collective")


class Background:
    """`start` it; then `session_within` waits for an epoch in which this process is. `why`: what keeps it
    from one, for messages. `own_name`: the name is not that of the job whose process this is, so no job may
    have it."""

    def __init__(self, access: EtcdAccess, keys: Keys, settings: Settings, *, own_name: bool = True) -> None:
        self.settings, self.keys = settings, keys
        self.progress = Progress()
        self.condition = threading.Condition()
        self.session: Session | None = None
        self.fatal = ""
        self.why = f"this process is not registered in etcd at {access}"
        self._access, self._own_name = access, own_name
        self._reach: Reach | None = None
        self._registered = False  # as far as is known here
        self._entering_since: float | None = None  # no epoch has been entered since
        self._started = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._troubles: asyncio.Queue[Trouble] = asyncio.Queue()
        self._thread = threading.Thread(target=self._run, name="trireme-communicator", daemon=True)
        self._process = os.getpid()
        self.me = EpochMember(member=ids.new_id("member"), incarnation=ids.new_id())

    # ------------------------------------------------------------ user's thread

    def start(self, limit_s: float) -> None:
        """Raises PeerError: etcd did not answer within `limit_s`; TriremeError: it refused."""
        try:
            self._thread.start()
            ready = self._started.wait(limit_s)
        except BaseException:  # an interrupt, for example: nobody would close it any more
            self.close()
            raise
        if not ready or self.fatal:
            refused, why = bool(self.fatal), self.fatal or f"{self.obstacle()} after {limit_s:g} s"
            self.close()
            hint = "" if refused else "is TRIREME_ETCD the address of a running etcd?"
            raise PeerError(f"no communicator: {why}", hint=hint)

    def check_process(self) -> None:
        """Raises InvalidArgument in a process that was forked from this one: the thread is not there, and
        every lock may be held for good."""
        if os.getpid() != self._process:
            msg = (
                f"this communicator was made in process {self._process}, and process {os.getpid()} "
                "was forked from it: "
                "make another one in this process, and let it take part as a member of its own"
            )
            raise InvalidArgument(msg)

    def session_within(self, limit_s: float) -> Session | None:
        """One that may be used; None: there is none within `limit_s`, or there will never be one
        (`fatal`)."""
        with self.condition:
            self.condition.wait_for(
                lambda: bool(self.fatal) or (self.session is not None and self.session.usable),
                max(0.0, limit_s),
            )
            return None if self.fatal else self.session if self.session and self.session.usable else None

    def obstacle(self, trouble: str = "") -> str:
        """Why there is no result, as far as is known. `trouble`: of the operation."""
        far = self._reach.trouble if self._reach is not None else ""
        return "; ".join(filter(None, (self._too_few() or trouble or self.why, far)))

    def _too_few(self) -> str:
        """Empty: there are as many processes as an epoch needs, or this one is none of them."""
        if not self._registered:
            return ""
        keys = list(self.mirror.values)  # in one step: the loop's thread changes them
        there, least = (
            sum(key.startswith(self.keys.collective_members) for key in keys),
            self.settings.min_members,
        )
        if not 0 < there < least:
            return ""
        return f"min_members is {least}, and {there} process{' is' if there == 1 else 'es are'} there"

    def report(self, epoch: int, cause: str) -> None:
        """The group of `epoch` is of no use any more, here."""
        self._soon(self._troubles.put_nowait, Trouble(epoch=epoch, cause=cause))

    def close(self) -> None:
        """Leave the group at once; the others go on without this process. It may be called more than once."""
        if os.getpid() != self._process:
            return  # a fork: it is the parent's
        self.fatal = self.fatal or "it is closed"
        if self._stop is not None:
            self._soon(self._stop.set)
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)
        with self.condition:
            session, self.session = self.session, None
            self.condition.notify_all()
        if session is not None and session.retire():
            session.drop()

    def _soon(self, function: Callable[..., Any], *arguments: Any) -> None:
        with suppress(RuntimeError):  # the loop is closed
            if self._loop is not None:
                self._loop.call_soon_threadsafe(function, *arguments)

    def _notify(self) -> None:
        with self.condition:
            self.condition.notify_all()

    # ------------------------------------------------------------ the loop

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except* TriremeError as errors:
            self._fail(str(next(leaves(errors))))
        except* Exception as errors:
            log.exception("communicator_failed")
            self._fail(f"an error of its own: {next(leaves(errors))!r}")
        finally:
            self._started.set()

    def _fail(self, why: str) -> None:
        self.fatal = self.fatal or why
        self._notify()

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        if self.fatal:  # closed before there was anything to stop
            return
        etcd = self._access.connect()
        try:
            async with lifeline(self.settings.host, self.me.incarnation) as port:
                await self._live(etcd, port)
        except OSError as error:
            msg = f"this process cannot listen at {self.settings.host}: {error}"
            raise InvalidArgument(msg, hint="host= (or TRIREME_HOST) is an address of this host") from error
        finally:
            await etcd.close()

    async def _live(self, etcd: Etcd, port: int) -> None:
        assert self._stop is not None
        host = self.settings.host
        record = CommunicatorMember(
            member=self.me.member,
            incarnation=self.me.incarnation,
            host=socket.gethostname(),
            pid=os.getpid(),
            address=f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
            network=http.own_network(),
        )
        self.own = OwnKey(etcd, record)
        self.mirror = Mirror(etcd, self.keys.collective)
        decider = Decider(etcd, self.keys, self.mirror, lambda: self.own, self.settings.min_members)
        place = etcd, self.keys, self.mirror, lambda: self.own
        entering = Entering(*place, self.settings, self.progress, self.me, self._freed)
        reach = self._reach = Reach(
            etcd, self.keys, self.mirror, lambda: self.own, self.me, self.settings.lease_ttl_s, self._stuck_s
        )
        async with asyncio.TaskGroup() as group:
            stopping = group.create_task(self._stop.wait())
            registered = asyncio.Event()
            tasks = [
                group.create_task(part)
                for part in (
                    self.mirror.follow(),
                    self._stay_registered(etcd, registered, reach),
                    self._after(registered, reach.run),
                    self._after(registered, decider.run),
                    self._after(registered, lambda: self._enter_epochs(entering)),
                    self._after(registered, lambda: self._tell_troubles(etcd)),
                )
            ]
            await stopping
            for task in tasks:
                task.cancel()
        await self.own.release()

    async def _after(self, event: asyncio.Event, begin: Callable[[], Coroutine[Any, Any, None]]) -> None:
        await event.wait()
        await begin()

    async def _stay_registered(self, etcd: Etcd, registered: asyncio.Event, reach: Reach) -> None:
        """Registered anew whenever the key was lost: this process was taken for dead or left out, and is a
        new member then. Not before it reaches those who are members: with a process that some do not reach no
        group comes together. Raises Conflict: a job has the name."""
        while True:
            await self.mirror.known.wait()
            await reach.everybody()
            try:
                if self._own_name and not registered.is_set():
                    uses = await uses_of(etcd, self.keys)
                    check_free(self.keys.job, uses, NameUse.COMMUNICATOR, "give another one as job=")
                claimed = await self.own.claim(
                    self.keys.collective_member(self.me.member), self.settings.lease_ttl_s, leaving=False
                )
            except (PeerError, LeaseLost) as error:
                self.why = f"etcd does not register this process: {error}"
                claimed = False
            if claimed:
                self.why = "this process is in no epoch yet"
                registered.set()
                self._registered = True
                self._started.set()
                await self.own.hold()
                self._registered = False
                self.why = "this process was taken for dead or left out, and registers anew"
                self.own = OwnKey(etcd, self.own.record)
            await asyncio.sleep(ids.jitter(AGAIN_S))

    # ------------------------------------------------------------ epochs

    async def _enter_epochs(self, entering: Entering) -> None:
        seen = 0
        while True:
            number, epoch = await self.mirror.until(partial(self._newer, seen))
            seen = number
            await self._retire(number, epoch)
            if self.me not in epoch.members:
                self.why = f"epoch {number} is without this process, which waits to be taken into the next"
                self.own.look()
                continue
            self.why = f"members of epoch {number} have not come together yet"
            self._entering_since = self._entering_since or clock.monotonic()
            try:
                session = await entering.enter(number, epoch)
            except Superseded:
                continue
            except Unfit as error:
                rank = epoch.members.index(self.me)
                session = Session(
                    number, rank, epoch.members, self.progress, refused=str(error), on_free=self._freed
                )
            except (PeerError, LeaseLost) as error:
                log.warning("epoch_not_entered", epoch=number, cause=str(error))
                self.report(number, str(error))
                continue
            self._entering_since = None
            with self.condition:
                self.session = session
                self.condition.notify_all()
            log.info("epoch_entered", epoch=number, rank=session.rank, size=session.size)

    def _freed(self) -> None:
        """An operation has ended, in the user's thread: the epoch may be given up now."""
        self._soon(self.mirror.notify)

    def _stuck_s(self) -> float:
        """For how long no epoch could be entered, or an operation is under way."""
        session = self.session
        begun = [
            at for at in (self._entering_since, session.busy_since if session is not None else None) if at
        ]
        return clock.monotonic() - min(begun) if begun else 0.0

    def _newer(self, seen: int) -> tuple[int, Epoch] | None:
        found = self.mirror.values.get(self.keys.collective_epoch)
        if found is None or found.mod_revision <= seen:
            return None
        epoch = read_record(Epoch, found.key, found.value)
        return (found.mod_revision, epoch) if epoch is not None else None

    async def _retire(self, number: int, epoch: Epoch) -> None:
        """Give up the group before: at once if no operation is under way. Else when it ends; it is cut if
        somebody of it has gone."""
        session = self.session
        if session is None:
            return
        gone = bool(set(session.members) - set(epoch.members))
        told = self.keys.collective_of(number)
        while not session.retire():
            if gone or self._somebody(told) or self._newer(number) is not None:
                await asyncio.to_thread(session.cut)
                gone = True
            with suppress(TimeoutError):
                await self.mirror.until(partial(self._may_go_on, session, "" if gone else told), CUT_AGAIN_S)
        await asyncio.to_thread(session.drop)

    def _may_go_on(self, session: Session, prefix: str) -> bool | None:
        return not session.busy or (bool(prefix) and self._somebody(prefix)) or None

    def _somebody(self, prefix: str) -> bool:
        return any(key.startswith(prefix) for key in self.mirror.values)

    async def _tell_troubles(self, etcd: Etcd) -> None:
        """Repeated until the epoch is over."""
        while True:
            trouble = await self._troubles.get()
            while self._newer(trouble.epoch) is None:
                try:
                    lease = self.own.lease
                    key = self.keys.collective_trouble(self.me.member)
                    await etcd.txn([self.own.held], [Put(key, trouble.to_bytes(), lease.id)])
                except (PeerError, LeaseLost) as error:
                    log.debug("trouble_not_told", cause=str(error))
                with suppress(TimeoutError):
                    await self.mirror.until(partial(self._newer, trouble.epoch), 1.0)
