"""`python -m tests.trireme.communicator.forked_members ETCD`: two members and a forked process that tries to
use one of them. Prints one JSON object. `... ETCD killed`: one member that forks a process, prints the pid of
that, and is killed as soon as it is in a group of two."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import trireme
from trireme_shared.protocol.errors import InvalidArgument

TTL_S = 2.0
LIMIT_S = 15.0  # of the forked process, its end included; a call that waits takes longer
CALLS = {
    "allreduce": lambda one: one.allreduce(1.0),
    "broadcast": lambda one: one.broadcast(1.0),
    "barrier": lambda one: one.barrier(),
}


def together(made) -> list[float]:
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda one: one.allreduce(1.0, op="SUM"), made))
    return [value for status, value in found if status]


def refused(one, writer: int) -> None:
    """Tell what calls answer, then leave as a program does that ends."""
    told = {}
    for name, call in CALLS.items():
        try:
            told[name] = repr(call(one))
        except InvalidArgument as error:
            told[name] = str(error)
    one.close()
    os.write(writer, json.dumps(told).encode())
    sys.exit(0)


def ended(child: int) -> bool:
    """Within LIMIT_S; else it is killed."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        if os.waitpid(child, os.WNOHANG)[0]:
            return True
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def main(etcd: str) -> None:
    settings = {"timeout_s": 60.0, "lease_ttl_s": TTL_S, "share_state": False, "min_members": 2}
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(lambda _: trireme.CollectiveCommunicator("forked", etcd, **settings), range(2)))
    sums = [together(made)]
    reader, writer = os.pipe()
    if not (child := os.fork()):
        refused(made[0], writer)
    os.close(writer)
    begun = time.monotonic()
    found = {
        "ended": ended(child),
        "seconds": time.monotonic() - begun,
        "told": os.read(reader, 1 << 16).decode(),
    }
    epoch = made[0].epoch
    time.sleep(1.5 * TTL_S)  # a lease that nobody renews would be over
    sums.append(together(made))
    found |= {"sums": sums, "epochs": made[0].epoch - epoch, "process": os.getpid(), "child": child}
    print(json.dumps(found))  # noqa: T201
    for one in made:
        one.close()


def die(etcd: str) -> None:
    one = trireme.CollectiveCommunicator(
        "killed", etcd, timeout_s=60.0, lease_ttl_s=20.0, share_state=False, min_members=2
    )
    assert one.barrier()
    if not (child := os.fork()):
        time.sleep(60.0)
        signal.raise_signal(signal.SIGKILL)
    print(child, flush=True)  # noqa: T201
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1]) if sys.argv[2:] != ["killed"] else die(sys.argv[1])
