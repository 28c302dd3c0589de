"""Groups of several members in the threads of one process, over a store in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from trireme_shared.collective.group import Device, EtcdStore, Group


class Values:
    """A trireme_shared.collective.group.Shelf."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.condition = threading.Condition()

    def put(self, name: str, value: bytes, timeout_s: float) -> None:
        with self.condition:
            self.values[name] = value
            self.condition.notify_all()

    def take(self, names: list[str], timeout_s: float) -> list[bytes]:
        with self.condition:
            if not self.condition.wait_for(lambda: self.held(names), timeout_s):
                raise TimeoutError(f"{names} are not there after {timeout_s} s")
            return [self.values[name] for name in names]

    def held(self, names: list[str]) -> bool:
        return all(name in self.values for name in names)


class Groups:
    def __init__(self, size: int, kind: type[Group] = Group, timeout_s: float = 10.0) -> None:
        self.size, self.values = size, Values()
        self.pool = ThreadPoolExecutor(size)
        devices = [Device("127.0.0.1") for _ in range(size)]
        peers = [device.address for device in devices]
        self.groups: list[Group] = [None] * size  # type: ignore[list-item]

        def build(rank: int) -> None:
            store = EtcdStore(self.values, "group/")
            self.groups[rank] = kind(store, rank, size, devices[rank], peers, timeout_s)

        self.each(build)

    def each(self, work: Callable) -> list:
        """`work(rank)` in all members at once; the answers by rank."""
        return list(self.pool.map(work, range(self.size)))

    def drop(self) -> None:
        for group in self.groups:
            if group is not None:
                group.drop()
        self.pool.shutdown()
