"""The user's model on flat vectors: `Compute` with torch.

    parameters   current <─swap─> staging          param.data views the current one
    gradients    slots of the canonical tree       param.grad, once there, views the slot of this backward

Nothing is copied to push or to pull on a CPU but gradients into their slot; on a GPU blocks are staged through page-locked host memory.
"""

from __future__ import annotations

import asyncio
import random
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from shared.errors import DatasetError, InvalidArgument
from shared.lanes import Interval
from shared.records import JobSpec, Mode
from shared.records.job_spec import Narrow
from shared.records.layout import Layout
from shared.records.step import LaneZero
from shared.runtime.light_torch import optimizers_without_compiler
from shared.wire.narrow import DTYPES
from trainer_agent.data.collate import default_collate
from trainer_agent.model import optimizer_spec as optimizers
from trainer_agent.model.buffers import LiveBuffers
from trainer_agent.model.compute import LaneResult, Records
from trainer_agent.model.export import write_model
from trainer_agent.model.flat import Plan, Vector, bytes_of, plan
from trainer_agent.model.gradient_tree import Entry, GradientTree
from trainer_agent.model.outbound import HOST, Outbound
from trainer_agent.script.user_module import UserModule

T = TypeVar("T")
WORTH_BYTES = 256 << 10  # of finished blocks, before the last ones, that are worth telling


