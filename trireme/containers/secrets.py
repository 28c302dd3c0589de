"""`python -m trireme.containers.secrets`: makes the secrets of a cluster of containers, each kind in a folder (a volume) of its own.

    <root>/etcd-root/password   etcd's superuser           whoever sets up etcd
    <root>/etcd/password        the user of our keys       masters, host agents
    <root>/members/table.json   who may do what (hashes)   masters, host agents
    <root>/members/member       a member's token           masters, host agents
    <root>/admin/admin          an admin's token           commands
    <root>/viewer/viewer        a viewer's token           monitoring
    <root>/grafana/password     of Grafana's user admin    Grafana
    <root>/s3, s3-server        see object_storage.py      who uses the storage; the S3 server

A container mounts only the folders that it needs. What is there already stays, so a user may put secrets of their own there first.
Nothing is ever printed.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from trireme.containers import object_storage
from trireme_shared.platform.runtime import ids
from trireme_shared.platform.security import private_files
from trireme_shared.platform.security.tokens import TABLE, Role, TokenFile, TokenFolder, private_text, write_private
from trireme_shared.protocol.errors import InvalidArgument, TriremeError

ROOT = Path("/secrets")
ETCD_ROOT, ETCD, GRAFANA, PASSWORD = "etcd-root", "etcd", "grafana", "password"
FOLDERS = {Role.ADMIN: "admin", Role.MEMBER: "members", Role.VIEWER: "viewer"}
VARIABLE = "TRIREME_SECRETS"


class TokenVolumes(TokenFolder):
    """The table of tokens beside the members' token; those of admins and viewers in folders of their own."""

    def __init__(self, root: Path) -> None:
        TokenFile.__init__(self, root / FOLDERS[Role.MEMBER] / TABLE)
        self._root = root

    def file(self, role: Role) -> Path:
        return self._root / FOLDERS[role] / role.value

    def prepare(self, given: str = "") -> None:
        """Make what is missing. Tokens that lie there already, and are not known, are a user's own: they count from now on."""
        for role in Role:
            private_files.make_missing(self.file(role).parent)
            if self.file(role).exists():
                self.adopt(role, self.token(role))
        super().prepare(given)


def prepare(root: Path) -> None:
    """Make what is missing below `root`. Raises InvalidArgument: a file there cannot be used, or nothing can be written."""
    for folder in (ETCD_ROOT, ETCD, GRAFANA):
        _prepare_password(root / folder / PASSWORD)
    TokenVolumes(root).prepare()
    object_storage.prepare_keys(root)


def password(root: Path, folder: str) -> str:
    """Raises InvalidArgument if there is none, or others can read it."""
    return private_text(root / folder / PASSWORD).strip()


def root_folder() -> Path:
    """Where the folders are: TRIREME_SECRETS, else /secrets."""
    return Path(os.environ.get(VARIABLE) or ROOT)


def _prepare_password(path: Path) -> None:
    try:
        private_files.make_missing(path.parent)
    except OSError as error:
        raise InvalidArgument(f"{path.parent} cannot be made: {error.strerror}") from error
    if path.exists():
        if not private_text(path).strip():
            raise InvalidArgument(f"{path} is empty", hint="put a password there, or remove it: one is made then")
        return
    write_private(path, f"{ids.secret()}\n")


def main() -> int:
    argparse.ArgumentParser(
        prog="python -m trireme.containers.secrets",
        description="Make the secrets of a cluster of containers below TRIREME_SECRETS (/secrets): etcd's passwords, tokens of an "
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
