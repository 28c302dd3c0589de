"""Pages of lists: the items from an offset on, and the token of the next page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from trireme_shared.protocol.errors import InvalidArgument

T = TypeVar("T")

TOKEN_PATTERN = r"^[0-9]{0,18}$"  # noqa: S105


def page_of(items: Sequence[T], start: int, page_size: int) -> tuple[Sequence[T], str]:
    """The items from `start` on, and the token of the next page, empty if there is none."""
    end = start + page_size
    return items[start:end], str(end) if end < len(items) else ""


def offset_of(page_token: str) -> int:
    if not page_token:
        return 0
    if not (page_token.isascii() and page_token.isdigit() and len(page_token) < 19):
        raise InvalidArgument(
            f"page_token {page_token[:40]!r} was not given by this API; use next_page_token of the last page"
        )
    return int(page_token)
