"""`trireme certs`: a small certificate authority for a cluster, and certificates of it."""

from __future__ import annotations

import json
import re
import socket
import sys
from pathlib import Path

from trireme.cli.exit_codes import OK, report_error
from trireme_shared.platform.security.authority import CA, create_authority, hosts_of, issue
from trireme_shared.platform.security.tls import Tls
from trireme_shared.protocol.errors import InvalidArgument, TriremeError

NAME = r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,62}[A-Za-z0-9])?$"
OWN = ("localhost", "127.0.0.1", "::1")


def make_certificates(folder: Path, name: str, hosts: list[str], days: int, *, renew: bool, as_json: bool) -> int:
    """Returns the exit code. `renew`: the certificate is there, and its hosts stay."""
    try:
        _make(folder, name, hosts, days, renew=renew, as_json=as_json)
    except TriremeError as error:
        return report_error(error, as_json=as_json)
    return OK


def _make(folder: Path, name: str, hosts: list[str], days: int, *, renew: bool, as_json: bool) -> None:
    if not re.match(NAME, name) or name == "ca":
        raise InvalidArgument(f"{name[:80]!r} is no name for a certificate", hint="use letters, digits, . _ and -")
    before = hosts_of(folder / f"{name}.pem") if renew else (*OWN, socket.gethostname())
    named = tuple(dict.fromkeys([*before, *hosts]))
    fresh = not (folder / CA).exists()
    if fresh:
        create_authority(folder)
    end = issue(folder, name, named, days)
    tls = Tls(str(folder / CA), str(folder / f"{name}.pem"), str(folder / f"{name}-key.pem"))
    tls.check()
    variables = tls.environment()
    if as_json:
        print(json.dumps({**variables, "hosts": named, "expire_time": end.isoformat().replace("+00:00", "Z")}))  # noqa: T201
        return
    made = f"{folder / CA} is a new certificate authority; keep {folder / 'ca-key.pem'} secret\n" if fresh else ""
    sys.stderr.write(f"{made}{tls.cert} is for {', '.join(named)}, until {end.date()}\n\n")
    sys.stderr.write(
        "for every service and command (TRIREME_TLS_MUTUAL=1 beside them: only clients with a certificate):\n"
    )
    print("\n".join(f"export {variable}={value}" for variable, value in variables.items()))  # noqa: T201
