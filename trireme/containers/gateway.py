"""`python -m trireme.containers.gateway`: one address at which the leader of a cluster answers, whichever
master that is.

    client ─► gateway ─► the master whose /readyz says that it leads        the others stand by

It passes bytes on and reads none of them, so event streams work as at a master, the master checks token and
Host itself, and with TLS a client sees the master's certificate. When another master leads, connections to
the one before are closed: clients connect again and reach the new one.

With TRIREME_TLS_CA (and TRIREME_TLS_CERT, where masters ask for one) it asks masters by https. Their
certificates must name the host of TRIREME_MASTERS.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import socket
import sys
from typing import Annotated

import aiohttp
from pydantic import Field
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from trireme_shared.platform.membership.settings import of_environment, read
from trireme_shared.platform.runtime import http, output, service, telemetry
from trireme_shared.platform.runtime.containment import Containment
from trireme_shared.platform.security.tls import Tls
from trireme_shared.protocol.errors import InvalidArgument

LOOK_S = 0.5
ANSWER_S = 2.0
WAIT_S = 5.0  # a new connection waits so long for a leader
CHUNK_BYTES = 1 << 16
AFTER_END_S = 5.0  # what a client still sends after the leader's end is passed on for so long
MAX_CONNECTIONS = 1000
TELL_S = 5.0  # refused connections are logged together, so often at most

log = telemetry.logger("gateway")


class Settings(BaseSettings):
    """`masters`: HOST:PORT; the name has one address or several. An IPv6 address stands in brackets."""

    model_config = SettingsConfigDict(env_prefix="TRIREME_", frozen=True)

    masters: Annotated[str, NoDecode] = Field(
        default="master:8470", pattern=r"^([^\s:]+|\[[0-9A-Fa-f:.]+\]):\d{1,5}$"
    )
    host: str = "0.0.0.0"
    port: int = Field(default=8470, ge=0, le=65535)
    log_level: str = "INFO"

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments before the environment."""
        return init_settings, of_environment(env_settings)


