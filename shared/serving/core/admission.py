"""What a push may be: one that was admitted, the payloads that fit a block, and whether a model is the one that is loaded."""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.errors import BadFrame, LayoutMismatch
from shared.lanes import Interval
from shared.records import Mode
from shared.records.layout import ELEMENT_BYTES, Layout
from shared.records.step import LanePosition, NodeResult
from shared.serving.core.blocks import BlockState
from shared.serving.core.optimizers import Options
from shared.wire.messages import InitHeader, PushBlock, PushHeader
from shared.wire.verdict import Verdict

MAX_TASKS = 1 << 40


@dataclass(slots=True)
class Push:
    """One admitted push. `options[g]`: of optimizer group g in this step, if the header has them. `judged`: by lanes.
    `results`: of nodes of the tree, as they came with their first blocks."""

    header: PushHeader
    task: int = -1
    options: tuple[Options, ...] | None = None
    positions: dict[int, LanePosition] = field(default_factory=dict)
    judged: dict[Interval, Verdict | None] = field(default_factory=dict)
    claims: int = 0
    noted: set[Interval] = field(default_factory=set)
    results: dict[Interval, NodeResult] = field(default_factory=dict)


def fits(state: BlockState, item: PushBlock, size: int) -> bool:
    """Whether a payload of `size` bytes is the whole block, in its own dtype or in one that it may be sent in; or nothing, because
    there is no data or, in a buffer, no change."""
    if not size and (not item.count or (state.is_buffer and item.dtype is None)):
        return True
    if item.dtype is None:
        return size == state.place.bytes
    return state.narrows and size == state.place.elements * ELEMENT_BYTES[item.dtype]


def task_number(header: PushHeader) -> int:
    task = int(header.task_id) if header.task_id.isascii() and header.task_id.isdigit() else -1
    if not 0 <= task < MAX_TASKS or not 0 <= header.start < header.end <= header.minibatches:
        msg = (
            f"push of task {header.task_id[:40]!r}, minibatches [{header.start}, {header.end}) of {header.minibatches}: "
            "expected a task number and 0 <= start < end <= minibatches"
        )
        raise BadFrame(msg)
    return task


def check_same_model(layout: Layout, mode: Mode, header: InitHeader) -> None:
    """Raises LayoutMismatch unless the header is of the model with this layout."""
    mine = (layout.digest, layout.segments, layout.block_bytes, layout.tables, mode)
    theirs = (
        header.layout.digest,
        header.layout.segments,
        header.layout.block_bytes,
        header.layout.tables,
        header.mode,
    )
    if mine != theirs:
        msg = (
            f"model {header.layout.digest[:12]} ({header.mode}, {len(header.layout.segments)} segments) does not fit the loaded "
            f"{layout.digest[:12]} ({mode}, {len(layout.segments)} segments): all trainers must run the same script"
        )
        raise LayoutMismatch(msg)
