"""One step of a native exchange: of what all trainers with lanes give, the next version.

all say which nodes they give ─► buckets, as backward finishes them ─► buffers ─► the version
    ─► (fast) all have it, with the same bits
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainer_agent.collective.mean_blocks import Arriving, MeanStore
from trainer_agent.collective.native.link import Link
from trainer_agent.collective.native.reducing import (
    ChosenNode,
    Given,
    buckets_of,
    buffers_of,
    canonical,
    chosen,
    fast,
    mean_of_buffer,
    read_told,
)
from trainer_agent.collective.server import ShareServer
from trireme_shared.blocks.buffer_mean import mean_of
from trireme_shared.blocks.buffers import Buffer
from trireme_shared.collective.group import Broken
from trireme_shared.protocol.errors import InvalidArgument, TriremeError
from trireme_shared.protocol.lanes import Interval
from trireme_shared.protocol.records import JobSpec
from trireme_shared.protocol.records.layout import Layout
from trireme_shared.protocol.records.step import StepRecord


@dataclass(frozen=True, slots=True)
class Made:
    """`arrived`: all blocks; the references are its owner's. `digests`: of each bucket, with the fast
    reduction."""

    version: int
    arrived: dict[int, Buffer | None]
    record: StepRecord
    digests: list[int]


class StepMaker:
    """`buckets`: of all parameters, the same in all trainers."""

    def __init__(self, spec: JobSpec, layout: Layout) -> None:
        self._spec = spec
        self.buckets = buckets_of(layout, layout.payloads(spec.gradient_dtype), spec.bucket_bytes)
        self._buffers = buffers_of(layout)
        self._kinds = [segment.kind for segment in layout.segments]
        self._canonical = spec.reduction == "canonical"

    async def made(self, link: Link, given: Given, store: MeanStore, server: ShareServer) -> Made:
        """The version after the one that `store` has. Raises Broken, InvalidArgument, StaleGeneration."""
        nodes = await self._all_told(link, given)
        self._note(store, server, nodes)
        arriving = Arriving(server, store, store.has)
        try:
            digests = await self._parameters(link, given, nodes, arriving)
            await self._buffer_values(link, given, nodes, arriving)
            arriving.check()
        except BaseException:
            link.cut()
            try:
                await link.idle()  # it writes there
            finally:
                arriving.release()
            raise
        store.history.fix(arriving.version)
        record = store.history.record(arriving.version)
        assert record is not None
        return Made(arriving.version, arriving.complete(), record, digests)

    async def all_have(self, link: Link, made: Made) -> None:
        """Returns once all have said that they have received it. Raises Broken; TriremeError: the trainers
        have different bits."""
        assert link.group is not None
        said = await link.call(link.group.exchange, [made.version, *made.digests], link.limit.seconds)
        if any(each != said[0] for each in said):
            rank = next(rank for rank, each in enumerate(said) if each != said[0])
            msg = (
                f"the group gave trainer {rank} another mean gradient of step {made.version - 1} than "
                "trainer 0"
            )
            raise TriremeError(
                msg, hint="use reduction canonical, or exchange direct; is the memory of a host damaged?"
            )

    async def _all_told(self, link: Link, given: Given) -> list[ChosenNode]:
        mine = given.told().to_bytes()
        told = [mine]
        if link.group is not None:
            told = await link.call(link.group.gather_bytes, mine, link.limit.seconds)
        return chosen(read_told(told, given.step), self._spec.lanes)

    def _note(self, store: MeanStore, server: ShareServer, nodes: Sequence[ChosenNode]) -> None:
        """What belongs to the step beside its gradients. Raises Broken: a trainer gives data of other records
        than this one knows of."""
        for node in nodes:
            push = store.admit(node.header)
            if store.judge(push, node.lanes) is not None:
                cause = (
                    f"{node.header.trainer} gives lanes {node.lanes} of step {node.header.step} of "
                    "other records"
                )
                server.tear(cause)
                raise Broken(cause)
            store.history.note(node.header, push.positions, node.lanes, node.result)
            store.history.results.forget(node.header.stored)

    async def _parameters(
        self, link: Link, given: Given, nodes: Sequence[ChosenNode], arriving: Arriving
    ) -> list[int]:
        """Answers a digest of each bucket, if the reduction is the fast one."""
        if not any(node.count for node in nodes):
            for bucket in self.buckets:
                for number in bucket.numbers:
                    arriving.keep(number)
            return []
        mine = [node.lanes for node in nodes if node.rank == link.rank and node.count]
        digests = []
        for bucket in self.buckets:
            await given.finished(mine, bucket.numbers)
            payloads = {lanes: given.payloads(lanes, bucket.numbers) for lanes in mine}
            outs = [arriving.tensor(number) for number in bucket.numbers]
            reduce = canonical if self._canonical else fast
            try:
                given_to = (link.group, bucket, nodes, payloads, outs, link.scratch, link.limit.seconds)
                digests.append(await link.call(reduce, *given_to))
            except OverflowError as error:
                hint = f"gradient_dtype is {self._spec.gradient_dtype}; start the job with another"
                raise InvalidArgument(f"the mean gradient of step {given.step}: {error}", hint=hint) from None
        return [] if self._canonical else [each for each in digests if each is not None]

    async def _buffer_values(
        self, link: Link, given: Given, nodes: Sequence[ChosenNode], arriving: Arriving
    ) -> None:
        """Of blocks that are no parameters: all get those of all, and make the same mean of them."""
        if not self._buffers:
            return
        numbers = [block.number for block in self._buffers]
        mine = [node.lanes for node in nodes if node.rank == link.rank and node.count]
        await given.finished(mine, numbers)
        parts = [bytes(payload) for lanes in mine for payload in given.payloads(lanes, numbers)]
        sizes = b"".join(len(part).to_bytes(8, "big") for part in parts)
        all_of_them = [sizes + b"".join(parts)]
        if link.group is not None:
            all_of_them = await link.call(link.group.gather_bytes, all_of_them[0], link.limit.seconds)
        found: dict[int, dict[Interval, bytes]] = {number: {} for number in numbers}
        for rank, data in enumerate(all_of_them):
            theirs = [node.lanes for node in nodes if node.rank == rank and node.count]
            read = taken_apart(data, len(theirs) * len(numbers))
            for place, lanes in enumerate(theirs):
                for position, number in enumerate(numbers):
                    found[number][lanes] = read[place * len(numbers) + position]
        for block in self._buffers:
            arriving.take_buffer(
                block.number,
                lambda now, at=block: mean_of_buffer(  # type: ignore[misc]
                    at, now, nodes, found[at.number], mean_of(self._kinds[at.segment])
                ),
            )


def taken_apart(data: bytes, count: int) -> list[bytes]:
    """`count` parts behind their sizes, of 8 bytes each. Raises Broken."""
    sizes = [int.from_bytes(data[8 * place : 8 * place + 8], "big") for place in range(count)]
    if len(data) != 8 * count + sum(sizes):
        raise Broken(f"{len(data)} bytes of buffers came, {8 * count + sum(sizes)} were told")
    found, first = [], 8 * count
    for size in sizes:
        found.append(data[first : first + size])
        first += size
    return found
