"""The embedding tables of a model that is trained, by a trainer (TrainedTables) or in one process without any
service (OneLane).

with tables.minibatch(permit): forward, backward ─► tables.end_lane(records) ─► tables.lane: pushed
with tables.minibatch(permit) as recorded: forward, backward ─► tables.step(recorded.lane_rows(records))
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from trainer_agent.tables.embedding import ModelTables, named_ids
from trainer_agent.tables.files import StoredTable
from trainer_agent.tables.recording import Recording, RowSource
from trireme_shared.checkpoints.start_tables import StartTable
from trireme_shared.platform.runtime import begun, telemetry
from trireme_shared.protocol.errors import InvalidArgument, NotReady
from trireme_shared.protocol.records import JobSpec, Mode, Strategy
from trireme_shared.protocol.records.layout import schedule_factor
from trireme_shared.tables.grouping import Grouped, Numbers

if TYPE_CHECKING:
    from trainer_agent.tables.local import LocalTables
    from trireme_shared.tables.lanes import LaneRows

log = telemetry.logger("remote_rows")
AtHand = Sequence[tuple[Grouped, npt.NDArray[np.float32]]]
"""Of each table ids, and their rows, which nobody else writes."""
Lookup = Callable[[Sequence[Numbers]], Awaitable[Sequence[npt.NDArray[np.float32]]]]


class TrainedTables:
    """The tables of a model in a trainer: rows come from parameter servers, gradients go there. `lane`: of
    the last lane, see Compute.lane_rows. `pinned`: see Compute.pin_rows. Raises InvalidArgument."""

    def __init__(self, model: nn.Module, spec: JobSpec) -> None:
        self._layers = ModelTables(model, spec.seed)
        self.specs = self._layers.specs
        self.rows = RemoteRows([table.name for table in self.specs])
        self.lane: tuple[LaneRows, ...] = ()
        self.pinned: RowSource | None = None
        self._recording: Recording | None = None
        self._named: Sequence[Grouped] = ()
        if self.specs:
            _check(spec, [table.name for table in self.specs])

    def named(self, found: object) -> list[Grouped]:
        """Of what the script's `ids(batch)` returned: ids of each table. Raises InvalidArgument."""
        return named_ids([table.name for table in self.specs], found)

    def begin_lane(self, at_hand: AtHand = ()) -> None:
        """Nothing is known of its rows but what is at hand."""
        if self.specs:
            # only where there are tables: it loads numba
            from trireme_shared.tables.lanes import LaneRows  # noqa: PLC0415

            none = np.empty(0, np.int64)
            self.lane = tuple(LaneRows(none, np.empty((0, table.dim), np.float32), 0) for table in self.specs)
            self.rows.at_hand = at_hand
            self._named = [named for named, _ in at_hand]

    @contextmanager
    def minibatch(self, permit: Callable[[torch.Tensor | None], None]) -> Iterator[None]:
        """For forward and backward. `permit`: see Recording."""
        if not self.specs:
            yield
            return
        with self._layers.recording(self.rows, permit, self._named) as self._recording:
            yield

    def end_lane(self, records: int, factor: float = 1.0) -> dict[str, torch.Tensor]:
        """`lane` is of the last minibatch. Its gradients times `factor`, as errors name them."""
        if self._recording is None:
            return {}
        self.lane, self._recording = self._recording.lane_rows(records, factor), None
        named = zip(self.specs, self.lane, strict=True)
        return {f"table {table.name}": torch.from_numpy(rows.gradients) for table, rows in named}

    @contextmanager
    def reading(self) -> Iterator[None]:
        """For an evaluation."""
        if not self.specs:
            yield
            return
        self.rows.at_hand = ()
        with self._layers.reading(self.rows):
            yield

    @contextmanager
    def reading_pinned(self) -> Iterator[None]:
        """For an evaluation while the job trains."""
        if not self.specs:
            yield
            return
        assert self.pinned is not None, "evaluated without the tables of a checkpoint"
        with self._layers.reading(self.pinned):
            yield


def _check(spec: JobSpec, names: list[str]) -> None:
    if spec.strategy is Strategy.COLLECTIVE and spec.exchange == "native":
        msg = (
            f"the model has embedding tables ({', '.join(names):.200}), and exchange is native, which "
            "carries gradients of parameters alone"
        )
        hint = "use exchange direct: each trainer has all rows then, and their gradients are exchanged, too"
        raise InvalidArgument(msg, hint=hint)
    if spec.mode is Mode.ASYNC and spec.skip_after_seconds is not None:
        what = f"skip_after_seconds = {spec.skip_after_seconds}"
        msg = (
            f"the model has embedding tables ({', '.join(names):.200}), which do not go together with "
            f"{what} yet"
        )
        hint = (
            "leave it out: the rows of a silent parameter server can be read from nobody else, so its "
            "trainers have to wait"
        )
        raise InvalidArgument(msg, hint=hint)


