"""`python -m trireme.containers.secrets`: makes the secrets of a cluster of containers, each kind in a folder
(a volume) of its own.

    <root>/etcd-root/password      etcd's superuser                 whoever sets up etcd
    <root>/etcd/password           the user of our keys             masters, host agents
    <root>/members/table.json      who may do what (hashes)         masters, host agents
    <root>/members/member          a member's token                 masters, host agents
    <root>/admin/admin             an admin's token                 commands
    <root>/viewer/viewer           a viewer's token                 monitoring
    <root>/grafana/password        of Grafana's user admin          Grafana
    <root>/s3/credentials          keys, as the AWS tools read it   who reads and writes the storage
    <root>/s3-server/config.json   those, as SeaweedFS reads it     the cluster's own S3 server alone

A container mounts only the folders that it needs. What is there already stays, so a user may put secrets of
their own there first. Nothing is ever printed.
"""

from __future__ import annotations

import argparse
import configparser
import json
import os
import sys
from pathlib import Path

from trireme_shared.platform.runtime import ids
from trireme_shared.platform.security import private_files
from trireme_shared.platform.security.tokens import (
    TABLE,
    Role,
    TokenFile,
    TokenFolder,
    private_text,
    write_private,
)
from trireme_shared.protocol.errors import InvalidArgument, TriremeError

ROOT = Path("/secrets")
ETCD_ROOT, ETCD, GRAFANA, PASSWORD = "etcd-root", "etcd", "grafana", "password"
FOLDERS = {Role.ADMIN: "admin", Role.MEMBER: "members", Role.VIEWER: "viewer"}
VARIABLE = "TRIREME_SECRETS"
S3, CREDENTIALS = "s3", "credentials"
S3_SERVER, SERVER_CONFIG = "s3-server", "config.json"
S3_USER, S3_RIGHTS = "trireme", ("Admin", "Read", "Write", "List", "Tagging")
SECTION, KEY_ID, KEY = "default", "aws_access_key_id", "aws_secret_access_key"


class TokenVolumes(TokenFolder):
    """The table of tokens beside the members' token; those of admins and viewers in folders of their own."""

    def __init__(self, root: Path) -> None:
        TokenFile.__init__(self, root / FOLDERS[Role.MEMBER] / TABLE)
        self._root = root

    def file(self, role: Role) -> Path:
        return self._root / FOLDERS[role] / role.value

    def prepare(self, given: str = "") -> None:
        """Make what is missing. Tokens that lie there already, and are not known, are a user's own: they
        count from now on."""
        for role in Role:
            private_files.make_missing(self.file(role).parent)
            if self.file(role).exists():
                self.adopt(role, self.token(role))
        super().prepare(given)


def prepare(root: Path) -> None:
    """Make what is missing below `root`. Raises InvalidArgument: a file there cannot be used, or nothing can
    be written."""
    for folder in (ETCD_ROOT, ETCD, GRAFANA):
        _prepare_password(root / folder / PASSWORD)
    TokenVolumes(root).prepare()
    prepare_s3_keys(root)


def prepare_s3_keys(root: Path) -> None:
    """Make what is missing below `root`; the server's file always has the keys of the other one. Raises
    InvalidArgument."""
    credentials, config = root / S3 / CREDENTIALS, root / S3_SERVER / SERVER_CONFIG
    for path in (credentials, config):
        _make_folder(path.parent)
    if not credentials.exists():
        write_private(credentials, f"[{SECTION}]\n{KEY_ID} = {S3_USER}\n{KEY} = {ids.secret()}\n")
    key_id, key = _s3_keys(credentials)
    identity = {
        "name": S3_USER,
        "credentials": [{"accessKey": key_id, "secretKey": key}],
        "actions": S3_RIGHTS,
    }
    text = json.dumps({"identities": [identity]}, indent=1) + "\n"
    if not config.exists() or private_text(config) != text:
        write_private(config, text)


def _s3_keys(path: Path) -> tuple[str, str]:
    parser = configparser.ConfigParser(interpolation=None)
    hint = f"write it as for the AWS tools: [{SECTION}], {KEY_ID} = ..., {KEY} = ..."
    try:
        parser.read_string(private_text(path))
    except configparser.Error:  # its message may show a key
        raise InvalidArgument(f"{path} is no file of credentials", hint=hint) from None
    found = tuple(parser.get(SECTION, name, fallback="").strip() for name in (KEY_ID, KEY))
    if not all(found):
        raise InvalidArgument(f"{path} has no {KEY_ID} and {KEY} below [{SECTION}]", hint=hint)
    return found[0], found[1]


def password(root: Path, folder: str) -> str:
    """Raises InvalidArgument if there is none, or others can read it."""
    return private_text(root / folder / PASSWORD).strip()


def root_folder() -> Path:
    """Where the folders are: TRIREME_SECRETS, else /secrets."""
    return Path(os.environ.get(VARIABLE) or ROOT)


def _make_folder(folder: Path) -> None:
    try:
        private_files.make_missing(folder)
    except OSError as error:
        raise InvalidArgument(f"{folder} cannot be made: {error.strerror}") from error


def _prepare_password(path: Path) -> None:
    _make_folder(path.parent)
    if path.exists():
        if not private_text(path).strip():
            raise InvalidArgument(
                f"{path} is empty", hint="put a password there, or remove it: one is made then"
            )
        return
    write_private(path, f"{ids.secret()}\n")


def main() -> int:
    argparse.ArgumentParser(
        prog="python -m trireme.containers.secrets",
        description="Make the secrets of a cluster of containers below TRIREME_SECRETS (/secrets): etcd's "
        "passwords, tokens of an "
        "admin, of members and of a viewer, keys of an S3 server. Those that are there stay.",
    ).parse_args()
    try:
        prepare(root_folder())
    except TriremeError as error:
        sys.stderr.write(f"error: {error.message}\n" + (f"hint: {error.hint}\n" if error.hint else ""))
        return 2
    sys.stdout.write(f"the cluster's secrets are in {root_folder()}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
