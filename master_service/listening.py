"""Where a master listens: at the port that it is given, at the one that it had before, or at any free one.

no TRIREME_PORT ─► the port in TRIREME_PORT_FILE, if it is free ─► else any free one, which is kept there
"""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

from master_service.settings import Settings
from trireme_shared.platform.runtime import telemetry
from trireme_shared.platform.security import private_files
from trireme_shared.protocol.errors import InvalidArgument

WAITING = 512  # connections that nobody has accepted yet

log = telemetry.logger("listening")


def listen(settings: Settings) -> socket.socket:
    """Raises InvalidArgument if nobody can listen there."""
    file = settings.port_file if settings.port == 0 else None
    listener = None
    if file is not None and (before := _kept_port(file)):
        with contextlib.suppress(OSError):  # somebody else has it now
            listener = _at(settings.host, before)
    try:
        listener = listener or _at(settings.host, settings.port)
    except OSError as error:
        msg = f"cannot listen on {settings.host}:{settings.port}: {error.strerror}; free it or set TRIREME_PORT"
        raise InvalidArgument(msg) from error
    listener.setblocking(False)
    if file is not None:
        try:
            private_files.write_text(file, str(listener.getsockname()[1]))
        except OSError as error:  # a full disk, say: the next process has another port
            log.warning("port_not_kept", file=str(file), cause=str(error))
    return listener


def _at(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=WAITING)


def _kept_port(file: Path) -> int:
    """Of a process before; 0: there is none, or the file says nothing that is a port."""
    try:
        port = int(file.read_text())
    except (OSError, ValueError):
        return 0
    return port if 0 < port < 1 << 16 else 0
