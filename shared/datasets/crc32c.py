"""CRC-32C (Castagnoli) of bytes, as TFRecord files use it, with NumPy alone.

A CRC is linear over XOR: that of a block is the XOR of one table entry for each (place, byte). So a block of BLOCK bytes is one
gather, and the CRCs of blocks are put together by moving each on over BLOCK zero bytes.
"""

from __future__ import annotations

from functools import cache, lru_cache

import numpy as np
import numpy.typing as npt

BLOCK = 1024
SHORT = 24  # below it a loop over bytes is faster
_POLYNOMIAL = 0x82F63B78
_ALL = 0xFFFFFFFF

Table = npt.NDArray[np.uint32]


def crc32c(content: bytes) -> int:
    """The checksum of `content`, from 0 to 2**32 - 1."""
    if len(content) < SHORT:
        return _over_bytes(_ALL, content) ^ _ALL
    state = _ALL
    array = np.frombuffer(content, dtype=np.uint8)
    for start in range(0, len(content) - 3, BLOCK):  # a block at a time: what it gathers stays in the cache
        state = _after(state, array[start : start + BLOCK])
    left = content[-(len(content) % BLOCK) :] if 0 < len(content) % BLOCK < 4 else b""
    return _over_bytes(state, left) ^ _ALL


def _over_bytes(state: int, content: bytes) -> int:
    bytewise = _bytewise()
    for byte in content:
        state = bytewise[(state ^ byte) & 0xFF] ^ (state >> 8)
    return state


def _after(state: int, block: npt.NDArray[np.uint8]) -> int:
    """The state after a block of 4 to BLOCK bytes. A state counts as if it were XORed into the first four."""
    places, steps = _places()
    first = BLOCK - len(block)
    part = int(np.bitwise_xor.reduce(places.take(steps[first:] + block)))
    a, b, c, d = _moving(first)
    return part ^ a[state & 0xFF] ^ b[state >> 8 & 0xFF] ^ c[state >> 16 & 0xFF] ^ d[state >> 24]


@cache
def _bytewise() -> tuple[int, ...]:
    """CRC of each byte."""
    found = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = (value >> 1) ^ (_POLYNOMIAL if value & 1 else 0)
        found.append(value)
    return tuple(found)


@cache
def _places() -> tuple[Table, npt.NDArray[np.int64]]:
    """BLOCK rows of 256, flat: what byte b at a place adds to the CRC of a block that ends with the last place; each row's start."""
    table = np.empty((BLOCK, 256), dtype=np.uint32)
    first = np.array(_bytewise(), dtype=np.uint32)
    table[-1] = first
    for place in range(BLOCK - 2, -1, -1):  # one zero byte more behind it
        after = table[place + 1]
        table[place] = first[after & 0xFF] ^ (after >> np.uint32(8))
    return table.ravel(), np.arange(BLOCK, dtype=np.int64) * 256


@lru_cache(maxsize=BLOCK)
def _moving(first: int) -> list[list[int]]:
    """The rows of four places from `first` on."""
    rows: list[list[int]] = _places()[0].reshape(BLOCK, 256)[first : first + 4].tolist()
    return rows
