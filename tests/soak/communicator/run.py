"""Real processes, faults at exact places, and what the survivors say afterwards.

python -m tests.soak.communicator --members 4 --faults "1:40:allreduce:during:kill,2:60:allreduce:before:stop"
python -m tests.soak.communicator --seed 1 2 3 --count 20

Whoever is killed is replaced. It fails if two members have different results of one operation, if two end
with different values, if a process ends with an error, or if a recovery takes longer than its bound.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.soak.moments.schedule import Fault
from trireme_shared.platform.etcd.embedded import EmbeddedEtcd

ROOT = Path(__file__).parents[3]
STOP_S = 3.5  # longer than the lease
LIMIT_S = 900.0


@dataclass
class Receipt:
    """`recoveries`: by kind of fault, seconds until the last survivor had finished the next operation."""

    operations: int = 0
    faults: int = 0
    recoveries: dict[str, list[float]] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    def __str__(self) -> str:
        lines = [
            f"{self.operations} operations, {self.faults} faults, {self.seconds:.1f} s; FAILED: {self.failed}"
        ]
        for kind, found in sorted(self.recoveries.items()):
            found.sort()
            lines.append(
                f"  {kind:6} {len(found):4} times, next operation finished after "
                f"{found[len(found) // 2]:.3f} s (median), "
                f"{found[-1]:.3f} s (longest)"
            )
        return "\n".join(lines)


class Soak:
    def __init__(
        self,
        members: int,
        steps: int,
        faults: list[Fault],
        environment: dict[str, str] | None = None,
        *,
        whole: bool = False,
    ) -> None:
        """`whole`: a fault waits until all members are there, so that the last one with the state is not
        killed."""
        self.members, self.steps, self.faults = members, steps, faults
        self.environment = {"WHOLE": "yes" if whole else ""} | (environment or {})
        self.started: list[asyncio.subprocess.Process] = []
        self.losing = asyncio.Lock()
        self.numbers = self.ready = 0

    async def run(self) -> Receipt:
        folder = Path(tempfile.mkdtemp(prefix="trireme-communicator-"))
        began = time.monotonic()
        try:
            async with EmbeddedEtcd(folder / "etcd", unsafe_no_fsync=True) as etcd, asyncio.timeout(LIMIT_S):
                self.etcd, self.folder = etcd, folder
                try:
                    async with asyncio.TaskGroup() as group:
                        for _ in range(self.members):
                            group.create_task(self.live())
                finally:
                    for process in self.started:
                        if process.returncode is None:
                            process.kill()
            receipt = verified(folder, self.members)
            receipt.seconds = time.monotonic() - began
            return receipt
        finally:
            if not os.environ.get("KEEP"):
                shutil.rmtree(folder, ignore_errors=True)

    async def live(self) -> None:
        """One place: whoever is killed in it is replaced."""
        while True:
            number, self.numbers = self.numbers, self.numbers + 1
            texts = ",".join(map(str, self.faults))
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tests.soak.communicator.member"),
                *(str(number), str(self.steps), texts, str(self.folder / f"{number}.jsonl")),
                cwd=ROOT,
                env=os.environ
                | {
                    "TRIREME_ETCD": self.etcd.url,
                    "TRIREME_JOB": "soak",
                    "OMP_NUM_THREADS": "1",
                    "MEMBERS": str(self.members),
                }
                | self.environment,
                stdout=asyncio.subprocess.PIPE,
            )
            self.started.append(process)
            assert process.stdout is not None
            async for line in process.stdout:
                if line.strip() == b"stopped":
                    await asyncio.sleep(STOP_S)
                    process.send_signal(signal.SIGCONT)
                elif line.strip() == b"lost":
                    async with self.losing:
                        await self.etcd.kill()
                        await asyncio.sleep(0.5)
                        await self.etcd.start()
                elif line.strip() == b"ready":
                    self.ready += 1
                    if self.ready == self.members:
                        (self.folder / "go").touch()
                    if self.ready == self.members + sum(fault.kind == "kill" for fault in self.faults):
                        (self.folder / "complete").touch()
                else:
                    sys.stdout.write(line.decode())
            code = await process.wait()
            if code == 0:
                return
            assert code == -signal.SIGKILL, f"member {number} ended with {code}"


def verified(folder: Path, members: int) -> Receipt:
    """Raises AssertionError."""
    records = [
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted(folder.glob("*.jsonl"))
    ]
    ends = {entry["end"] for lines in records for entry in lines if "end" in entry}
    finished = sum("end" in lines[-1] for lines in records)
    assert finished == members, f"{finished} of {members} places came to the end"
    assert len(ends) == 1, f"members ended with different values: {ends}"
    results: dict[tuple[int, int], str] = {}
    by_number: dict[int, set[int]] = {}
    for lines in records:
        done = [entry for entry in lines if "number" in entry]
        for place, entry in enumerate(done):
            key = entry["number"], entry["epoch"]
            assert results.setdefault(key, entry["digest"]) == entry["digest"], (
                f"two results of operation {key}"
            )
            # killed or evicted then
            last = place + 1 == len(done) or done[place + 1]["number"] != entry["number"] + 1
            if not last or (place + 1 == len(done) and "end" in lines[-1]):
                by_number.setdefault(entry["number"], set()).add(entry["epoch"])
    torn = {number: epochs for number, epochs in by_number.items() if len(epochs) > 1}
    assert not torn, f"survivors have operations from different epochs: {torn}"
    receipt = Receipt(operations=len(by_number))
    for lines in records:
        for entry in lines:
            if "failed" in entry:
                receipt.failed[entry["failed"]] = receipt.failed.get(entry["failed"], 0) + 1
            if "fault" in entry:
                receipt.faults += 1
                kind = entry["fault"].rpartition(":")[2]
                receipt.recoveries.setdefault(kind, []).append(_recovery(entry, records))
    return receipt


def _recovery(fault: dict, records: list[list[dict]]) -> float:
    """Until the last of those who were there and came to the next operation had finished it: in a new epoch,
    if the fault ends one."""
    ends_epoch = fault["fault"].rpartition(":")[2] in ("kill", "stop", "cut")
    found = []
    for lines in records:
        before = [entry["epoch"] for entry in lines if "number" in entry and entry["at"] < fault["at"]]
        after = [
            entry["at"]
            for entry in lines
            if "number" in entry
            and entry["at"] > fault["at"]
            and not (ends_epoch and entry["epoch"] <= (before or [0])[-1])
        ]
        if before and after and lines[0]["member"] != fault["member"]:
            found.append(after[0] - fault["at"])
    return max(found, default=0.0)
