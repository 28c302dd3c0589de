"""The form in which etcd holds jobs and clusters: a number beside each of them, so that a program which does
not know the form says so and changes nothing.

A field or a key more is no new form: whoever does not know it leaves it as it is. SCHEMA grows with what
programs before would read in another sense, READABLE_BY (up to SCHEMA) once they must not go on with it.
"""

from __future__ import annotations

from typing import Self

from trireme_shared import __version__
from trireme_shared.protocol.errors import StateUnreadable
from trireme_shared.protocol.records.record import Name, Record

SCHEMA = 1
READABLE_BY = 1


class StateSchema(Record):
    """`schema_version`: the newest that has written here. `readable_by`: programs with that schema or a later
    one may go on. `trireme_version`: of the program that wrote it."""

    schema_version: int
    readable_by: int
    trireme_version: Name

    @classmethod
    def own(cls) -> Self:
        return cls(schema_version=SCHEMA, readable_by=READABLE_BY, trireme_version=__version__)

    def check(self, key: str) -> None:
        """Raises StateUnreadable."""
        if self.readable_by > SCHEMA:
            msg = (
                f"{key} in etcd says that Trireme {self.trireme_version} wrote what is there, in a form "
                f"which programs with schema {self.readable_by} or later can read; this is Trireme "
                f"{__version__} with schema {SCHEMA}"
            )
            hint = f"start Trireme {self.trireme_version} or later again (docs/upgrades.md)"
            raise StateUnreadable(msg, hint=hint, key=key)
