"""How a member enters an epoch: it says what it has, waits for what the others say, builds the group, and
gives or takes the last result.

statement ─► all statements ─► they fit? ─► group ─► whoever lacks the last result gets it ─► session
    └────────── a newer epoch: Superseded, at any point; what is being built is given up ──────────┘
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import torch

from trireme_shared.collective.group import Broken, Device, EtcdStore, Group, NcclGroup
from trireme_shared.collective.records import NCCL, Epoch, EpochMember, Mirror, Settings, Statement
from trireme_shared.collective.session import STATE, Line, Progress, Result, Session
from trireme_shared.platform.etcd import Compare, Etcd, OutcomeUnknown, Put
from trireme_shared.platform.etcd.reading import read_record
from trireme_shared.platform.membership.directory import OwnKey
from trireme_shared.platform.runtime import http
from trireme_shared.protocol.errors import NotReady
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records.members import CommunicatorMember

BUILD_S = 10.0
PUT_S = 5.0

T = TypeVar("T")


class Superseded(Exception):
    """A newer epoch is there."""


class Unfit(Exception):
    """Members were made with arguments that do not fit together; the message names them."""


class Entering:
    def __init__(
        self,
        etcd: Etcd,
        keys: Keys,
        mirror: Mirror,
        own: Callable[[], OwnKey[CommunicatorMember]],
        settings: Settings,
        progress: Progress,
        me: EpochMember,
        on_free: Callable[[], None],
    ) -> None:
        self._etcd, self._keys, self._mirror, self._own = etcd, keys, mirror, own
        self._settings, self._progress, self._me = settings, progress, me
        self._on_free = on_free

    async def enter(self, number: int, epoch: Epoch) -> Session:
        """Raises Superseded, Unfit, PeerError."""
        rank, size = epoch.members.index(self._me), len(epoch.members)
        device = await self._aside(number, lambda: Device(self._settings.host)) if size > 1 else None
        listener = device.address if device is not None else None
        statement = self._progress.state(self._settings.manifest(size), listener, http.own_network())
        await self.put(number, f"statements/{rank}", statement.to_bytes())
        statements = await self._statements(number, size)
        check_fit(statements)
        line = Line.of(statements)
        store = EtcdStore(_Shelf(self, number), "group/")

        def build() -> tuple[Session, Callable[[], None]]:
            group = None
            if device is not None:
                kind = NcclGroup if self._settings.backend == NCCL else Group
                group = kind(store, rank, size, device, [each.listener for each in statements], BUILD_S)
            session = Session(number, rank, epoch.members, self._progress, group, on_free=self._on_free)
            try:
                return session, self._caught_up(session, line)
            except Exception:
                session.drop()
                raise

        try:
            session, apply = await self._aside(number, build, lambda made: made[0].drop())
        except Broken as error:
            raise NotReady(f"epoch {number} was not entered: {error}") from None
        apply()  # not in the thread: what a thread that was given up still receives must change nothing
        return session

    async def _statements(self, number: int, size: int) -> list[Statement]:
        prefix = self._keys.collective_of(number) + "statements/"

        def all_there() -> list[Statement] | None:
            values = [self._mirror.values.get(f"{prefix}{rank}") for rank in range(size)]
            if any(value is None for value in values):
                return None
            read = [read_record(Statement, kv.key, kv.value) for kv in values if kv is not None]
            if any(each is None for each in read):
                raise Unfit("a member says what cannot be understood: is it of another version of Trireme?")
            return [each for each in read if each is not None]

        return await self.until(number, all_there)

    def _caught_up(self, session: Session, line: Line) -> Callable[[], None]:
        """Whoever lacks the last result gets it, in the thread that builds. What this changes here is done by
        the answer. Raises Broken."""
        progress, rank = self._progress, session.rank
        given = None
        if line.behind and session.group is not None:
            given = _given(
                session.group, progress.last if rank == line.giver else None, line, self._settings.timeout_s
            )
        stateless = line.lost if given is not None and given.kind == STATE else line.stateless
        if self._settings.share_state and session.size > 1:
            session.stateless = stateless
        session.root = line.root
        return partial(progress.enter, line, rank, session.epoch, given)

    # ------------------------------------------------------------ with an eye on newer epochs

    async def until(self, number: int, found: Callable[[], T | None], limit_s: float | None = None) -> T:
        """Raises Superseded, TimeoutError."""

        def look() -> T | None:
            self._check(number)
            return found()

        return await self._mirror.until(look, limit_s)

    def _check(self, number: int) -> None:
        now = self._mirror.values.get(self._keys.collective_epoch)
        if now is not None and now.mod_revision > number:
            raise Superseded(f"epoch {now.mod_revision} has followed epoch {number}")

    async def _aside(
        self, number: int, work: Callable[[], T], give_up: Callable[[T], None] = lambda _: None
    ) -> T:
        """`work` in a thread of its own. A newer epoch does not wait for it: what it makes then is given up
        when it is ready."""
        outcome: list[tuple[T | None, Exception | None]] = []
        lock, over = threading.Lock(), False
        loop, mirror = asyncio.get_running_loop(), self._mirror

        def run() -> None:
            made: T | None = None
            error: Exception | None = None
            try:
                made = work()
            except Exception as raised:  # noqa: BLE001  raised in the loop
                error = raised.with_traceback(None)
            with lock:
                outcome.append((made, error))
                late = over
            if not late:
                with suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(mirror.notify)
            elif made is not None:
                give_up(made)

        threading.Thread(target=run, name="trireme-group", daemon=True).start()
        try:
            made, error = await self.until(number, lambda: outcome[0] if outcome else None)
        except BaseException:
            with lock:
                over = True
                ready = outcome[0][0] if outcome else None
            if ready is not None:
                give_up(ready)
            raise
        if error is not None:
            raise error
        assert made is not None
        return made

    async def put(self, number: int, name: str, value: bytes) -> None:
        """Written only while the epoch lasts. Raises Superseded, PeerError, LeaseLost."""
        self._check(number)
        lease = self._own().lease
        key = self._keys.collective_of(number) + name
        fence = [Compare.mod(self._keys.collective_epoch, "==", number)]
        try:
            result = await self._etcd.txn(fence, [Put(key, value, lease.id)], timeout_s=PUT_S)
        except OutcomeUnknown:  # the same value again does no harm
            result = await self._etcd.txn(fence, [Put(key, value, lease.id)], timeout_s=PUT_S)
        if not result.succeeded:
            raise Superseded(f"epoch {number} is over")

    def values(self, number: int, names: list[str]) -> list[bytes] | None:
        prefix = self._keys.collective_of(number)
        found = [self._mirror.values.get(prefix + name) for name in names]
        return [kv.value for kv in found if kv is not None] if all(kv is not None for kv in found) else None


class _Shelf:
    """The epoch's values for the thread that builds the group (trireme_shared.collective.group.Shelf)."""

    def __init__(self, entering: Entering, number: int) -> None:
        self._entering, self._number = entering, number
        self._loop = asyncio.get_running_loop()

    def put(self, name: str, value: bytes, timeout_s: float) -> None:
        self._wait(self._entering.put(self._number, name, value), timeout_s)

    def take(self, names: list[str], timeout_s: float) -> list[bytes]:
        found = self._entering.until(
            self._number, lambda: self._entering.values(self._number, names), timeout_s
        )
        answer: list[bytes] = self._wait(found, timeout_s + 1.0)
        return answer

    def held(self, names: list[str]) -> bool:
        return self._entering.values(self._number, names) is not None

    def _wait(self, coroutine: Any, timeout_s: float) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout_s)


