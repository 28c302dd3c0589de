"""Rows that embedding tables start with: the files `tables/<name>.safetensors` beside the file that
`init_from` names, as exports have them.

headers --fit to the model's tables--> StartTable of each
    --rows, some at a time--> the table in this process, or the own slots of a parameter server

    ids      int64 (n,), ascending
    values   float32 (n, dim)
    state    float32 (n, numbers of the optimizer's state), for `init_optimizer`
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt

from trireme_shared.platform.runtime import telemetry
from trireme_shared.platform.storage import files, tensor_file
from trireme_shared.platform.storage.tensor_file import Entry
from trireme_shared.protocol.errors import BadFrame, InvalidArgument
from trireme_shared.protocol.records.layout import TableSpec

if TYPE_CHECKING:
    from trireme_shared.tables.sharded import ShardedTable  # loads numba
    from trireme_shared.tables.table import Flags

FOLDER, SUFFIX = "tables", ".safetensors"
PART_BYTES = 8 << 20  # of values that are read at once
MARKED_BYTES = 64 << 10  # at each end of the file
MARK_DIGITS = 16
SEPARATOR = "-"  # in Layout.initial: <digest of the model's values>-<mark of the tables>

log = telemetry.logger("start_tables")


@dataclass(frozen=True, slots=True)
class StartTable:
    """A file with rows of table `name`. `offset`: bytes in front of its first tensor. `state`: of a row
    optimizer with the options `optimizer` ({}: the file does not tell them), after `updates` steps; None: the
    rows' state begins anew."""

    name: str
    url: str
    ids: Entry
    values: Entry
    offset: int
    state: Entry | None = None
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    updates: int = 0

    @property
    def rows(self) -> int:
        return self.ids.shape[0]

    @property
    def dim(self) -> int:
        return self.values.shape[1]


@dataclass(frozen=True, slots=True)
class Fit:
    """`tables`: of which rows are taken. The others by name, in the words of an error: that have no file,
    whose table the model lacks, of another dim or dtype, of more rows than `max_rows`. `stateless`: what
    lacks the state that `init_optimizer` asks for."""

    tables: tuple[StartTable, ...] = ()
    lacking: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    different: tuple[str, ...] = ()
    too_many: tuple[str, ...] = ()
    stateless: tuple[str, ...] = ()

    def mark(self) -> str:
        """Changes if one of the files does, as far as its header and both of its ends tell; "": there are
        none. Reads them. Raises OSError."""
        if not self.tables:
            return ""
        digest = hashlib.sha256()
        for table in self.tables:
            size = files.size(table.url)
            digest.update(f"{table.name} {size}\n".encode())
            with files.open_read(table.url) as file:
                digest.update(file.read(table.offset + MARKED_BYTES))
                file.seek(max(0, size - MARKED_BYTES))
                digest.update(file.read(MARKED_BYTES))
        return digest.hexdigest()[:MARK_DIGITS]


def fit_tables(specs: Sequence[TableSpec], init_from: str, *, states: bool = False) -> Fit:
    """What the files beside `init_from` have for these tables; only headers are read. `states`: with the
    state of their optimizers. Raises InvalidArgument: a file is no table; OSError."""
    folder, there = _folder(init_from), names_beside(init_from)
    own = {spec.name: spec for spec in specs}
    taken, different, too_many, stateless = [], [], [], []
    for name, spec in own.items():
        if name not in there:
            continue
        found = open_table(name, files.join(folder, name + SUFFIX))
        if found.values.dtype != "float32" or found.dim != spec.dim:
            different.append(
                f"table {name} ({found.values.dtype} rows of {found.dim}, the model has float32 "
                f"rows of {spec.dim})"
            )
        elif spec.max_rows is not None and found.rows > spec.max_rows:
            too_many.append(f"table {name} ({found.rows} rows, max_rows is {spec.max_rows})")
        else:
            if states and (problem := _lacks_state(found, spec)):
                stateless.append(f"table {name} has {problem}")
            taken.append(found if states else replace(found, state=None, updates=0))
    lacking = tuple(f"table {name} ({FOLDER}/{name}{SUFFIX} beside it)" for name in own if name not in there)
    unknown = tuple(f"table {name}" for name in sorted(there - own.keys()))
    return Fit(tuple(taken), lacking, unknown, tuple(different), tuple(too_many), tuple(stateless))


def _lacks_state(found: StartTable, spec: TableSpec) -> str:
    """What there is instead of the state that the table's optimizer needs; "": that."""
    needed = spec.optimizer.state_words(spec.dim)
    words = 0 if found.state is None else found.state.shape[1]
    kind = found.optimizer.get("kind", "")
    if kind == spec.optimizer.kind and words == needed:
        return ""
    theirs = f"{words} numbers of {kind} a row" if kind and words else "no state of an optimizer"
    return f"{theirs}, the model's {spec.optimizer.kind} needs {needed}"


def names_beside(init_from: str) -> set[str]:
    """Of the tables whose files lie beside it. Raises OSError."""
    return {name.removesuffix(SUFFIX) for name in files.names(_folder(init_from)) if name.endswith(SUFFIX)}


def _folder(init_from: str) -> str:
    return files.join(init_from.rpartition("/")[0] if "/" in init_from else ".", FOLDER)


