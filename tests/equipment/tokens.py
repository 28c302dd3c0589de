"""Services that know a token of each role."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from trireme_shared.platform.security.access import Access
from trireme_shared.platform.security.tokens import Role, TokenRecord, Tokens, TokenTable, digest_of


def write_tokens(path: Path, tokens: dict[str, Role]) -> Path:
    """A table with these tokens."""
    records = tuple(
        TokenRecord(name=f"t{number}", role=role, sha256=digest_of(token))
        for number, (token, role) in enumerate(tokens.items())
    )
    fresh = path.with_name(f"{path.name}.new")
    fresh.write_bytes(TokenTable(tokens=records).to_bytes())
    fresh.chmod(0o600)
    fresh.replace(path)
    return path


def access_by_role(path: Path, hosts: Iterable[str] = ()) -> Access:
    """A service for whose table `path` is used; each role's token is the role's name."""
    return Access.of(Tokens(write_tokens(path, {role.value: role for role in Role})), hosts)
