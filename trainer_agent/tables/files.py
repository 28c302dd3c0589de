"""Tables as files that anything with safetensors reads, and what has changed in them between two checkpoints,
as files for online serving.

    tables/<name>.safetensors     `ids` (int64 (n,), ascending) and `values` (float32 (n, dim))

    <feed>/00000000/user.safetensors, ..., done.json     all rows
    <feed>/00000001/user.safetensors, ..., done.json     `ids`, `values` (as in an export) that changed since,
                                                         and `removed`: ids without a row now

A file's metadata has the table's settings, so that ids without a row have their initial one after loading,
too. `done.json` is written last: a folder without it is not complete. table --apply(delta)--> the table of
the delta's checkpoint, bit for bit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from pydantic import Field, ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load, save
from torch import nn

from trainer_agent.tables.embedding import ModelTables
from trireme_shared.platform.storage import files
from trireme_shared.protocol.errors import InvalidArgument
from trireme_shared.protocol.records.layout import TableSpec
from trireme_shared.protocol.records.record import Record, misfits
from trireme_shared.tables.grouping import Numbers

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float32]

FOLDER, SUFFIX = "tables", ".safetensors"
LENGTH_BYTES = 8  # of the header, in front of it
DONE = "done.json"
DIGITS = 8


@dataclass(frozen=True, slots=True)
class StoredTable:
    """The rows of one table at a version. `ids`: int64 (n,), ascending; `values`: float32 (n, dim). `state`:
    of their optimizer after `updates` steps, float32 (n, numbers); None: not kept."""

    spec: TableSpec
    version: int
    ids: Numbers
    values: Floats
    state: Floats | None = None
    updates: int = 0

    def check(self, url: str) -> None:
        """Raises InvalidArgument: what was read from there is no such table."""
        ids, values = self.ids, self.values
        fits = (
            ids.dtype == np.int64 and values.dtype == np.float32 and values.shape == (len(ids), self.spec.dim)
        )
        if not fits or not bool((ids[1:] > ids[:-1]).all()):
            shapes = f"ids {ids.dtype} {ids.shape}, values {values.dtype} {values.shape}"
            raise InvalidArgument(
                f"{url} is no table that Trireme exported: {shapes} for dim {self.spec.dim}"
            )


class StoredTables:
    """A RowSource that stays as it is."""

    def __init__(self, tables: Sequence[StoredTable]) -> None:
        self._tables = tables

    def lookup(self, table: int, ids: Numbers) -> Floats:
        # only where there are tables: it loads numba
        from trireme_shared.tables.table import initial_values  # noqa: PLC0415

        stored = self._tables[table]
        found = initial_values(stored.spec, ids)
        places = np.searchsorted(stored.ids, ids)
        places[places == len(stored.ids)] = 0
        there = stored.ids[places] == ids if len(stored.ids) else np.zeros(len(ids), np.bool_)
        found[there] = stored.values[places[there]]
        return found

    def stored(self) -> tuple[StoredTable, ...]:
        return tuple(self._tables)


@runtime_checkable
class Storable(Protocol):
    """A RowSource that has all rows in this process."""

    def stored(self) -> tuple[StoredTable, ...]: ...


def in_order(ids: Sequence[Numbers], rows: Sequence[Floats], dim: int) -> tuple[Numbers, Floats]:
    """All parts as one, ascending by id."""
    flat = np.concatenate([np.empty(0, np.int64), *ids])
    places = np.empty(len(flat), np.int64)
    places[np.argsort(flat)] = np.arange(len(flat))
    found, first = np.empty((len(flat), dim), np.float32), 0
    for part in rows:
        found[places[first : first + len(part)]] = part
        first += len(part)
    flat.sort()
    return flat, found


def write_tables(tables: Sequence[StoredTable], directory: str) -> dict[str, str]:
    """Into `tables/` in the directory; "table <name>" -> URL. A retry overwrites with the same bytes."""
    urls = {}
    for table in tables:
        url = urls[f"table {table.spec.name}"] = files.join(directory, FOLDER, table.spec.name + SUFFIX)
        about, arrays = {"table": table.spec.model_dump(mode="json"), "version": table.version}, {}
        if table.state is not None:
            about, arrays = about | {"updates": table.updates}, {"state": table.state}
        # one entry: safetensors writes several in any order, and the same rows are the same bytes
        told = {"trireme": json.dumps(about)}
        files.write_bytes(url, save({"ids": table.ids, "values": table.values, **arrays}, told))
    return urls


def read_table(url: str) -> StoredTable:
    """Raises InvalidArgument: there is no such file, or it holds something else."""
    arrays, about = arrays_in(url)
    try:
        spec = TableSpec.model_validate(about["table"])
        found = StoredTable(spec, int(about["version"]), arrays["ids"], arrays["values"])
    except (ValidationError, KeyError, TypeError, ValueError) as error:
        raise InvalidArgument(f"{url} is no table that Trireme exported: {misfits(error)}") from error
    found.check(url)
    return found


def arrays_in(url: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arrays of a file, and what its metadata tell. Raises InvalidArgument: there is no such file, or it
    is none of these."""
    try:
        content = files.read_bytes(url)
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError) as error:
        msg = f"the table {url} cannot be read: {error.strerror or error}"
        raise InvalidArgument(msg, hint=f"give the folder of an export, in which {FOLDER}/ is") from error
    try:
        header = json.loads(
            content[LENGTH_BYTES : LENGTH_BYTES + int.from_bytes(content[:LENGTH_BYTES], "little")]
        )
        return load(content), dict(json.loads(header["__metadata__"]["trireme"]))
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise InvalidArgument(f"{url} is no table that Trireme exported: {misfits(error)}") from error


