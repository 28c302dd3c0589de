"""A connection that tells at once when another process is dead: the kernel closes it, and refuses the next one.

    member: listens, says who it is, holds the connection          observer: connect ─► its line ─► read until it ends ─┐
                                                                       ▲        └─ refused, or another process: dead     │
                                                                       └───────────────────────────────────────────────┘
A frozen process, or one behind a broken network, proves nothing: its lease runs out. A forked process lets go of what it has inherited: else
the kernel would not close it when the member dies.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from trireme_shared.platform.runtime import clock, ids, network, telemetry
from trireme_shared.protocol.records.members import CommunicatorMember

CONNECT_S = 2.0
PAUSE_S = 0.5
LINE_BYTES = 256
MAX_CONNECTIONS = 4096

Held = tuple[asyncio.Server, set[asyncio.StreamWriter]]

_held: list[Held] = []  # of this process
log = telemetry.logger("collective.lifeline")


def _let_go() -> None:
    """In a forked process. Nothing is shut down, and the descriptors stay taken: their objects close them at some time."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for server, writers in _held:
        own = [*server.sockets, *(writer.get_extra_info("socket") for writer in writers)]
        for descriptor in [each.fileno() for each in own]:
            if descriptor >= 0:
                os.dup2(nothing, descriptor, inheritable=False)
    os.close(nothing)
    _held.clear()


os.register_at_fork(after_in_child=_let_go)


@asynccontextmanager
async def lifeline(host: str, incarnation: str) -> AsyncIterator[int]:
    """Listen at a free port of `host`, which is yielded. Nothing is read from the connections, and nothing secret is said."""
    held: set[asyncio.StreamWriter] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(held) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        held.add(writer)
        try:
            writer.write(f"{incarnation}\n".encode())
            while await reader.read(LINE_BYTES):
                pass
        except OSError:
            pass
        finally:
            held.discard(writer)
            writer.close()

    server = await asyncio.start_server(answer, host, 0)
    own = server, held
    _held.append(own)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        _held[:] = [each for each in _held if each is not own]
        server.close()
        for writer in list(held):
            writer.transport.abort()


async def until_dead(member: CommunicatorMember) -> None:
    """Returns when that process is proved dead, else never: cancel it."""
    host, _, port = member.address.rpartition(":")
    proves = network.tells(f"tcp://{member.address}", member.network, network.own_network())
    short = 0  # connections in a row that ended soon
    while True:
        try:
            async with asyncio.timeout(CONNECT_S):
                reader, writer = await asyncio.open_connection(host.strip("[]"), int(port), limit=LINE_BYTES)
        except ConnectionRefusedError:
            if proves:
                return
            await asyncio.sleep(ids.jitter(PAUSE_S))
            continue
        except (OSError, TimeoutError):
            await asyncio.sleep(ids.jitter(PAUSE_S))
            continue
        began = clock.monotonic()
        try:
            if await _is_another(reader, member) and proves:
                return
            while await reader.read(LINE_BYTES):
                pass
        except (OSError, ValueError):
            pass
        finally:
            writer.transport.abort()
            with suppress(OSError):
                await writer.wait_closed()
        # one that closes each connection at once shall not keep this process busy; one that died just now is found at once
        short = short + 1 if clock.monotonic() - began < PAUSE_S else 0
        await asyncio.sleep(ids.jitter(PAUSE_S) if short > 1 else 0.001)


async def reaches(member: CommunicatorMember) -> bool:
    """Whether a connection to that process is made and answered within CONNECT_S. A refused one counts: then the way is open, and the process is
    dead, which is proved in another way."""
    host, _, port = member.address.rpartition(":")
    try:
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port), limit=LINE_BYTES)
            try:
                return bool(await reader.readline())
            finally:
                writer.transport.abort()
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError, ValueError):
        return False


async def _is_another(reader: asyncio.StreamReader, member: CommunicatorMember) -> bool:
    """Whether another process than `member` listens there by now. Waits as long as a frozen process says nothing."""
    line = await reader.readline()
    return bool(line) and line.decode("ascii", "replace").strip() != member.incarnation