def check_fit(statements: list[Statement]) -> None:
    """Raises Unfit, with the same text in all members."""
    first = statements[0]
    for rank, each in enumerate(statements[1:], 1):
        for name in sorted(first.manifest.keys() | each.manifest.keys()):
            mine, theirs = first.manifest.get(name, "none"), each.manifest.get(name, "none")
            if mine != theirs:
                raise Unfit(
                    f"members were made differently: {name} is {mine} in rank 0 and {theirs} in rank {rank}"
                )
        if each.network != first.network:
            for at, told in ((0, first), (rank, each)):
                if told.listener is not None and _is_loopback(told.listener[0]):
                    msg = (
                        f"rank 0 and rank {rank} are on different hosts, and rank {at} listens at "
                        f"{told.listener[0]}, where only its own "
                        "host can connect; give host= (or TRIREME_HOST) the address at which the "
                        "others reach it"
                    )
                    raise Unfit(msg)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _given(group: Group, mine: Result | None, line: Line, limit_s: float) -> Result:
    """The giver's last result, in all members. Raises Broken."""
    flats = mine.flats or [] if mine is not None else []
    told = None
    if mine is not None:
        told = json.dumps(
            {
                "kind": mine.kind,
                "digest": mine.digest,
                "text": mine.text,
                "factor": mine.factor,
                "weight": mine.weight,
                "flats": [[str(flat.dtype).removeprefix("torch."), flat.numel()] for flat in flats],
            }
        ).encode()
    read = json.loads(group.tell(told, line.giver, limit_s))
    if mine is None:
        flats = [
            torch.empty(size, dtype=getattr(torch, name), device=group.data_device)
            for name, size in read["flats"]
        ]
    group.broadcast(flats, line.giver, limit_s, lambda: None)
    return Result(
        line.head, read["kind"], read["digest"], read["text"], read["factor"], read["weight"], flats
    )
