"""Mean gradients in one trainer of a collective job: all blocks of the last versions that it has, two at
least, and those of the next one as they come.

    own share     version s --pushes of step s, all lanes--> mean gradient of step s: version s + 1
                  (as a parameter server, without optimizer)
    other blocks  pulled from their owners (Arriving), and taken all at once by `complete`: from then on this
                  trainer has version s + 1

Version s + 1 of a block is the mean gradient of step s, or the values of a buffer after it. A step without
any data has no gradient. That of the version that the trainer began with is not known to it. A new generation
of trainers begins at the version that the trainer has: what its own blocks have beyond that is made again
(`start_again`), maybe of other records.

Trainers with lanes are never more than two versions apart. A spare that had no processor for a moment may be
further behind: of small models more versions are kept for it (OlderVersions).
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from xxhash import xxh3_64

from trainer_agent.data_plane.fleet_client import FleetClient
from trainer_agent.waiting import Backoff
from trireme_shared.blocks.buffer_mean import Mean, bits_of, mean_of
from trireme_shared.blocks.buffers import Buffer, BufferPool, tensor_over
from trireme_shared.protocol.errors import BadFrame, PeerError, StaleGeneration
from trireme_shared.protocol.records import Mode, SlotMap
from trireme_shared.protocol.records.job_choices import Narrow
from trireme_shared.protocol.records.layout import Block, Layout
from trireme_shared.protocol.records.step import StepRecord
from trireme_shared.protocol.wire.messages import (
    MOST_STATED,
    InitHeader,
    PushBlock,
    RowMeansPart,
    TableRequest,
    Verdict,
)
from trireme_shared.serving.block_server import BlockServer
from trireme_shared.serving.core.blocks import BlockState, Node
from trireme_shared.serving.core.optimizers import Options
from trireme_shared.serving.core.store import Push, Store
from trireme_shared.serving.core.stores import StepPushes
from trireme_shared.tables.hashing import Ids
from trireme_shared.tables.payload import Rows, ids_in, rows_in

if TYPE_CHECKING:
    from trainer_agent.collective.rows import MeanRows, RowMeans
    from trireme_shared.serving.core.table.rows import TableRows  # loads numba


# at least so many versions a trainer says what they are made of: as far as trainers with lanes are apart, and
# the one that it has
STATED = 3
KEPT_BYTES = 8 << 20  # it stays in a processor's cache; a model of more than that keeps no older ones
MOST_KEPT = 128
RECORD_BYTES = 512  # of each lane's position in a version's record

Arrived = Mapping[int, Buffer | None]
"""By block: its mean gradient, or its values if it is a buffer, with a reference; None: there is none."""


class MeanBlock(BlockState):
    """`kept`: by version, each with a reference; None: the step had no data of it. `nothing`: a buffer of its
    size, read by nobody. `first`: values of a buffer at the first version, as long as one has them; None: of
    a block of parameters."""

    def __init__(
        self,
        place: Block,
        pool: BufferPool,
        lanes: int,
        version: int,
        nothing: Buffer,
        first: Buffer | None,
        mean: Mean,
    ) -> None:
        self._is_buffer = first is not None
        super().__init__(place, first or nothing, pool, lanes, None, version, mean=mean)
        self._nothing, self._first = nothing, first
        self.kept: dict[int, Buffer | None] = {} if first is None else {version: first}

    @property
    def is_buffer(self) -> bool:
        return self._is_buffer

    @property
    def narrows(self) -> bool:
        return not self._is_buffer and self.place.dtype == "float32"

    def is_empty_at(self, version: int | None) -> bool:
        at = self.version if version is None else version
        return at in self.kept and self.kept[at] is None

    def pull(self, version: int) -> Buffer | Verdict:
        if version in self.kept:
            return self.kept[version] or self._nothing
        return Verdict.TOO_EARLY if version > self.version else Verdict.GONE

    def _advance(self, whole: Node, options: Options) -> None:  # noqa: ARG002
        made = self._made_of(whole)
        whole.release()
        self._put(self.version + 1, made)

    def _made_of(self, whole: Node) -> Buffer | None:
        """The next version, with a reference of its own."""
        if whole.value is None:
            return self.current.retain() if self._is_buffer else None
        if self._is_buffer and torch.equal(bits_of(whole.value), bits_of(self.current.tensor)):
            return self.current.retain()
        if (
            whole.buffer is not None
            and not whole.lent
            and whole.buffer.kind == (self.place.dtype, self.place.elements)
        ):
            return whole.buffer.retain()
        return self.copied(whole.value)

    def _put(self, version: int, made: Buffer | None) -> None:
        if made is not self.current:
            self.changed = version
        self.kept[version], self.version = made, version
        self.current = made or self._nothing

    def take(self, version: int, arrived: Buffer | None) -> None:
        """The values of a version that was made elsewhere; the reference is this block's from now on."""
        self.drop_tree()
        self._put(version, arrived)

    def know_first(self, version: int, values: memoryview) -> None:
        """The values of a buffer at `version`, which were not known at first: as long as no step has brought
        others, its steps keep them."""
        if self._first is not None and any(
            self._first is each for each in (self.kept.get(version), self.current)
        ):
            self._first.view[:] = values

    def start_again(self, version: int) -> None:
        """Back to `version`, without any data of its step."""
        self.drop_tree()
        for newer in [each for each in self.kept if each > version]:
            self._drop(newer)
        self.version = version
        self.current = self.kept.get(version) or self._nothing
        self.changed = version

    def forget_before(self, version: int) -> None:
        while self.kept and (oldest := next(iter(self.kept))) < version:  # they are in order
            self._drop(oldest)

    def drop_tree(self) -> None:
        self.tree.clear()

    def let_go(self) -> None:
        self.drop_tree()
        for version in list(self.kept):
            self._drop(version)

    def _drop(self, version: int) -> None:
        if (buffer := self.kept.pop(version)) is not None:
            if buffer is self._first and all(each is not buffer for each in self.kept.values()):
                self._first = None  # its memory may come again, with values of another version
            self.tree.reuse(buffer)


