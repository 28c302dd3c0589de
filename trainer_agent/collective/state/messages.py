"""What trainers say to each other when one gets the parameters and the optimizer's state of others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pydantic import Field

from trireme_shared.protocol.records.record import Record
from trireme_shared.protocol.records.step import StepRecord
from trireme_shared.protocol.wire.messages import MessageHeader
from trireme_shared.serving.core.geometry import MAX_BLOCKS

MOST_HURRY = 4


class StateRequest(MessageHeader):
    """Some of these blocks, the first ones first, all at the version in use, which is at least `at_least`;
    the first `together` of them in any case. None: only which version that is. `hurry`: 0 as a rule; each one
    more doubles the share of its time that the giver spends on it. `rows` not "": rows of embedding tables in
    place of blocks; names a series of portions, `portion` counts them."""

    timeline: int
    blocks: tuple[int, ...] = Field(max_length=MAX_BLOCKS)
    at_least: int = 0
    together: int = Field(default=1, ge=1)
    hurry: int = Field(default=0, ge=0, le=MOST_HURRY)
    rows: str = Field(default="", max_length=80)
    portion: int = Field(default=0, ge=0)


class StatePart(Record):
    """One tensor. Of rows (block ROWS): `name` is the table's number and what they are, see rows.py. Else
    `name`: "" for the values of the block, which come before the rest, else a tensor of its optimizer's
    state. `scalar`: it has no dimensions, else it is as long as the block. `digest`: xxh3-128 of its bytes,
    in hexadecimal."""

    block: int
    name: str = ""
    dtype: str
    scalar: bool = False
    digest: str


class RowsHead(Record):
    """Of a portion of rows. `updates`: of each table, see Table. `last`: all others came before it, and it
    has none."""

    updates: tuple[int, ...]
    last: bool


class StateHead(Record):
    """First map of the answer; parts follow. `given`: the blocks that come, whole, all at the version of
    `record`. `pause_s`: how long the giver wants to be left alone then."""

    record: StepRecord
    given: tuple[int, ...] = ()
    pause_s: float = 0.0
    rows: RowsHead | None = None


@dataclass(frozen=True)
class Portion:
    """An answer. Payloads are the receiver's."""

    head: StateHead
    parts: Sequence[tuple[StatePart, memoryview]]

    def with_pause(self, pause_s: float) -> Portion:
        return replace(self, head=self.head.with_fields(pause_s=pause_s))
