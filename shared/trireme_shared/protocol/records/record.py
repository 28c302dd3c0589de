"""The base of every record that crosses REST, etcd or the data plane; texts in records, which are bounded as
they enter."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from trireme_shared.protocol.urls import Url

MESSAGE_CHARACTERS = 4000
TRACEBACK_CHARACTERS = 16_000


class Record(BaseModel):
    """Unknown fields are ignored: a newer peer may send more."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    #: Whether null in a field, here or in a record inside, means something else than the field's default.
    keeps_nulls: ClassVar[bool] = False

    def to_bytes(self) -> bytes:
        """JSON, without the nulls unless the record keeps them."""
        return self.model_dump_json(exclude_none=not self.keeps_nulls).encode()

    def with_fields(self, **fields: Any) -> Self:
        """Return a copy in which `fields` have these values. mypy checks their names and types
        (tests/tidy/typed_copies.py), so no value is validated again."""
        return self.model_copy(update=fields)


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
