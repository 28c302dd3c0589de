"""How much memory a table takes at one parameter server, before there is one.

rows x (values, state) + cells at their worst + what a step needs + what a snapshot keeps
"""

from __future__ import annotations

from dataclasses import dataclass

from trireme_shared.protocol.records.layout import TableSpec

CELL_BYTES = 16  # the id; stamp, frequency and row
# a slot gets a larger table when so many of its cells are used: the limit lies between the first and the sum
LEAST_LOAD, LOADS = 0.55, 0.20
AFTER_GROWTH = 0.42  # of the cells are used then
SKETCH_DEPTH, SKETCH_CELLS = 4, 1024  # of each slot
QUEUE_SHARE, QUEUE_BYTES = 8, 12  # one row in so many is in its slot's queue of the oldest
LANE_COPIES = 3  # of a lane's gradients: as they come, as they wait, and what is free for the next
TEMPORARY_BYTES = 48  # for an id of a step
OTHER_BYTES = 64 << 20  # compiled loops, buffers of connections, pages that are begun


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes. `snapshot`: of rows that change while a checkpoint is written, at most."""

    count: int
    rows: int
    cells: int
    limits: int
    step: int
    snapshot: int
    other: int = OTHER_BYTES

    @property
    def total(self) -> int:
        """Beyond what the process takes without rows."""
        return self.rows + self.cells + self.limits + self.step + self.snapshot + self.other

    def text(self) -> str:
        parts = {
            "values and state": self.rows,
            "ids, at most": self.cells,
            "counts and ages": self.limits,
            "a step": self.step,
            "a checkpoint meanwhile, at most": self.snapshot,
            "other": self.other,
        }
        told = ", ".join(f"{name} {size / 1e6:,.0f} MB" for name, size in parts.items() if size)
        return f"{self.count:,} rows take at most {self.total / 1e9:.2f} GB: {told}"


def needs_of(
    spec: TableSpec, rows: int, ids: int, slot_count: int = 1024, lanes: int = 1, snapshot: int = 0
) -> Needs:
    """`rows`: that one parameter server has. `ids`: of a minibatch, of these. `snapshot`: bytes that a
    checkpoint may keep."""
    queue = -(-(spec.max_rows or 0) // QUEUE_SHARE) * QUEUE_BYTES
    sketch = slot_count * SKETCH_DEPTH * SKETCH_CELLS if spec.admit_after > 1 else 0
    ids_of_step = ids * lanes
    gradients = LANE_COPIES * ids_of_step * (8 + 4 * spec.dim)
    before = ids_of_step * (16 + 4 * spec.row_words + TEMPORARY_BYTES)
    ahead = ids_of_step * 4 * spec.row_words  # memory of rows that may come next
    return Needs(
        rows,
        rows * 4 * spec.row_words,
        int(rows * CELL_BYTES / AFTER_GROWTH),
        queue + sketch,
        gradients + before + ahead,
        min(snapshot, rows * (16 + 4 * spec.row_words)),  # a row is kept once
    )
