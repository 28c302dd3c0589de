"""Pulls from all processes that serve blocks: each is asked for its blocks until all are there.

one version's blocks, as their owners have them ──► PullSink; the version's StepRecord, or Gone
    PullSink: the staging vectors of a compute (parameters) │ Arriving (mean gradients of a collective job)
a job that clips: the owners say the sums of squares of their blocks
    ──StepNormFinder──► the norm, told to all that wait
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from trainer_agent.data_plane.fleet_client import FleetClient, Routes
from trainer_agent.data_plane.row_lookups import narrow_of
from trainer_agent.model.compute import Compute
from trainer_agent.waiting import Backoff, SingleErrorGroup
from trireme_shared.blocks.gradient_norm import norm_of
from trireme_shared.platform.runtime.clock import event_within
from trireme_shared.protocol.errors import (
    BadFrame,
    Gone,
    InvalidArgument,
    PeerError,
    StaleGeneration,
    WrongOwner,
)
from trireme_shared.protocol.records.job_choices import Narrow, Nonfinite, Transported
from trireme_shared.protocol.records.layout import ELEMENT_BYTES
from trireme_shared.protocol.records.step import StepRecord, StepResult
from trireme_shared.protocol.wire.messages import (
    PulledBlock,
    PullEnd,
    PullRequest,
    RowMeansPart,
    StalenessBound,
    StepNorm,
)
from trireme_shared.serving.transport.shared_memory import NOTHING

PULL_WAIT_S = 10.0
BOUND_WAIT_S = 1.0  # then a parameter server is asked again: who was waited for may be dead
MOST_HELD = 6  # answers in a row that the norm of the gradient is missing

Source = tuple[int, int, Narrow | None]
"""Where values came from: version of the slot map, index of the process, and the narrower dtype that they
travelled in (values in use that were rounded are not those of an exact pull)."""


class Abandoned(Exception):
    """A pull that waited, and is not needed any more."""


@dataclass(slots=True)
class Within:
    """A pull that is answered once `bound` holds. `is_needed` is asked while it waits. `waited`: whether it
    had to, `waits_for`: for what."""

    bound: StalenessBound
    is_needed: Callable[[], bool]
    waited: bool = False
    waits_for: str = ""


class PullSink(Protocol):
    """Takes what a pull brings."""

    @property
    def row_means(self) -> int | None:
        """Which mean gradients of rows shall come with the blocks, see PullRequest.row_means; None: none."""
        ...

    def check(self) -> None:
        """Called before each request. Raises StaleGeneration: what the pull brings does not count any
        more."""
        ...

    def staging(self, block: int) -> memoryview:
        """Writable memory for a block's values, in its own dtype."""
        ...

    def widen(self, block: int, dtype: Narrow, payload: memoryview) -> None:
        """Take a block's values, which came in a narrower dtype."""
        ...

    def keep(self, block: int) -> None:
        """Take the block's values in use."""
        ...

    def may_keep(self, block: int, *, named: bool) -> bool:
        """Whether a block may come without values. `named`: the request named the values in use."""
        ...

    def take_row_means(self, index: int, found: RowMeansPart) -> None:
        """Take mean gradients of rows, which came with the end of process `index`'s answer. Raises BadFrame,
        StaleGeneration."""
        ...


class StagingVectors:
    """A PullSink for parameters: the staging vectors of a compute."""

    row_means = None

    def __init__(self, compute: Compute) -> None:
        self._compute = compute

    def check(self) -> None:
        """A pull of parameters counts until it ends: values of a version are the same whoever asks."""

    def staging(self, block: int) -> memoryview:
        return self._compute.staging(block)

    def widen(self, block: int, dtype: Narrow, payload: memoryview) -> None:
        self._compute.widen(block, dtype, payload)

    def keep(self, block: int) -> None:
        self._compute.keep(block)

    def may_keep(self, block: int, *, named: bool) -> bool:  # noqa: ARG002
        return named

    def take_row_means(self, index: int, found: RowMeansPart) -> None:
        raise BadFrame(
            f"mean gradients of {sum(found.counts)} rows came from pserver-{index}, and none were asked for"
        )