class MeanStore(Store):
    """`has`: the version of which it has every block. `own`: the blocks of its share, the only ones that it
    takes pushes of. `in_use`: the version that the trainer's parameters have: what it still has to step is
    kept."""

    blocks: dict[int, MeanBlock]  # type: ignore[assignment]
    mode = Mode.SYNC
    rows: MeanRows | None  # of a model with embedding tables

    def __init__(
        self,
        job: str,
        layout: Layout,
        lanes: int,
        record: StepRecord,
        values: Callable[[int], memoryview],
        pool: BufferPool | None = None,
    ) -> None:
        """`values(block)`: of a block of buffers at the version of `record`."""
        header = InitHeader(
            job=job, generation=0, mode=Mode.SYNC, lanes=lanes, layout=layout, pserver=0, record=record
        )
        super().__init__(header, lanes, pool, _mean_rows(layout, lanes, record.version))
        self.pushes = StepPushes(layout, lanes, self.history, self.clipping)
        self.has = self.in_use = record.version
        self.own: frozenset[int] = frozenset()
        # by version that it has not yet: blocks of its share that are made
        self._made: Counter[int] = Counter()
        self._digests: dict[int, str] = {}
        # by version: the generation in which it had that, from the one in use on
        self._had_in: dict[int, int] = {}
        self._older = OlderVersions(record.version + 1)
        self.history.kept = sys.maxsize  # `forget` says which records nobody needs
        nothing: dict[tuple[str, int], Buffer] = {}
        for place in layout.blocks():
            kind = place.dtype, place.elements
            if kind not in nothing:
                nothing[kind] = self.pool.take(*kind)
            first, segment = None, layout.segments[place.segment].kind
            if segment != "param":
                first = self.pool.take(*kind)
                first.view[:] = memoryview(values(place.number)).cast("B")
            self.blocks[place.number] = MeanBlock(
                place, self.pool, lanes, record.version, nothing[kind], first, mean_of(segment)
            )
        self.renumber()

    def __repr__(self) -> str:
        return f"<MeanStore at version {self.has}: {len(self.own)} of {len(self.blocks)} blocks are its own>"

    def _arguments_of(self, layout: Layout) -> list[Options | None]:
        """Nothing is stepped here, so it may be any optimizer that a replica has."""
        return [None] * len(layout.segments)

    def regroup(self, slots: SlotMap, own: Collection[int]) -> None:
        """Another generation: the step after the version that it has begins again, and it owns these
        blocks."""
        self.slots, self.own = slots, frozenset(own)
        self._made.clear()
        for block in self.blocks.values():
            block.start_again(self.has)
        if self.rows is not None:
            self.rows.start_again(self.has)
        self.history.start_again(self.has)

    def complete(
        self, version: int, arrived: Arrived, record: StepRecord, rows: Mapping[int, RowMeans] | None = None
    ) -> None:
        """It has `version` from now on, the next one: with what has `arrived`, whose references are its own
        now, and its own share for the rest. `rows`: see MeanRows.complete."""
        assert version == self.has + 1
        for number, block in self.blocks.items():
            if number in arrived:
                block.take(version, arrived[number])
            else:
                assert version in block.kept
        if self.rows is not None:
            self.rows.complete(version, rows or {})
        self.history.take_record(record)
        self.has = version
        if self.slots is not None:
            self._had_in[version] = self.slots.version
        del self._made[version]
        self._older.add(self._bytes_of(version, record))
        self.forget()

    def _bytes_of(self, version: int, record: StepRecord) -> int:
        """Of that version alone."""
        size = len(record.positions) * RECORD_BYTES
        for block in self.blocks.values():
            made = block.kept[version]
            if made is not None and made is not block.kept.get(version - 1):
                size += made.view.nbytes
        return size + (self.rows.whole[version].bytes if self.rows is not None else 0)

    def know_buffers(self, version: int, values: Callable[[int], memoryview]) -> None:
        """`values(block)`: of a block of buffers at `version`, of a store that began before they were
        there."""
        for number, block in self.blocks.items():
            if block.is_buffer:
                block.know_first(version, memoryview(values(number)).cast("B"))

    def had_in(self, version: int) -> int | None:
        """The generation in which all of that version was there, from the one in use on; None: this trainer
        began with it."""
        return self._had_in.get(version)

    def forget(self) -> None:
        """What nobody needs any more: others may lack the last version, this trainer what it has not stepped
        yet."""
        for version in [each for each in self._had_in if each < self.in_use]:
            del self._had_in[version]
        before = self._older.first
        first = self._older.forget_before(self._needed)
        if first == before:
            return
        for block in self.blocks.values():
            block.forget_before(first)
        if self.rows is not None:
            self.rows.forget_before(first)
        self.history.forget_before(self._first_stated)
        for version in [each for each in self._digests if each < self._first_stated]:
            del self._digests[version]

    @property
    def _needed(self) -> int:
        return min(self.has - 1, self.in_use + 1)

    def own_share_has(self, version: int) -> bool:
        """Whether all blocks of its own share have been made at `version`."""
        return version <= self.has or self._made[version] == len(self.own) + (self.rows is not None)

    @property
    def first_kept(self) -> int:
        """The first version of which it gives every block, up to `has`; `has` + 1: none."""
        return max(self._older.first, self.has + 2 - MOST_STATED)

    @property
    def _first_stated(self) -> int:
        """Whoever has a version, of which this trainer can give the next one, sees whether both are made of
        the same records."""
        return min(self.first_kept - 1, self.has - STATED + 1)

    def made_of(self) -> tuple[tuple[int, str], ...]:
        """By version, the last ones up to `has`: a digest of the positions of the lanes' readers behind it,
        so of which records its last step had."""
        records = [self.history.record(version) for version in range(self._first_stated, self.has + 1)]
        return tuple((record.version, self._digest_of(record)) for record in records if record is not None)

    def _digest_of(self, record: StepRecord) -> str:
        if (known := self._digests.get(record.version)) is None:
            known = self._digests[record.version] = digest_of(record)
        return known

    def retained(self, version: int) -> dict[int, Buffer | None]:
        """All blocks at a version that it has; the caller releases them."""
        found = {number: block.kept[version] for number, block in self.blocks.items()}
        for buffer in found.values():
            if buffer is not None:
                buffer.retain()
        return found

    def let_go(self) -> None:
        """Give all memory back."""
        for block in self.blocks.values():
            block.let_go()

    # ------------------------------------------------------------ Store

    @property
    def collected(self) -> Iterable[MeanBlock]:
        return [self.blocks[number] for number in self.own]

    def apply(
        self, push: Push, item: PushBlock, payload: memoryview, memory: Buffer | None = None
    ) -> Verdict:
        if item.block in self.blocks and item.block not in self.own:
            return Verdict.WRONG_OWNER
        return super().apply(push, item, payload, memory)

    def stepped(self, part: BlockState | TableRows) -> None:
        self._made[part.version] += 1
        self.history.fix(part.version)

    @property
    def lowest(self) -> int:
        return self.has

    @property
    def highest(self) -> int:
        return self.has