class OneLane:
    """The tables of a model in training with one lane, without any service; nothing for a model that has
    none. The model's layers read the tables from now on; in `minibatch` their rows have gradients.
    `slot_count`: see LocalTables. `optimizer`: of the parameters. Raises InvalidArgument."""

    def __init__(
        self, model: nn.Module, seed: int, slot_count: int, optimizer: torch.optim.Optimizer
    ) -> None:
        self._optimizer = optimizer
        self._first_options = [
            {"lr": group.get("initial_lr", group["lr"])} for group in optimizer.param_groups
        ]
        self._layers = ModelTables(model, seed)
        self._tables: LocalTables | None = None
        if self._layers.specs:
            # only where there are tables: it loads numba
            from trainer_agent.tables.local import LocalTables  # noqa: PLC0415

            self._tables = LocalTables(self._layers.specs, slot_count)
            self._layers.bind(self._tables)

    @property
    def are_there(self) -> bool:
        return self._tables is not None

    def start_with(self, starts: Sequence[StartTable]) -> None:
        """See LocalTables.start_with."""
        if self._tables is not None:
            self._tables.start_with(starts)

    @contextmanager
    def minibatch(self, permit: Callable[[torch.Tensor], None]) -> Iterator[Recording]:
        """For forward and backward. `permit`: see Recording."""
        if self._tables is None:
            yield Recording(())
            return
        with self._layers.recording(self._tables, permit) as recording:
            yield recording

    def gradients(self, lane: Sequence[LaneRows]) -> dict[str, torch.Tensor]:
        """As errors name them."""
        named = zip(self._layers.specs, lane, strict=True)
        return {f"table {spec.name}": torch.from_numpy(rows.gradients) for spec, rows in named}

    def step(self, lane: Sequence[LaneRows] | None) -> None:
        """See LocalTables.step. The optimizer has the options of this step."""
        if self._tables is not None:
            self._tables.step(lane, schedule_factor(self._first_options, self._optimizer.param_groups))

    def stored(self) -> tuple[StoredTable, ...]:
        """Copies of all rows."""
        return () if self._tables is None else self._tables.stored()


class RemoteRows:
    """A RowSource: rows on the parameter servers, for a forward pass in a thread. They are at hand if the
    script has named their ids; else the thread waits while the event loop looks them up.

        forward, in its thread ─ lookup ─► at hand ─► rows
                                      └──► event loop ─► parameter servers ─► rows
                                           given up, or failed ─► raised in forward, and kept in `failure`

    `tables`: names of the model's. `at_hand`: what needs no lookup."""

    def __init__(self, tables: Sequence[str]) -> None:
        self._tables = tables
        self.at_hand: AtHand = ()
        self._told: set[int] = set()
        self._lookup: Lookup | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._asked: concurrent.futures.Future[Sequence[npt.NDArray[np.float32]]] | None = None
        self._given_up = threading.Event()
        self.failure: Exception | None = None

    def read_by(self, lookup: Lookup) -> None:
        """From now on, in the running event loop."""
        self._lookup, self._loop = lookup, asyncio.get_running_loop()

    def begin(self) -> None:
        """A forward pass will begin; called in the event loop."""
        self._given_up.clear()
        self.failure = None

    def lookup(self, table: int, ids: Numbers) -> npt.NDArray[np.float32]:
        """Raises what the lookup raises; NotReady if it is given up."""
        if not self.at_hand or not len(self.at_hand[table][0].ids):
            return self._asked_for(table, ids)
        named, rows = self.at_hand[table]
        known = named.ids
        if len(known) == len(ids) and np.array_equal(known, ids):
            return rows.copy()  # another layer may have the same ids
        places = np.searchsorted(known, ids)
        places[places == len(known)] = 0
        missing = known[places] != ids
        found: npt.NDArray[np.float32] = rows[places]
        if missing.any():
            if table not in self._told:
                self._told.add(table)
                count = int(missing.sum())
                log.warning(
                    "ids_not_named", table=self._tables[table], ids=count, example=int(ids[missing][0])
                )
            found[missing] = self._asked_for(table, ids[missing])
        return found

    def _asked_for(self, table: int, ids: Numbers) -> npt.NDArray[np.float32]:
        assert self._lookup is not None
        assert self._loop is not None
        nothing = np.empty(0, np.int64)
        asked = [ids if number == table else nothing for number in range(len(self._tables))]
        try:
            if self._given_up.is_set():
                raise NotReady("the minibatch was given up")
            self._asked = asyncio.run_coroutine_threadsafe(_awaited(self._lookup, asked), self._loop)
            if self._given_up.is_set():  # in this moment
                self._asked.cancel()
            with begun.waiting():
                return self._asked.result()[table]
        except concurrent.futures.CancelledError:
            raise NotReady("the minibatch was given up") from None
        except Exception as error:
            self.failure = error
            raise
        finally:
            self._asked = None

    def give_up(self) -> None:
        """The forward pass that waits ends with an error; called in the event loop."""
        self._given_up.set()
        if (asked := self._asked) is not None:
            asked.cancel()


async def _awaited(lookup: Lookup, asked: Sequence[Numbers]) -> Sequence[npt.NDArray[np.float32]]:
    return await lookup(asked)
