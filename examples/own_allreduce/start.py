"""Starts an etcd and some processes of digits_allreduce.py on this machine, and, if it is told to, harms
them.

python examples/own_allreduce/start.py --members 3
python examples/own_allreduce/start.py --members 3 --steps 2000 --join-at 100 --kill-at 400 --freeze-at 800
                                       --thaw-at 1200
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from pathlib import Path

from trireme_shared.platform.etcd.embedded import EmbeddedEtcd

LOOP = Path(__file__).with_name("digits_allreduce.py")
PROGRESS = re.compile(r"step (\d+) of")


class Members:
    """Processes of the loop. Each line that one prints is printed after its name; faults wait for a step in
    them."""

    def __init__(self, environment: dict[str, str], faults: list[tuple[int, Callable[[], None]]]) -> None:
        self.environment = environment
        self.faults = sorted(faults, key=lambda fault: fault[0])
        self.processes: list[Process] = []
        self.readers: list[asyncio.Task[None]] = []
        self.killed: set[int] = set()

    async def start(self) -> None:
        place = len(self.processes)
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(LOOP), env=self.environment, stdout=PIPE, limit=1 << 20
        )
        self.processes.append(process)
        self.readers.append(asyncio.create_task(self.read(place, process)))

    def signal(self, place: int, number: signal.Signals) -> None:
        if self.processes[place].returncode is None:
            print(f"member {place} gets {number.name}", flush=True)
            self.processes[place].send_signal(number)
            if number == signal.SIGKILL:
                self.killed.add(place)

    async def read(self, place: int, process: Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            text = line.decode().rstrip()
            print(f"member {place}: {text}", flush=True)
            step = PROGRESS.match(text)
            while step and self.faults and int(step[1]) >= self.faults[0][0]:
                self.faults.pop(0)[1]()

    def end(self) -> None:
        """At once, those that still run."""
        for process in self.processes:
            if process.returncode is None:
                process.kill()

    async def wait(self, frozen: int | None) -> int:
        """The worst exit code of those that nobody has killed. The frozen one is killed when the others have
        ended."""
        place = 0
        while place < len(self.processes):  # more may join meanwhile
            if place != frozen:
                await self.processes[place].wait()
                await self.readers[place]
            place += 1
        if frozen is not None:
            self.signal(frozen, signal.SIGKILL)
            await self.processes[frozen].wait()
        codes = (
            process.returncode for place, process in enumerate(self.processes) if place not in self.killed
        )
        return max(abs(code or 0) for code in codes)


async def main(given: argparse.Namespace) -> int:
    joining: list[asyncio.Task[None]] = []

    def join() -> None:
        print("another member joins", flush=True)
        joining.append(asyncio.create_task(members.start()))

    with tempfile.TemporaryDirectory() as folder:
        async with EmbeddedEtcd(folder) as etcd:
            environment = os.environ | {
                "TRIREME_ETCD": etcd.url,
                "TRIREME_JOB": "digits",
                "STEPS": str(given.steps),
            }
            faults: list[tuple[int, Callable[[], None]]] = [
                (given.kill_at, lambda: members.signal(0, signal.SIGKILL)),
                (given.freeze_at, lambda: members.signal(1, signal.SIGSTOP)),
                (given.thaw_at, lambda: members.signal(1, signal.SIGCONT)),
                (given.join_at, join),
            ]
            members = Members(environment, [fault for fault in faults if fault[0]])
            me = asyncio.current_task()
            assert me is not None
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, me.cancel)  # as Ctrl-C
            try:
                for _ in range(given.members):
                    await members.start()
                return await members.wait(1 if given.freeze_at and not given.thaw_at else None)
            finally:
                members.end()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--members", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--kill-at", type=int, default=0, metavar="STEP", help="SIGKILL for member 0")
    parser.add_argument("--freeze-at", type=int, default=0, metavar="STEP", help="SIGSTOP for member 1")
    parser.add_argument(
        "--thaw-at", type=int, default=0, metavar="STEP", help="SIGCONT for member 1; it joins again"
    )
    parser.add_argument("--join-at", type=int, default=0, metavar="STEP", help="one more member")
    given = parser.parse_args()
    least = 2 if given.freeze_at else 1
    if given.members < least:
        parser.error(f"--members is {given.members}: at least {least} are needed")
    if given.steps < 1:
        parser.error(f"--steps is {given.steps}: at least 1")
    if given.thaw_at and not 0 < given.freeze_at < given.thaw_at:
        parser.error(
            f"--thaw-at is {given.thaw_at}, --freeze-at {given.freeze_at}: a member freezes before it goes on"
        )
    return given


if __name__ == "__main__":
    try:
        sys.exit(asyncio.run(main(arguments())))
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit("interrupted: its members were ended")