class OlderVersions:
    """How far back a trainer keeps mean gradients that only a spare can need which is far behind. `first`:
    the first version that is kept.

    first ……… needed ……… has
      │          `─ what others may lack, and what the trainer has not stepped yet; kept whatever it takes
      `─ older ones: KEPT_BYTES and MOST_KEPT at most

    A spare that was without a processor for some steps goes on from where it was. Without older versions it
    fetches all parameters anew, and is behind again when they are there.
    """

    def __init__(self, first: int) -> None:
        self.first = self._needed = first
        self._sizes = deque[int]()
        self._older_bytes = 0

    def __repr__(self) -> str:
        return f"<OlderVersions from {self.first} to {self._needed - 1}: {self._older_bytes} bytes>"

    def add(self, size: int) -> None:
        """One more version is kept. `size`: bytes that are of it alone."""
        self._sizes.append(size)

    def forget_before(self, needed: int) -> int:
        """Of the versions before `needed` the last ones stay, as many as go into the limits. Returns the
        first one that stays."""
        while self._needed < needed:
            self._older_bytes += self._sizes[self._needed - self.first]
            self._needed += 1
        while self.first < self._needed and (
            self._older_bytes > KEPT_BYTES or self._needed - self.first > MOST_KEPT
        ):
            self._older_bytes -= self._sizes.popleft()
            self.first += 1
        return self.first