def save_tables(model: nn.Module, folder: str) -> list[str]:
    """Write the rows of a model that was trained in this process, for load_tables: below `tables/` in the
    folder. Returns the files. `python script.py --export` does it by itself. Raises InvalidArgument: the rows
    are not in this process."""
    tables = ModelTables(model, 0)
    source: object = tables.source
    if not isinstance(source, Storable):
        names = ", ".join(spec.name for spec in tables.specs) or "none"
        msg = (
            f"the rows of the model's tables ({names:.200}) are not in this process, so they cannot be saved"
        )
        raise InvalidArgument(
            msg, hint="save_tables is for a model that plain python has trained, or whose tables were loaded"
        )
    return list(write_tables(source.stored(), str(folder)).values())


@dataclass(frozen=True, slots=True)
class TableDelta:
    """From version `since` of a table (None: from nothing) to that of `rows`, which has the changed rows
    alone. `removed`: int64 (n,), ascending, not in `rows`."""

    since: int | None
    rows: StoredTable
    removed: Numbers


class Done(Record):
    """The marker of a complete folder of a feed. `since`, `since_checkpoint`: None of all rows. `rows`,
    `removed`: of each table."""

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
    """The table at the delta's version; a delta on nothing takes any table's place. Raises InvalidArgument:
    the delta is of another version or table."""
    rows = delta.rows
    if delta.since is None:
        return rows
    if table is None or (table.spec.name, table.spec.dim) != (rows.spec.name, rows.spec.dim):
        there = "nothing" if table is None else f"table {table.spec.name} of dim {table.spec.dim}"
        msg = f"a delta of table {rows.spec.name} of dim {rows.spec.dim} cannot be applied to {there}"
        raise InvalidArgument(msg, hint="begin with the export, or the folder with all rows, of the same job")
    if table.version != delta.since:
        msg = (
            f"table {rows.spec.name} is of step {table.version}, and the delta leads from step "
            f"{delta.since} to {rows.version}"
        )
        raise InvalidArgument(
            msg, hint="apply deltas in their order, from the export's step on; none may be left out"
        )
    stays = ~np.isin(table.ids, np.concatenate([rows.ids, delta.removed]))
    ids, values = in_order([table.ids[stays], rows.ids], [table.values[stays], rows.values], rows.spec.dim)
    return StoredTable(rows.spec, rows.version, ids, values)


# ------------------------------------------------------------ files


def write_delta(delta: TableDelta, folder: str) -> str:
    """The URL of the file. The same delta is the same bytes."""
    spec = delta.rows.spec
    about = {"table": spec.model_dump(mode="json"), "version": delta.rows.version, "since": delta.since}
    arrays: dict[str, npt.NDArray[Any]] = {
        "ids": delta.rows.ids,
        "values": delta.rows.values,
        "removed": delta.removed,
    }
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
        raise InvalidArgument(f"{url} is no delta of a table: {misfits(error)}") from error
    rows.check(url)
    if found.removed.dtype != np.int64 or found.removed.ndim != 1:
        raise InvalidArgument(
            f"{url} is no delta of a table: removed is {found.removed.dtype} {found.removed.shape}"
        )
    return found


def folder_name(number: int) -> str:
    return f"{number:0{DIGITS}d}"


def complete(feed: str) -> list[tuple[Done, str]]:
    """The complete folders of a feed, in order, with their URLs. Raises InvalidArgument: a marker cannot be
    read."""
    found = []
    for name in sorted(files.names(feed)):
        if len(name) == DIGITS and name.isdecimal():
            url = files.join(feed, name)
            if files.exists(files.join(url, DONE)):
                found.append((_done_in(url), url))
    return found


def folders_of(given: Sequence[str]) -> list[str]:
    """Of deltas and of feeds, the folders to apply one after the other. Raises InvalidArgument: there is
    none."""
    found: list[str] = []
    for url in given:
        if files.exists(files.join(url, DONE)):
            found.append(url)
        elif within := [folder for _, folder in complete(url)]:
            found += within
        else:
            msg = f"{url} is no delta and no feed: neither it nor a folder in it has {DONE}"
            raise InvalidArgument(
                msg, hint="give folders that `trireme table delta` or `trireme table feed` wrote"
            )
    return found


def _done_in(folder: str) -> Done:
    url = files.join(folder, DONE)
    try:
        return Done.model_validate_json(files.read_bytes(url))
    except (OSError, ValidationError) as error:
        raise InvalidArgument(f"{url} cannot be read: {misfits(error)}") from error


def advanced(table: StoredTable | None, name: str, folders: Sequence[str]) -> StoredTable:
    """A table after the deltas of these folders, but for those that it has already. Raises
    InvalidArgument."""
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
    """The rows of all tables of the model are from now on those of an export (the folder that holds
    `tables/`): for inference in plain PyTorch. They are constants, without gradients. A URL or a path.
    `deltas`: folders that `trireme table delta` or `feed` wrote, applied in this order. Raises
    InvalidArgument: a table is not there, or of another dim; a delta does not follow."""
    tables, stored = ModelTables(model, 0), []
    folders = folders_of([str(each) for each in deltas])
    for spec in tables.specs:
        url = files.join(str(folder), FOLDER, spec.name + SUFFIX)
        found = read_table(url)
        if (found.spec.name, found.spec.dim) != (spec.name, spec.dim):
            msg = (
                f"{url} holds the table {found.spec.name} of dim {found.spec.dim}, the model has "
                f"{spec.name} of dim {spec.dim}"
            )
            raise InvalidArgument(msg, hint="use the script that the tables were trained with")
        stored.append(advanced(found, spec.name, folders))
    tables.bind(StoredTables(stored))
