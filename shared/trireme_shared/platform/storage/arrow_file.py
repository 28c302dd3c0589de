"""Arrow files in the streaming format, as HF `datasets` saves them: mapped, so that only what is used is read."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import IO

import pyarrow as pa

from trireme_shared.platform.storage import files, nameless
from trireme_shared.protocol.errors import DatasetError


def read_table(file: str) -> pa.Table:
    """The rows of a file. A remote one is copied into a temporary file without a name first. Raises DatasetError, which names the
    record before which the file is damaged or cut off."""
    with files.reading(file, "Arrow"):
        mapped = _mapped(file)
        rows, batches = 0, []
        try:
            with pa.ipc.open_stream(pa.py_buffer(mapped)) as stream:
                for batch in stream:
                    rows += batch.num_rows
                    batches.append(batch)
                return pa.Table.from_batches(batches, stream.schema)
        except (pa.ArrowInvalid, OSError) as error:
            msg = f"{file} is damaged or cut off behind record {rows}: {' '.join(str(error).split())}"
            raise DatasetError(msg, hint="copy or save it again", url=file, rows=rows) from error


def _mapped(file: str) -> mmap.mmap | bytes:
    local = files.local_path(file)
    if local is not None:
        with Path(local).open("rb") as source:
            return _map(source)
    with files.open_read(file) as remote, nameless.copy_of(file, remote) as copy:
        return _map(copy)


def _map(source: IO[bytes]) -> mmap.mmap | bytes:
    if not source.seek(0, 2):
        return b""  # what is empty cannot be mapped
    return mmap.mmap(source.fileno(), 0, prot=mmap.PROT_READ)