def _mean_rows(layout: Layout, lanes: int, version: int) -> MeanRows | None:
    if not layout.tables:
        return None
    from trainer_agent.collective.rows import MeanRows  # noqa: PLC0415  loads numba

    return MeanRows(layout, lanes, version)


def digest_of(record: StepRecord) -> str:
    """Of the lanes' positions."""
    places = [
        (each.lane, each.epoch, each.index, each.offset, each.exhausted)
        for each in sorted(record.positions, key=lambda each: each.lane)
    ]
    return xxh3_64(repr(places).encode()).hexdigest()


def released(found: Arrived) -> None:
    """Give all references back."""
    for buffer in found.values():
        if buffer is not None:
            buffer.release()


class Arriving:
    """A PullSink: mean gradients on their way to one trainer, kept apart until all of them are there; then
    the trainer's store has the version.

        pull ─staging─► own memory of each block
            ├─ all blocks, the generation is still the same ─► MeanStore.complete
            └─ another generation: given back, whatever came is thrown away

    It takes what a pull of the version after `store.has` brings, asked in the server's present generation,
    which began at version `newest`. `release` it at the end."""

    def __init__(self, server: BlockServer, store: MeanStore, newest: int) -> None:
        self._server, self._store = server, store
        self.generation, self.version = server.generation, store.has + 1
        #: which rows are asked for: those of each owner's slots (see TableRequest.slots); 0: one trainer
        # gives all
        self.shares = self.generation if self.version > newest else 0
        self.layout: Layout = store.layout
        self.blocks: dict[int, Buffer | None] = {}
        self.rows: dict[int, RowMeans] = {}  # by place of the owner, see MeanRows.complete
        self._dims = [spec.dim for spec in store.layout.tables]

    def __repr__(self) -> str:
        return f"<Arriving version {self.version} in generation {self.generation}: {len(self.blocks)} blocks>"

    @property
    def is_over(self) -> bool:
        """Whether the generation has ended, or the trainer has other blocks."""
        return self._server.generation != self.generation or self._server.store is not self._store

    def check(self) -> None:
        """Raises StaleGeneration: what was asked, and what came, does not count any more."""
        if self.is_over:
            msg = (
                f"generation {self.generation} is over, so version {self.version} is pulled again in "
                f"{self._server.generation}"
            )
            raise StaleGeneration(msg)

    def staging(self, block: int) -> memoryview:
        """Writable bytes for a block; also while an answer to a call of a generation that is over still
        comes."""
        return self._buffer(block).view

    def widen(self, block: int, dtype: Narrow, payload: memoryview) -> None:
        self._buffer(block).tensor.copy_(tensor_over(payload, dtype))

    def keep(self, block: int) -> None:
        """It has no gradient; or it is a buffer that is as it was."""
        state = self._store.blocks[block]
        values = state.kept.get(self.version - 1) if state.is_buffer else None
        self._put(block, values.retain() if values is not None else None)

    def may_keep(self, block: int, *, named: bool) -> bool:
        """A mean gradient may always come without values: no lane had data."""
        return named or not self._store.blocks[block].is_buffer

    def tensor(self, block: int) -> torch.Tensor:
        """The same memory as `staging`, in the block's dtype."""
        return self._buffer(block).tensor

    def take_buffer(self, block: int, mean: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        """A block of buffers: its mean, made of its values at the version before; None: it stays as it is."""
        before = self._store.blocks[block].kept[self.version - 1]
        assert before is not None
        value = mean(before.tensor)
        if value is None or torch.equal(bits_of(value), bits_of(before.tensor)):
            self.keep(block)
        else:
            self._buffer(block).tensor.copy_(value)

    def complete(self) -> dict[int, Buffer | None]:
        """All of it; the caller has the references now."""
        found, self.blocks = self.blocks, {}
        return found

    def release(self) -> None:
        """Nothing of it is needed."""
        for buffer in self.complete().values():
            if buffer is not None:
                buffer.release()

    # ------------------------------------------------------------ rows of embedding tables

    @property
    def row_means(self) -> int | None:
        return self.shares if self._dims else None

    def take_row_means(self, index: int, found: RowMeansPart) -> None:
        from trainer_agent.collective.rows import RowMeans  # noqa: PLC0415  loads numba

        self.check()
        payload = bytearray(found.payload)  # loops are compiled for arrays that can be written
        ids = ids_in(payload, found.counts, self._dims, rows=True)
        rows = rows_in(payload, found.counts, self._dims, ids=True)
        self.rows[self._place_of_rows(index)] = RowMeans(ids, rows, found.has_data)

    async def pull_rows(self, fleet: FleetClient, place: int) -> None:
        """Bring the mean gradients of rows from a trainer that has the whole version of its blocks, unless
        they came with the end of the pull. Raises StaleGeneration: the generation is over."""
        if self._dims and self._place_of_rows(place) not in self.rows:  # they are many
            self.check()
            self.rows[self._place_of_rows(place)] = await self._row_means(fleet, place)

    async def _row_means(self, fleet: FleetClient, place: int) -> RowMeans:
        """Of all tables: one request, more only if they are large."""
        from trainer_agent.collective.rows import RowMeans  # noqa: PLC0415  loads numba

        backoff = Backoff(f"mean gradients of rows from the trainer at place {place}")
        parts, first = list[tuple[list[Ids], list[Rows]]](), 0
        while True:
            self.check()
            fields = {"version": self.version, "table": 0, "first": first, "slots": self.shares}
            try:
                end, payload = await fleet.port(place).table(TableRequest(**fleet.envelope(), **fields))
            except (PeerError, StaleGeneration) as error:
                self.check()
                await fleet.suspect(place, error)
                await backoff.failed(error)
                continue
            ids = ids_in(payload, end.counts, self._dims, rows=True)
            parts.append((ids, rows_in(payload, end.counts, self._dims, ids=True)))
            if end.next >= end.total:
                self.check()
                if len(parts) > 1:
                    ids, rows = (
                        [np.concatenate(each) for each in zip(*some, strict=True)]
                        for some in zip(*parts, strict=True)
                    )
                else:
                    ids, rows = parts[0]
                return RowMeans(ids, rows, end.has_data)
            if end.next <= first:
                raise BadFrame(
                    f"the trainer at place {place} sent no mean gradients of rows from the {first}th on"
                )
            first = end.next

    def _place_of_rows(self, place: int) -> int:
        """As in `rows`."""
        from trainer_agent.collective.rows import WHOLE_PLACE  # noqa: PLC0415  loads numba

        return place if self.shares else WHOLE_PLACE

    def _buffer(self, block: int) -> Buffer:
        found = self.blocks.get(block)
        if found is None:
            place = self._store.blocks[block].place
            found = self._store.pool.take(place.dtype, place.elements)
            self._put(block, found)
        return found

    def _put(self, block: int, buffer: Buffer | None) -> None:
        if (before := self.blocks.get(block)) is not None:
            before.release()
        self.blocks[block] = buffer
