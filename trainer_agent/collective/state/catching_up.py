"""A trainer without state gets that of others block by block, while they train on, and keeps up with their
versions meanwhile.

    donors, each some blocks, each at some version ─► arrived ─┐
    mean gradients of each version, as members pull them ──────┴─► each piece stepped to the version that
                                                                   is followed
    all blocks are there, at that version ─► the replica has it

A piece is a block, or a parameter for rules that need whole ones (pieces.py). One that comes too late for the
gradients that are kept is fetched again; if that happens too often, the donors are asked to hurry. Nothing is
in use before all of it is there.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from xxhash import xxh3_128

from trainer_agent.collective.mean_blocks import digest_of
from trainer_agent.collective.replica import Gradients, Replica
from trainer_agent.collective.state.giving import StepIn, at_once
from trainer_agent.collective.state.messages import MOST_HURRY, Portion, StateRequest
from trainer_agent.collective.state.pieces import Piece, wanted_pieces, whole_blocks
from trainer_agent.model.compute import Compute
from trainer_agent.waiting import SingleErrorGroup
from trireme_shared.blocks.buffers import DTYPES, bytes_of, tensor_over
from trireme_shared.platform.runtime import clock, ids, telemetry
from trireme_shared.protocol.errors import BadFrame, Gone, NotReady, PeerError, StaleGeneration
from trireme_shared.protocol.records.step import StepRecord
from trireme_shared.serving.core.optimizers import options_of

if TYPE_CHECKING:
    from trainer_agent.collective.rows import RowMeans
    from trainer_agent.collective.state.rows import JoiningRows  # loads numba

AT_ONCE = 64  # blocks that are asked for in one request; the donor sends as many as make a portion
KEPT_BYTES = 32 << 20  # of gradients; at least KEPT versions, and at most MOST_KEPT
KEPT, MOST_KEPT = 2, 256
TRIES = 3  # in a row, with one donor
PAUSE_S = 0.2

Factor = Callable[[Gradients, StepRecord], tuple[float | None, float | None]]

log = telemetry.logger("collective.catching_up")


class Donor(Protocol):
    """A trainer that has the parameters, as one that joins reaches it."""

    @property
    def name(self) -> str: ...

    async def state(self, request: StateRequest) -> Portion:
        """Raises PeerError, NotReady, DeadlineExceeded, StaleGeneration, BadFrame."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True)
class Step:
    """How a version follows from the one before: the mean gradient of each block (None: none), or a buffer's
    values (None: as they were). `rows`: of the embedding tables. `release` gives the memory back."""

    record: StepRecord
    gradients: Gradients
    release: Callable[[], None] = lambda: None
    rows: RowMeans | None = None

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.gradients.values() if tensor is not None)


class Follow(Protocol):
    """The mean gradients of all versions behind one, in order."""

    def begin(self, record: StepRecord, timeline: int) -> None:
        """From the version behind `record` on; `record` has the results of steps before it that may not be
        stored yet."""
        ...

    async def wait(self, version: int) -> None:
        """Until it is there. Raises Gone: it is not kept any more."""
        ...

    def take(self, version: int) -> Step:
        """It is there, and so was each one before."""
        ...

    def measured(self, version: int, norm: float) -> StepRecord:
        """The record of a version that was taken, with the norm of the whole gradient that made it."""
        ...


