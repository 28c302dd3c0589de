"""An asyncio event loop on which a whole distributed system runs in one thread, repeatable from a seed.

Time is virtual: when nothing is ready, the clock jumps to the next timer. Callbacks belong to a *process* (a
context variable that tasks inherit); within a process they keep asyncio's order, between processes the order
is drawn.

    RUNNING <--freeze / thaw--> FROZEN (SIGSTOP: nothing of it runs, its timers wait)
       `--------- kill --------> DEAD  (SIGKILL: nothing of it ever runs again, no `finally`, no `except`)

Nothing here sleeps, opens a socket or starts a thread, and `isolated()` makes sure that nobody else does.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import heapq
import inspect
import random
import selectors
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any

from trireme_shared.platform.runtime import clock, ids

Context = contextvars.Context
CLOCK_RESOLUTION = 1e-9


class Deadlock(AssertionError):
    """Nothing is ready and no timer is set: whoever waits, waits for ever."""


class Runaway(AssertionError):
    """A bound on virtual time or on callbacks was passed."""


class Process:
    """A named share of the loop. Everything started by `spawn`, and everything that starts in turn, belongs
    to it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.dead = False
        self.frozen = False
        self.held: list[asyncio.Handle] = []
        self.tasks: list[asyncio.Task[Any]] = []
        self._context = Context()
        self._context.run(_process.set, self)

    def __repr__(self) -> str:
        return f"<Process {self.name} {'DEAD' if self.dead else 'FROZEN' if self.frozen else 'RUNNING'}>"

    @property
    def stopped(self) -> bool:
        return self.dead or self.frozen

    def spawn(self, work: Coroutine[Any, Any, Any], name: str = "") -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(
            work, name=name or self.name, context=self._context.copy()
        )
        self.tasks.append(task)
        return task

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call inside this process: timers and tasks that the call starts belong to it."""
        return self._context.copy().run(function, *args)

    def freeze(self) -> None:
        self.frozen = True

    def thaw(self) -> None:
        self.frozen = False
        if not self.dead:
            self.release()

    def kill(self) -> None:
        self.dead = True

    def release(self) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        held, self.held = self.held, []
        loop._ready.extend(held)


_process: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)


def waited_for(task: asyncio.Task[Any]) -> asyncio.Future[Any] | None:
    """What the task waits for now; None: nothing. On any loop."""
    waiter: asyncio.Future[Any] | None = task._fut_waiter  # type: ignore[attr-defined]
    return waiter


def current_process() -> Process | None:
    return _process.get()


class _Numbered:
    """Hash by creation order, so that sets of tasks and futures iterate the same way in each run."""

    _number: int

    def __hash__(self) -> int:
        return self._number


class _Task(_Numbered, asyncio.Task):  # type: ignore[type-arg]
    def __init__(self, work: Any, *, loop: VirtualLoop, context: Context | None = None) -> None:
        self._number = loop.next_number()
        self.process = _process.get() if context is None else context.get(_process)
        super().__init__(work, loop=loop, context=context)


class _Future(_Numbered, asyncio.Future):  # type: ignore[type-arg]
    """The loop sets its number: a Python `__init__` for each future would cost as much as the future."""


class _NoSelector(selectors.BaseSelector):
    """The loop never asks it to wait; registering anything is an error."""

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        raise AssertionError(f"real I/O in the simulation: {fileobj!r}; go through a port")

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        raise KeyError(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        return []

    def get_map(self) -> dict[Any, selectors.SelectorKey]:
        return {}

    def close(self) -> None:
        pass


class VirtualLoop(asyncio.SelectorEventLoop):
    """`rng` draws the order of processes; None keeps first come, first served."""

    def __init__(
        self,
        rng: random.Random | None = None,
        *,
        max_seconds: float = 86_400.0,
        max_callbacks: int = 5_000_000,
    ) -> None:
        self._now = 0.0
        self._numbers = 0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._rng = rng
        self._max_seconds = max_seconds
        self._max_callbacks = max_callbacks
        self.callbacks = 0
        self.errors: list[dict[str, Any]] = []
        super().__init__(_NoSelector())
        self._clock_resolution = CLOCK_RESOLUTION
        self.set_task_factory(lambda _, work, context=None: _Task(work, loop=self, context=context))
        self.set_exception_handler(lambda _, context: self.errors.append(context))

    def unbounded(self) -> None:
        self._max_seconds = self._max_callbacks = sys.maxsize

    def next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def time(self) -> float:
        return self._now

    def spend(self, seconds: float) -> None:
        """The callback that runs takes so long: nothing else runs meanwhile."""
        self._now += seconds

    def create_future(self) -> asyncio.Future[Any]:
        future = _Future(loop=self)
        self._numbers += 1
        future._number = self._numbers
        return future

    def _make_self_pipe(self) -> None:
        """No socket pair: nobody outside this thread wakes the loop."""

    def _close_self_pipe(self) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

    def call_soon_threadsafe(
        self, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        assert threading.get_ident() == self._thread_id or self._thread_id is None, (
            "a thread called into the simulation"
        )
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:
        raise AssertionError(f"a thread in the simulation: {func!r}; go through the injected executor")

    def call_at(
        self, when: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Timers of the same moment run in the order of their making."""
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._numbers += 1
        heapq.heappush(self._timers, (when, self._numbers, timer))
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """It stays where it is until its time has come."""

    def _run_once(self) -> None:
        self._advance()
        ready = self._ready
        if len(ready) == 1:
            handles: Iterable[asyncio.Handle] = (ready.popleft(),)
        else:
            self._ready = deque()
            handles = self._in_drawn_order(ready)
        for handle in handles:
            if handle._cancelled:
                continue
            process = handle._context.get(_process)
            if process is not None and process.stopped:
                process.held.append(handle)
            else:
                handle._run()
                self.callbacks += 1
        if self.callbacks > self._max_callbacks:
            raise Runaway(
                f"{self.callbacks} callbacks run by {self._now:.1f} s of virtual time; something spins"
            )

    def _advance(self) -> None:
        """Move timers that are due to the ready queue; if nothing is ready, jump to the next one first."""
        timers = self._timers
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
        if not self._ready and not self._stopping:
            if not timers:
                raise Deadlock(f"nothing left to run at {self._now:.3f} s of virtual time")
            self._now = max(self._now, timers[0][0])
            if self._now > self._max_seconds:
                raise Runaway(f"virtual time passed {self._max_seconds:g} s")
        while timers and timers[0][0] < self._now + CLOCK_RESOLUTION:
            self._ready.append(heapq.heappop(timers)[2])

    def _in_drawn_order(self, ready: Iterable[asyncio.Handle]) -> list[asyncio.Handle]:
        """First come first served within a process, processes in a drawn order."""
        queues: dict[Process | None, list[asyncio.Handle]] = {}
        for handle in ready:
            process = handle._context.get(_process)
            queue = queues.get(process)
            if queue is None:
                queues[process] = [handle]
            else:
                queue.append(handle)
        order = list(queues.values())
        if len(order) == 1:
            return order[0]
        if self._rng is not None:
            self._rng.shuffle(order)
        return [handle for queue in order for handle in queue]


