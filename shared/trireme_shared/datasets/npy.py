"""Heads of .npy files, read safely from several threads.

numpy parses a head with `ast`. CPython 3.11 counts nested nodes for all threads together, so a parse sometimes fails with a
SystemError while another thread parses (python/cpython#106905). Therefore only one head is parsed at a time.
"""

from __future__ import annotations

import io
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy_format

HEAD_BYTES = 1 << 20  # numpy refuses longer ones as well

_parsing = Lock()


def read_head(source: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """(shape, whether in Fortran order, dtype). Leaves `source` at the end of the head. Raises ValueError."""
    version = npy_format.read_magic(source)
    size = source.read(2 if version == (1, 0) else 4)
    head = io.BytesIO(size + source.read(min(int.from_bytes(size, "little"), HEAD_BYTES)))
    read = npy_format.read_array_header_1_0 if version == (1, 0) else npy_format.read_array_header_2_0
    with _parsing:
        return read(head)


def mapped(path: Path) -> npt.NDArray[Any]:
    """The array of a local file, memory-mapped. Raises ValueError, OSError."""
    with _parsing:
        array: npt.NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    return array
