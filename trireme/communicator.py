"""`trireme.CollectiveCommunicator`: means and sums over the processes of a job, whichever of them live, for a
training loop of one's own.

allreduce ─► wait for an epoch ─► all call the same? ─► exchange ─► SUCCEEDED, the same result in all members
                   ▲                     │                 └─ a peer died: a new epoch ─┐
                   │                     └─ no: FAILED in all                           │
                   └──────── again with those who live ─────────────────────────────────┘
"""

from __future__ import annotations

import atexit
import operator
import os
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import torch

from trireme.communicator_status import Cause, Status
from trireme_shared.collective.background import Background
from trireme_shared.collective.group import Broken, nccl_is_there
from trireme_shared.collective.operations import (
    MEAN,
    SUM,
    AllReduce,
    Barrier,
    Broadcast,
    Moment,
    Operation,
    bits_of,
    difference,
    digest,
    number_of,
)
from trireme_shared.collective.records import CANONICAL, GLOO, NATIVE, NCCL, PROTOCOL, Settings
from trireme_shared.collective.session import STATE, Session
from trireme_shared.platform.membership.etcd_access import PASSWORD, EtcdAccess, split
from trireme_shared.platform.runtime import clock, telemetry
from trireme_shared.platform.runtime.telemetry import hidden
from trireme_shared.protocol.errors import InvalidArgument
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records.job_choices import name_problem, not_reserved

WAIT_S = 30.0  # for all members to begin an operation; then the group is built anew, until timeout_s is over
MANIFEST_BYTES = 8 << 20  # of what a member called, tensor by tensor: told only if the members differ
MOST_S = 365 * 86400.0  # the clocks of threads, torch and etcd end somewhere above

Observer = Callable[[str, str, int], None]


