"""A network and file systems of the soak's own (Linux namespaces), where it may drop packets and fill disks.
They vanish with it.

`enter` starts this program again below `unshare`; as root, or where users may make namespaces.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Self

INSIDE = "SOAK_ISOLATED"
LIMIT_S = 20.0


def obstacle(*command: str) -> str:
    """Why `command` cannot run in namespaces of its own; "" if it can."""
    try:
        _call(*_unshare(), "sh", "-c", " ".join(command))
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", "") or str(error)).strip()
        return f"`{' '.join((*_unshare(), *command))}`: {said}"
    return ""


def no_packets() -> str:
    """Why packets cannot be dropped here; "" if they can."""
    why = obstacle("ip link set lo up && iptables -w -S")
    return f"{why} (needs iproute2, iptables, and root or user namespaces)" if why else ""


def no_disks() -> str:
    """Why no file system can be mounted here; "" if one can."""
    why = obstacle("mount -t tmpfs -o size=1m tmpfs /mnt")
    return f"{why} (needs root or user namespaces)" if why else ""


def enter() -> None:
    """Become the same command in new namespaces; returns if it is in them."""
    if os.environ.get(INSIDE):
        subprocess.run(["ip", "link", "set", "lo", "up"], check=False, capture_output=True, timeout=LIMIT_S)
        return
    unshare = _unshare()
    os.execvpe(unshare[0], [*unshare, *sys.orig_argv], os.environ | {INSIDE: "1"})


def _unshare() -> list[str]:
    return ["unshare", "--net", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]


class SmallDisk:
    """A file system in memory at `folder`. `fill` takes all room that is left, `empty` gives it back.
    `release` leaves a plain folder with the same files in its place, without those `but`."""

    def __init__(self, folder: Path, mebibytes: int) -> None:
        self.folder = folder
        self._filler = folder / ".filler"
        folder.mkdir(parents=True)
        _call("mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", str(folder))

    def fill(self) -> None:
        """Also the room that somebody has freed since."""
        with self._filler.open("ab", buffering=0) as file:
            for size in (1 << 20, 1 << 12):
                _write_until_full(file.fileno(), bytes(size))

    def empty(self) -> None:
        self._filler.unlink(missing_ok=True)

    def release(self, *but: str) -> None:
        self.empty()
        kept = self.folder.with_suffix(".kept")
        shutil.copytree(self.folder, kept, symlinks=True, ignore=shutil.ignore_patterns(*but))
        _call("umount", "--lazy", str(self.folder))
        self.folder.rmdir()
        kept.rename(self.folder)


def _write_until_full(descriptor: int, piece: bytes) -> None:
    try:
        while True:
            os.write(descriptor, piece)
    except OSError:
        return


class DroppedPackets:
    """While the block runs, TCP packets to and from `ports` of this network are dropped with this
    probability; `count`: how many were, afterwards."""

    def __init__(self, ports: Collection[int], probability: float) -> None:
        chance = (
            ()
            if probability >= 1
            else ("-m", "statistic", "--mode", "random", "--probability", str(probability))
        )
        numbers = ",".join(map(str, sorted(ports)))
        self._rule = ("INPUT", "-p", "tcp", "-m", "multiport", "--ports", numbers, *chance, "-j", "DROP")
        self.count = 0

    def __enter__(self) -> Self:
        _call("iptables", "-w", "-A", *self._rule)
        return self

    def __exit__(self, *_: object) -> None:
        listed = _call("iptables", "-w", "-nvxL", "INPUT").splitlines()
        self.count = int(listed[-1].split()[0])
        _call("iptables", "-w", "-D", *self._rule)


def _call(*command: str) -> str:
    """Its output. Raises OSError, SubprocessError (`stderr` says why)."""
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=LIMIT_S).stdout
