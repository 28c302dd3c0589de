"""What has changed in tables between two checkpoints, as files for online serving, and what these make of an exported table.

    <feed>/00000000/user.safetensors, ..., done.json     all rows
    <feed>/00000001/user.safetensors, ..., done.json     `ids`, `values` (as in an export) that changed since, and `removed`: ids without a row now

`done.json` is written last: a folder without it is not complete. table --apply(delta)--> the table of the delta's checkpoint, bit for bit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field, ValidationError
from safetensors.numpy import save
from torch import nn

from trainer_agent.tables.files import (
    FOLDER,
    SUFFIX,
    StoredTable,
    StoredTables,
    arrays_in,
    in_order,
    read_table,
)
from trainer_agent.tables.of_model import ModelTables
from trireme_shared.platform.storage import files
from trireme_shared.protocol.errors import InvalidArgument
from trireme_shared.protocol.records.layout import TableSpec
from trireme_shared.protocol.records.record import Record

if TYPE_CHECKING:
    import numpy.typing as npt

    Numbers = npt.NDArray[np.int64]

DONE = "done.json"
DIGITS = 8


@dataclass(frozen=True, slots=True)
class TableDelta:
    """From version `since` of a table (None: from nothing) to that of `rows`, which has the changed rows alone. `removed`: int64 (n,), ascending, not in `rows`."""

    since: int | None
    rows: StoredTable
    removed: Numbers


class Done(Record):
    """The marker of a complete folder of a feed. `since`, `since_checkpoint`: None of all rows. `rows`, `removed`: of each table."""

    number: int = Field(ge=0)
    job: str
    checkpoint: str
    step: int
    since_checkpoint: str | None = None
    since: int | None = None
    rows: dict[str, int]
    removed: dict[str, int]


def changed(before: StoredTable, now: StoredTable) -> TableDelta:
    """What two versions of a table differ in, whatever lies between them."""
    places = np.searchsorted(before.ids, now.ids)
    places[places == len(before.ids)] = 0
    same = before.ids[places] == now.ids if len(before.ids) else np.zeros(len(now.ids), np.bool_)
    same[same] = (before.values[places[same]].view(np.int32) == now.values[same].view(np.int32)).all(1)
    rows = StoredTable(now.spec, now.version, now.ids[~same], now.values[~same])
    return TableDelta(before.version, rows, np.setdiff1d(before.ids, now.ids, assume_unique=True))


def apply(table: StoredTable | None, delta: TableDelta) -> StoredTable:
    """The table at the delta's version; a delta on nothing takes any table's place. Raises InvalidArgument: the delta is of another version or table."""
    rows = delta.rows
    if delta.since is None:
        return rows
    if table is None or (table.spec.name, table.spec.dim) != (rows.spec.name, rows.spec.dim):
        there = "nothing" if table is None else f"table {table.spec.name} of dim {table.spec.dim}"
        msg = f"a delta of table {rows.spec.name} of dim {rows.spec.dim} cannot be applied to {there}"
        raise InvalidArgument(msg, hint="begin with the export, or the folder with all rows, of the same job")
    if table.version != delta.since:
        msg = f"table {rows.spec.name} is of step {table.version}, and the delta leads from step {delta.since} to {rows.version}"
        raise InvalidArgument(msg, hint="apply deltas in their order, from the export's step on; none may be left out")
    stays = ~np.isin(table.ids, np.concatenate([rows.ids, delta.removed]))
    ids, values = in_order([table.ids[stays], rows.ids], [table.values[stays], rows.values], rows.spec.dim)
    return StoredTable(rows.spec, rows.version, ids, values)


# ------------------------------------------------------------ files


def write_delta(delta: TableDelta, folder: str) -> str:
    """The URL of the file. The same delta is the same bytes."""
    spec = delta.rows.spec
    about = {"table": spec.model_dump(mode="json"), "version": delta.rows.version, "since": delta.since}
    arrays: dict[str, npt.NDArray[Any]] = {"ids": delta.rows.ids, "values": delta.rows.values, "removed": delta.removed}
    url = files.join(folder, spec.name + SUFFIX)
    files.write_bytes(url, save(arrays, {"trireme": json.dumps(about)}))
    return url


def read_delta(url: str) -> TableDelta:
    """Raises InvalidArgument."""
    arrays, about = arrays_in(url)
    try:
        spec = TableSpec.model_validate(about["table"])
        rows = StoredTable(spec, int(about["version"]), arrays["ids"], arrays["values"])
        since = None if about["since"] is None else int(about["since"])
        found = TableDelta(since, rows, arrays["removed"])
    except (ValidationError, KeyError, TypeError, ValueError) as error:
        raise InvalidArgument(f"{url} is no delta of a table: {error}") from error
    rows.check(url)
    if found.removed.dtype != np.int64 or found.removed.ndim != 1:
        raise InvalidArgument(f"{url} is no delta of a table: removed is {found.removed.dtype} {found.removed.shape}")
    return found


def folder_name(number: int) -> str:
    return f"{number:0{DIGITS}d}"


def complete(feed: str) -> list[tuple[Done, str]]:
    """The complete folders of a feed, in order, with their URLs. Raises InvalidArgument: a marker cannot be read."""
    found = []
    for name in sorted(files.names(feed)):
        if len(name) == DIGITS and name.isdecimal():
            url = files.join(feed, name)
            if files.exists(files.join(url, DONE)):
                found.append((_done_in(url), url))
    return found


def folders_of(given: Sequence[str]) -> list[str]:
    """Of deltas and of feeds, the folders to apply one after the other. Raises InvalidArgument: there is none."""
    found: list[str] = []
    for url in given:
        if files.exists(files.join(url, DONE)):
            found.append(url)
        elif within := [folder for _, folder in complete(url)]:
            found += within
        else:
            msg = f"{url} is no delta and no feed: neither it nor a folder in it has {DONE}"
            raise InvalidArgument(msg, hint="give folders that `trireme table delta` or `trireme table feed` wrote")
    return found


def _done_in(folder: str) -> Done:
    url = files.join(folder, DONE)
    try:
        return Done.model_validate_json(files.read_bytes(url))
    except (OSError, ValidationError) as error:
        raise InvalidArgument(f"{url} cannot be read: {error}") from error


def advanced(table: StoredTable | None, name: str, folders: Sequence[str]) -> StoredTable:
    """A table after the deltas of these folders, but for those that it has already. Raises InvalidArgument."""
    for folder in folders:
        delta = read_delta(files.join(folder, name + SUFFIX))
        if table is None or delta.rows.version > table.version:
            table = apply(table, delta)
    if table is None:
        raise InvalidArgument(f"there is no table {name}, and no delta of it")
    return table


def names_in(folder: str) -> Iterator[str]:
    """Of the tables whose files are in it."""
    return (name.removesuffix(SUFFIX) for name in sorted(files.names(folder)) if name.endswith(SUFFIX))


def load_tables(model: nn.Module, folder: str, deltas: Sequence[str] = ()) -> None:
    """The rows of all tables of the model are from now on those of an export (the folder that holds `tables/`): for inference in plain
    PyTorch. They are constants, without gradients. A URL or a path. `deltas`: folders that `trireme table delta` or `feed` wrote, applied in this
    order. Raises InvalidArgument: a table is not there, or of another dim; a delta does not follow."""
    tables, stored = ModelTables(model, 0), []
    folders = folders_of([str(each) for each in deltas])
    for spec in tables.specs:
        url = files.join(str(folder), FOLDER, spec.name + SUFFIX)
        found = read_table(url)
        if (found.spec.name, found.spec.dim) != (spec.name, spec.dim):
            msg = f"{url} holds the table {found.spec.name} of dim {found.spec.dim}, the model has {spec.name} of dim {spec.dim}"
            raise InvalidArgument(msg, hint="use the script that the tables were trained with")
        stored.append(advanced(found, spec.name, folders))
    tables.bind(StoredTables(stored))
