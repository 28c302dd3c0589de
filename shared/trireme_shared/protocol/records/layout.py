"""What of a model lies on parameter servers: the flat vectors of its parameters, and its embedding tables.

parameters --64-byte aligned--> flat vector of a segment --cut--> blocks --mod slot_count--> slots
    --slot map--> pserver
ids of a table ----------------------------------- hash ---------------------------------> slots
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from trireme_shared.protocol.records.job_choices import Narrow, Transported
from trireme_shared.protocol.records.record import Record

ALIGNMENT_BYTES = 64
ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8}
# Instead of the number of a block: the rows of all embedding tables; the ledger of what is handed over.
ROWS, LEDGER = -1, -2
TABLE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
MOST_TABLES = 256
MOST_CONSTANTS = 64
MOST_DIM = 4096
MOST_ROWS = 1 << 31  # of one table at one parameter server
# A row's stamp is the number of a step modulo STAMPS. At a version v it means a step in
# (v + LATER_STAMPS - STAMPS, v + LATER_STAMPS]: rows that are read while steps go on have later ones.
STAMPS = 1 << 28
LATER_STAMPS = 1 << 23
# Steps since a row was changed: when it has reached OLDEST it is kept there (trireme_shared.tables.leaving),
# each row once in AGED_STEPS steps, so that it never looks like one that was changed lately.
OLDEST = STAMPS - 2 * LATER_STAMPS
AGED_STEPS = LATER_STAMPS // 2
MOST_STEPS = OLDEST - 1  # of `evict_after_steps`: older rows have all expired


SMALLEST_RATE = 2.0**-126  # 1 / rate is a float32
SMALLEST_EPS = 2.0**-149  # that is not 0 as a float32

Finite = Annotated[float, Field(allow_inf_nan=False)]
Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Beta = Annotated[float, Field(ge=0, lt=1)]


class Segment(Record):
    """One flat vector: parameters (kind "param", stepped by optimizer group `group`) or buffers. After a step
    floating-point buffers of kind "buffer" have the mean over the lanes; those of kind "first", and integers,
    have the value of the first lane with data. `parameters`: how many elements each has, in order, if the
    bits of a step depend on that (see trireme_shared.serving.core.geometry)."""

    kind: str
    dtype: str
    elements: int
    group: int = -1
    parameters: tuple[Annotated[int, Field(ge=0)], ...] = ()

    @property
    def bytes(self) -> int:
        return self.elements * ELEMENT_BYTES[self.dtype]

    def travels_as(self, dtype: Transported) -> Narrow | None:
        """The dtype its blocks are cast to if float32 parameters are sent as `dtype`; None: they are not
        cast.

        Buffers are never cast: they are few, and running statistics would lose small changes.
        """
        return None if dtype == "float32" or self.kind != "param" or self.dtype != "float32" else dtype


class OptimizerSpec(Record):
    """A class of trireme_shared.serving.optimizers.classes by name, with its constructor defaults and the
    options of each parameter group."""

    name: str
    defaults: dict[str, Any]
    groups: tuple[dict[str, Any], ...]
    #: The class of each group, if a job has optimizers of several classes; `name` is no class then.
    classes: tuple[str, ...] = ()

    def class_of(self, group: int) -> str:
        return self.classes[group] if 0 <= group < len(self.classes) else self.name

    @property
    def class_names(self) -> tuple[str, ...]:
        """Each once."""
        return tuple(dict.fromkeys(self.classes)) or (self.name,)


def schedule_factor(first: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> float:
    """By how much a scheduler has changed the learning rate of the first parameter group. Options of all
    groups: those that the optimizer was made with, and those of a step. 1 if the group has no learning rate,
    or began with 0."""
    before, after = (groups[0].get("lr") if groups else None for groups in (first, now))
    if not isinstance(before, int | float) or not isinstance(after, int | float) or not before:
        return 1.0
    return after / before


class RowOptimizer(Record):
    """How rows are stepped, as torch.optim steps rows of sparse gradients (FTRL: McMahan et al. 2013, "Ad
    Click Prediction", algorithm 1).

    `sgd`: no state. `adagrad`: one number a column, or, with `per_row`, one a row (it grows by the mean of
    the squares). `adam`: SparseAdam, without weight decay. `ftrl`: with `l1`, `l2` and `beta`; its learning
    rate falls with the square root. `initial_accumulator_value`: of the sums of squares of `adagrad` and
    `ftrl`. `follow_schedule`: the learning rate is multiplied by the factor by which a scheduler has changed
    that of the first parameter group; not with `ftrl`."""

    kind: Literal["sgd", "adagrad", "adam", "ftrl"]
    lr: Rate
    eps: Rate = 1e-10
    per_row: bool = False
    initial_accumulator_value: Rate = 0.0
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    l1: Rate = 0.0
    l2: Rate = 0.0
    beta: Rate = 1.0
    follow_schedule: bool = False

    @model_validator(mode="after")
    def _has_a_rate_to_change(self) -> Self:
        if self.follow_schedule and self.kind == "ftrl":
            raise ValueError(
                "ftrl rows cannot follow a schedule: their sums are of gradients at one learning rate"
            )
        if self.kind == "ftrl" and self.lr < SMALLEST_RATE:
            raise ValueError(f"ftrl divides by its learning rate, and lr is {self.lr}: give one above 0")
        return self

    @model_validator(mode="after")
    def _never_divides_by_zero(self) -> Self:
        if self.kind == "adam" and self.eps < SMALLEST_EPS:
            raise ValueError(
                f"adam divides by eps where a gradient is 0, and eps is {self.eps}: give one above 0"
            )
        if self.kind == "adagrad" and max(self.eps, self.initial_accumulator_value) < SMALLEST_EPS:
            raise ValueError(
                f"adagrad divides by eps where a gradient is 0, and eps is {self.eps}: give one "
                "above 0, or an initial_accumulator_value"
            )
        return self

    def rate(self, factor: float) -> float:
        """Of a step in which the scheduler's factor is `factor`."""
        return self.lr * factor if self.follow_schedule else self.lr

    def state_words(self, dim: int) -> int:
        """float32 numbers of state that a row of `dim` values has."""
        match self.kind:
            case "sgd":
                return 0
            case "adagrad":
                return 1 if self.per_row else dim
            case "adam" | "ftrl":
                return 2 * dim


class RowInit(Record):
    """Values of a row that appears: `constant` (all are `scale`), `uniform` in [-scale, scale), `normal` with
    standard deviation `scale` (the sum of eight uniform numbers, so it never leaves 4.9 standard deviations,
    and every machine computes the same bits)."""

    kind: Literal["constant", "uniform", "normal"]
    scale: Finite


class TableSpec(Record):
    """One table. `seed`: of the initial rows, see trireme_shared.tables.hashing.table_seed. `max_rows`: of
    all parameter servers together. `admit_after`: so many minibatches must have had an id before it gets a
    row. `evict_after_steps`: a row that no step has changed for longer is forgotten."""

    name: str
    dim: int = Field(ge=1, le=MOST_DIM)
    seed: int = Field(default=0, ge=0, lt=2**64)
    optimizer: RowOptimizer
    init: RowInit
    max_rows: int | None = Field(default=None, ge=1, lt=2**48)
    admit_after: int = Field(default=1, ge=1, le=255)
    evict_after_steps: int | None = Field(default=None, ge=1, le=MOST_STEPS)

    @field_validator("name")
    @classmethod
    def _is_name(cls, value: str) -> str:
        if not TABLE_NAME.fullmatch(value):
            msg = (
                "a table's name has up to 64 letters, digits and any of . _ -, and begins with one of "
                f"the first three, got {value[:80]!r}"
            )
            raise ValueError(msg)
        return value

    def differences(self, other: TableSpec) -> list[tuple[str, Any, Any]]:
        """Name of each setting ("optimizer.lr") that is another one, and both values."""
        return [
            (name, value, theirs)
            for (name, value), (_, theirs) in zip(_flat(self), _flat(other), strict=True)
            if value != theirs
        ]

    @property
    def row_words(self) -> int:
        """float32 numbers of a row: its values, then its optimizer's state."""
        return self.dim + self.optimizer.state_words(self.dim)


def _flat(record: Record, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name in type(record).model_fields:
        value = getattr(record, name)
        if isinstance(value, Record):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


class Constant(Record):
    """A digest of values that no parameter server has, since each trainer's `model()` makes its own: a frozen
    parameter, or a buffer that is neither floating-point nor int64. `name`: of the tensor, or of the first
    and the last of several."""

    name: str
    digest: str


class Layout(Record):
    """`digest`: SHA-256 over names, shapes, dtypes and memory formats of all parameters and buffers, in
    order. `device`: the kind of device (cpu, cuda) of the trainer that initialised the parameters; "" if it
    is not known. `initial`: digest of the model's values after `init_from` was loaded; "": none was.
    `tables`: embedding tables, in the order of their names. `values`: of a collective job, digest of all
    values, and of the state of the optimizer, that it began with."""

    segments: tuple[Segment, ...]
    block_bytes: int
    digest: str
    optimizer: OptimizerSpec
    slot_count: int = 1024
    device: str = ""
    initial: str = ""
    tables: tuple[TableSpec, ...] = Field(default=(), max_length=MOST_TABLES)
    values: str = ""
    #: SHA-256 over what `digest` is made of, sorted: equal for models that differ in the order of their parts
    # alone. "": not known.
    unordered: str = ""
    #: What the trainers' own constants are, in the order of the model. None: not known.
    constants: tuple[Constant, ...] | None = Field(default=None, max_length=MOST_CONSTANTS)
    #: By segment: how many elements each of its parameters has, in order. A parameter's number counts through
    # all segments. (): not known, or no parameter is ever frozen (asynchronous jobs).
    sizes: tuple[tuple[Annotated[int, Field(ge=0)], ...], ...] = ()
    #: The numbers of parameters that require no gradient at first, as intervals [first, last).
    frozen: tuple[tuple[int, int], ...] = ()

    @property
    def offsets(self) -> tuple[int, ...]:
        """Byte offsets of the segments, laid end to end, each aligned to ALIGNMENT_BYTES."""
        sizes = [-(-segment.bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for segment in self.segments]
        return tuple(accumulate(sizes, initial=0))[:-1]

    @property
    def vector_bytes(self) -> int:
        """Bytes of all segments laid end to end."""
        return self.offsets[-1] + self.segments[-1].bytes if self.segments else 0

    def blocks(self) -> Iterator[Block]:
        """All blocks, numbered from 0 through the segments in order; the last block of a segment may be
        shorter."""
        number = 0
        for index, segment in enumerate(self.segments):
            step = self.block_bytes // ELEMENT_BYTES[segment.dtype]
            for first in range(0, segment.elements, step):
                yield Block(number, index, first, min(step, segment.elements - first), segment.dtype)
                number += 1

    def payloads(self, dtype: Transported) -> list[Narrow | None]:
        """Segment.travels_as of each block."""
        return [self.segments[block.segment].travels_as(dtype) for block in self.blocks()]


@dataclass(frozen=True, slots=True)
class Block:
    """`elements` elements of segment `segment`, starting at `first`."""

    number: int
    segment: int
    first: int
    elements: int
    dtype: str

    @property
    def bytes(self) -> int:
        return self.elements * ELEMENT_BYTES[self.dtype]
