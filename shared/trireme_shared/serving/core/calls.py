"""Pulls in progress at one server of blocks, and what they and pushes (pushes.py) need of that server.
Nothing here waits.

OpenPull   next() --> block | end | None: nothing yet
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from typing import Protocol

from trireme_shared.blocks.buffers import Buffer
from trireme_shared.blocks.reused_memory import ReceivedMemory
from trireme_shared.protocol.records import Mode
from trireme_shared.protocol.records.job_choices import Narrow
from trireme_shared.protocol.records.layout import ROWS
from trireme_shared.protocol.records.step import StepRecord
from trireme_shared.protocol.wire.messages import PullEnd, PullRequest
from trireme_shared.protocol.wire.verdict import Verdict
from trireme_shared.serving.core.progress import Counters, is_same, known_of, moment_of, squares_at
from trireme_shared.serving.core.store import Store
from trireme_shared.serving.core.table.row_steps import RowSteps

Payload = bytes | bytearray | memoryview


class CallServer(Protocol):
    """What open pushes and pulls need of the server that has the blocks (serving/block_server.py).

    `pulls`: those that are open. `payloads`: memory in which pushed rows are received. `row_steps`: steps the
    rows of embedding tables. `refused_at`: when a push was first refused because its block is being moved to
    another server, in seconds of `now`.
    """

    store: Store | None
    generation: int
    timeline: int
    index: int
    counters: Counters
    pulls: list[OpenPull]
    payloads: ReceivedMemory
    row_steps: RowSteps
    refused_at: float | None

    def now(self) -> float:
        """Seconds of a clock that only goes forward."""
        ...

    def is_live(self, trainer: str) -> bool:
        """Whether the trainer is a member of the job."""
        ...

    def is_stale(self, generation: int) -> bool:
        """Whether pushes of that generation are refused."""
        ...

    def stepped(self, number: int, version: int) -> None:
        """A block has reached a version."""
        ...

    def held(self, number: int) -> None:
        """A block has all data of its step, and waits for the norm of the whole gradient."""
        ...

    def push_ended(self, store: Store, trainer: str, *, keeps: bool) -> None:
        """A trainer's push is over. `keeps`: the trainer goes on with the parameters that it has."""
        ...

    def within_bounds(self) -> None:
        """A trainer with old parameters has stopped computing with them."""
        ...

    def look_for_snapshot(self) -> None:
        """A snapshot may have become whole."""
        ...