@contextlib.contextmanager
def isolated(rng: random.Random, *, offline: bool = True) -> Iterator[None]:
    """`trireme_shared.platform.runtime.ids` draws from `rng`, the wall clock shows loop time, sockets and
    threads are refused (unless not `offline`: for storage that is a real server), the garbage collector
    waits; all restored."""

    def refuse(what: str) -> Callable[..., Any]:
        def refused(*args: Any, **_: Any) -> Any:
            raise AssertionError(f"{what} in the simulation: {args!r}; go through a port")

        return refused

    source, start, connect, bind = (
        ids.source,
        threading.Thread.start,
        socket.socket.connect,
        socket.socket.bind,
    )
    timestamp = clock.timestamp
    collecting = gc.isenabled()
    gc.disable()
    ids.source = rng
    clock.timestamp = lambda: f"{clock.monotonic():.3f}"
    if offline:
        threading.Thread.start = refuse("a thread")  # type: ignore[method-assign]
        socket.socket.connect = refuse("a socket")  # type: ignore[method-assign]
        socket.socket.bind = refuse("a socket")  # type: ignore[method-assign]
    try:
        yield
    finally:
        ids.source = source
        clock.timestamp = timestamp
        threading.Thread.start = start  # type: ignore[method-assign]
        socket.socket.connect = connect  # type: ignore[method-assign]
        socket.socket.bind = bind  # type: ignore[method-assign]
        if collecting:
            gc.enable()


def run(
    loop: VirtualLoop, main: Coroutine[Any, Any, Any], rng: random.Random, *, offline: bool = True
) -> Any:
    """Run `main` to its end on `loop`, isolated, and close the loop."""
    with isolated(rng, offline=offline):
        try:
            return loop.run_until_complete(main)
        finally:
            loop.unbounded()
            with contextlib.suppress(Deadlock):
                loop.run_until_complete(_unwound())
            loop.close()


def run_virtually(
    scenario: Callable[..., Coroutine[Any, Any, Any]],
    *arguments: Any,
    seed: int = 1,
    shuffled: bool = True,
    offline: bool = True,
) -> Any:
    """Run `scenario(*arguments)` on a loop of its own; an error that no one handled fails the test."""
    rng = random.Random(seed)
    loop = VirtualLoop(rng if shuffled else None, max_seconds=3600.0)
    result = run(loop, scenario(*arguments), rng, offline=offline)
    assert not loop.errors, loop.errors
    return result


async def _unwound() -> None:
    """As asyncio.Runner does: generators that were left behind are closed, then what is left is cancelled.

    Tasks of processes that stay dead stay as they are."""
    await asyncio.get_running_loop().shutdown_asyncgens()
    for _ in range(3):
        for _ in range(3):
            await asyncio.sleep(0)
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=1.0)
    for task in asyncio.all_tasks():  # a process that died in the moment of its start has run nothing
        _close_unstarted(task.get_coro())


def _close_unstarted(work: object) -> None:
    """With the coroutines that it was given (`uninterrupted`)."""
    if inspect.iscoroutine(work) and inspect.getcoroutinestate(work) == inspect.CORO_CREATED:
        given = list(work.cr_frame.f_locals.values())
        work.close()
        for each in given:
            _close_unstarted(each)
