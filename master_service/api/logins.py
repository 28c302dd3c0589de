"""Codes by which a browser logs in: `trireme dashboard` opens an address with a code, never with a token.

a token ──createLoginCode──► a code ── #/login/CODE of the page ──createLogin──► the token, once
                                └── VALID_S over, or used ──► refused

A code gives whoever has it what the token gives: it is a secret until it is used. It lies in the memory of
the master that made it, as a hash, so that master's page takes it whoever leads by then. It ends with that
process.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from trireme_shared.platform.runtime import ids
from trireme_shared.platform.security.tokens import digest_of
from trireme_shared.protocol.errors import Unauthorized

VALID_S = 120.0
MOST = 64  # at once: the oldest makes place


@dataclass(slots=True)
class LoginCodes:
    """Codes that nobody has used yet."""

    #: By the hash of each code: when it ends, and the token that it stands for. The oldest first.
    _open: dict[str, tuple[float, str]] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<LoginCodes: {len(self._open)} not used yet>"

    def create(self, token: str, now: float) -> str:
        """A new code for `token` ("": the service asks for none), until `now` + VALID_S seconds."""
        self._forget(now)
        if len(self._open) >= MOST:
            del self._open[next(iter(self._open))]
        code = f"trireme_login_{ids.secret()}"
        self._open[digest_of(code)] = (now + VALID_S, token)
        return code

    def use(self, code: str, now: float) -> str:
        """The token of a code, which is over with that. Raises Unauthorized."""
        self._forget(now)
        if (found := self._open.pop(digest_of(code), None)) is None:
            msg = (
                f"this login code was used already, is older than {VALID_S:.0f} s, or another process made it"
            )
            raise Unauthorized(msg, hint="`trireme dashboard` makes another one")
        return found[1]

    def _forget(self, now: float) -> None:
        self._open = {code: each for code, each in self._open.items() if each[0] > now}
