"""Files of which only what is used is read: arrays in .npy files, and Arrow files in the streaming format, as
HF `datasets` saves them.

numpy parses a head with `ast`. CPython 3.11 counts nested nodes for all threads together, so a parse
sometimes fails with a SystemError while another thread parses (python/cpython#106905). Therefore only one
head is parsed at a time.
"""

from __future__ import annotations

import io
import mmap
from pathlib import Path
from threading import Lock
from typing import IO, TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy_format

from trireme_shared.platform.storage import compressed, files
from trireme_shared.protocol.errors import DatasetError

if TYPE_CHECKING:
    import pyarrow as pa

HEAD_BYTES = 1 << 20  # numpy refuses longer ones as well

_parsing = Lock()


def read_npy_head(source: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """(shape, whether in Fortran order, dtype). Leaves `source` at the end of the head. Raises ValueError."""
    version = npy_format.read_magic(source)
    size = source.read(2 if version == (1, 0) else 4)
    head = io.BytesIO(size + source.read(min(int.from_bytes(size, "little"), HEAD_BYTES)))
    read = npy_format.read_array_header_1_0 if version == (1, 0) else npy_format.read_array_header_2_0
    with _parsing:
        return read(head)


def mapped_npy(path: Path) -> npt.NDArray[Any]:
    """The array of a local file, memory-mapped. Raises ValueError, OSError."""
    with _parsing:
        array: npt.NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    return array


def read_arrow(file: str) -> pa.Table:
    """The rows of a file. A remote one is copied into a temporary file without a name first. Raises
    DatasetError, which names the record before which the file is damaged or cut off."""
    import pyarrow as pa  # noqa: PLC0415  only where it is needed

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
    with files.open_read(file) as remote, compressed.copy_of(file, remote) as copy:
        return _map(copy)


def _map(source: IO[bytes]) -> mmap.mmap | bytes:
    if not source.seek(0, 2):
        return b""  # what is empty cannot be mapped
    return mmap.mmap(source.fileno(), 0, prot=mmap.PROT_READ)
