"""Death just before any single thing that a process does and others can see: its memory dies with it, so no
other moments differ.

writes to etcd: before it is sent; the moment after it took effect and before its answer is the one before the
next thing storage: a file about to be made, synced, renamed or deleted, a folder about to be made or deleted
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.equipment.replaced import replaced
from tests.equipment.virtual_loop import Process
from trireme_shared.platform.etcd.operations import Body, Transport, is_write

_CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir"}
_watcher: Callable[[str], None] | None = None


class Died(BaseException):
    """Ends the work of a background thread; the thread's process is dead already."""


class StoppingProcess(Process):
    """Stops by itself after so many turns of its code (what runs between two awaits): at any await, one after
    the other."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.turns = 0
        self.last_turn: int | None = None
        self.at_last: Callable[[], None] = self.kill

    @property
    def stopped(self) -> bool:
        if not self.dead and not self.frozen:
            self.turns += 1
            if self.last_turn is not None and self.turns >= self.last_turn:
                self.last_turn = None
                self.at_last()
        return self.dead or self.frozen


class CrashPoint:
    """`done`: what its process did. Once as many as `last` are done, `at_last` is called instead of the
    next."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.done: list[str] = []
        self.last: int | None = None
        self.at_last: Callable[[], None] = process.kill

    def meet(self, what: str) -> None:
        """`what` is about to be done. Raises Died if that is not to be."""
        if self.last is not None and len(self.done) >= self.last:
            self.last = None
            self.at_last()
        if self._process.dead:
            raise Died
        self.done.append(what)

    def transport(self, inner: Transport) -> Transport:
        return _Transport(self, inner)

    async def offload(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """The background thread."""
        await asyncio.sleep(0.01)
        try:
            with _watched(self.meet):
                result = work(*arguments)
        except Died:
            await asyncio.Event().wait()
        await asyncio.sleep(0.01)
        return result


class _Transport:
    def __init__(self, crash_point: CrashPoint, inner: Transport) -> None:
        self._crash_point, self._inner = crash_point, inner

    async def call(self, method: str, body: Body, timeout_s: float) -> Body:
        if is_write(method, body):
            try:
                self._crash_point.meet(method)
            except Died:
                await asyncio.Event().wait()
        return await self._inner.call(method, body, timeout_s)

    def stream(self, method: str, body: Body) -> AsyncGenerator[Body, None]:
        return self._inner.stream(method, body)

    async def close(self) -> None:
        await self._inner.close()


@contextmanager
def _watched(watcher: Callable[[str], None]) -> Iterator[None]:
    """`watcher(what)` before each change of the file system; what it raises keeps the change from
    happening."""
    global _watcher
    fsync = os.fsync

    def synced(descriptor: int) -> None:
        watcher("os.fsync")
        fsync(descriptor)

    _watcher = watcher
    try:
        with replaced(os, "fsync", synced):
            yield
    finally:
        _watcher = None


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _watcher is None:
        return
    if event in _CHANGES or (event == "open" and arguments[2] & (os.O_CREAT | os.O_WRONLY | os.O_RDWR)):
        _watcher(event)


sys.addaudithook(_audit)
