#!/usr/bin/env python3
"""Exit code 0 if the service in this container is ready: its /readyz at TRIREME_PORT, else the file that it
makes (TRIREME_READY_FILE). Prints what /readyz says: of a host also whether the processes of its places live
and are ready."""

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
    if port not in ("", "0"):
        return _asked(port)
    if file:
        return None if Path(file).exists() else f"it has not made {file} yet"
    return None  # a command, no service


def _asked(port: str) -> str | None:
    ca, cert = os.environ.get("TRIREME_TLS_CA", ""), os.environ.get("TRIREME_TLS_CERT", "")
    context = None
    if cert:
        context = ssl.create_default_context(cafile=ca or None)
        context.check_hostname = False  # it is this container, by whatever name
        context.load_cert_chain(cert, os.environ.get("TRIREME_TLS_KEY") or None)
    url = f"{'https' if cert else 'http'}://127.0.0.1:{port}/readyz"
    try:
        # http or https
        with urllib.request.urlopen(url, timeout=TIMEOUT_S, context=context) as answer:  # noqa: S310
            sys.stdout.write(f"{_text(answer)}\n")
            return None
    except urllib.error.HTTPError as error:
        return f"{url}: {error}: {_text(error)}"
    except OSError as error:
        return f"{url}: {error}"


def _text(answer: IO[bytes]) -> str:
    return answer.read(MOST_BYTES).decode(errors="replace")


if __name__ == "__main__":
    sys.exit(main())
