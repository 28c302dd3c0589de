"""`trireme token ...`: the tokens of a run or a cluster on this machine, or of a table that services
elsewhere read; `trireme certs`: a small certificate authority for a cluster, and certificates of it."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trireme.cli import exit_codes
from trireme.cli.targets import is_of_cluster
from trireme.containers import secrets
from trireme.containers.secrets import TokenVolumes
from trireme.launch import run_folder
from trireme.pool import cluster_folder
from trireme.settings import UsageError
from trireme_shared.platform.security.authority import CA, create_authority, hosts_of, issue
from trireme_shared.platform.security.tls import Tls
from trireme_shared.platform.security.tokens import Role, TokenFile, TokenFolder, TokenRecord
from trireme_shared.protocol.errors import InvalidArgument, TriremeError

NAME = r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,62}[A-Za-z0-9])?$"
OWN = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class Where:
    """The table `file`, else that of the volumes of a cluster of containers (TRIREME_SECRETS), else that of a
    job's run, else that of the cluster or the run in the data folder that started last."""

    file: Path | None = None
    job: str | None = None
    data_dir: Path | None = None

    def tokens(self) -> TokenFile:
        """Raises NotFound."""
        if self.file is not None:
            return TokenFile(self.file.absolute())
        if (self.job, self.data_dir) == (None, None) and (root := os.environ.get(secrets.VARIABLE)):
            return TokenVolumes(Path(root))
        cluster = cluster_folder.place_of(self.data_dir)
        if self.job is None and cluster.is_dir() and is_of_cluster(None, self.data_dir):
            return TokenFolder(cluster)
        return TokenFolder(run_folder.find_begun_run(self.data_dir, self.job, "--data-dir or --file")[0])


def list_tokens(where: Where, *, as_json: bool) -> int:
    def listed(tokens: TokenFile) -> tuple[dict[str, Any], str]:
        records = tokens.records()
        document = {"table": str(tokens.table), "tokens": [described(record) for record in records]}
        lines = [line_of(record) for record in records] or ["no token: nobody is asked for one"]
        return document, "\n".join(lines)

    return _done(where, listed, as_json=as_json)


def create_token(where: Where, name: str, role: str, valid_s: float | None, *, as_json: bool) -> int:
    def created(tokens: TokenFile) -> tuple[dict[str, Any], str]:
        if role not in set(Role):
            raise UsageError(f"--role {role}: give one of {', '.join(Role)}")
        token = tokens.create(name, Role(role), valid_s)
        return {"name": name, "role": role, "token": token}, token

    return _done(where, created, as_json=as_json)


def rotate_token(where: Where, name: str, keep_s: float, *, as_json: bool) -> int:
    def rotated(tokens: TokenFile) -> tuple[dict[str, Any], str]:
        token = tokens.rotate(name, keep_s)
        return {"name": name, "token": token, "keep_s": keep_s}, token

    return _done(where, rotated, as_json=as_json)


def revoke_token(where: Where, name: str, *, as_json: bool) -> int:
    def revoked(tokens: TokenFile) -> tuple[dict[str, Any], str]:
        record = tokens.revoke(name)
        return described(record), f"the token {name} ({record.role}) is refused from now on"

    return _done(where, revoked, as_json=as_json)


def described(record: TokenRecord) -> dict[str, Any]:
    """Of a token, without its hash."""
    return record.model_dump(mode="json", exclude={"sha256"})


def line_of(record: TokenRecord) -> str:
    until = f", until {record.expire_time}" if record.expire_time else ""
    return f"{record.name:<24} {record.role:<8} since {record.create_time or 'unknown'}{until}"


def _done(where: Where, act: Callable[[TokenFile], tuple[dict[str, Any], str]], *, as_json: bool) -> int:
    """Print what was done; returns the exit code."""
    try:
        document, text = act(where.tokens())
    except TriremeError as error:
        return exit_codes.report_error(error, as_json=as_json)
    print(json.dumps(document) if as_json else text)  # noqa: T201
    return exit_codes.OK


def make_certificates(
    folder: Path, name: str, hosts: list[str], days: int, *, renew: bool, as_json: bool
) -> int:
    """Returns the exit code. `renew`: the certificate is there, and its hosts stay."""
    try:
        _make(folder, name, hosts, days, renew=renew, as_json=as_json)
    except TriremeError as error:
        return exit_codes.report_error(error, as_json=as_json)
    return exit_codes.OK


def _make(folder: Path, name: str, hosts: list[str], days: int, *, renew: bool, as_json: bool) -> None:
    if not re.match(NAME, name) or name == "ca":
        raise InvalidArgument(
            f"{name[:80]!r} is no name for a certificate", hint="use letters, digits, . _ and -"
        )
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
        print(  # noqa: T201
            json.dumps({**variables, "hosts": named, "expire_time": end.isoformat().replace("+00:00", "Z")})
        )
        return
    made = (
        f"{folder / CA} is a new certificate authority; keep {folder / 'ca-key.pem'} secret\n"
        if fresh
        else ""
    )
    sys.stderr.write(f"{made}{tls.cert} is for {', '.join(named)}, until {end.date()}\n\n")
    sys.stderr.write(
        "for every service and command (TRIREME_TLS_MUTUAL=1 beside them: only clients with a certificate):\n"
    )
    print("\n".join(f"export {variable}={value}" for variable, value in variables.items()))  # noqa: T201