class TorchCompute:
    """See trainer_agent.model.compute.Compute. `executor` runs one call at a time; building takes as long as model() does.
    `shared`: gradients lie where parameter servers on this host can read them."""

    def __init__(self, user: UserModule, spec: JobSpec, executor: Executor, *, shared: bool = False) -> None:
        torch.set_num_threads(spec.threads_per_trainer)
        self._user, self._executor, self._clip_norm = user, executor, spec.clip_norm
        self._device = device_of(spec.device)
        torch.manual_seed(spec.seed)
        self.model = checked_model(user.call("model")).to(self._device)
        optimizers_without_compiler()
        self.optimizer = user.call("optimizer", self.model)
        self.plan: Plan = plan(self.model, self.optimizer, spec.block_bytes, spec.slot_count)
        self._scheduler = user.call("scheduler", self.optimizer) if user.has("scheduler") else None
        vars(self.optimizer)["_opt_called"] = True  # the servers step; without it schedulers warn about their order
        self._bind_parameters()
        self._buffers = LiveBuffers(self.model, self.plan)
        payloads = self.layout.payloads(spec.gradient_dtype)
        self._outbound: Outbound | None = None
        if any(payloads) or self._device.type != "cpu":
            feedback = spec.feeds_errors_back
            self._outbound = Outbound(self.plan, self._device, spec.gradient_dtype, feedback=feedback, shared=shared)
        rounded = payloads if spec.mode is Mode.SYNC else ()
        self._tree = GradientTree(self.plan, self._device, self._outbound, rounded, shared=shared)
        self._homes: list[torch.Tensor] = []  # where the gradients of this backward belong, by parameter
        self._gradient_views: weakref.WeakKeyDictionary[Vector, list[torch.Tensor]] = weakref.WeakKeyDictionary()
        self._due: list[int] | None = None
        self._may_overlap = False
        self._count_gradients()
        self.initial_lane_zero()

    def __repr__(self) -> str:
        sizes = ", ".join(f"{s.kind} {s.dtype} {s.elements}" for s in self.layout.segments)
        return f"<TorchCompute on {self._device}: {sizes}; {len(self.plan.blocks)} blocks>"

    @property
    def layout(self) -> Layout:
        return self.plan.layout

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
        if self._device.type == "cpu":
            self._staging = Vector(self.plan, HOST)
            self._staging_views = self._staging.views(self.plan.parameters)
            self._current_memory = self._current.memory()
        else:
            self._staging = Vector(self.plan, HOST, pinned=True)
        self._staging_memory = self._staging.memory()
        self._view_current()

    def _view_current(self) -> None:
        for tensor, view in zip(self._parameters, self._current_views, strict=True):
            tensor.data = view

    def current(self, block: int) -> memoryview:
        if self._device.type == "cpu":
            return self._current_memory[block].toreadonly()
        return bytes_of(self._current.blocks[block].cpu()).toreadonly()

    def staging(self, block: int) -> memoryview:
        return self._staging_memory[block]

    def widen(self, block: int, dtype: Narrow, payload: memoryview) -> None:
        self._staging.blocks[block].copy_(torch.frombuffer(payload, dtype=DTYPES[dtype]))

    def swap(self) -> None:
        if self._device.type != "cpu":
            for target, source in zip(self._current.segments, self._staging.segments, strict=True):
                target.copy_(source, non_blocking=True)
            torch.cuda.current_stream(self._device).synchronize()
            return
        self._current, self._staging = self._staging, self._current
        self._current_views, self._staging_views = self._staging_views, self._current_views
        self._current_memory, self._staging_memory = self._staging_memory, self._current_memory
        self._view_current()

    # ------------------------------------------------------------ scheduler

    def begin_step(self) -> LaneZero:
        options = optimizers.numeric_options(self.optimizer)
        if self._scheduler is not None:
            self._user.guard(self._scheduler.step)
        return optimizers.lane_zero(self.optimizer, self._scheduler, options)

    def initial_lane_zero(self) -> LaneZero:
        options = optimizers.numeric_options(self.optimizer)
        return optimizers.lane_zero(self.optimizer, self._scheduler, options)

    def restore(self, lane_zero: LaneZero) -> None:
        optimizers.restore(self.optimizer, self._scheduler, lane_zero)
        if self._outbound is not None:
            self._outbound.forget_rests()

    # ------------------------------------------------------------ gradients

    async def gradient(
        self, node: Interval, lane: int, seed: int, records: Records | None, finished: Callable[[int], None]
    ) -> LaneResult:
        loop = asyncio.get_running_loop()
        waiting: list[int] = []
        size, left = 0, len(self.plan.blocks)

        def announce(block: int) -> None:
            """Little ones wait for company: waking the event loop, and a parameter server, costs more than they are worth."""
            nonlocal size, left
            waiting.append(block)
            size, left = size + self.plan.blocks[block].bytes, left - 1
            if size >= WORTH_BYTES or not left:
                loop.call_soon_threadsafe(all_finished, tuple(waiting))
                waiting.clear()
                size = 0

        def all_finished(blocks: tuple[int, ...]) -> None:
            for block in blocks:
                finished(block)

        return await self._in_thread(self._gradient, node, lane, seed, records, announce)

    def contribution(self, node: Interval, block: int) -> memoryview:
        return self._tree.contribution(node, block)

    def forget_nodes(self) -> None:
        self._tree.forget()

    def _gradient(
        self, node: Interval, lane: int, seed: int, records: Records | None, announce: Callable[[int], None]
    ) -> LaneResult:
        entry = Entry(1, len(records), self._tree.take()) if records else Entry(1, 0, None)
        last = lane == node[1] - 1
        self._due = None  # a call that failed may have left it
        if last:
            self._tree.open(node, entry, announce)
            self._due = list(self._members) if self._may_overlap and records else None
        loss_sum = self._backward(seed, records, entry.slot) if records and entry.slot is not None else 0.0
        if last:
            self._due = None
            self._user.guard(self._tree.close)
        else:
            self._user.guard(self._tree.add, entry)
        return LaneResult(loss_sum, entry.count)

    def _backward(self, seed: int, records: Records, slot: int) -> float:
        gradients = self._tree.vector(slot)
        if gradients not in self._gradient_views:
            self._gradient_views[gradients] = gradients.views(self.plan.parameters)
        self._homes = self._gradient_views[gradients]
        for parameter in self._parameters:
            parameter.grad = None
        self._buffers.load(self._current)
        seed_everything(seed)
        self.model.train()
        loss = self._checked_loss(self._user.call("loss", self.model, self._batch(records)))
        self._fired = [0] * len(self._parameters)
        self._user.guard(loss.backward)
        self._check_fired()
        for index, fired in enumerate(self._fired):
            if not fired:
                self._homes[index].zero_()
        if self._clip_norm is not None:
            nn.utils.clip_grad_norm_(self._parameters, self._clip_norm)
        self._buffers.store(gradients)
        return float(loss.item()) * len(records)

    def _checked_loss(self, loss: Any) -> torch.Tensor:
        if isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.requires_grad:
            return loss
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            found = "a scalar that does not depend on the parameters"
        message = f"loss(model, batch) returned {found}; return the minibatch's mean loss, a scalar with a gradient"
        raise self._user.error_of(TypeError(message))

    def _batch(self, records: Records) -> Any:
        if self._user.has("collate"):
            batch = self._user.call("collate", records)
        else:
            try:
                batch = default_collate(records)
            except DatasetError as error:
                raise self._user.error_of(error) from error
        return batch if self._device.type == "cpu" else on_device(batch, self._device)

    # ------------------------------------------------------------ which blocks backward has finished

    def _count_gradients(self) -> None:
        """Per block, the parameters whose gradient it waits for. The first backward only watches: see `_check_fired`."""
        self._blocks_of = [self.plan.blocks_of(place) for place in self.plan.parameters]
        self._members = [0] * len(self.plan.blocks)
        for blocks in self._blocks_of:
            for block in blocks:
                self._members[block] += 1
        self._fired = [0] * len(self._parameters)
        for index, parameter in enumerate(self._parameters):
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                partial(self._on_gradient, index)
            )

    def _on_gradient(self, index: int, parameter: torch.Tensor) -> None:
        """A gradient that autograd made goes home, at first; what is added to it later is added there. Bound from the start,
        each would be added to zeros that had to be written before."""
        home = self._homes[index]
        if parameter.grad is not home:
            assert parameter.grad is not None
            home.copy_(parameter.grad.to_dense())
            parameter.grad = home
        self._fired[index] += 1
        if self._due is None:
            return
        for block in self._blocks_of[index]:
            self._due[block] -= 1
            if self._due[block] == 0:
                self._tree.finish(block)

    def _check_fired(self) -> None:
        """Reentrant checkpointing completes a gradient in parts: then nothing may be announced before backward's end."""
        in_parts = max(self._fired) > 1
        if in_parts and self._due is not None:
            message = "backward went on with a gradient that was finished; use checkpoint(..., use_reentrant=False)"
            raise self._user.error_of(RuntimeError(message))
        if self._due is None:
            self._may_overlap = self._clip_norm is None and not in_parts

    # ------------------------------------------------------------ after training

    async def evaluate(self, records: Records) -> dict[str, float]:
        return await self._in_thread(self._evaluate, records)

    def _evaluate(self, records: Records) -> dict[str, float]:
        self._buffers.load(self._current)
        self.model.eval()
        with torch.no_grad():
            batch = self._batch(records)
            if self._user.has("evaluate"):
                sums = self._user.call("evaluate", self.model, batch)
            else:
                sums = {"loss": self._user.call("loss", self.model, batch) * len(records), "records": len(records)}
        return self._numbers("evaluate(model, batch)", sums)

    async def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        if self._user.has("metrics"):
            return self._numbers("metrics(sums)", await self._in_thread(self._user.call, "metrics", dict(sums)))
        if not self._user.has("evaluate") and sums.get("records"):
            return {"loss": sums["loss"] / sums["records"]}
        return dict(sums)

    def _numbers(self, what: str, found: Any) -> dict[str, float]:
        if not isinstance(found, Mapping):
            raise self._user.error_of(TypeError(f"{what} returned {type(found).__name__}; return a dict of numbers"))
        try:
            return {str(name): float(value) for name, value in found.items()}
        except (TypeError, ValueError) as error:
            raise self._user.error_of(TypeError(f"{what} returned {found!r:.200}; return a dict of numbers")) from error

    async def export(self, directory: str) -> dict[str, str]:
        self._buffers.load(self._current)
        return await self._in_thread(write_model, self.model, directory)

    async def _in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run in the executor; a cancelled call returns only when the thread has let go of the vectors."""
        future = asyncio.get_running_loop().run_in_executor(self._executor, partial(work, *arguments))
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait([future])
            raise


def seed_everything(seed: int) -> None:
    """All generators that a forward pass or a collate may use."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # noqa: NPY002  user code uses the global generator


def device_of(name: str) -> torch.device:
    """Raises InvalidArgument for `cuda` on a machine without; on a GPU, kernels are told to be repeatable."""
    if name == "cuda" and not torch.cuda.is_available():
        raise InvalidArgument("device is cuda, but torch finds no GPU", hint="use device auto or cpu")
    if name == "cpu" or not torch.cuda.is_available():
        return HOST
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    return torch.device("cuda", torch.cuda.current_device())


def checked_model(model: Any) -> nn.Module:
    if isinstance(model, nn.Module):
        return model
    raise InvalidArgument(f"model() returned {type(model).__name__}", hint="return a torch.nn.Module")


def on_device(batch: Any, device: torch.device) -> Any:
    match batch:
        case torch.Tensor():
            return batch.to(device, non_blocking=True)
        case Mapping():
            return {name: on_device(value, device) for name, value in batch.items()}
        case tuple() | list():
            return type(batch)(on_device(value, device) for value in batch)
    return batch
