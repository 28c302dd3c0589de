"""The base of every record that crosses REST, etcd or the data plane; texts in records, which are bounded as
they enter."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache, cached_property, partial
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from trireme_shared.protocol.urls import Url

MESSAGE_CHARACTERS = 4000
TRACEBACK_CHARACTERS = 16_000
MISFITS = 5  # that are told


class Record(BaseModel):
    """Unknown fields are ignored: a newer peer may send more."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    #: Whether fields of other versions stay in the record, to be written again; else they are dropped.
    keeps_unknown: ClassVar[bool] = False

    def to_bytes(self) -> bytes:
        """JSON with every field, nulls too: null may mean something else than the field's default, which may
        also be another one in the version that reads it."""
        text = self.model_dump_json()
        if self.keeps_unknown and _has_unknown(self):
            text = json.dumps(_with_unknown(json.loads(text), self), separators=(",", ":"))
        return text.encode()

    @classmethod
    def from_bytes(cls, value: bytes) -> Self:
        """What `to_bytes` of this or another version gave. Raises ValidationError."""
        return cls.model_validate_json(value, extra="allow" if cls.keeps_unknown else "ignore")

    def with_fields(self, **fields: Any) -> Self:
        """Return a copy in which `fields` have these values. mypy checks their names and types
        (tests/tidy/typed_copies.py), so no value is validated again."""
        return self.model_copy(update=fields)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """As pydantic's, but what a `cached_property` has computed from the old fields is not copied."""
        copy = super().model_copy(update=update, deep=deep)
        for name in _computed_once(type(self)):
            copy.__dict__.pop(name, None)
        return copy


@cache
def _computed_once(kind: type[Record]) -> tuple[str, ...]:
    """Names of its `cached_property`s."""
    return tuple(
        name
        for each in kind.__mro__
        for name, value in vars(each).items()
        if isinstance(value, cached_property)
    )


def _has_unknown(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(map(_has_unknown, value))
    if not isinstance(value, BaseModel):
        return False
    return bool(value.model_extra) or any(
        _has_unknown(getattr(value, name)) for name in type(value).model_fields
    )


def _with_unknown(document: Any, value: Any) -> Any:
    """`document`, the JSON of `value`, with the fields that its class lacks, also of records inside."""
    if isinstance(value, tuple):
        return [_with_unknown(part, each) for part, each in zip(document, value, strict=True)]
    if not isinstance(value, BaseModel):
        return document
    known = {name: _with_unknown(document[name], getattr(value, name)) for name in type(value).model_fields}
    return known | (value.model_extra or {})


def misfits(error: Exception) -> str:
    """What does not fit a record, for people: the first fields by name. What was in them is told of numbers
    and of fields with few possible values: another text may be a secret. Of any other error its own text."""
    if not isinstance(error, ValidationError):
        return str(error)
    found = error.errors(include_url=False, include_context=False)
    told = "; ".join(
        ": ".join(filter(None, (".".join(map(str, item["loc"])), item["msg"] + _instead(item))))
        for item in found[:MISFITS]
    )
    return told if len(found) <= MISFITS else f"{told}; and {len(found) - MISFITS} more"


def _instead(item: ErrorDetails) -> str:
    given = item["input"]
    has_choices = item["type"] in ("enum", "literal_error") and isinstance(given, str)
    if has_choices or isinstance(given, int | float):
        return f", not {shortened(repr(given), 200)}"
    return ""


def shortened(text: str, limit: int) -> str:
    """`text` if it has at most `limit` characters; else its beginning and its end, and how much is left out
    between them."""
    if len(text) <= limit:
        return text
    half = (limit - 60) // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters are left out ...] {text[-half:]}"


Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]  # as the API says of every integer
Id = Annotated[str, Field(max_length=200)]
Name = Annotated[str, AfterValidator(partial(shortened, limit=200))]
UrlText = Annotated[str, AfterValidator(Url)]  # of a path or URL that a user gives: it may have a password
Message = Annotated[str, AfterValidator(partial(shortened, limit=MESSAGE_CHARACTERS))]
Traceback = Annotated[str, AfterValidator(partial(shortened, limit=TRACEBACK_CHARACTERS))]
