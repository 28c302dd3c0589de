"""Conditional requests (RFC 9110): entity tags of answers, If-None-Match of readers, If-Match of who changes something.

ETag: "<version>.<digest of the body>"
If-None-Match ─► the whole tag is the same: 304, without a body
If-Match ─► the version in it is another one: PreconditionFailed (412)

The body shows progress, too, and a cache must not show that of an hour ago: so the tag changes with it. A job is paused though a
step was trained since it was read: so If-Match compares the version alone.

If-None-Match and 304 are no parameter and answer of the document, as little as HEAD is: generated clients would have to tell a
record from no answer at each call.
"""

from __future__ import annotations

import hashlib
import re
from typing import Annotated

from fastapi import Depends, Header, Request, Response

from master_service.core.decisions.requests import ANY, Expected
from trireme_shared.protocol.errors import InvalidArgument
from trireme_shared.protocol.records.record import Record

TAGS = r'^(\*|(W/)?"[!#-~]*"([ \t]*,[ \t]*(W/)?"[!#-~]*")*)$'
_TAG = re.compile(r'(W/)?"([!#-~]*)"')

IfMatch = Annotated[str | None, Header(alias="If-Match", max_length=1000, pattern=TAGS)]


class Reading:
    """A GET. `if_none_match`: the tags that the caller has. Raises InvalidArgument."""

    def __init__(self, if_none_match: str | None) -> None:
        if if_none_match is not None and not re.fullmatch(TAGS, if_none_match):
            raise InvalidArgument(f"If-None-Match {if_none_match[:100]!r} is neither * nor a list of tags in quotes")
        self._known = if_none_match

    def answer(self, view: Record, version: str) -> Response:
        """`view`, or that the caller has it."""
        body = view.model_dump_json()
        tag = f"{version}.{hashlib.sha256(body.encode()).hexdigest()[:16]}"
        headers = {"ETag": f'"{tag}"'}
        if self._known is not None and (self._known == "*" or tag in {known for _, known in _TAG.findall(self._known)}):
            return Response(status_code=304, headers=headers)
        return Response(body, headers=headers, media_type="application/json")


async def _reading(request: Request) -> Reading:
    return Reading(request.headers.get("if-none-match"))


async def _expected(if_match: IfMatch = None) -> Expected:
    """Weak tags match nothing: they do not say that two versions are the same."""
    if if_match is None or if_match == "*":
        return ANY
    return Expected(frozenset(tag.partition(".")[0] for weak, tag in _TAG.findall(if_match) if not weak))


ReadingIf = Annotated[Reading, Depends(_reading)]
ExpectedVersion = Annotated[Expected, Depends(_expected)]
