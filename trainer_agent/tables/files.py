"""Tables as files that anything with safetensors reads: `tables/<name>.safetensors`, with `ids` (int64 (n,), ascending) and `values`
(float32 (n, dim)). The file's metadata has the table's settings, so that ids without a row have their initial one after loading, too.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load, save
from torch import nn

from trainer_agent.tables.of_model import ModelTables
from trireme_shared.platform.storage import files
from trireme_shared.protocol.errors import InvalidArgument
from trireme_shared.protocol.records.layout import TableSpec
from trireme_shared.tables.grouping import Numbers

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float32]

FOLDER, SUFFIX = "tables", ".safetensors"
LENGTH_BYTES = 8  # of the header, in front of it


@dataclass(frozen=True, slots=True)
class StoredTable:
    """The rows of one table at a version. `ids`: int64 (n,), ascending; `values`: float32 (n, dim). `state`: of their optimizer after `updates` steps, float32
    (n, numbers); None: not kept."""

    spec: TableSpec
    version: int
    ids: Numbers
    values: Floats
    state: Floats | None = None
    updates: int = 0

    def check(self, url: str) -> None:
        """Raises InvalidArgument: what was read from there is no such table."""
        ids, values = self.ids, self.values
        fits = ids.dtype == np.int64 and values.dtype == np.float32 and values.shape == (len(ids), self.spec.dim)
        if not fits or not bool((ids[1:] > ids[:-1]).all()):
            shapes = f"ids {ids.dtype} {ids.shape}, values {values.dtype} {values.shape}"
            raise InvalidArgument(f"{url} is no table that Trireme exported: {shapes} for dim {self.spec.dim}")


class StoredTables:
    """A RowSource that stays as it is."""

    def __init__(self, tables: Sequence[StoredTable]) -> None:
        self._tables = tables

    def lookup(self, table: int, ids: Numbers) -> Floats:
        from trireme_shared.tables.table import initial_values  # noqa: PLC0415  only where there are tables: it loads numba

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
        raise InvalidArgument(f"{url} is no table that Trireme exported: {error}") from error
    found.check(url)
    return found


def arrays_in(url: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arrays of a file, and what its metadata tell. Raises InvalidArgument: there is no such file, or it is none of these."""
    try:
        content = files.read_bytes(url)
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError) as error:
        msg = f"the table {url} cannot be read: {error.strerror or error}"
        raise InvalidArgument(msg, hint=f"give the folder of an export, in which {FOLDER}/ is") from error
    try:
        header = json.loads(content[LENGTH_BYTES : LENGTH_BYTES + int.from_bytes(content[:LENGTH_BYTES], "little")])
        return load(content), dict(json.loads(header["__metadata__"]["trireme"]))
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise InvalidArgument(f"{url} is no table that Trireme exported: {error}") from error


def save_tables(model: nn.Module, folder: str) -> list[str]:
    """Write the rows of a model that was trained in this process, for load_tables: below `tables/` in the folder. Returns the files. `python
    script.py --export` does it by itself. Raises InvalidArgument: the rows are not in this process."""
    tables = ModelTables(model, 0)
    source: object = tables.source
    if not isinstance(source, Storable):
        names = ", ".join(spec.name for spec in tables.specs) or "none"
        msg = f"the rows of the model's tables ({names:.200}) are not in this process, so they cannot be saved"
        raise InvalidArgument(
            msg, hint="save_tables is for a model that plain python has trained, or whose tables were loaded"
        )
    return list(write_tables(source.stored(), str(folder)).values())
