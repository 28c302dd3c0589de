"""Another user of the machine, who is told everything about a run or a cluster and tries what such a user can
try.

    python other_user.py < {"pids", "ports", "routes", "sockets", "files", "folders", "shared_before"}
        ->   one line of JSON for each attempt: [what, what came of it]

Started as root, it becomes NOBODY for good before it does anything. It uses the standard library only.
"""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

NOBODY = 65534
GOT = "GOT IN"
TIMEOUT_S = 5.0
ANYTHING = '{"key": "AA==", "range_end": "AA=="}'
READS = ("/v1/job", "/v1/info", "/v1/config", "/metrics")  # beside the routes that the test tells
WRITES = ("/v1/init", "/v1/ledger", "/v1/handoffs", "/v1/snapshots")
PTRACE_ATTACH, PTRACE_DETACH = 16, 17

Attempt = tuple[str, Callable[[], str | None]]


def main() -> None:
    told = json.load(sys.stdin)
    "localhost".encode("idna")  # imported now: it may lie where only root can read
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    assert os.getresuid() == (NOBODY, NOBODY, NOBODY)
    for what, attempt in attempts(told):
        try:
            found = attempt()
            outcome = "nothing there" if found is None else f"{GOT}: {found}"
        except (OSError, http.client.HTTPException) as error:
            outcome = f"{type(error).__name__}: {error}"
        sys.stdout.write(f"{json.dumps([what, outcome])}\n")
        sys.stdout.flush()


def attempts(told: dict[str, Any]) -> Iterator[Attempt]:
    for port in told["ports"]:
        yield from at_port(
            port, [*told["routes"], *(("GET", path) for path in READS), *(("POST", path) for path in WRITES)]
        )
    for path in told["sockets"]:
        yield f"connect to the socket {path}", lambda path=path: connect(path)
    for path in told["files"]:
        yield f"read {path}", lambda path=path: read(path)
        yield f"write {path}", lambda path=path: str(os.open(path, os.O_WRONLY))
    for path in told["folders"]:
        yield f"list {path}", lambda path=path: str([*Path(path).iterdir()])
        yield f"make a file in {path}", lambda path=path: str(os.open(f"{path}/x", os.O_WRONLY | os.O_CREAT))
        yield f"rename {path}", lambda path=path: str(Path(path).rename(f"{path}.old"))
    for path in Path("/dev/shm").iterdir():
        if str(path) not in told["shared_before"]:
            yield f"read shared memory {path}", lambda path=path: read(str(path))
    yield "find System V shared memory", lambda: system_v(told["pids"])
    for pid in told["pids"]:
        yield from at_process(pid)


def at_port(port: int, routes: list[tuple[str, str]]) -> Iterator[Attempt]:
    yield f"read etcd at port {port}", lambda: request(port, "POST", "/v3/kv/range", ANYTHING)
    yield (
        f"write etcd at port {port}",
        lambda: request(port, "POST", "/v3/kv/put", '{"key": "AA==", "value": "AA=="}'),
    )
    yield f"join etcd at port {port}", lambda: request(port, "GET", "/members")
    yield f"raft of etcd at port {port}", lambda: request(port, "GET", "/raft/probing")
    for method, path in routes:
        body = "" if method == "GET" else "{}"
        yield f"{method} {path} at port {port}", lambda place=(method, path, body): request(port, *place)
    for address in ("127.0.0.1", "0.0.0.0", "::"):
        yield f"listen at port {port} of {address} as well", lambda address=address: listen(address, port)
    stream = {"Connection": "Upgrade", "Upgrade": "trireme-frames/1"}
    yield f"open a stream at port {port}", lambda: request(port, "GET", "/v1/stream", headers=stream)


