"""Where an id of a table belongs, and which random bits it has: pure functions of (seed of the table, id).

    id --mix64--> hash --mod slot_count--> slot --slot map--> parameter server
    hash --mix64--> bits of the initial row

All arithmetic is modulo 2**64, so it is the same on every machine. The kernels (kernels/) compute the same; a
test compares.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

Ids = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
FIRST = np.uint64(0xBF58476D1CE4E5B9)
SECOND = np.uint64(0x94D049BB133111EB)


def table_seed(job_seed: int, name: str) -> int:
    """Of a table of that name in a job with that seed; in [0, 2**64)."""
    return int.from_bytes(hashlib.sha256(f"{job_seed}/{name}".encode()).digest()[:8], "little")


def mix64(values: Hashes) -> Hashes:
    """The finaliser of splitmix64 of each value; a bijection. (Steele, Lea, Flood 2014.)"""
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(30))) * FIRST
        values = (values ^ (values >> np.uint64(27))) * SECOND
    return values ^ (values >> np.uint64(31))


def hashes_of(ids: Ids, seed: int) -> Hashes:
    """int64 (n,) -> uint64 (n,)."""
    with np.errstate(over="ignore"):
        return mix64((ids.view(np.uint64) ^ np.uint64(seed)) + GOLDEN)


def slots_of(ids: Ids, seed: int, slot_count: int) -> npt.NDArray[np.int64]:
    """The slot of each id: int64 (n,) in [0, slot_count)."""
    return (hashes_of(ids, seed) % np.uint64(slot_count)).astype(np.int64)


def slots_of_tables(ids: Sequence[Ids], seeds: Sequence[int], slot_count: int) -> npt.NDArray[np.int64]:
    """`slots_of` the ids of several tables, one after the other: int64 (n,) of all. `seeds`: of each
    table."""
    flat = np.concatenate(ids).view(np.uint64)
    flat ^= np.repeat(np.array(seeds, np.uint64), [len(some) for some in ids])
    with np.errstate(over="ignore"):
        flat += GOLDEN
    return (mix64(flat) % np.uint64(slot_count)).astype(np.int64)


def owned_slots(owners: Sequence[int], index: int) -> npt.NDArray[np.bool_]:
    """Whether each slot is parameter server `index`'s: bool (slots,). `owners`: of a slot map."""
    return np.array([owner == index for owner in owners])


def ids_of_texts(texts: Sequence[str]) -> Ids:
    """An id for each text, int64 (n,): XXH3, 64 bits, seed 0, of its UTF-8 bytes, as a signed number in
    [-2**63, 2**63)."""
    return np.array([xxhash.xxh3_64_intdigest(text.encode()) for text in texts], np.uint64).view(np.int64)
