"""The writes of one transaction, and how many fit: etcd refuses more operations or bytes, and then no master could go on.

decisions' writes --takes?--> add --one transaction--> etcd          too large alone --> TooLarge, for its caller only
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from trireme_shared.platform.etcd import Delete, Put
from trireme_shared.protocol.errors import TooLarge

MAX_OPERATIONS = 100  # etcd takes 128
MAX_BYTES = 512 * 1024  # of keys and values; etcd takes 1.5 MiB

Write = Put | Delete


class Batch:
    """No key is written twice. `writes` in order."""

    def __init__(self) -> None:
        self._by_key: dict[str, Write] = {}
        self._bytes = 0

    @property
    def writes(self) -> list[Write]:
        return list(self._by_key.values())

    def takes(self, writes: Sequence[Write]) -> bool:
        """Whether there is room for these too. An empty batch takes whatever `check_fits` takes."""
        added = sum(write.key not in self._by_key for write in writes)
        return len(self._by_key) + added <= MAX_OPERATIONS and self._bytes + _size(writes) <= MAX_BYTES

    def add(self, writes: Sequence[Write]) -> None:
        """In place. The sizes of writes that these replace are still counted."""
        merge(self._by_key, writes)
        self._bytes += _size(writes)


def merge(by_key: dict[str, Write], writes: Iterable[Write]) -> None:
    """In place: the last write of a key wins, and a deleted range takes the writes before it along."""
    for write in writes:
        if isinstance(write, Delete) and write.end is not None:
            for key in [key for key in by_key if write.key <= key < write.end]:
                del by_key[key]
        by_key.pop(write.key, None)
        by_key[write.key] = write


def check_fits(writes: Sequence[Write]) -> None:
    """Raises TooLarge if no transaction takes them."""
    if len(writes) > MAX_OPERATIONS:
        msg = f"the request changes {len(writes)} keys of the job's state, at most {MAX_OPERATIONS} are taken"
        raise TooLarge(msg, hint="send less at once")
    if (size := _size(writes)) > MAX_BYTES:
        msg = f"the request changes the job's state by {size} bytes, at most {MAX_BYTES} are taken"
        raise TooLarge(msg, hint="send shorter texts, or fewer values")


def _size(writes: Sequence[Write]) -> int:
    """Bytes of keys and values; a key's characters count as bytes."""
    return sum(len(write.key) + (len(write.value) if isinstance(write, Put) else 0) for write in writes)