class Gateway:
    """`run` it once. `address`: where it listens, once it does. `leader`: the address of the leading master,
    "": none. `tls`: how masters are asked who leads."""

    def __init__(self, settings: Settings, tls: Tls | None = None) -> None:
        """Raises InvalidArgument: the files for TLS cannot be used."""
        self.settings = settings
        self.address: tuple[str, int] = ("", 0)
        host, _, port = settings.masters.rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        self._tls = tls.client() if tls is not None else None
        self.leader = ""
        self._causes: dict[str, str] = {}  # by address: why it was not asked who leads
        self._led = asyncio.Event()
        self._open: dict[asyncio.Task[None], str] = {}
        self._refused = telemetry.Tally()

    def __repr__(self) -> str:
        return f"<Gateway to {self.leader or 'nobody'}: {len(self._open)} connections>"

    async def run(self, stopping: asyncio.Event) -> int:
        """Until `stopping`. Raises InvalidArgument: it cannot listen."""
        try:
            server = await asyncio.start_server(self._accept, self.settings.host, self.settings.port)
        except OSError as error:
            msg = f"cannot listen on {self.settings.host}:{self.settings.port}: {error.strerror}"
            raise InvalidArgument(msg) from error
        self.address = server.sockets[0].getsockname()[:2]
        async with http.session(tls=self._tls) as session:
            looking = asyncio.ensure_future(
                Containment().keep(lambda: self._look(session), "looking for the leader")
            )
            try:
                await stopping.wait()
            finally:
                looking.cancel()
                server.close()
                for task in self._open:
                    task.cancel()
                await asyncio.gather(looking, *self._open, return_exceptions=True)
        return 0

    # ------------------------------------------------------------ who leads

    async def _look(self, session: aiohttp.ClientSession) -> None:
        while True:
            self._note(await self._find(session))
            if refused := self._refused.due(TELL_S):
                log.warning("too_many_connections", most=MAX_CONNECTIONS, refused=refused)
            await asyncio.sleep(LOOK_S)

    async def _find(self, session: aiohttp.ClientSession) -> str:
        """The address of the leader; "": there is none now."""
        try:
            found = await asyncio.get_running_loop().getaddrinfo(
                self._host, self._port, type=socket.SOCK_STREAM
            )
        except OSError as error:
            self._told(self._host, f"its name has no address: {error.strerror or error}")
            return ""
        addresses = list(dict.fromkeys(str(each[4][0]) for each in found))
        leads = await asyncio.gather(*(self._leads(session, address) for address in addresses))
        return next((address for address, leading in zip(addresses, leads, strict=True) if leading), "")

    async def _leads(self, session: aiohttp.ClientSession, address: str) -> bool:
        host = f"[{address}]" if ":" in address else address
        url = f"{'https' if self._tls else 'http'}://{host}:{self._port}/readyz"
        named = self._host if self._tls else None
        try:
            async with asyncio.timeout(ANSWER_S), session.get(url, server_hostname=named) as answer:
                document = json.loads(await answer.content.read(CHUNK_BYTES)) if answer.status == 200 else {}
        except (aiohttp.ClientError, OSError, ValueError) as error:
            self._told(address, f"{type(error).__name__}: {error}")
            return False
        self._causes.pop(address, None)
        return isinstance(document, dict) and document.get("status") == "ok"

    def _told(self, address: str, cause: str) -> None:
        """A master that does not say whether it leads is told once for each cause."""
        if self._causes.get(address) != cause:
            self._causes[address] = cause
            log.warning("master_does_not_answer", master=address, port=self._port, cause=cause)

    def _note(self, leader: str) -> None:
        if leader == self.leader:
            return
        log.info("leader_changed", leader=leader or "none", before=self.leader or "none")
        self.leader = leader
        for task, served in self._open.items():
            if served and served != leader and leader:
                task.cancel()
        if leader:
            self._led.set()
        else:
            self._led.clear()

    # ------------------------------------------------------------ one connection

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._open) >= MAX_CONNECTIONS:
            self._refused.add()
            writer.close()
            return
        self._open[task] = ""
        try:
            await self._serve(task, reader, writer)
        except (asyncio.CancelledError, OSError):
            pass  # another master leads, the gateway ends, or either side is gone
        finally:
            del self._open[task]
            writer.close()

    async def _serve(
        self, task: asyncio.Task[None], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            async with asyncio.timeout(WAIT_S):
                await self._led.wait()
                self._open[task] = leader = self.leader
                there, back = await asyncio.open_connection(leader, self._port)
        except (TimeoutError, OSError) as error:
            writer.write(_no_leader(str(error) or "; ".join(self._causes.values())))
            await writer.drain()
            return
        try:
            async with asyncio.TaskGroup() as group:
                asked = group.create_task(_pass_on(reader, back))
                await _pass_on(there, writer)
                await asyncio.wait([asked], timeout=AFTER_END_S)
                asked.cancel()  # clients keep a connection that the leader has ended
        except* OSError:
            pass  # one side is gone: so is the other now
        finally:
            back.close()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Until its end, which is passed on, too."""
    while chunk := await reader.read(CHUNK_BYTES):
        writer.write(chunk)
        await writer.drain()
    with contextlib.suppress(OSError):
        writer.write_eof()


def _no_leader(cause: str) -> bytes:
    problem = {
        "type": "about:blank",
        "title": "Service Unavailable",
        "status": 503,
        "detail": f"no master leads the cluster: waited {WAIT_S:g} s" + (f" ({cause})" if cause else ""),
        "code": "NOT_LEADER",
        "retryable": True,
    }
    body = json.dumps(problem).encode()
    head = (
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/problem+json\r\n"
        f"Content-Length: {len(body)}\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


def main() -> int:
    argparse.ArgumentParser(
        prog="python -m trireme.containers.gateway",
        description="Passes connections on to the master that leads. TRIREME_MASTERS: HOST:PORT of the "
        "masters, a name with the "
        "addresses of all (master:8470). TRIREME_HOST, TRIREME_PORT: where it listens. "
        "TRIREME_TLS_CA, TRIREME_TLS_CERT, TRIREME_TLS_KEY: with these it asks masters by https.",
    ).parse_args()
    settings = read(Settings)
    output.patient()
    telemetry.configure(level=settings.log_level, service="gateway", member="gateway")
    return service.run(lambda stopping: serve(settings, stopping))


async def serve(settings: Settings, stopping: asyncio.Event) -> int:
    """Raises InvalidArgument: it cannot listen, or the files for TLS cannot be used."""
    return await Gateway(settings, Tls.from_environment()).run(stopping)


if __name__ == "__main__":
    sys.exit(main())
