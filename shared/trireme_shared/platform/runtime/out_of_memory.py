"""Whether the kernel has killed a child because memory was short. SIGKILL does not say it: so ends whoever is
killed by hand, too.

/proc/self/cgroup ─► the control group of this process and its children
    version 2: memory.events      version 1: memory.oom_control     ─► oom_kill: how many it has killed there
a child has ended with SIGKILL, and a moment ago there was one more than before
    ─► "out of memory (limit 4 GiB, 3.9 GiB used)"

A process outside of all groups reads the whole machine's number (/proc/vmstat). Others have children in the
group, too: a kill that was seen FRESH_S ago, or before the child was started, was one of theirs.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from trireme_shared.platform.runtime import clock

OWN = Path("/proc/self/cgroup")
MOUNT = Path("/sys/fs/cgroup")
MACHINE = Path("/proc/vmstat")
FRESH_S = 30.0  # the kernel needs a while to take a large process apart
LOOK_S = 5.0
NO_LIMIT = 1 << 60  # version 1 shows the largest number of pages


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """`folders`: the group's own, and those that it is in; empty: there is none. `version`: of control
    groups."""

    folders: tuple[Path, ...]
    version: int = 2

    @classmethod
    def own(cls, own: Path = OWN, mount: Path = MOUNT) -> MemoryGroup:
        """Of this process."""
        lines = [line.split(":", 2) for line in _text(own).splitlines() if line.count(":") >= 2]
        paths = {name: path for _, names, path in lines for name in names.split(",")}
        if "memory" in paths:
            return cls(tuple(_folders(mount / "memory", paths["memory"], "memory.oom_control")), 1)
        return cls(tuple(_folders(mount, paths[""], "memory.events")) if "" in paths else ())

    @property
    def kills(self) -> int:
        """How many processes the kernel has killed there because memory was short, or in the machine if that
        is not known."""
        name = "memory.events" if self.version == 2 else "memory.oom_control"
        for place in [folder / name for folder in self.folders[:1]] or [MACHINE]:
            for line in _text(place).splitlines():
                key, _, value = line.partition(" ")
                if key == "oom_kill":
                    return int(value)
        return 0

    def __str__(self) -> str:
        """`limit 4 GiB, 3.9 GiB used`, of the narrowest group around; "" without a limit."""
        most, uses = "memory.max", ["memory.peak", "memory.current"]
        if self.version == 1:
            most, uses = "memory.limit_in_bytes", ["memory.max_usage_in_bytes"]
        limits = [(limit, folder) for folder in self.folders if (limit := _number(folder / most)) > 0]
        limit, folder = min(limits, default=(NO_LIMIT, Path()))
        if limit >= NO_LIMIT:
            return ""
        used = next(filter(None, (_number(folder / name) for name in uses)), 0)
        return f"limit {in_words(limit)}" + (f", {in_words(used)} used" if used else "")


class MemoryKills:
    """Those of children of this process. `look` whenever one is started, and wait for its end while they are
    `watched`; `claim` one when it has ended with SIGKILL that nobody here has sent."""

    def __init__(self, group: MemoryGroup | None = None) -> None:
        self._group = group or MemoryGroup.own()
        self._known, self._looked = self._group.kills, clock.monotonic()
        self._seen = deque[float]()  # when; of those that nobody has claimed

    def __repr__(self) -> str:
        return f"<MemoryKills: {self._known} in {self._group.folders[:1]}, {len(self._seen)} of them lately>"

    def look(self, least_s: float = 0.0) -> None:
        """Nothing is done less than `least_s` after the look before."""
        now = clock.monotonic()
        if now - self._looked < least_s:
            return
        known = self._group.kills
        self._seen.extend([now] * (known - self._known))
        self._known, self._looked = known, now
        while self._seen and now - self._seen[0] > FRESH_S:
            self._seen.popleft()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While a child is waited for, kills are seen when they happen."""
        loop = asyncio.get_running_loop()
        timer: asyncio.TimerHandle

        def look() -> None:
            nonlocal timer
            self.look(LOOK_S / 2)
            timer = loop.call_later(LOOK_S, look)

        timer = loop.call_later(LOOK_S, look)
        try:
            yield
        finally:
            timer.cancel()

    def claim(self, since: float = 0.0) -> str:
        """`since`: when (monotonic s) the child was started. `out of memory (limit 4 GiB, 3.9 GiB used)`; "":
        the kernel has killed nobody lately, or others have claimed those that it has."""
        self.look()
        found = next((seen for seen in self._seen if seen >= since), None)
        if found is None:
            return ""
        self._seen.remove(found)
        around = str(self._group)
        return f"out of memory ({around})" if around else "out of memory"


@cache
def memory_kills() -> MemoryKills:
    """Of this process's children, from its first call on."""
    return MemoryKills()


def in_words(size: int) -> str:
    """`3.9 GiB`, `512 MiB`."""
    unit, name = (1 << 30, "GiB") if size >= 1 << 30 else (1 << 20, "MiB")
    return f"{size / unit:.1f}".removesuffix(".0") + f" {name}"


def _folders(mount: Path, path: str, file: str) -> Iterator[Path]:
    """The folder of a group and those around it. A container sees its own group as the mounted one."""
    place = mount / path.lstrip("/")
    if not (place / file).is_file():
        place = mount
    while (place / file).is_file():
        yield place
        if place == mount:
            return
        place = place.parent


def _number(file: Path) -> int:
    """0: the file is not there, or has no number (`max`)."""
    text = _text(file).strip()
    return int(text) if text.isdecimal() else 0


def _text(file: Path) -> str:
    with suppress(OSError):
        return file.read_text(encoding="ascii", errors="replace")
    return ""
