"""The only source of randomness outside training: ids and jitter. A simulation replaces `source` by a seeded
one."""

from __future__ import annotations

import random
import secrets
import uuid

source: random.Random = random.SystemRandom()


def new_id(prefix: str = "") -> str:
    """`prefix-9f2c51ab03de`: unguessable in production, repeatable in a simulation."""
    token = f"{source.getrandbits(48):012x}"
    return f"{prefix}-{token}" if prefix else token


def secret() -> str:
    """256 random bits as base64url, never from `source`: nobody can guess them or repeat them."""
    return secrets.token_urlsafe(32)


def secret_odd() -> int:
    """An odd number of 64 bits, as `secret`."""
    return secrets.randbits(64) | 1


def jitter(seconds: float) -> float:
    """Between half of `seconds` and all of it."""
    return seconds * (0.5 + source.random() / 2)


def named_uuid(*parts: str | int) -> str:
    """The same uuid for the same parts, in every process."""
    return str(uuid.uuid5(uuid.NAMESPACE_OID, "/".join(map(str, parts))))
