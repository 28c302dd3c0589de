"""Host memory for finished gradients that are not sent from the memory they were computed in: from a GPU, or cast.

    cast: block + residual ─► narrower dtype ─► sent        the new residual = block + residual - what is sent
    GPU: the whole vector, cast there ─► one copy to page-locked host memory ─► all blocks sent

A copy for each block of a GPU's vector would cost a wait for each.

Error feedback (Seide et al. 2014, Karimireddy et al. 2019): the residual of a block's cast is added to its next gradient, so
nothing is lost for ever. The residual is kept by this trainer only: if it dies, at most one rounding error per element is lost.
"""

from __future__ import annotations

import torch

from trainer_agent.model.devices import HOST
from trainer_agent.model.flat import Plan, Vector
from trireme_shared.blocks.narrow import cast_into
from trireme_shared.protocol.records.job_choices import Narrow, Transported


class SendBuffers:
    """A host vector per gradient slot, in the dtypes that are sent; allocated once. Not thread-safe. `shared`: see Vector."""

    def __init__(
        self, plan: Plan, device: torch.device, dtype: Transported, *, feedback: bool, shared: bool = False
    ) -> None:
        self._plan, self._device, self._dtype = plan, device, dtype
        self._shared = shared and device.type == "cpu"
        self._narrow = plan.layout.payloads(dtype)
        self.hosts: dict[int, tuple[Vector, list[memoryview]]] = {}
        feeds = [feedback and segment.travels_as(dtype) is not None for segment in plan.layout.segments]
        self._residuals = [
            torch.zeros(segment.elements, device=device) if fed else None
            for segment, fed in zip(plan.layout.segments, feeds, strict=True)
        ]
        self.residuals = {
            block.number: residual[block.first : block.first + block.elements]
            for block in plan.blocks
            if (residual := self._residuals[block.segment]) is not None
        }
        self._cast: Vector | None = None  # on a GPU: what is sent

    def __repr__(self) -> str:
        return f"<SendBuffers from {self._device} as {self._dtype}, {len(self.residuals)} blocks with feedback>"

    def memory(self, slot: int) -> list[memoryview]:
        return self._host(slot)[1]

    def renew(self, slot: int) -> None:
        """Before the slot's vector is written: replace one that a parameter server may still read."""
        if slot in self.hosts and self.hosts[slot][0].lost:
            del self.hosts[slot]

    def drop(self, slot: int) -> None:
        """The slot was freed."""
        self.hosts.pop(slot, None)

    def put(self, slot: int, block: int, values: torch.Tensor) -> None:
        """Take a finished block in host memory; `values` may change. Raises OverflowError."""
        out = self._host(slot)[0].blocks[block]
        self._write(out, values, self._narrow[block], self.residuals.get(block), f"block {block}")

    def put_all(self, slot: int, vector: Vector) -> None:
        """Take a whole vector of a GPU, and wait for it; its values may change. Raises OverflowError."""
        sent = vector
        if any(self._narrow):
            sent = self._cast = self._cast or Vector(self._plan, self._device, dtype=self._dtype)
            for number, segment in enumerate(self._plan.layout.segments):
                out, values, residual = sent.segments[number], vector.segments[number], self._residuals[number]
                self._write(out, values, segment.travels_as(self._dtype), residual, f"segment {number}")
        self._host(slot)[0].flat.copy_(sent.flat)

    def clear_residuals(self) -> None:
        """What was left out belongs to parameters that are no longer in use."""
        for residual in self.residuals.values():
            residual.zero_()

    @staticmethod
    def _write(
        out: torch.Tensor, values: torch.Tensor, dtype: Narrow | None, residual: torch.Tensor | None, where: str
    ) -> None:
        with torch.no_grad():
            if dtype is None:
                out.copy_(values)
                return
            if residual is not None:
                values.add_(residual)
            try:
                cast_into(out, values)
            except OverflowError as error:
                raise overflow(where, error) from None
            if residual is not None:
                torch.sub(values, residual.copy_(out), out=residual)

    def _host(self, slot: int) -> tuple[Vector, list[memoryview]]:
        if slot not in self.hosts:
            host = Vector(self._plan, HOST, pinned=self._device.type == "cuda", dtype=self._dtype, shared=self._shared)
            self.hosts[slot] = host, host.memory()
        return self.hosts[slot]


def overflow(where: str, error: OverflowError) -> OverflowError:
    return OverflowError(f"a gradient in {where}: {error}; use gradient_dtype bfloat16, or scale the loss down")
