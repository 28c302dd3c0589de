"""The headers of blocks on a stream: the same in every step, so they are made once."""

from __future__ import annotations

from functools import lru_cache

from shared.wire import codec
from shared.wire.lending import Place


@lru_cache(maxsize=codec.KNOWN_HEADERS)
def head_of(number: int, block: int, dtype: str | None, size: int, at: Place | None = None) -> bytes:
    """The header of a block that a pull gets; it is the same in every step."""
    fields: codec.Fields = {"id": number, "block": block}
    return codec.encode_block(fields | ({"dtype": dtype} if dtype else {}) | ({"at": at} if at else {}), size)


@lru_cache(maxsize=codec.KNOWN_HEADERS)
def same_of(number: int, block: int) -> bytes:
    """All of a block that a pull need not get again."""
    return codec.encode_block({"id": number, "block": block, "same": True}, 0)