def request(
    port: int, method: str, path: str, body: str = "", headers: dict[str, str] | None = None
) -> str | None:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)) as connection:
        connection.request(method, path, body, {"Content-Type": "application/json", **(headers or {})})
        answer = connection.getresponse()
        if answer.status in (404, 405):
            return None
        if answer.status in (401, 403, 421):  # any other has looked at the request
            raise PermissionError(f"{answer.status} {answer.reason}")
        text = "" if answer.status == 101 else answer.read(200).decode(errors="replace")
        return f"{answer.status} {text}"


def listen(address: str, port: int) -> str:
    """Who does gets requests of others, with their tokens."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((address, port))
        listener.listen()
        listener.settimeout(0.1)
        try:
            listener.accept()
        except TimeoutError:
            return "listens"
        return "somebody connected"


def connect(path: str) -> str:
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        with socket.socket(socket.AF_UNIX, kind) as client:
            client.settimeout(TIMEOUT_S)
            try:
                client.connect(path.replace("@", "\0", 1) if path.startswith("@") else path)
            except OSError as error:
                refused = error
            else:
                return "connected"
    raise refused


def read(path: str) -> str:
    with Path(path).open("rb") as file:
        return repr(file.read(20))


def system_v(pids: list[int]) -> str | None:
    found = []
    for kind in ("shm", "sem", "msg"):
        lines = Path(f"/proc/sysvipc/{kind}").read_text().splitlines()
        names = lines[0].split()
        for line in lines[1:]:
            entry = dict(zip(names, line.split(), strict=False))
            if any(int(entry.get(name, 0)) in pids for name in ("cpid", "lpid", "lspid", "lrpid")):
                found.append(f"{kind} {entry}")
    return str(found) if found else None


def at_process(pid: int) -> Iterator[Attempt]:
    for name in (
        "environ",
        "mem",
        "maps",
        "smaps",
        "pagemap",
        "auxv",
        "stack",
        "syscall",
        "io",
        "clear_refs",
    ):
        yield f"read /proc/{pid}/{name}", lambda name=name: read(f"/proc/{pid}/{name}")
    for name in ("cwd", "root", "exe"):
        yield f"follow /proc/{pid}/{name}", lambda name=name: str(Path(f"/proc/{pid}/{name}").readlink())
    yield f"list descriptors of {pid}", lambda: str([*Path(f"/proc/{pid}/fd").iterdir()])
    for number in range(40):  # memfds of shared memory are among them
        yield f"open descriptor {number} of {pid}", lambda number=number: read(f"/proc/{pid}/fd/{number}")
    yield f"change oom_score_adj of {pid}", lambda: str(os.open(f"/proc/{pid}/oom_score_adj", os.O_WRONLY))
    for number in (0, signal.SIGCONT, signal.SIGSTOP, signal.SIGTERM, signal.SIGKILL):
        yield f"signal {int(number)} to {pid}", lambda number=number: str(os.kill(pid, number))
    yield (
        f"signal by pidfd to {pid}",
        lambda: str(signal.pidfd_send_signal(os.pidfd_open(pid), signal.SIGTERM)),
    )
    yield f"lower the priority of {pid}", lambda: str(os.setpriority(os.PRIO_PROCESS, pid, 19))
    yield f"bind {pid} to one core", lambda: str(os.sched_setaffinity(pid, {0}))
    yield (
        f"limit the memory of {pid}",
        lambda: str(resource.prlimit(pid, resource.RLIMIT_AS, (1 << 20, 1 << 20))),
    )
    yield f"trace {pid}", lambda: trace(pid)
    yield f"read the memory of {pid}", lambda: read_memory(pid)


def trace(pid: int) -> str:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(PTRACE_ATTACH, pid, None, None) == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    os.waitpid(pid, 0)
    libc.ptrace(PTRACE_DETACH, pid, None, None)
    return "attached"


class IoVector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def read_memory(pid: int) -> str:
    libc, buffer = ctypes.CDLL(None, use_errno=True), ctypes.create_string_buffer(8)
    here = IoVector(ctypes.addressof(buffer), 8)
    there = IoVector(0x400000, 8)
    if libc.process_vm_readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0) == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return repr(buffer.raw)


if __name__ == "__main__":
    main()