class OpenPull:
    """`arrived` is called when `next` has a block again, or the end, after it had none. Close it at the end."""

    def __init__(
        self, server: CallServer, store: Store, request: PullRequest, deadline: float, arrived: Callable[[], None]
    ) -> None:
        self.deadline, self.wake = deadline, arrived
        self._server, self._store = server, store
        self._version, self._dtype = request.version, request.dtype
        self._results_from = request.results_from
        self._moment = moment_of(store, request.known)
        self._known = None if request.known is None else known_of(store, request.version)
        self._blocks = request.blocks
        self._due = deque(request.blocks)
        self._slots = request.slots
        self._missing: set[int] = set()
        self._unheld: set[int] = set()  # those of the missing ones whose data is not all there
        self._lost: int | None = None  # one of the missing blocks, which another parameter server has now
        if store.rows is not None and request.version is not None and store.rows.version < request.version:
            self._missing.add(ROWS)
            self._unheld.add(ROWS)
        self._lowest = store.highest
        self._record: StepRecord | None = None
        self._versions: dict[int, int] | None = {} if request.versions else None
        self._bound = request.bound if store.mode is Mode.ASYNC else None
        if self._bound is not None and store.parameters_in_use.let_go(self._bound.trainer):
            server.within_bounds()
        server.pulls.append(self)

    def __repr__(self) -> str:
        return f"<OpenPull of version {self._version}: {len(self._due)} due, {len(self._missing)} missing>"

    def next(self) -> tuple[int, int, Buffer | None] | PullEnd | None:
        """A block, its version and its values (retained: the caller releases them when they are sent; None:
        the puller has them), the end, or None: not yet."""
        store, wanted = self._store, self._version
        if self._server.store is not store:
            return PullEnd(code="NOT_READY", message="the job is being rolled back")
        if self._is_held_back() is not None:
            return None
        while self._due:
            number = self._due.popleft()
            found = store.pull(number, wanted)
            if found is Verdict.TOO_EARLY and store.settle(number):
                self._server.stepped(number, store.blocks[number].version)
                found = store.pull(number, wanted)
            if found is Verdict.WRONG_OWNER:
                return _moved(number)
            if found is Verdict.TOO_EARLY:
                self._missing.add(number)
                if not store.blocks[number].held:
                    self._unheld.add(number)
                continue
            if not isinstance(found, Buffer):
                held = store.blocks[number].version
                return PullEnd(
                    code="GONE", message=f"block {number} is at version {held}, {wanted} was asked: join again"
                )
            version = store.blocks[number].version if wanted is None else wanted
            self._lowest = min(self._lowest, version)
            if self._versions is not None:
                self._versions[number] = version
            # the history may drop it before the last block is sent
            self._record = self._record or store.history.record(version)
            if is_same(store, number, wanted, self._moment):
                return number, version, None
            try:
                narrow = self.narrow(number)
                sent = found.narrowed(narrow) if narrow else found.retain()
            except OverflowError as error:
                return PullEnd(code="OVERFLOW", message=f"a parameter in block {number}: {error}")
            self._server.counters.bytes_pulled += sent.view.nbytes
            return number, version, sent
        if self._missing:
            if self._lost is not None:
                return _moved(self._lost)
            return None if self._unheld else self._held_end()
        if store.rows is not None and not store.rows.are_by(self._slots, store.slots):
            return PullEnd(code="WRONG_OWNER", message=f"slot map {self._slots} does not say whose rows are here")
        if store.do_rows_wait(wanted):
            if not store.settle_rows():
                return self._held_end()
            self._server.look_for_snapshot()
        version = self._lowest if wanted is None else wanted
        record = self._record
        if record is None or record.version != version:
            record = store.history.record(version)
        if store.mode is Mode.ASYNC:
            versions = tuple((self._versions or {}).items())
            return PullEnd(code="OK", known=self._known, timeline=self._server.timeline, versions=versions)
        return PullEnd(
            code="OK",
            record=record,
            known=self._known,
            squares=squares_at(store.blocks, self._blocks, version) if store.clipping.measures(version - 1) else (),
            timeline=self._server.timeline,
            results=None if self._results_from is None else store.history.results.portion(self._results_from),
        )

    def _held_end(self) -> PullEnd:
        """All data of the missing blocks is there; or none is missing, and the rows' step waits."""
        version = min((self._store.blocks[each].version for each in self._missing), default=-1)  # ROWS is an unheld one
        return PullEnd(
            code="HELD",
            message=f"{len(self._missing) or 'no'} blocks, and the record of the version, wait for the norm of the whole gradient",
            known=self._known,
            squares=squares_at(self._store.blocks, sorted(self._missing), version),
            timeline=self._server.timeline,
        )

    def _is_held_back(self) -> tuple[str, int] | None:
        """By which trainer, and how many pushes old its parameters are."""
        bound, server = self._bound, self._server
        if bound is None or bound.versions is None:
            return None
        now = server.now()
        slowest = self._store.parameters_in_use.slowest(bound, server.is_live, now)
        if slowest is not None and slowest[1] > bound.versions:
            return slowest
        if server.is_live(bound.trainer):
            self._store.parameters_in_use.pulled(bound.trainer, now)
        self._bound = None
        return None

    def look_at_bound(self) -> None:
        """The oldest parameters that a trainer computes with may be newer than before."""
        if self._bound is not None:
            self.wake()

    def narrow(self, number: int) -> Narrow | None:
        """The dtype that a block's values are sent in, if it is not their own."""
        return self._dtype if self._store.blocks[number].narrows else None

    def stepped(self, number: int, version: int) -> None:
        """A block has reached a version."""
        if version == self._version and number in self._missing:
            self._missing.remove(number)
            self._unheld.discard(number)
            if number != ROWS:
                self._due.append(number)
            if number == ROWS and not self._unheld:
                self._due.extend(self._missing)  # they are held
                self._missing.clear()
            self.wake()

    def held(self, number: int) -> None:
        """All data of a block is there. If that is so of all, the puller has to find the norm."""
        if number in self._unheld:
            self._unheld.remove(number)
            if not self._unheld:
                self._due.extend(self._missing)  # the norm may be known
                self._missing.clear()
                self.wake()

    def forgotten(self, numbers: Collection[int]) -> None:
        """Other parameter servers have these blocks now."""
        if not self._missing.isdisjoint(numbers):
            self._lost = min(self._missing.intersection(numbers))
            self.wake()

    def too_early(self) -> PullEnd:
        """The end of a pull that has waited until its deadline."""
        if (slowest := self._is_held_back()) is not None and self._bound is not None:
            name, behind = slowest
            message = (
                f"{name} computes with parameters {behind} pushes old, and max_staleness is {self._bound.versions}"
            )
            return PullEnd(code="TOO_EARLY", message=message, known=self._known)
        if self._lost is not None:
            return _moved(self._lost)
        number = min(self._missing - {ROWS}, default=ROWS)
        held = self._store.lowest if number == ROWS else self._store.blocks[number].version
        what = "rows of tables are" if number == ROWS else f"block {number} is"
        return PullEnd(
            code="TOO_EARLY",
            message=f"{len(self._missing)} blocks have not reached version {self._version} ({what} at {held}): ask again",
            known=self._known,
        )

    def close(self) -> None:
        self._missing.clear()
        if self in self._server.pulls:
            self._server.pulls.remove(self)


def _moved(number: int) -> PullEnd:
    return PullEnd(code="WRONG_OWNER", message=f"block {number} is at another parameter server now")
