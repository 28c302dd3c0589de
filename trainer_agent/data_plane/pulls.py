"""Pulls from all parameter servers at once: each is asked for its blocks until all are there.

pull: blocks of one version, as pservers have them ──► staging vector; the version's StepRecord, or Gone
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from shared.errors import BadFrame, Gone, InvalidArgument, PeerError, StaleGeneration, WrongOwner
from shared.records.job_spec import Narrow, Nonfinite, Transported
from shared.records.layout import ELEMENT_BYTES, Layout
from shared.records.step import StepRecord, StepResult
from shared.wire.lending import NOTHING
from shared.wire.messages import PulledBlock, PullEnd, PullRequest, RowMeansPart, StalenessBound
from trainer_agent.core.steps import agreed
from trainer_agent.data_plane.fleet_client import OWN_LEASE, Connect, JobView, Suspect
from trainer_agent.data_plane.routing import Routes
from trainer_agent.data_plane.row_lookups import WholeTables
from trainer_agent.data_plane.step_norm import StepNormFinder
from trainer_agent.model.compute import Compute
from trainer_agent.waiting import Backoff, SingleErrorGroup

PULL_WAIT_S = 10.0
BOUND_WAIT_S = 1.0  # then a parameter server is asked again: who was waited for may be dead
MOST_HELD = 6  # answers in a row that the norm of the gradient is missing


class Abandoned(Exception):
    """A pull that waited, and is not needed any more."""


@dataclass(slots=True)
class Within:
    """A pull that is answered once `bound` holds. `is_needed` is asked while it waits. `waited`: whether it had to, `waits_for`: for what."""

    bound: StalenessBound
    is_needed: Callable[[], bool]
    waited: bool = False
    waits_for: str = ""


async def _at_once() -> bool:
    """Nothing to wait for."""
    return False


class Vectors(Protocol):
    """Where pulled blocks are written, see Compute."""

    @property
    def layout(self) -> Layout: ...

    def staging(self, block: int) -> memoryview: ...

    def widen(self, block: int, dtype: Narrow, payload: memoryview) -> None: ...

    def keep(self, block: int) -> None: ...

    def swap(self) -> None: ...


class Pulls(WholeTables):
    """`vectors`: whose staging vector a pull fills, and whose parameters in use `swap` replaces."""

    def __init__(
        self,
        directory: JobView,
        connect: Connect,
        vectors: Compute,
        suspect: Suspect,
        parameter_dtype: Transported = "float32",
        certain: Callable[[], Awaitable[bool]] = _at_once,
        on_nonfinite: Nonfinite = "fail",
        gradient_dtype: Transported = "float32",
    ) -> None:
        super().__init__(directory, connect, vectors.layout, suspect, certain)
        self._vectors: Vectors = vectors
        self._fails = on_nonfinite == "fail"
        self._norm = StepNormFinder(-1, fails=False)
        self._narrow: Narrow | None = None if parameter_dtype == "float32" else parameter_dtype
        self.row_dtype = self._narrow
        self.row_gradient_dtype = None if gradient_dtype == "float32" else gradient_dtype
        self._narrowed = vectors.layout.payloads(parameter_dtype)
        # by (slot map version, pserver index): PullEnd.known of the values in use, and of those in the staging vector
        self._known: dict[tuple[int, int], str] = {}
        self._staged: dict[tuple[int, int], str] = {}
        # asynchronous: of each block of the values in use the version; None: it does not matter
        self.versions: dict[int, int] | None = None
        self._staged_versions: dict[int, int] = {}
        self.results: tuple[StepResult, ...] = ()
        self._results_from: int | None = None
        self._within: Within | None = None
        self._narrow_blocks: list[memoryview] = []  # memory for a block in its narrow dtype, before it is widened
        self._narrow_bytes = vectors.layout.block_bytes if self._narrow is not None else 0

    @property
    def grad_norm(self) -> float | None:
        """Of the step that made the version which was pulled last, if it was measured."""
        return self._norm.measured

    @cached_property
    def _parameters(self) -> list[int]:
        """Numbers of all blocks of parameters."""
        layout = self._vectors.layout
        return [block.number for block in layout.blocks() if layout.segments[block.segment].kind == "param"]

    async def pull(
        self,
        version: int | None,
        skip_after_s: float | None = None,
        *,
        exact: bool = False,
        results_from: int | None = None,
    ) -> StepRecord | None:
        """Every block at `version` (None: at the version it has) into the staging vector. Returns the version's record.

        Waits until the pservers have the version. The blocks of a pserver that gives no answer for `skip_after_s` keep their
        current values. `exact`: in full precision, whatever the job's parameter_dtype. Raises Gone if the version is no
        longer kept, InvalidArgument if parameters do not fit the dtype, or the norm of the step's gradient is not finite. `results_from`:
        `results` will be those of steps from this one on, as far as a parameter server keeps them.
        """
        self.results, self._results_from = (), results_from
        narrow = None if exact else self._narrow
        self._staged, self._staged_versions = {}, {}
        if version is not None:
            self._norm = StepNormFinder(version - 1, fails=self._fails)
        return await self._pull_parts(self.routes.blocks, version, skip_after_s, narrow)

    async def pull_within(self, within: Within, skip_after_s: float | None = None) -> None:
        """Asynchronous: `pull`, once the bound holds. Raises Abandoned, Gone, InvalidArgument."""
        self._within = within
        try:
            await self.pull(None, skip_after_s)
        finally:
            self._within = None
        if within.waited:  # what the others sent is as old as the wait was long
            await self.pull(None, skip_after_s)

    @property
    def _asked_for_bound(self) -> int:
        """The parameter server that says whether a bound holds: one for all trainers, so nobody is waited for at one while it waits at another."""
        return min(index for index, blocks in self.routes.blocks.items() if blocks)

    async def let_go(self, bound: StalenessBound) -> None:
        """This trainer computes with none of the parameters that it pulled within a bound. Raises PeerError, StaleGeneration."""
        none = bound.model_copy(update={"versions": None})
        request = PullRequest(**self.envelope(), blocks=(), bound=none)
        await self._port(self._asked_for_bound).pull(request, lambda _: NOTHING)

    def _parts_since(
        self, before: Routes, index: int, blocks: Iterable[int], version: int | None
    ) -> dict[int, tuple[int, ...]]:
        """Where these blocks are now, and who has other rows of tables than by that slot map: whether those have the version is asked again. `index`
        did not say so either."""
        routes = self.routes
        parts = routes.split(blocks)
        if self._layout.tables and version is not None:
            silent = {index}.intersection(routes.slots)
            parts |= {each: parts.get(each, ()) for each in (*routes.changed_since(before), *silent)}
        return parts

    async def _pull_parts(
        self,
        parts: Mapping[int, Sequence[int]],
        version: int | None,
        skip_after_s: float | None,
        narrow: Narrow | None,
    ) -> StepRecord | None:
        async with SingleErrorGroup() as group:
            pulls = [
                group.create_task(self._pull_from(index, blocks, version, skip_after_s, narrow))
                for index, blocks in parts.items()
            ]
        return agreed(pull.result() for pull in pulls)

    def swap(self) -> None:
        """What the last pull brought becomes the parameters in use; buffers that stay as they are come only once."""
        self._vectors.swap()
        self._known, self._staged = self._staged, {}
        if self.versions is not None:
            self.versions |= self._staged_versions

    def forget(self) -> None:
        """The parameters in use are not those that were pulled last: the next pull brings everything."""
        self._known = {}

    async def _pull_from(
        self,
        index: int,
        blocks: Sequence[int],
        version: int | None,
        skip_after_s: float | None,
        narrow: Narrow | None,
    ) -> StepRecord | None:
        memory = self._narrow_blocks.pop() if self._narrow_blocks else memoryview(bytearray(self._narrow_bytes))
        try:
            return await self._pull_into(memory, index, blocks, version, skip_after_s, narrow)
        finally:
            self._narrow_blocks.append(memory)

    async def _pull_into(
        self,
        narrowed: memoryview,
        index: int,
        blocks: Sequence[int],
        version: int | None,
        skip_after_s: float | None,
        narrow: Narrow | None,
    ) -> StepRecord | None:
        """`narrowed`: memory for one block in its narrow dtype."""
        missing, routes, refusals, held = dict.fromkeys(blocks), self.routes, 0, 0
        # what comes from elsewhere than the slot map said at first is named by nobody
        place_known = routes.version, index
        everything = blocks is routes.blocks.get(index)
        known = self._known.get(place_known, "") if everything else ""
        named: set[str] = set()  # what the ends of this pull's requests say
        record: StepRecord | None = None
        backoff = Backoff(f"pulling {'parameters' if version is None else f'version {version}'} from pserver-{index}")

        def place(item: PulledBlock) -> memoryview:
            if item.same:
                if not self._may_be_same(item.block, known):
                    raise BadFrame(
                        f"block {item.block} came from pserver-{index} as unchanged, but no values were named"
                    )
                return NOTHING
            expected = self._narrowed[item.block] if narrow is not None else None
            if item.dtype != expected:
                raise BadFrame(
                    f"block {item.block} came from pserver-{index} as {item.dtype or 'it is'}, {expected or 'as it is'} was asked "
                    "for; run the same version everywhere"
                )
            whole = self._vectors.staging(item.block)
            if item.dtype is None:
                return whole
            return narrowed[: whole.nbytes * ELEMENT_BYTES[item.dtype] // ELEMENT_BYTES["float32"]]

        def placed(item: PulledBlock) -> None:
            if item.same:
                self._vectors.keep(item.block)
            elif item.dtype is not None:
                self._vectors.widen(item.block, item.dtype, place(item))
            missing.pop(item.block, None)

        ended = version is None  # else the last answer brings the record, even if all blocks came without it
        while missing or not ended:
            self._check_pull()
            before = len(missing)
            wanted: dict[str, Any] = {
                "version": version,
                "blocks": tuple(missing),
                "wait_s": PULL_WAIT_S,
                "dtype": narrow,
                "known": known,
                "norm": self._norm.norm if version is not None else None,
                "results_from": self._results_from,
                "slots": routes.version if self._layout.tables and version is not None else 0,
                "versions": self.versions is not None and version is None,
            }
            if (within := self._within) is not None and index == self._asked_for_bound:
                wanted |= {"bound": within.bound, "wait_s": BOUND_WAIT_S}
            if await self._certain():
                backoff.waited(OWN_LEASE)
            if await self._is_silent(index, skip_after_s):
                self._keep_current(missing)
                return record
            try:
                request = PullRequest(**self.envelope(), **wanted, row_means=self._row_means_wanted)
                end = await self._port(index).pull(request, place, placed)
            except WrongOwner as error:
                end = PullEnd(code="WRONG_OWNER", message=error.message)
            except (PeerError, StaleGeneration) as error:
                if self.routes.version != routes.version:
                    parts = self._parts_since(routes, index, missing, version)
                    rest = await self._pull_parts(parts, version, skip_after_s, narrow)
                    return agreed((rest, record))
                if isinstance(error, PeerError) and self._silence.failed(index, error, skip_after_s):
                    self._keep_current(missing)
                    return record
                named.add("")  # blocks that came belong to no end
                await self._suspect_peer(index, error)
                await backoff.failed(error)
                continue
            self._silence.answered(index)
            named.add(end.known or "")
            record = end.record or record
            self._staged_versions.update(end.versions)
            if end.record is not None:
                self._norm.learn_of_version(end.timeline, end.record)
            if end.code == "OK" and end.squares:
                self._norm.measure(end.timeline, end.squares, self._parameters)
            self._take_results(end.results)
            if end.row_means is not None:
                self._take_row_means(index, end.row_means)
            if len(missing) < before:
                backoff.reset()
            match end.code:
                case "GONE":
                    raise Gone(end.message)
                case "OVERFLOW":
                    raise InvalidArgument(end.message, hint=f"parameter_dtype is {narrow}; start the job with another")
                case "TOO_EARLY":
                    if within is not None:
                        within.waited, within.waits_for = True, end.message
                        if not within.is_needed():
                            raise Abandoned
                    backoff.waited(end.message)
                case "HELD":
                    held += 1
                    if held > MOST_HELD:
                        raise Gone(f"version {version} is not made: {end.message}, {self._norm!r}; join again")
                    self._norm.add(end.timeline, end.squares, self._parameters)
                    if not await self._norm.wait(PULL_WAIT_S):
                        backoff.waited(f"{end.message}: {self._norm!r}")
                case "WRONG_OWNER":
                    refusals += 1
                    await self._rerouted(routes.version, refusals)
                    parts, routes = self._parts_since(routes, index, missing, version), self.routes
                    if parts.keys() != {index}:
                        rest = await self._pull_parts(parts, version, skip_after_s, narrow)
                        return agreed((rest, record))
                    backoff.waited(end.message)
                case "OK" if not missing:
                    ended = True
                case "NOT_READY" | "OK":
                    await backoff.failed(end.message or f"{len(missing)} blocks did not come")
        if len(named) == 1 and everything:
            self._staged[place_known] = named.pop()
        return record

    def _take_results(self, found: Sequence[StepResult] | None) -> None:
        """Of those that were found, the ones that begin with the first step."""
        if found and (not self.results or found[0].step < self.results[0].step):
            self.results = tuple(found)

    @property
    def _row_means_wanted(self) -> int | None:
        """See PullRequest.row_means."""
        return None

    def _take_row_means(self, index: int, found: RowMeansPart) -> None:
        """They came with the end of a pull."""
        raise BadFrame(f"mean gradients of {sum(found.counts)} rows came from pserver-{index}, and none were asked for")

    def _check_pull(self) -> None:
        """Before each request of a pull. Raises StaleGeneration: it does not count any more."""

    def _may_be_same(self, _: int, known: str) -> bool:
        """Whether a block may come without values, because they are those that `known` names."""
        return bool(known)

    def _keep_current(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._vectors.keep(block)