def open_table(name: str, url: str) -> StartTable:
    """By its header. Raises InvalidArgument: it is no table; OSError."""
    try:
        metadata, entries, offset = tensor_file.read_header(url)
    except BadFrame as error:
        raise InvalidArgument(
            f"init_from: {url} is no safetensors file of a table: {error.message}"
        ) from error
    found = {entry.name: entry for entry in entries}
    ids, values = found.get("ids"), found.get("values")
    if (
        ids is None
        or values is None
        or ids.dtype != "int64"
        or len(values.shape) != 2
        or ids.shape != values.shape[:1]
    ):
        told = ", ".join(f"{entry.name} {entry.dtype} {list(entry.shape)}" for entry in entries[:8])
        raise InvalidArgument(
            f"init_from: {url} is no table: it has {told or 'nothing'}",
            hint="a table's file has `ids`, int64 (n,), and `values`, float32 (n, dim), as `trireme "
            "export` writes it",
        )
    state, (optimizer, updates) = found.get("state"), _told(metadata.get("trireme", ""))
    if state is not None and (
        state.dtype != "float32" or len(state.shape) != 2 or state.shape[0] != ids.shape[0]
    ):
        raise InvalidArgument(
            f"init_from: {url} is no table: its state is {state.dtype} {list(state.shape)} of "
            f"{ids.shape[0]} rows"
        )
    return StartTable(name, url, ids, values, offset, state, optimizer, updates)


def _told(metadata: str) -> tuple[dict[str, Any], int]:
    """By the export: the options of the rows' optimizer, and how many steps it has made; of other files
    nothing is known."""
    try:
        about = json.loads(metadata)
        return dict(about["table"]["optimizer"]), int(about.get("updates", 0))
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}, 0


def rows_in(table: StartTable) -> Iterator[tuple[npt.NDArray[np.int64], list[npt.NDArray[np.float32]]]]:
    """Ids, then values and, if there is one, state of all rows, in the order of their ids, some MiB at a
    time. Raises InvalidArgument: ids do not ascend, or the file ends before; OSError."""
    tensors = [table.ids, table.values, *([] if table.state is None else [table.state])]
    at_once, last = max(1, PART_BYTES // sum(entry.bytes // max(1, table.rows) for entry in tensors)), None
    with ExitStack() as stack:
        opened = [stack.enter_context(files.open_read(table.url)) for _ in tensors]
        for file, entry in zip(opened, tensors, strict=True):
            file.seek(table.offset + entry.first)
        for first in range(0, table.rows, at_once):
            count = min(at_once, table.rows - first)
            ids, *content = (
                _read(file, entry, count, table.url) for file, entry in zip(opened, tensors, strict=True)
            )
            if (last is not None and ids[0] <= last) or not bool((ids[1:] > ids[:-1]).all()):
                raise InvalidArgument(
                    f"init_from: the ids in {table.url} do not ascend: each has to be there once"
                )
            last = int(ids[-1])
            yield ids, content


def put_rows(table: ShardedTable, start: StartTable, own: Flags | None = None) -> None:
    """Into a table that has none yet; the rows of `own` slots alone (None: of all). States of the optimizer
    are those of rows that appear, if the file's are not taken; sums of `ftrl` are those that give the values.
    No step has changed the rows yet. Of a slot that has more than its share of `max_rows`, those with the
    least ids are left out. Raises as rows_in."""
    from trireme_shared.tables.hashing import slots_of  # noqa: PLC0415  only where there are tables

    # loads numba
    from trireme_shared.tables.table import RowsOfIds, first_state, sums_of_values  # noqa: PLC0415

    optimizer, dim = table.spec.optimizer, table.spec.dim
    has_own_sums = start.state is not None and start.optimizer == optimizer.model_dump(mode="json")
    state = first_state(optimizer, dim)
    for ids, columns in rows_in(start):
        content = np.empty((len(ids), table.width), np.float32)
        content[:, dim:] = state
        read = np.concatenate(columns, 1)
        content[:, : read.shape[1]] = read
        if optimizer.kind == "ftrl" and not has_own_sums:
            sums_of_values(optimizer, content, dim)
        rows = RowsOfIds(ids, np.zeros(len(ids), np.uint64), content)
        if own is not None:
            rows = rows.where(own[slots_of(ids, table.spec.seed, table.slot_count)])
        if len(rows):
            table.put(rows)
    table.updates = start.updates
    left_out = table.leave_surplus()
    log.info("rows_loaded", table=start.name, rows=table.rows, left_out=left_out, url=start.url)


def marked(digest: str, mark: str) -> str:
    """Layout.initial of a model with this digest, and of tables with this mark."""
    return f"{digest}{SEPARATOR}{mark}" if mark else digest


def mark_in(initial: str) -> str:
    return initial.partition(SEPARATOR)[2]


def digest_in(initial: str) -> str:
    return initial.partition(SEPARATOR)[0]


def _read(file: BinaryIO, entry: Entry, rows: int, url: str) -> Any:
    """The next rows of a tensor: (rows, ...)."""
    found: npt.NDArray[Any] = np.empty((rows, *entry.shape[1:]), entry.dtype)
    try:
        tensor_file.fill(file, found.data.cast("B"), "a table")
    except BadFrame as error:
        raise InvalidArgument(f"init_from: {url} cannot be read: {error.message}") from error
    return found
