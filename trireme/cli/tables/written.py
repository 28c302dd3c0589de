"""The tables of a checkpoint as files: `tables/` in the folder of `trireme export`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.records.checkpoints import CheckpointRef, Manifest
from shared.storage import files

if TYPE_CHECKING:
    from trainer_agent.tables.files import StoredTable  # loads torch


def write_checkpoint_tables(
    storage_url: str, ref: CheckpointRef, manifest: Manifest, directory: str, form: str, *, state: bool = False
) -> dict[str, str]:
    """`form`: safetensors (with `state` that of the optimizer, too), npy, parquet or none. Kind -> URL of each file. One table at a time: its ids and values are in memory up to three times, and all parts are read for each.
    Raises CheckpointUnusable, OSError."""
    from trainer_agent.tables.checkpoint import read_table  # noqa: PLC0415  loads torch
    from trainer_agent.tables.files import write_tables  # noqa: PLC0415

    urls: dict[str, str] = {}
    for spec in manifest.layout.tables if form != "none" else ():
        table = read_table(storage_url, ref, manifest, spec, state=state and form == "safetensors")
        match form:
            case "npy":
                urls |= _write_npy(table, directory)
            case "parquet":
                urls |= _write_parquet(table, directory)
            case _:
                urls |= write_tables([table], directory)
    return urls


def _write_npy(table: StoredTable, directory: str) -> dict[str, str]:
    import numpy as np  # noqa: PLC0415

    urls = {}
    for what, array in (("ids", table.ids), ("values", table.values)):
        url = urls[f"table {table.spec.name} {what}"] = files.join(directory, "tables", f"{table.spec.name}.{what}.npy")
        with files.write_atomic(url) as file:
            np.save(file, array)
    return urls


def _write_parquet(table: StoredTable, directory: str) -> dict[str, str]:
    """Columns `id` and `values`, a list of `dim` numbers."""
    import pyarrow as pa  # noqa: PLC0415
    from pyarrow import parquet  # noqa: PLC0415

    url = files.join(directory, "tables", f"{table.spec.name}.parquet")
    values = pa.FixedSizeListArray.from_arrays(pa.array(table.values.reshape(-1)), table.spec.dim)
    with files.write_atomic(url) as file:
        parquet.write_table(pa.table({"id": pa.array(table.ids), "values": values}), file)
    return {f"table {table.spec.name}": url}
