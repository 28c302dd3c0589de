"""Other systems' tables as ways: workers in virtual environments of their own (benchmarks/other_systems),
asked by pipes."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.baselines import free_port
from benchmarks.other_systems import environments
from benchmarks.tables.minibatches import Minibatches
from benchmarks.tables.replies import REPLIES

ROOT = Path(__file__).resolve().parents[2]
ANSWER_S = 600.0
SAME = 1e-3  # of what a step changes at most: float32, added up in another order
SAME_PADDLE = 1e-2  # of all changes: its powers of beta are float32, too


class PeerError(Exception):
    """It ended, said an error, or did not answer."""


def script_of(name: str) -> Path:
    return environments.HERE / f"{name}.py"


class Process:
    """A worker of other_systems/`script`."""

    def __init__(
        self, system: str, script: str, environment: Mapping[str, str], folder: Path, cores: set[int]
    ) -> None:
        python = environments.interpreter(system)
        if python is None:
            raise PeerError(environments.how_to_install(system))
        role = environment.get("TRAINING_ROLE", "worker").lower()
        self._log = folder / f"{script}-{role}-{environment.get('PADDLE_PORT', 0)}.log"
        replies, theirs = os.pipe()
        self._replies = os.fdopen(replies, "rb", buffering=0)
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [str(python), str(script_of(script))],
                env={
                    **os.environ,
                    "PYTHONPATH": str(ROOT),
                    "OMP_NUM_THREADS": "1",
                    **environment,
                    REPLIES: str(theirs),
                },
                cwd=folder,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=[theirs],
            )
        os.close(theirs)
        os.sched_setaffinity(self._process.pid, cores)  # before it has other threads
        self.pid = self._process.pid

    def begin(self, name: str, *arguments) -> None:
        try:
            self._process.stdin.write(json.dumps([name, arguments]).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise PeerError(self._ended()) from error

    def end(self, seconds: float = ANSWER_S):
        """Raises PeerError."""
        if not select.select([self._replies], [], [], seconds)[0]:
            raise PeerError(f"no answer within {seconds:g} s; its output is {self._log}")
        line = self._replies.readline()
        if not line:
            raise PeerError(self._ended())
        answer = json.loads(line)
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer["answer"]

    def ask(self, name: str, *arguments):
        self.begin(name, *arguments)
        return self.end()

    @property
    def lives(self) -> bool:
        return self._process.poll() is None

    def check(self) -> None:
        """Raises PeerError if it has ended."""
        if not self.lives:
            raise PeerError(self._ended())

    def resident(self) -> int:
        """Bytes of its own memory."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) << 10

    def _ended(self) -> str:
        code = self._process.wait(10)
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return f"ended with {code}: {lines[-1] if lines else 'it said nothing'}"

    def close(self) -> None:
        self._process.kill()
        self._process.wait(10)
        self._replies.close()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()


class Peer:
    """A way. `how`: the forms in which it was fastest, by kind of work."""

    def __init__(self, name: str, worker: Process) -> None:
        self.name, self._worker = name, worker
        self.how: dict[str, str] = {}

    def setup(self, data: Minibatches, initial: Path) -> None:
        self.how = self._worker.ask("setup", data.rows, data.dim, data.ids, str(initial))

    def lookup(self, number: int) -> float:
        return self._worker.ask("lookup", number)

    def small(self, number: int) -> float:
        return self._worker.ask("small", number)

    def steps(self, numbers: Sequence[int]) -> float:
        return self._worker.ask("steps", list(numbers))

    def close(self) -> None:
        self._worker.close()


class Tfra(Peer):
    """In process: no network, nobody else."""

    def __init__(self, folder: Path, cores: set[int]) -> None:
        # it is killed, so what AutoGraph writes into its temporary folder stays there
        super().__init__("TFRA", Process("tfra", "tfra_table", {"TMPDIR": str(folder)}, folder, cores))
        self._found = folder / "tfra.npy"

    def found(self, number: int) -> np.ndarray:
        self._worker.ask("found", number, str(self._found))
        return np.load(self._found)


class Paddle(Peer):
    """A server and a trainer. `bytes_a_row`: of the server's memory, with Adam's."""

    def __init__(self, dim: int, folder: Path, server_cores: set[int], cores: set[int]) -> None:
        environments_of = paddle_environments(1)
        self._server, worker = (
            Process("paddle", "paddle_table", {**environment, "TABLE_DIM": str(dim)}, folder, on)
            for environment, on in zip(environments_of, (server_cores, cores), strict=True)
        )
        super().__init__("Paddle", worker)
        self.bytes_a_row = 0.0

    def setup(self, data: Minibatches, initial: Path) -> None:
        self._worker.ask("ready")
        before = self._server.resident()
        super().setup(data, initial)
        self.bytes_a_row = (self._server.resident() - before) / data.rows

    def check(self) -> None:
        """Raises PeerError if rows are not what their steps make of them."""
        difference, moved = self._worker.ask("wrong")
        if not difference < SAME_PADDLE * moved:
            raise PeerError(
                f"rows differ by {difference:.2g} from what Adam makes of them, which moved them "
                f"by {moved:.2g}"
            )

    def close(self) -> None:
        super().close()
        self._server.close()


def paddle_environments(trainers: int) -> list[dict[str, str]]:
    """Of the server, then of each trainer."""
    server, *others = (str(free_port()) for _ in range(1 + trainers))
    common = {
        "PADDLE_PSERVERS_IP_PORT_LIST": f"127.0.0.1:{server}",
        "PADDLE_TRAINER_ENDPOINTS": ",".join(f"127.0.0.1:{port}" for port in others),
        "PADDLE_TRAINERS_NUM": str(trainers),
        "PADDLE_WITH_GLOO": "0",
        "POD_IP": "127.0.0.1",
        "GLOG_minloglevel": "2",
    }
    found = [{**common, "TRAINING_ROLE": "PSERVER", "PADDLE_PORT": server}]
    for number, port in enumerate(others):
        found.append(
            {**common, "TRAINING_ROLE": "TRAINER", "PADDLE_PORT": port, "PADDLE_TRAINER_ID": str(number)}
        )
    return found