@dataclass(slots=True)
class Pull:
    """One pull of all blocks at `version` (None: at the versions that their owners have)."""

    version: int | None
    into: PullSink
    #: the narrower dtype in which parameters travel; None: they travel as they are
    narrow: Narrow | None = None
    skip_after_s: float | None = None
    within: Within | None = None
    #: PullEnd.known of the values that came
    named: dict[Source, str] = field(default_factory=dict)
    #: asynchronous: by block, the version of the values that came
    versions: dict[int, int] = field(default_factory=dict)


class Pulls:
    """Pulls of one trainer, and what it knows of the values in use: so that buffers which stay as they are
    come only once."""

    def __init__(
        self, fleet: FleetClient, dtype: Transported = "float32", on_nonfinite: Nonfinite = "fail"
    ) -> None:
        """`dtype`: of values on their way."""
        self._fleet, self._narrow = fleet, narrow_of(dtype)
        self._narrowed = fleet.layout.payloads(dtype)
        self._fails = on_nonfinite == "fail"
        self._norm = StepNormFinder(-1, fails=False)
        self._known: dict[Source, str] = {}  # Pull.named of the values in use
        #: asynchronous: of each block of the values in use the version; None: the versions do not matter
        self.versions: dict[int, int] | None = None
        #: of the steps that were asked for with `want_results`, as far as an owner of blocks keeps them
        self.results: tuple[StepResult, ...] = ()
        self._results_from: int | None = None
        # memory for a block in its narrow dtype, before it is widened
        self._narrow_blocks: list[memoryview] = []
        self._narrow_bytes = fleet.layout.block_bytes if self._narrow is not None else 0

    def __repr__(self) -> str:
        return f"<Pulls as {self._narrow or 'float32'}, {len(self._known)} answers known>"

    @property
    def grad_norm(self) -> float | None:
        """The norm of the gradient of the step that made the version which was pulled last, if it was
        measured."""
        return self._norm.measured

    @cached_property
    def _parameters(self) -> list[int]:
        """Numbers of all blocks of parameters."""
        layout = self._fleet.layout
        return [block.number for block in layout.blocks() if layout.segments[block.segment].kind == "param"]

    def want_results(self, first: int | None) -> None:
        """The next pulls ask for results of steps from `first` on (None: for none); `results` is empty until
        they come."""
        self.results, self._results_from = (), first

    async def pull(
        self,
        version: int | None,
        into: PullSink,
        *,
        skip_after_s: float | None = None,
        exact: bool = False,
        within: Within | None = None,
    ) -> tuple[StepRecord | None, Pull]:
        """Every block at `version` (None: at the version that its owner has). Returns the version's record,
        and the pull: call `use` once what it brought is in use.

        Waits until the owners have the version. The blocks of a process that gives no answer for
        `skip_after_s` keep their current values. `exact`: in full precision, whatever the dtype on the way
        is. Raises Gone if the version is no longer kept, InvalidArgument if values do not fit the dtype, or
        the norm of the step's gradient is not finite; Abandoned, see `Within`.
        """
        if version is not None:
            self._norm = StepNormFinder(version - 1, fails=self._fails)
        pull = self.begun(version, into, skip_after_s=skip_after_s, exact=exact, within=within)
        return await self._pull_parts(pull, self._fleet.routes.blocks), pull

    def begun(
        self,
        version: int | None,
        into: PullSink,
        *,
        skip_after_s: float | None = None,
        exact: bool = False,
        within: Within | None = None,
    ) -> Pull:
        """A pull of which nothing is asked yet: call `pull_from`."""
        return Pull(version, into, None if exact else self._narrow, skip_after_s, within)

    def use(self, pull: Pull) -> None:
        """The values of that pull are in use from now on."""
        self._known = pull.named
        if self.versions is not None:
            self.versions |= pull.versions

    def forget(self) -> None:
        """The values in use are not those that were pulled last: the next pull brings everything."""
        self._known = {}

    @property
    def _asked_for_bound(self) -> int:
        """The parameter server that says whether a bound holds: one for all trainers, so nobody is waited for
        at one while it waits at another."""
        return min(index for index, blocks in self._fleet.routes.blocks.items() if blocks)

    async def let_go(self, bound: StalenessBound) -> None:
        """This trainer computes with none of the parameters that it pulled within a bound. Raises PeerError,
        StaleGeneration."""
        none = bound.with_fields(versions=None)
        request = PullRequest(**self._fleet.envelope(), blocks=(), bound=none)
        await self._fleet.port(self._asked_for_bound).pull(request, lambda _: NOTHING)

    async def ask_for_results(self, first: int) -> None:
        """Ask all owners of blocks for results of steps from `first` on: `results` has them then, as far as
        an owner keeps them."""

        async def ask(routes: Routes, index: int) -> PullEnd:
            wanted = {"version": None, "blocks": (), "results_from": first}
            request = PullRequest(**self._fleet.envelope(), **wanted)
            return await self._fleet.ask(index, lambda port: port.pull(request, _no_blocks), routes=routes)

        for end in await self._fleet.ask_all(ask):
            self._take_results(end.results)

    def _parts_since(
        self, before: Routes, index: int, blocks: Iterable[int], version: int | None
    ) -> dict[int, tuple[int, ...]]:
        """Where these blocks are now, and who has other rows of tables than by that slot map: whether those
        have the version is asked again. `index` did not say so either."""
        routes = self._fleet.routes
        parts = routes.split(blocks)
        if self._fleet.layout.tables and version is not None:
            silent = {index}.intersection(routes.slots)
            parts |= {each: parts.get(each, ()) for each in (*routes.changed_since(before), *silent)}
        return parts

    async def _pull_parts(self, pull: Pull, parts: Mapping[int, Sequence[int]]) -> StepRecord | None:
        async with SingleErrorGroup() as group:
            pulls = [
                group.create_task(self.pull_from(pull, index, blocks)) for index, blocks in parts.items()
            ]
        return agreed(each.result() for each in pulls)

    async def pull_from(self, pull: Pull, index: int, blocks: Sequence[int]) -> StepRecord | None:
        """Some of the pull's blocks from one process, or from those that have the blocks by then. Raises as
        `pull`."""
        memory = (
            self._narrow_blocks.pop() if self._narrow_blocks else memoryview(bytearray(self._narrow_bytes))
        )
        try:
            return await self._pull_into(memory, pull, index, blocks)
        finally:
            self._narrow_blocks.append(memory)

    async def _pull_into(
        self, narrowed: memoryview, pull: Pull, index: int, blocks: Sequence[int]
    ) -> StepRecord | None:
        """`narrowed`: memory for one block in its narrow dtype."""
        fleet, version, into = self._fleet, pull.version, pull.into
        narrow, skip_after_s = pull.narrow, pull.skip_after_s
        missing, routes, refusals, held = dict.fromkeys(blocks), fleet.routes, 0, 0
        # what comes from elsewhere than the slot map said at first is named by nobody
        place_known = routes.version, index, narrow
        everything = blocks is routes.blocks.get(index)
        known = self._known.get(place_known, "") if everything else ""
        named: set[str] = set()  # what the ends of this pull's requests say
        record: StepRecord | None = None
        backoff = Backoff(
            f"pulling {'parameters' if version is None else f'version {version}'} from pserver-{index}"
        )

        def place(item: PulledBlock) -> memoryview:
            if item.same:
                if not into.may_keep(item.block, named=bool(known)):
                    raise BadFrame(
                        f"block {item.block} came from pserver-{index} as unchanged, but no values were named"
                    )
                return NOTHING
            expected = self._narrowed[item.block] if narrow is not None else None
            if item.dtype != expected:
                raise BadFrame(
                    f"block {item.block} came from pserver-{index} as {item.dtype or 'it is'}, "
                    f"{expected or 'as it is'} was asked "
                    "for; run the same version everywhere"
                )
            whole = into.staging(item.block)
            if item.dtype is None:
                return whole
            return narrowed[: whole.nbytes * ELEMENT_BYTES[item.dtype] // ELEMENT_BYTES["float32"]]

        def placed(item: PulledBlock) -> None:
            if item.same:
                into.keep(item.block)
            elif item.dtype is not None:
                into.widen(item.block, item.dtype, place(item))
            missing.pop(item.block, None)

        ended = version is None  # else the last answer brings the record, even if all blocks came without it
        while missing or not ended:
            into.check()
            before = len(missing)
            wanted: dict[str, Any] = {
                "version": version,
                "blocks": tuple(missing),
                "wait_s": PULL_WAIT_S,
                "dtype": narrow,
                "known": known,
                "norm": self._norm.norm if version is not None else None,
                "results_from": self._results_from,
                "slots": routes.version if fleet.layout.tables and version is not None else 0,
                "versions": self.versions is not None and version is None,
            }
            if (within := pull.within) is not None and index == self._asked_for_bound:
                wanted |= {"bound": within.bound, "wait_s": BOUND_WAIT_S}
            await fleet.be_certain(backoff)
            if await fleet.is_silent(index, skip_after_s):
                _keep_current(into, missing)
                return record
            try:
                request = PullRequest(**fleet.envelope(), **wanted, row_means=into.row_means)
                end = await fleet.port(index).pull(request, place, placed)
            except WrongOwner as error:
                end = PullEnd(code="WRONG_OWNER", message=error.message)
            except (PeerError, StaleGeneration) as error:
                if fleet.routes.version != routes.version:
                    parts = self._parts_since(routes, index, missing, version)
                    rest = await self._pull_parts(pull, parts)
                    return agreed((rest, record))
                if isinstance(error, PeerError) and fleet.silence.failed(index, error, skip_after_s):
                    _keep_current(into, missing)
                    return record
                named.add("")  # blocks that came belong to no end
                await fleet.suspect(index, error)
                await backoff.failed(error)
                continue
            fleet.silence.answered(index)
            named.add(end.known or "")
            record = end.record or record
            pull.versions.update(end.versions)
            if end.record is not None:
                self._norm.learn_of_version(end.timeline, end.record)
            if end.code == "OK" and end.squares:
                self._norm.measure(end.timeline, end.squares, self._parameters)
            self._take_results(end.results)
            if end.row_means is not None:
                into.take_row_means(index, end.row_means)
            if len(missing) < before:
                backoff.reset()
            match end.code:
                case "GONE":
                    raise Gone(end.message)
                case "OVERFLOW":
                    raise InvalidArgument(
                        end.message, hint=f"parameter_dtype is {narrow}; start the job with another"
                    )
                case "TOO_EARLY":
                    if within is not None:
                        within.waited, within.waits_for = True, end.message
                        if not within.is_needed():
                            raise Abandoned
                    backoff.waited(end.message)
                case "HELD":
                    held += 1
                    if held > MOST_HELD:
                        raise Gone(
                            f"version {version} is not made: {end.message}, {self._norm!r}; join again"
                        )
                    self._norm.add(end.timeline, end.squares, self._parameters)
                    if not await self._norm.wait(PULL_WAIT_S):
                        backoff.waited(f"{end.message}: {self._norm!r}")
                case "WRONG_OWNER":
                    refusals += 1
                    await fleet.rerouted(routes.version, refusals)
                    parts, routes = self._parts_since(routes, index, missing, version), fleet.routes
                    if parts.keys() != {index}:
                        rest = await self._pull_parts(pull, parts)
                        return agreed((rest, record))
                    backoff.waited(end.message)
                case "OK" if not missing:
                    ended = True
                case "NOT_READY" | "OK":
                    await backoff.failed(end.message or f"{len(missing)} blocks did not come")
        if len(named) == 1 and everything:
            pull.named[place_known] = named.pop()
        return record

    def _take_results(self, found: Sequence[StepResult] | None) -> None:
        """Keep the results that begin with the earliest step."""
        if found and (not self.results or found[0].step < self.results[0].step):
            self.results = tuple(found)


def _keep_current(into: PullSink, blocks: Iterable[int]) -> None:
    for block in blocks:
        into.keep(block)


def _no_blocks(item: PulledBlock) -> memoryview:
    raise BadFrame(f"block {item.block} was not asked for")


class StepNormFinder:
    """The norm of a step's whole gradient, as one trainer finds it while it pulls the version that the step
    makes.

        a parameter server: HELD, its blocks' sums of squares ─► add ─┐
        another one: OK, a record with the norm ─► learn_of_version ─┴─► known ─► every pull that goes on
                                                                                  says it

    Each trainer may find the norm and tell it: all find the same bits, so whoever dies, the step is made.
    `step`: the one that makes the version. `fails`: a norm that is not finite is an error. `norm` is for
    parameter servers that wait, `measured` for people: also of steps that are not clipped."""

    def __init__(self, step: int, *, fails: bool) -> None:
        self._step, self._fails = step, fails
        self._timeline = -1
        self._squares: dict[int, float] = {}
        self._found = asyncio.Event()
        self.norm: StepNorm | None = None
        self.measured: float | None = None

    def __repr__(self) -> str:
        return f"<StepNormFinder of step {self._step}: {len(self._squares)} blocks, {self.norm}>"

    def add(self, timeline: int, squares: Iterable[tuple[int, float]], blocks: Collection[int]) -> None:
        """What one parameter server says of its blocks; `blocks`: numbers of all blocks of parameters. Raises
        InvalidArgument: the norm is not finite."""
        if self._is_current(timeline):
            self._squares.update(squares)
            if self.norm is None and len(self._squares) == len(blocks):
                self._know(norm_of(self._squares[block] for block in blocks))

    def learn_of_version(self, timeline: int, record: StepRecord) -> None:
        """A parameter server has made the step, so it was told the norm; nobody has its blocks' squares any
        more. Raises as `add`."""
        if record.grad_norm is not None and self._is_current(timeline):
            self._know(record.grad_norm)

    def measure(self, timeline: int, squares: Iterable[tuple[int, float]], blocks: Collection[int]) -> None:
        """As `add`, of a step that is not clipped: nobody waits for the norm, and it may be anything."""
        if self._is_current(timeline):
            self._squares.update(squares)
            if len(self._squares) == len(blocks):
                self.measured = norm_of(self._squares[block] for block in blocks)

    def _know(self, norm: float) -> None:
        if self._fails:
            check_finite(self._step, norm)
        self.measured = norm
        self.norm = StepNorm(timeline=self._timeline, step=self._step, norm=norm)
        self._found.set()

    def _is_current(self, timeline: int) -> bool:
        """Steps repeat after a rollback: what is said of an older timeline does not count."""
        if timeline > self._timeline:
            self._timeline, self.norm, self.measured = timeline, None, None
            self._squares.clear()
            self._found.clear()
        return timeline == self._timeline

    async def wait(self, limit_s: float) -> bool:
        """Until the norm is known, at most `limit_s`; answers whether it is."""
        return await event_within(self._found, limit_s)


def check_finite(step: int, norm: float) -> None:
    """Raises InvalidArgument."""
    if not math.isfinite(norm):
        raise InvalidArgument(
            f"the norm of the gradient of step {step} is {norm}, although each lane's gradient is finite",
            hint="lower the learning rate or look at the records; on_nonfinite = skip leaves such steps out",
        )


def agreed(records: Iterable[StepRecord | None]) -> StepRecord | None:
    """One of the records that parameter servers have of a version. What it says about a checkpoint on demand
    is left out unless all say the same: in a step in which lane 0 moved, some have it from one owner and some
    from the next."""
    found = [record for record in records if record is not None]
    if not found:
        return None
    first = found[0]
    if first.lane_zero is None or all(record.asked == first.asked for record in found):
        return first
    return first.with_fields(lane_zero=first.lane_zero.with_fields(asked=None))