class CatchingUp:
    """One attempt, for one timeline. `copying_s`: until every piece was there, at any version. `envelope()`:
    job, term and generation of requests. `factor`: see Replica.factor. `step_in`: where blocks are stepped: a
    thread."""

    def __init__(
        self,
        compute: Compute,
        donors: Sequence[Donor],
        follow: Follow,
        envelope: Callable[[], Mapping[str, Any]],
        timeline: int,
        checkpoint: str,
        factor: Factor = lambda *_: (None, 1.0),
        step_in: StepIn = at_once,
    ) -> None:
        self._compute, self._layout = compute, compute.layout
        self._places = tuple(self._layout.blocks())
        self._donors, self._follow, self._envelope, self._step_in = list(donors), follow, envelope, step_in
        self._timeline, self._checkpoint, self._factor = timeline, checkpoint, factor
        self._wanted = wanted_pieces(compute)
        self._missing = deque(range(len(self._wanted)))
        self._pieces: dict[int, Piece] = {}
        self._record: StepRecord | None = None
        self._first_version = 0
        self._made_of: dict[int, str] = {}  # by version that something came of
        self._kept: deque[Step] = deque()
        self._kept_bytes = 0
        self._factors: dict[int, float | None] = {}
        self._norm: float | None = None
        self._stepping = False
        self._changed = asyncio.Event()
        self._rows = self._joining_rows()
        self.late = self.damaged = self.hurry = 0
        self._began, self.copying_s = clock.monotonic(), 0.0

    def __repr__(self) -> str:
        version = self._record.version if self._record is not None else "none"
        return (
            f"<CatchingUp: {len(self._pieces)} of {len(self._wanted)} pieces, version {version}, "
            f"{self.late} came too late>"
        )

    @property
    def version(self) -> int:
        """The one that is followed."""
        assert self._record is not None
        return self._record.version

    async def run(self) -> None:
        """Until all blocks are there at one version; then `hand_over`. Raises NotReady: no donor is left;
        Gone: the versions pass faster than they can be followed here. Begin anew then."""
        try:
            await self._first()
            async with SingleErrorGroup() as group:
                following = group.create_task(self._keep_up())
                fetching = group.create_task(self._fetch_all())
                rows = group.create_task(self._fetch_rows())
                while not self.whole:
                    self._changed.clear()
                    await self._changed.wait()
                following.cancel()
                fetching.cancel()
                rows.cancel()
        finally:
            while self._kept:
                self._kept.popleft().release()

    @property
    def whole(self) -> bool:
        """Whether all blocks are at the version that is followed."""
        there = self._record is not None and not self._stepping and len(self._pieces) == len(self._wanted)
        there = there and (self._rows is None or self._rows.are_at(self.version))
        return there and all(piece.version == self.version for piece in self._pieces.values())

    def hand_over(self, replica: Replica) -> None:
        """The replica has the version from now on; what was collected is its own."""
        assert self.whole
        assert self._record is not None
        replica.forget()
        for number, values, state in whole_blocks(self._layout, list(self._pieces.values())):
            replica.load(number, bytes_of(values), state)
        rows = self._rows.rows if self._rows is not None else None
        replica.loaded(self._record, self._timeline, self._checkpoint, rows)
        self._pieces = {}

    # ------------------------------------------------------------ blocks

    async def _first(self) -> None:
        """From which version on the others are followed: the newest one, without any block, so that it is
        known at once. Raises NotReady."""
        problem: object = "nobody has the parameters"
        for donor in self._donors:
            try:
                portion = await self._ask(donor, (), 0)
            except (PeerError, StaleGeneration, BadFrame) as error:
                problem = error
            else:
                self._record = portion.head.record.with_fields(results=())
                self._compare(self._record)
                self._first_version = self._record.version
                self._follow.begin(portion.head.record, self._timeline)
                return
        raise NotReady(f"none of {len(self._donors)} trainers gives its parameters: {problem}")

    async def _fetch_all(self) -> None:
        """From all donors at once. Raises NotReady: none is left, and blocks are missing."""
        async with SingleErrorGroup() as group:
            for donor in self._donors:
                group.create_task(self._fetch(donor))
        raise NotReady(
            f"all of {len(self._donors)} donors are gone, {len(self._wanted) - len(self._pieces)} "
            "pieces are missing"
        )

    async def _fetch(self, donor: Donor) -> None:
        """Until it fails too often."""
        failed = 0
        while failed < TRIES:
            if not self._missing:
                await asyncio.sleep(PAUSE_S)  # some may come too late, from others
                continue
            share = -(-len(self._missing) // len(self._donors))
            wanted = self._take_missing(min(AT_ONCE, share))
            blocks = tuple(dict.fromkeys(block for number in wanted for block in self._wanted[number].blocks))
            try:
                portion = await self._ask(donor, blocks, self.version, len(self._wanted[wanted[0]].blocks))
            except (PeerError, StaleGeneration, BadFrame) as error:
                failed += 1
                log.warning("donor_failed", donor=donor.name, times=failed, cause=str(error))
                self._missing.extend(wanted)
                await asyncio.sleep(ids.jitter(PAUSE_S))
            except BaseException:
                self._missing.extend(wanted)
                raise
            else:
                failed = 0
                given = set(portion.head.given)
                came = [number for number in wanted if given.issuperset(self._wanted[number].blocks)]
                self._missing.extendleft(number for number in reversed(wanted) if number not in came)
                self._take(portion, came)
        log.warning("donor_left_out", donor=donor.name)

    def _take_missing(self, most: int) -> list[int]:
        """So many pieces, or fewer if they have more than AT_ONCE blocks; one at least."""
        found, blocks = [self._missing.popleft()], 0
        while self._missing and len(found) < most:
            blocks += len(self._wanted[found[-1]].blocks)
            if blocks >= AT_ONCE:
                break
            found.append(self._missing.popleft())
        return found

    async def _ask(self, donor: Donor, blocks: tuple[int, ...], at_least: int, together: int = 1) -> Portion:
        """Raises as Donor.state; BadFrame: something of it is damaged, or not what was asked for."""
        wanted = {
            "timeline": self._timeline,
            "blocks": blocks,
            "at_least": at_least,
            "together": together,
            "hurry": self.hurry,
        }
        portion = await donor.state(StateRequest(**self._envelope(), **wanted))
        try:
            self._check(portion, blocks)
        except BadFrame:
            self.damaged += 1
            raise
        return portion

    def _check(self, portion: Portion, blocks: tuple[int, ...]) -> None:
        """Raises BadFrame."""
        found: dict[int, set[str]] = {}
        for part, payload in portion.parts:
            if part.block not in blocks or part.dtype not in DTYPES:
                raise BadFrame(
                    f"{part.name or 'values'} of block {part.block} in {part.dtype}: blocks "
                    f"{blocks[:4]} … were asked for"
                )
            place = self._places[part.block]
            expected = (
                place.bytes
                if not part.name
                else DTYPES[part.dtype].itemsize * (1 if part.scalar else place.elements)
            )
            if payload.nbytes != expected or (not part.name and (part.dtype != place.dtype or part.scalar)):
                raise BadFrame(
                    f"{part.name or 'values'} of block {part.block}: {payload.nbytes} bytes of "
                    f"{part.dtype}, {expected} were expected"
                )
            if xxh3_128(payload).hexdigest() != part.digest:
                raise BadFrame(f"{part.name or 'values'} of block {part.block} was damaged on its way")
            found.setdefault(part.block, set()).add(part.name)
        if set(portion.head.given) != found.keys() or any("" not in names for names in found.values()):
            raise BadFrame(f"blocks {portion.head.given[:4]} … were announced, {sorted(found)[:4]} … came")

    def _compare(self, record: StepRecord) -> None:
        """All that is collected has to be of one history. Raises Gone: a donor has a version that is made of
        other records."""
        made_of = digest_of(record)
        if self._made_of.setdefault(record.version, made_of) != made_of:
            msg = f"two trainers have a version {record.version}, made of different records"
            raise Gone(msg)

    def _take(self, portion: Portion, came: Sequence[int]) -> None:
        """`came`: pieces that are whole. Those that are not too old are kept up with from now on. Raises
        Gone."""
        version = portion.head.record.version
        if came:
            self._compare(portion.head.record)
        states: dict[int, dict[str, torch.Tensor]] = {number: {} for number in portion.head.given}
        values: dict[int, torch.Tensor] = {}
        for part, payload in portion.parts:
            tensor = tensor_over(payload, part.dtype).clone()  # as aligned as torch wants it
            if part.name:
                states[part.block][part.name] = tensor.reshape(()) if part.scalar else tensor
            else:
                values[part.block] = tensor
        late = self._is_too_late(version)
        for number in came:
            if late:
                self._missing.append(number)
            else:
                self._pieces[number] = self._wanted[number].made(version, values, states)
        self._note_late(len(came) if late else 0)
        if len(self._pieces) == len(self._wanted):
            self.copying_s = clock.monotonic() - self._began
        if not self._stepping:
            self._step_pieces()
        self._changed.set()

    def _is_too_late(self, version: int) -> bool:
        first_kept = self._kept[0].record.version if self._kept else self.version + 1
        return version + 1 < first_kept and version < self.version

    def _note_late(self, late: int) -> None:
        """If more came too late than there are pieces, the donors have to hurry."""
        before, self.late = self.late, self.late + late
        if self.late // len(self._wanted) > before // len(self._wanted) and self.hurry < MOST_HURRY:
            self.hurry += 1
            log.warning("versions_pass_too_fast", late=self.late, pieces=len(self._wanted), hurry=self.hurry)

    # ------------------------------------------------------------ rows of embedding tables

    def _joining_rows(self) -> JoiningRows | None:
        if not self._layout.tables:
            return None
        from trainer_agent.collective.state.rows import JoiningRows  # noqa: PLC0415  loads numba

        return JoiningRows(self._layout, self._compare)

    async def _fetch_rows(self) -> None:
        """Raises NotReady, Gone."""
        if self._rows is not None:
            await self._rows.fetch(len(self._donors), self._ask_for_rows)
            self._changed.set()

    async def _ask_for_rows(self, donor: int, token: str, portion: int) -> Portion:
        fields = {"timeline": self._timeline, "blocks": (), "rows": token, "portion": portion}
        request = StateRequest(**self._envelope(), **fields, at_least=self._first_version)
        return await self._donors[donor].state(request)

    # ------------------------------------------------------------ versions

    async def _keep_up(self) -> None:
        """Each version that the others make, until all blocks are there. Raises Gone."""
        while not self.whole:
            version = self.version + 1
            await self._follow.wait(version)
            step = self._follow.take(version)
            self._kept.append(step)
            self._compare(step.record)
            self._kept_bytes += step.bytes
            self._stepping = True
            try:
                await self._step_in(self._step_newest)
                if self._rows is not None and step.rows is not None:
                    await self._rows.note(step.record, step.rows)
            finally:
                self._stepping = False
            self._record = step.record if self._norm is None else self._follow.measured(version, self._norm)
            self._step_pieces()  # those that came meanwhile
            self._trim()
            self._changed.set()

    def _trim(self) -> None:
        """Nothing that is here needs the oldest gradients any more."""
        while len(self._kept) > KEPT and (self._kept_bytes > KEPT_BYTES or len(self._kept) > MOST_KEPT):
            oldest = self._kept.popleft()
            self._kept_bytes -= oldest.bytes
            del self._factors[oldest.record.version]
            self._made_of.pop(oldest.record.version - 1, None)  # what comes of it is too late
            oldest.release()

    def _step_newest(self) -> None:
        newest = self._kept[-1]
        self._norm, factor = self._factor(newest.gradients, newest.record)
        self._factors[newest.record.version] = factor
        self._step_pieces()

    def _step_pieces(self) -> None:
        """All that are behind, with the gradients that are kept."""
        for step in self._kept:
            version, zero = step.record.version, step.record.lane_zero
            options = [options_of(each) for each in zero.options] if zero is not None else []
            for piece in list(self._pieces.values()):
                if piece.version + 1 == version:
                    piece.step(step.gradients, self._factors[version], options, step.record.left_alone)
