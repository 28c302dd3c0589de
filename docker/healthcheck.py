#!/usr/bin/env python3
"""Exit code 0 if the service in this container is ready: its /readyz at TRIREME_PORT, else the file that it
makes (TRIREME_READY_FILE). Prints what /readyz says: of a host also whether the processes of its places live
and are ready. It asks its own container, so no proxy of the environment is asked."""

from __future__ import annotations

import os
import ssl
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import IO

TIMEOUT_S = 3
MOST_BYTES = 4000  # the engine keeps 4096 of what a check prints


def main() -> str | None:
    """None, or why it is not ready."""
    port, file = os.environ.get("TRIREME_PORT", ""), os.environ.get("TRIREME_READY_FILE", "")
    if port.isdecimal() and int(port):  # tcp://...: of a service link, and services take it for no setting
        return _asked(int(port))
    if file:
        return None if Path(file).exists() else f"it has not made {file} yet"
    return None  # a command, no service


def _asked(port: int) -> str | None:
    ca, cert = os.environ.get("TRIREME_TLS_CA", ""), os.environ.get("TRIREME_TLS_CERT", "")
    # a gateway passes on what masters say, and needs no certificate of its own
    secure = bool(cert or (ca and "TRIREME_MASTERS" in os.environ))
    context = None
    if secure:
        context = ssl.create_default_context(cafile=ca or None)
        context.check_hostname = False  # it is this container, by whatever name
    if context and cert:
        context.load_cert_chain(cert, os.environ.get("TRIREME_TLS_KEY") or None)
    url = f"{'https' if secure else 'http'}://{_host()}:{port}/readyz"
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
    )
    try:
        with opener.open(url, timeout=TIMEOUT_S) as answer:
            sys.stdout.write(f"{_text(answer)}\n")
            return None
    except urllib.error.HTTPError as error:
        return f"{url}: {error}: {_text(error)}"
    except OSError as error:
        return f"{url}: {error}"


def _host() -> str:
    """Where the service can be asked from inside its container, as part of a URL."""
    host = os.environ.get("TRIREME_HOST", "")
    own = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{own}]" if ":" in own else own


def _text(answer: IO[bytes]) -> str:
    return answer.read(MOST_BYTES).decode(errors="replace")


if __name__ == "__main__":
    sys.exit(main())
