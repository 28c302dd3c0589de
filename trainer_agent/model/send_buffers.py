"""Host memory for finished gradients that are not sent from the memory they were computed in: from a GPU, or cast.

    GPU: block ─► page-locked host memory, on a CUDA stream beside backward ─► announced when the copy is done
    cast: block + residual ─► narrower dtype ─► announced        the new residual = block + residual - what is sent

Error feedback (Seide et al. 2014, Karimireddy et al. 2019): the residual of a block's cast is added to its next gradient,
so nothing is lost for ever. The residual is kept by this trainer only: if it dies, at most one rounding error per element is lost.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from shared.blocks.narrow import DTYPES, cast_into
from shared.records.job_spec import Transported
from trainer_agent.model.flat import Plan, Vector

HOST = torch.device("cpu")


class SendBuffers:
    """A host vector per gradient slot, in the dtypes that are sent; allocated once. Not thread-safe. `shared`: see Vector."""

    def __init__(
        self, plan: Plan, device: torch.device, dtype: Transported, *, feedback: bool, shared: bool = False
    ) -> None:
        self._plan, self._device, self._dtype = plan, device, dtype
        self._shared = shared and device.type == "cpu"
        self._narrow = plan.layout.payloads(dtype)
        self.hosts: dict[int, tuple[Vector, list[memoryview]]] = {}
        self.residuals = {
            block.number: torch.zeros(block.elements, device=device)
            for block in plan.blocks
            if feedback and self._narrow[block.number]
        }
        self._stream: torch.cuda.Stream | None = None
        if device.type != "cpu":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._copies: list[tuple[int, torch.cuda.Event]] = []

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

    def put(self, slot: int, block: int, values: torch.Tensor, announce: Callable[[int], object]) -> None:
        """Take a finished block; `values` may change. It is announced at once, on a GPU by `drain`. Raises OverflowError."""
        out = self._host(slot)[0].blocks[block]
        with torch.no_grad():
            if self._stream is None:
                self._write(out, block, values)
                announce(block)
                return
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            copied: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            with torch.cuda.stream(self._stream):
                self._write(out, block, values)
                copied.record()
            self._copies.append((block, copied))

    def drain(self, announce: Callable[[int], object]) -> None:
        """On a GPU: announce each block when its copy is done. Only then may the slots be overwritten."""
        for block, copied in self._copies:
            copied.synchronize()
            announce(block)
        self._copies.clear()

    def clear_residuals(self) -> None:
        """What was left out belongs to parameters that are no longer in use."""
        for residual in self.residuals.values():
            residual.zero_()

    def _write(self, out: torch.Tensor, block: int, values: torch.Tensor) -> None:
        dtype, residual = self._narrow[block], self.residuals.get(block)
        if dtype is None:
            out.copy_(values, non_blocking=True)
            return
        sent = out if self._stream is None else torch.empty_like(values, dtype=DTYPES[dtype])
        if residual is not None:
            values.add_(residual)
        try:
            cast_into(sent, values)
        except OverflowError as error:
            raise overflow(block, error) from None
        if residual is not None:
            torch.sub(values, residual.copy_(sent), out=residual)
        if sent is not out:
            out.copy_(sent, non_blocking=True)

    def _host(self, slot: int) -> tuple[Vector, list[memoryview]]:
        if slot not in self.hosts:
            pinned = self._stream is not None
            host = Vector(self._plan, HOST, pinned=pinned, dtype=self._dtype, shared=self._shared)
            self.hosts[slot] = host, host.memory()
        return self.hosts[slot]


def overflow(block: int, error: OverflowError) -> OverflowError:
    return OverflowError(f"a gradient in block {block}: {error}; use gradient_dtype bfloat16, or scale the loss down")
