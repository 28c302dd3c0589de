"""The floor that dense.py's rows stand on, and what all of them share: processes of their own, gradients, the
check.

floor   one socket, both directions at once, blocking threads, nothing computed
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

from trireme_shared.platform.runtime import telemetry

LR = {"SGD": 0.1, "Adam": 0.001}
PERIOD = 251  # gradients repeat after so many elements, so that a short vector is the reference
HANG_S = 300.0


def optimizer_options(name: str) -> dict[str, object]:
    return {"lr": LR[name], **({"fused": True} if name == "Adam" else {})}


def make_optimizer(name: str, parameter):
    import torch

    return getattr(torch.optim, name)([parameter], **optimizer_options(name))


def gradient_of(elements: int):
    import torch

    part = (torch.arange(PERIOD, dtype=torch.float32) - PERIOD // 2) / PERIOD
    return part.repeat(-(-elements // PERIOD))[:elements].clone()


def is_right(parameters, optimizer: str, rounds: int, dtype: str = "float32") -> bool:
    """Whether `parameters` are what plain torch computes in so many rounds from zeros, both ways in
    `dtype`."""
    import torch

    travels = getattr(torch, dtype)
    reference = torch.nn.Parameter(torch.zeros(PERIOD))
    local = make_optimizer(optimizer, reference)
    for _ in range(rounds):
        reference.grad = gradient_of(PERIOD).to(travels).float()
        local.step()
    expected = reference.detach().repeat(-(-len(parameters) // PERIOD))[: len(parameters)]
    rounding = torch.finfo(travels).eps
    return bool(torch.allclose(parameters, expected, rtol=max(1e-5, rounding), atol=1e-7))


class Remote:
    """An object in another process, on the next of `cores`; its methods are called by name."""

    cores: Iterator[set[int]] = itertools.repeat(os.sched_getaffinity(0))

    def __init__(self, made, *arguments) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, made, arguments, next(self.cores)), daemon=True
        )
        self._process.start()
        theirs.close()

    def begin(self, name: str, *arguments) -> None:
        self._pipe.send((name, arguments))

    def end(self):
        if not self._pipe.poll(HANG_S):
            raise TimeoutError(f"no answer within {HANG_S:g} s")
        answer = self._pipe.recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def ask(self, name: str, *arguments):
        self.begin(name, *arguments)
        return self.end()

    def cpu(self) -> float:
        """Seconds of processor time that the process has taken."""
        return self.ask("cpu")

    def close(self) -> None:
        self._process.terminate()
        self._process.join(10)


def _serve(pipe: Connection, made, arguments, cores: set[int]) -> None:
    os.sched_setaffinity(0, cores)
    telemetry.configure(level="WARNING", service="benchmark")  # stdout is the table's
    served = made(*arguments)
    while True:
        try:
            name, given = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(time.process_time() if name == "cpu" else getattr(served, name)(*given))
        except Exception as error:  # noqa: BLE001  whoever asked hears of it
            pipe.send(RuntimeError(f"{type(error).__name__}: {error}"))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]


# ---------------------------------------------------------------- floor


class EchoServer:
    def __init__(self, path: str) -> None:
        self._listening = (
            socket.create_server(path, family=socket.AF_UNIX)
            if path
            else socket.create_server(("127.0.0.1", 0))
        )
        threading.Thread(target=self._serve, daemon=True).start()

    def address(self):
        return self._listening.getsockname()

    def _serve(self) -> None:
        while True:
            connection, _ = self._listening.accept()
            threading.Thread(target=self._duplex, args=(connection,), daemon=True).start()

    def _duplex(self, connection: socket.socket) -> None:
        out = into = memoryview(b"")
        while size := int.from_bytes(receive(connection, bytearray(8)), "big"):
            if len(out) != size:
                out, into = memoryview(bytearray(size)), memoryview(bytearray(size))
            duplex(connection, out, into)


def receive(connection: socket.socket, into: bytearray | memoryview) -> bytes | bytearray | memoryview:
    view, got = memoryview(into), 0
    while got < len(view):
        count = connection.recv_into(view[got:], min(len(view) - got, 1 << 20))
        if not count:
            return b""
        got += count
    return into


def duplex(connection: socket.socket, out: memoryview, into: memoryview) -> None:
    sending = threading.Thread(
        target=lambda: [connection.sendall(out[k : k + (1 << 20)]) for k in range(0, len(out), 1 << 20)]
    )
    sending.start()
    receive(connection, into)
    sending.join()


class Floor:
    """The client's side, in its own process as everybody's."""

    def __init__(self, path: str = "") -> None:
        self._server = Remote(EchoServer, path)
        self._address = self._server.ask("address")
        self._connection: socket.socket | None = None

    def setup(self, mib: int, _: str) -> None:
        self._size = mib << 20
        if self._connection is None:
            self._connection = socket.socket(
                socket.AF_UNIX if isinstance(self._address, str) else socket.AF_INET
            )
            self._connection.connect(self._address)
        self._out, self._into = memoryview(bytearray(self._size)), memoryview(bytearray(self._size))

    def round(self) -> float:
        start = time.perf_counter()
        self._connection.sendall(self._size.to_bytes(8, "big"))
        duplex(self._connection, self._out, self._into)
        return time.perf_counter() - start

    def cpu(self) -> list[float]:
        return [self._server.cpu(), time.process_time()]

    def check(self) -> bool:
        return True

    def close(self) -> None:
        self._server.close()