class CollectiveCommunicator:
    """One for each process; its operations are called in the same order in all processes, from one thread.

    `job`, `etcd`: TRIREME_JOB and TRIREME_ETCD if they are left out; `etcd`: an address or several. Processes
    with the same job find each other there. `timeout_s`: no call takes longer. `lease_ttl_s`: after so long a
    silent process is left out (a dead one at once). `min_members`: fewer wait for more. `reduction`:
    "canonical" reduces over a fixed binary tree of the members instead of torch's own way. `transport_dtype`:
    "bfloat16" or "float16": what float32 and float64 are rounded to on their way. `backend`: "gloo", "nccl",
    or "auto": NCCL where this process has a GPU. `share_state`: new members get the group's state by a
    `broadcast` before anything else. `host`: the address of this process for the others (TRIREME_HOST, else
    127.0.0.1). `observer`: told (phase, operation, number) before, during and after each operation. Raises
    InvalidArgument for values that cannot be, PeerError if etcd does not answer.
    """

    def __init__(
        self,
        job: str | None = None,
        etcd: str | Sequence[str] | None = None,
        *,
        timeout_s: float = 60.0,
        lease_ttl_s: float = 5.0,
        min_members: int = 1,
        reduction: str = NATIVE,
        transport_dtype: str | None = None,
        backend: str = "auto",
        share_state: bool = True,
        host: str | None = None,
        observer: Observer | None = None,
    ) -> None:
        job, access = job_of(job), access_of(etcd)
        if reduction not in (NATIVE, CANONICAL):
            raise InvalidArgument(f"reduction is {reduction!r}; it is {NATIVE!r} or {CANONICAL!r}")
        if transport_dtype not in (None, "bfloat16", "float16"):
            raise InvalidArgument(
                f"transport_dtype is {transport_dtype!r}; it is 'bfloat16', 'float16' or None"
            )
        if backend not in ("auto", GLOO, NCCL) or (backend == NCCL and not nccl_is_there()):
            there = "there" if nccl_is_there() else "not there"
            raise InvalidArgument(
                f"backend is {backend!r}; it is 'auto', 'gloo' or 'nccl' (which is {there}: it needs a GPU)"
            )
        host = host or os.environ.get("TRIREME_HOST", "127.0.0.1")
        if not isinstance(host, str):
            raise InvalidArgument(f"host is {host!r}; it is an address of this host, as text")
        self.settings = Settings(
            host=host,
            timeout_s=seconds("timeout_s", timeout_s, 0.0, above=True),
            lease_ttl_s=seconds("lease_ttl_s", lease_ttl_s, 2.0),
            min_members=whole("min_members", min_members, 1, "a whole number, at least 1"),
            reduction=reduction,
            transport_dtype=transport_dtype or "",
            backend=backend if backend != "auto" else NCCL if nccl_is_there() else GLOO,
            share_state=share_state,
        )
        telemetry.only_warnings()
        self._transport = getattr(torch, transport_dtype) if transport_dtype else None
        self._observer = observer
        self._seen: tuple[int, int, int] = (-1, 0, 0)
        self._joined = share_state
        self._background = Background(
            access,
            Keys(job, os.environ.get("TRIREME_ROOT", "trireme")),
            self.settings,
            own_name=job != os.environ.get("TRIREME_JOB"),
        )
        self._background.start(self.settings.timeout_s)
        atexit.register(self.close)

    def __repr__(self) -> str:
        rank, size, epoch = self._seen
        return (
            f"<CollectiveCommunicator of job {self._background.keys.job}: rank {rank} of {size}, epoch "
            f"{epoch}>"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def rank(self) -> int:
        """Of the last operation; 0 is the oldest member. -1 before the first one."""
        return self._seen[0]

    @property
    def size(self) -> int:
        """Members at the last operation."""
        return self._seen[1]

    @property
    def epoch(self) -> int:
        """Of the last operation: it grows whenever the members change."""
        return self._seen[2]

    @property
    def joined(self) -> bool:
        """Whether new members (maybe this process) wait for the group's state: `broadcast` it. True at the
        beginning."""
        return self._joined

    # ------------------------------------------------------------ operations

    def allreduce(self, tensors: Any, op: str = MEAN, weight: float = 1.0) -> tuple[Status, Any]:
        """The mean (or sum) over all members: of a torch tensor, numpy array or number, or of lists, tuples
        and dictionaries of them, in the same form and in new memory. `weight`: of this member's values in the
        mean, 0 leaves them out; if all have 0 the mean is 0. Returns (status, None) on failure. Raises
        InvalidArgument for arguments that cannot be; never for a peer."""
        if op not in (MEAN, SUM):
            raise InvalidArgument(f'op is {op!r}; it is "MEAN" or "SUM"')
        return self._done(
            AllReduce(
                tensors,
                op,
                weight_of(weight, summed=op == SUM),
                reduction=self.settings.reduction,
                transport=self._transport,
                buffers=self._background.progress.buffers,
            )
        )

    def broadcast(self, value: Any, root: int | None = None) -> tuple[Status, Any]:
        """The value of rank `root`, in all members: tensors, arrays, numbers and texts in lists and
        dictionaries, as in a `state_dict()`. `root` None: the group's state, of the oldest member that has
        it; if nobody has, of the oldest one. All call it; what the others give may be None or of any form
        that can be sent. Raises InvalidArgument for a value that cannot, whoever's counts; never for a
        peer."""
        if root is not None:
            root = whole("root", root, 0, "a rank, or None for the oldest member")
        return self._done(Broadcast(value, root))

    def barrier(self) -> Status:
        """SUCCEEDED once all members have called it."""
        return self._done(Barrier())[0]

    def close(self) -> None:
        """Leave the group; the others go on. Call `barrier()` before, if all shall have the last result."""
        atexit.unregister(self.close)
        self._background.close()

    # ------------------------------------------------------------ how

    def _done(self, operation: Operation) -> tuple[Status, Any]:
        """Try in one epoch after the other, until it is done or the time is over. Raises InvalidArgument in a
        forked process."""
        self._background.check_process()
        deadline = clock.monotonic() + self.settings.timeout_s
        trouble = ""
        while True:
            session = self._background.session_within(deadline - clock.monotonic())
            if session is None:
                return self._failed(trouble), None
            if not session.use():
                continue
            try:
                return self._tried(session, operation, deadline)
            except Broken as error:
                trouble = (
                    f"operation {self._background.progress.last.done.number + 1} broke in epoch "
                    f"{session.epoch}: {error}"
                )
                session.broken = trouble
                self._background.report(session.epoch, trouble)
            except BaseException as error:
                session.broken = f"interrupted by {type(error).__name__}"
                self._background.report(session.epoch, session.broken)
                raise
            finally:
                session.leave()
            if clock.monotonic() >= deadline:
                return self._failed(trouble), None

    def _failed(self, trouble: str) -> Status:
        background = self._background
        if background.fatal:
            return Status(succeeded=False, cause=Cause.CLOSED, reason=background.fatal)
        reason = f"not done within {self.settings.timeout_s:g} s: {background.obstacle(trouble)}"
        return Status(succeeded=False, cause=Cause.TIMEOUT, reason=reason)

    def _tried(self, session: Session, operation: Operation, deadline: float) -> tuple[Status, Any]:
        """Raises Broken."""
        progress = session.progress
        self._seen = session.rank, session.size, session.epoch
        self._joined = bool(session.stateless)
        if session.refused:
            return Status(succeeded=False, cause=Cause.MISMATCH, reason=session.refused), None
        if not progress.delivered:  # the others had done it when the group broke
            if progress.last.digest != digest(operation.lines):
                msg = (
                    f"the others have finished operation {progress.last.done.number}, "
                    f"{progress.last.kind}, which is not this one: repeat it"
                )
                return Status(succeeded=False, cause=Cause.MISMATCH, reason=msg), None
            progress.delivered = True
            return self._read(operation, session)
        if session.stateless and operation.kind != STATE:
            ranks = ", ".join(map(str, sorted(session.stateless)))
            msg = (
                f"rank {ranks} of {session.size} is new: call broadcast(state) in all members, then "
                "this again"
            )
            return Status(succeeded=False, cause=Cause.JOINED, reason=msg), None
        number = session.next_number()
        self._observe("before", operation, number.number)
        weights = [operation.weight]
        if session.group is not None:
            said = session.group.exchange(
                [PROTOCOL, number.number, digest(operation.lines), bits_of(operation.weight)], _left(deadline)
            )
            if len({tuple(each[:3]) for each in said}) > 1:
                return self._mismatch(session, operation, said, deadline), None
            weights = [number_of(each[3]) for each in said]
        if operation.root is not None and operation.root >= session.size:
            msg = f"root is {operation.root}, and the group has {session.size} members"
            return Status(succeeded=False, cause=Cause.MISMATCH, reason=msg), None
        moment = Moment(
            lambda: _left(deadline, self.settings.timeout_s),
            lambda: self._observe("during", operation, number.number),
        )
        result = operation.run(session.group, number, weights, session.root, moment)
        session.finish(result)
        self._joined = bool(session.stateless)
        self._observe("after", operation, number.number)
        return self._read(operation, session)

    def _read(self, operation: Operation, session: Session) -> tuple[Status, Any]:
        result = session.progress.last
        done = result.done
        status = Status(succeeded=True, weight=result.weight, number=done.number, epoch=done.epoch)
        return status, operation.read(result)

    def _mismatch(
        self, session: Session, operation: Operation, said: list[list[int]], deadline: float
    ) -> Status:
        """The same text in all members."""
        assert session.group is not None
        if len({each[0] for each in said}) > 1 or len({each[1] for each in said}) > 1:
            msg = (
                f"the members speak protocols and operations {[each[:2] for each in said]}: are they "
                "of one version?"
            )
            return Status(succeeded=False, cause=Cause.MISMATCH, reason=msg)
        mine = "\n".join(operation.lines).encode()[:MANIFEST_BYTES]
        texts = [
            each.decode("utf-8", "replace") for each in session.group.gather_bytes(mine, _left(deadline))
        ]
        msg = f"operation {said[0][1]} differs: {difference([text.splitlines() for text in texts])}"
        return Status(succeeded=False, cause=Cause.MISMATCH, reason=msg)

    def _observe(self, phase: str, operation: Operation, number: int) -> None:
        if self._observer is not None:
            self._observer(phase, "broadcast" if operation.kind == STATE else operation.kind, number)


def _left(deadline: float, most_s: float = WAIT_S) -> float:
    """Seconds. Raises Broken when the time is over."""
    left_s = deadline - clock.monotonic()
    if left_s <= 0:
        raise Broken("its time is over")
    return min(left_s, most_s)


def seconds(name: str, value: Any, least: float, *, above: bool = False) -> float:
    """Raises InvalidArgument: no number from `least` (`above`: more than that) to a year."""
    found = as_float(value)
    if found is None or not least <= found <= MOST_S or (above and found == least):
        shown = f"{found:g}" if found is not None else repr(value)
        msg = (
            f"{name} {shown} must be {'above' if above else 'at least'} {least:g} and at most "
            f"{MOST_S:.0f} (seconds)"
        )
        raise InvalidArgument(msg)
    return found


def whole(name: str, value: Any, least: int, meaning: str) -> int:
    """Raises InvalidArgument: no int from `least`. Bools are none."""
    try:
        found = operator.index(value) if not isinstance(value, bool) else None
    except TypeError:
        found = None
    if found is None or found < least:
        raise InvalidArgument(f"{name} is {value!r}; it is {meaning}")
    return found


def weight_of(value: Any, *, summed: bool) -> float:
    """Raises InvalidArgument."""
    found = as_float(value)
    if found is None or not 0 <= found < float("inf") or (summed and found != 1):
        raise InvalidArgument(f"weight is {value!r}; it is 0 or a positive number, and SUM has none")
    return found


def as_float(value: Any) -> float | None:
    """None: it is no number. Texts are none, whatever they say; tensors and arrays of one element are."""
    if isinstance(value, str | bytes | bytearray):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: a tensor of several elements
        return None


def job_of(job: Any) -> str:
    """Raises InvalidArgument."""
    name = os.environ.get("TRIREME_JOB", "") if job is None or job == "" else job
    if problem := name_problem(name) if isinstance(name, str) else "a job's name is a text":
        raise InvalidArgument(f"the job is {name!r}: {problem}; give it as job= or TRIREME_JOB")
    try:
        return not_reserved(name)
    except ValueError as error:
        raise InvalidArgument(f"the job is {name!r}: {error}") from error


def access_of(etcd: str | Sequence[str] | None) -> EtcdAccess:
    """Raises InvalidArgument."""
    given: Any = etcd if etcd is not None else os.environ.get("TRIREME_ETCD", "")
    try:
        urls = split(given) if isinstance(given, str) else tuple(given)
    except TypeError:
        urls = (given,)
    if not all(isinstance(url, str) for url in urls):
        raise InvalidArgument(
            f"etcd is {hidden(repr(given))}; it is an address or several, as http://host:2379"
        )
    if not urls:
        raise InvalidArgument("no etcd is named; give etcd= or TRIREME_ETCD, as http://host:2379")
    names = ("user", "password_file", "ca", "cert", "key")
    found = {name: os.environ.get(f"TRIREME_ETCD_{name.upper()}", "") for name in names}
    return EtcdAccess(urls, password=os.environ.get(PASSWORD, ""), **found)
