"""The user's model on flat vectors: `Compute` with torch.

    parameters   current <─swap─> staging          param.data is a view of the current one
    gradients    slots of the canonical tree       param.grad, once made, is a view of this backward's slot

On a CPU the only copy is that of each gradient into its slot: pushes and pulls use the vectors themselves. A
GPU's vector is copied as a whole, once a step and direction, from and to page-locked host memory.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from safetensors.torch import save
from torch import nn

from trainer_agent.data.shard import on_record
from trainer_agent.model import optimizer as optimizers
from trainer_agent.model.averages import averages_of
from trainer_agent.model.block_states import BlockStates
from trainer_agent.model.buffer_policies import policies_of
from trainer_agent.model.compute import NOTHING_BEFORE, BeforeStep, BlockSink, LaneResult, Ready, Records
from trainer_agent.model.devices import (
    HOST,
    check_precision,
    compile_each_shape_alone,
    device_of,
    is_host,
)
from trainer_agent.model.flat import PinnedVector, Plan, Vector, bytes_of, checked_model, plan
from trainer_agent.model.gradient_tree import (
    Entry,
    GradientTree,
    LeftOutError,
    NonFiniteError,
    SendBuffers,
    ToEventLoop,
    TreeRules,
    check_gradients,
)
from trainer_agent.model.minibatch import MinibatchRunner
from trainer_agent.model.pretrained import write_pretrained
from trainer_agent.model.schedule import Schedule, made_by
from trainer_agent.model.watch.minibatch_rules import UserCode
from trainer_agent.model.watch.unshared_state import constants_of
from trainer_agent.own_loop.turns import use_threads
from trainer_agent.start_values import PYTORCH, load_start_state, start_values, state_of, without_wrappers
from trainer_agent.tables.files import StoredTable, StoredTables
from trainer_agent.tables.trained import TrainedTables
from trireme_shared.blocks.buffers import DTYPES
from trireme_shared.datasets.random_state import alone, drawing
from trireme_shared.platform.runtime.process_setup import optimizers_without_compiler
from trireme_shared.platform.storage import files
from trireme_shared.protocol.errors import InvalidArgument, UserCodeError
from trireme_shared.protocol.lanes import Interval
from trireme_shared.protocol.records import JobSpec, Mode
from trireme_shared.protocol.records.job_choices import Narrow
from trireme_shared.protocol.records.layout import Layout
from trireme_shared.protocol.records.metric_states import Sum
from trireme_shared.protocol.records.step import LaneZero
from trireme_shared.serving.optimizers.several import parts_of

if TYPE_CHECKING:
    from trainer_agent.tables.trained import Lookup
    from trireme_shared.tables.lanes import LaneRows  # loads numba


T = TypeVar("T")


class TorchCompute:
    """See trainer_agent.model.compute.Compute. `executor` runs one call at a time; building takes as long as
    model() does. `shared`: gradients are in memory that parameter servers on this host can read. `number`: of
    the trainer on its host, which chooses its GPU. `initial`: Layout.initial of a job that has begun: its own
    copy of these values is loaded."""

    def __init__(
        self,
        user: UserCode,
        spec: JobSpec,
        executor: Executor,
        *,
        shared: bool = False,
        number: int = 0,
        initial: str = "",
    ) -> None:
        overruled = use_threads(spec.threads_per_trainer)
        self._user, self._executor, self.is_finished = user, executor, False
        deterministic = spec.mode is Mode.SYNC and spec.deterministic
        self._device = device_of(spec.device, deterministic=deterministic, number=number)
        self._on_host = is_host(self._device)
        # of the last lane; None: of the minibatch under way
        self._result: LaneResult | None = LaneResult(0.0, 0)
        self._records = 0
        model = checked_model(drawing(spec.seed, user.call, "model"))
        if deterministic:
            compile_each_shape_alone()
        self.started = start_values(model, spec, initial)
        check_precision(spec.precision, model, self._device)
        self.model = model.to(self._device)
        optimizers_without_compiler()
        self.optimizer = optimizers.for_job(drawing(spec.seed, user.call, "optimizer", self.model), spec)
        is_sync = spec.mode is Mode.SYNC
        averages_of(self.model, has_lanes=is_sync)  # refuses those that would not follow
        policies = policies_of(self.model, user.buffers, has_lanes=is_sync)
        laid_out = plan(
            self.model,
            self.optimizer,
            spec.block_bytes,
            spec.slot_count,
            self._device.type,
            policies,
            numbered=is_sync,
            thaws=is_sync and user.loop is None,
        )
        self.tables = TrainedTables(self.model, spec)
        layout = laid_out.layout.with_fields(
            initial=self.started.digest,
            tables=self.tables.specs,
            constants=constants_of(self.model, laid_out),
        )
        self.plan: Plan = replace(laid_out, layout=layout)
        self.places = self.plan.parameters
        self._schedule = Schedule(made_by(user, self.optimizer, spec.seed), spec, user.guard)
        # the servers step; without it schedulers warn about their order
        for part in parts_of(self.optimizer):
            vars(part)["_opt_called"] = True
        self._bind_parameters()
        self._initial_states: BlockStates | None = None
        self.by_columns = not user.has("collate")
        self.may_initialise = not (spec.init_optimizer and initial)
        if spec.init_optimizer and not initial:  # else the parameter servers have it
            load_start_state(self.model, self.optimizer, self._schedule.scheduler, spec)
            self._initial_states = BlockStates(self.plan, self.model, self.optimizer)
            self._initial_states.fill()
        self._pinned = PinnedVector(self.plan, self._device)
        payloads = self.layout.payloads(spec.gradient_dtype)
        self.send_buffers: SendBuffers | None = None
        if any(payloads) or not self._on_host:
            feedback = spec.feeds_errors_back
            self.send_buffers = SendBuffers(
                self.plan, self._device, spec.gradient_dtype, feedback=feedback, shared=shared
            )
        # native exchange reduces all blocks of all trainers alike
        self._leaves_out = spec.exchange != "native"
        self._finite, self._skips = spec.on_nonfinite != "ignore", spec.on_nonfinite == "skip"
        # synchronous: parameter servers clip the mean over all lanes
        self._limit = spec.clip_grad_norm if spec.mode is Mode.ASYNC else None
        rules = TreeRules(
            payloads if spec.mode is Mode.SYNC else (),
            whole=not self._on_host,
            # to clip, the norm of all gradients is computed
            finite=self._finite and spec.clip_lane_norm is None,
            counts=spec.mode is Mode.ASYNC,
            shared=shared,
            limit=self._limit,
            any_norm=not self._finite,
        )
        self.tree = GradientTree(self.plan, self._device, self.send_buffers, rules)
        self.minibatch = MinibatchRunner(
            user, self.model, self.plan, self._parameters, self.optimizer, spec, overruled
        )
        self.initial_lane_zero()

    def __repr__(self) -> str:
        sizes = ", ".join(f"{s.kind} {s.dtype} {s.elements}" for s in self.layout.segments)
        return f"<TorchCompute on {self._device}: {sizes}; {len(self.plan.blocks)} blocks>"

    @property
    def layout(self) -> Layout:
        return self.plan.layout

    @property
    def scheduler(self) -> Any:
        """The script's, or None."""
        return self._schedule.scheduler

    # ------------------------------------------------------------ parameters

    def _bind_parameters(self) -> None:
        named, buffers = dict(self.model.named_parameters()), dict(self.model.named_buffers())
        self._parameters = [named[place.name] for place in self.plan.parameters]
        self._current = Vector(self.plan, self._device)
        with torch.no_grad():
            for place, tensor in zip(self.plan.parameters, self._parameters, strict=True):
                self._current.view(place).copy_(tensor)
            for place in self.plan.buffers:
                self._current.view(place).copy_(buffers[place.name])
        self._current_views = self._current.views(self.plan.parameters)
        if self._on_host:
            self._staging = Vector(self.plan, HOST)
            self._staging_views = self._staging.views(self.plan.parameters)
            self._current_memory = self._current.memory()
        else:
            self._staging = Vector(self.plan, HOST, pinned=self._device.type == "cuda")
        self._staging_memory = self._staging.memory()
        # blocks of the staging vector that may differ from those in use; a GPU's has what was copied to the
        # GPU last
        self._staged = set(range(len(self.plan.blocks)))
        self.use_current()

    def use_current(self) -> None:
        """The model's parameters are those in use."""
        self._view(self._current_views)

    def _view(self, views: Sequence[torch.Tensor]) -> None:
        for tensor, view in zip(self._parameters, views, strict=True):
            tensor.data = view

    def current(self, block: int) -> memoryview:
        if self._on_host:
            return self._current_memory[block].toreadonly()
        return bytes_of(self._current.blocks[block].cpu()).toreadonly()

    def staging(self, block: int) -> memoryview:
        self._staged.add(block)
        return self._staging_memory[block]

    def keep(self, block: int) -> None:
        if block in self._staged:
            self._staging.blocks[block].copy_(self._current.blocks[block])
            if self._on_host:
                self._staged.discard(block)

    def widen(self, block: int, dtype: Narrow, payload: memoryview) -> None:
        self._staged.add(block)
        self._staging.blocks[block].copy_(torch.frombuffer(payload, dtype=DTYPES[dtype]))

    def swap(self) -> None:
        if not self._on_host:
            self._current.flat.copy_(self._staging.flat)
            self._staged.clear()
            return
        self._current, self._staging = self._staging, self._current
        self._current_views, self._staging_views = self._staging_views, self._current_views
        self._current_memory, self._staging_memory = self._staging_memory, self._current_memory
        self.use_current()

    # ------------------------------------------------------------ scheduler

    def begin_step(self, before: BeforeStep = NOTHING_BEFORE) -> LaneZero:
        self._initial_states = None
        self.minibatch.step_and_epoch = before.step_and_epoch
        self.minibatch.averaged.version(self._current)
        self.minibatch.freezing.begin_step(before.version)
        self._schedule.before_step(before)
        options = optimizers.numeric_options(self.optimizer) if before.is_own else ()
        self._schedule.after_step()
        return optimizers.lane_zero(
            self.optimizer, self._schedule.scheduler if before.is_own else None, options
        )

    def initial_lane_zero(self) -> LaneZero:
        return optimizers.lane_zero(
            self.optimizer, self._schedule.scheduler, optimizers.numeric_options(self.optimizer)
        )

    def initial_state(self, block: int) -> Sequence[tuple[str, memoryview]]:
        return () if self._initial_states is None else self._initial_states.of(block)

    def restore(self, lane_zero: LaneZero) -> None:
        optimizers.restore(self.optimizer, self._schedule.scheduler, lane_zero)
        self.minibatch.averaged.forget()
        if self.send_buffers is not None:
            self.send_buffers.clear_residuals()

    # ------------------------------------------------------------ gradients

    async def prepare(self, seed: int, records: Records) -> Ready | None:
        if not self.tables.specs or not self._user.has("ids"):
            return None
        return await self._in_thread(self.minibatch.prepare, records, seed, self.tables.named)

    async def gradient(
        self,
        node: Interval,
        lane: int,
        seed: int,
        records: Records | None,
        sink: BlockSink,
        ready: Ready | None = None,
    ) -> LaneResult:
        work = node, lane, seed, records, ToEventLoop(self.plan.blocks, sink), ready
        return await self._in_thread(self._gradient, *work)

    def contribution(self, node: Interval, block: int) -> memoryview:
        return self.tree.contribution(node, block)

    def samples(self, node: Interval) -> int:
        return self.tree.samples(node)

    def forget_nodes(self) -> None:
        self.tree.forget()

    def read_rows(self, lookup: Lookup) -> None:
        self.tables.rows.read_by(lookup)

    def lane_rows(self) -> Sequence[LaneRows]:
        return self.tables.lane

    def _gradient(
        self,
        node: Interval,
        lane: int,
        seed: int,
        records: Records | None,
        sink: BlockSink,
        ready: Ready | None,
    ) -> LaneResult:
        entry = Entry(1, len(records), self.tree.take()) if records else Entry(1, 0, None)
        last = lane == node[1] - 1
        # a block that is done cannot be left out or changed any more; a script with its own loop may do both
        # until its step
        overlaps = last and not self._skips and self._limit is None and self._user.loop is None
        if overlaps:
            self.tree.open(node, entry, sink)
        self._result, self._records = (None, len(records)) if records else (LaneResult(0.0, 0), 0)
        self.tables.begin_lane(() if ready is None else ready.at_hand)
        try:
            if records and entry.slot is not None:
                self._backward(entry.slot, records, seed, ready, overlaps=overlaps)
                self._result = self.result()
            if overlaps:
                self._close(entry)
        except NonFiniteError as error:
            if entry.slot is None or not (self._skips or isinstance(error, LeftOutError)):
                raise self._user.error_of(error, fatal=True) from error
            self.tree.free(entry.slot)
            self.tables.begin_lane()
            self._result = LaneResult(0.0, 0, entry.count)
            entry = Entry(1, 0, None)
        if last and not overlaps:
            self.tree.open(node, entry, sink)
            try:
                self._close(entry)
            except NonFiniteError as error:  # the norm
                raise self._user.error_of(error, fatal=True) from error
        elif not last:
            self._user.guard(self.tree.add, entry)
        return replace(self.result(), warnings=self.minibatch.warnings())

    def result(self) -> LaneResult:
        if self._result is not None:
            return self._result
        minibatch, freezing = self.minibatch, self.minibatch.freezing
        return LaneResult(
            minibatch.loss_sum,
            self._records,
            metrics=minibatch.logged,
            frozen=freezing.frozen,
            unused=freezing.unused,
            resting=freezing.resting,
        )

    def _backward(
        self, slot: int, records: Records, seed: int, ready: Ready | None, *, overlaps: bool
    ) -> None:
        """Raises NonFiniteError."""
        sink = self.tree if overlaps else self.tree.lane(slot)
        vector = self.tree.vector(slot)
        with self.tables.minibatch(self.minibatch.permit):
            of_host, idle = sink if self._on_host else None, self.tree.idle if self._leaves_out else None
            self.minibatch.backward(records, seed, self._current, vector, of_host, ready, idle)
        try:
            of_rows = self.tables.end_lane(len(records), self.minibatch.row_factor)
        except InvalidArgument as error:
            # more ids than a table takes: that of the script's settings, not of a record
            raise self._user.error_of(error, fatal=True) from error
        if self._finite:
            check_gradients(of_rows)
        self.tree.note_unchanged(slot, self._current)
        if not overlaps and not self.tree.is_finite(slot):
            self.minibatch.check_gradients()

    def _close(self, last: Entry) -> None:
        """Raises NonFiniteError."""
        try:
            self._user.guard(self.tree.close)
        except UserCodeError as error:
            if isinstance(error.__cause__, NonFiniteError):  # the norm; no fault of one task
                raise error.__cause__ from None
            raise
        if self.tree.broken and last.slot is not None:
            self.minibatch.check_gradients()

    # ------------------------------------------------------------ after training

    async def evaluate(self, records: Records, seed: int = 0, *, pinned: bool = False) -> Mapping[str, Sum]:
        return await self._in_thread(self._evaluate_pinned if pinned else self._evaluate, records, seed)

    def _evaluate(self, records: Records, seed: int) -> Mapping[str, Sum]:
        with self.tables.reading():
            return self.minibatch.evaluate(records, seed, self._current)

    def _evaluate_pinned(self, records: Records, seed: int) -> Mapping[str, Sum]:
        """The parameters are those in use again afterwards; buffers are loaded for each minibatch that is
        trained."""
        pinned = self._pinned.vector()
        self._view(pinned.views(self.plan.parameters))
        try:
            with self.tables.reading_pinned():
                return self.minibatch.evaluate(records, seed, pinned)
        finally:
            self.use_current()

    def pinned(self, block: int) -> memoryview:
        return self._pinned.memory(block)

    def pin_rows(self, tables: Sequence[StoredTable]) -> None:
        self.tables.pinned = StoredTables(tables)

    def forget_pinned(self) -> None:
        self._pinned.forget()
        self.tables.pinned = None

    async def metrics(self, sums: Mapping[str, Sum]) -> dict[str, float]:
        return await self._in_thread(self.minibatch.metrics, sums)

    async def export(self, directory: str) -> dict[str, str]:
        self.minibatch.buffers.load(self._current)
        return await self._in_thread(self._export, directory)

    def _export(self, directory: str) -> dict[str, str]:
        self.minibatch.check_at_end()
        return write_model(self.model, directory)

    async def finish(self) -> None:
        if self._user.loop is not None:
            self.is_finished = True
            self.minibatch.release()
            await self._in_thread(self._user.loop.end)

    def close(self) -> None:
        """The script ends, if it still waits."""
        if self._user.loop is not None:
            self._user.loop.close()

    async def _in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run in the executor. If cancelled, it returns only when the thread no longer uses the vectors. What
        kept the script from its rows is raised as it is: it is no error of the script."""
        reads = work != self.minibatch.prepare  # that runs beside a forward pass
        if reads:  # not in the thread: it may be given up before it has one
            self.tables.rows.begin()
        future = asyncio.get_running_loop().run_in_executor(
            self._executor, partial(alone, on_record, work, *arguments)
        )
        try:
            return await asyncio.shield(future)
        except UserCodeError as error:
            raise self.tables.rows.failure or error from None
        except asyncio.CancelledError:
            if reads:
                self.tables.rows.give_up()
            while not future.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([future])
            if not future.cancelled():
                future.exception()  # nobody waits for it any more; asyncio would report it as never retrieved
            raise


def write_model(model: nn.Module, directory: str) -> dict[str, str]:
    """Names (see without_wrappers) and values of `model.state_dict()`, and what Hugging Face's libraries save
    of such a model; kind -> URL. A retry overwrites with the same bytes."""
    state = without_wrappers(model, state_of(model))
    urls = {
        "safetensors": files.join(directory, "model.safetensors"),
        "state_dict": files.join(directory, "model.pt"),
    }
    files.write_bytes(urls["safetensors"], save(state, PYTORCH))
    with files.write_atomic(urls["state_dict"]) as file:
        torch.save(state, file)
    del state  # as large as the model
    return urls | write_pretrained(model, directory)
