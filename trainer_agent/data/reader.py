"""What readers have in common: a range of a file's records is read, and columns of records without a schema
keep their dtypes.

    first records ─► column -> dtype, text, …
    records of a task ──ColumnTypes.shard──► arrays of these dtypes, or errors with the value

A reader knows nothing of tasks, lanes or epochs. The dtype of a column is found in the first records of the
dataset and kept for the whole job. Without this it would be that of the values that happen to be in a task.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

from trainer_agent.data.shard import Column, Record, RecordShard, Shard, as_column, columns_of
from trireme_shared.datasets.numbers import DType, Misfit, column_of, common_dtype, shown
from trireme_shared.protocol.errors import DatasetError

Kind = DType | str | DatasetError
"""`str`, `bytes`: what values are. "": anything else, which is not looked at. An error: the first records fit
into no dtype."""


class Reader(Protocol):
    """`read` blocks, and may be called from several threads."""

    def read(self, file: str, first: int, count: int, offset: int | None = None) -> Shard:
        """Records [first, first + count) of `file`, a path of the master's file table.

        `offset`: the byte at which record `first` starts, where the master knows it (formats of lines).
        Raises DatasetError if the file cannot be read, or has fewer records than the master counted.
        """


def too_short(file: str, first: int, count: int, records: int) -> DatasetError:
    """The error for a file that ends after `records` records though the master counted at least `first +
    count`."""
    msg = f"{file} ends at record {records}, but records {first} to {first + count - 1} were counted in it"
    return DatasetError(
        msg, hint="the file was changed while the job ran: start a new job", url=file, records=records
    )


class ColumnTypes:
    """`place`: the first records, in words. `given`: column -> type, by the user. `advice`: what to do about
    a value that does not fit."""

    def __init__(
        self, first: Sequence[Record], place: str, advice: str, given: Mapping[str, str] | None = None
    ) -> None:
        self._place, self._advice = place, advice
        self._given = {name: np.dtype(kind) for name, kind in (given or {}).items() if kind != "string"}
        texts: dict[str, Kind] = {name: "str" for name, kind in (given or {}).items() if kind == "string"}
        first = [record for record in first if isinstance(record, Mapping)]
        names = {name: None for record in first for name in record}
        self._needed = {name for name in names if all(record.get(name) is not None for record in first)}
        values = {name: [record[name] for record in first if record.get(name) is not None] for name in names}
        self._kinds: dict[str, Kind] = {name: self._kind_of(name, values[name]) for name in names}
        self._kinds |= {**self._given, **texts}

    def __repr__(self) -> str:
        return f"<ColumnTypes of {self._place}: {self._kinds}>"

    def shard(self, records: Sequence[Record], file: str, numbers: Sequence[int]) -> RecordShard:
        """The records of a task, or some of them; `numbers`: theirs in `file`. Raises DatasetError for a
        record that is no dict. Columns that these records do not make are told to who asks for columns: a
        script's own collate takes records as they are."""
        if not all(isinstance(record, Mapping) for record in records):
            columns_of(records)  # raises
        return RecordShard(
            records, partial(self._columns, file=file, numbers=numbers) if self._kinds else None
        )

    def _columns(
        self, records: Sequence[Record], file: str, numbers: Sequence[int]
    ) -> dict[str, Column | DatasetError]:
        names = {name: None for record in records for name in record}
        made = {
            name: self._column(name, [record.get(name) for record in records], file, numbers)
            for name in names
        }
        for name in self._needed - names.keys():
            msg = (
                f"{file} records {min(numbers)}-{max(numbers)} have no column {name!r}, and "
                f"{self._place} have it"
            )
            made[name] = DatasetError(msg, hint=self._advice, column=name, url=file)
        return made

    def _kind_of(self, name: str, values: list[Any]) -> Kind:
        for kind in (str, bytes):
            if values and all(isinstance(value, kind) for value in values):
                return kind.__name__
        if not values or any(isinstance(value, str | bytes | Mapping) for value in values):
            return ""
        try:
            return common_dtype(values) or ""
        except (TypeError, OverflowError):
            return ""
        except Misfit as error:
            return DatasetError(
                f"column {name!r} of {self._place} has {shown(error.value)}: {error}", hint=self._advice
            )

    def _column(
        self, name: str, values: list[Any], file: str, numbers: Sequence[int]
    ) -> Column | DatasetError:
        kind = self._kinds.get(name)
        if isinstance(kind, DatasetError):
            return kind
        places = [place for place, value in enumerate(values) if value is not None]
        if not places:
            return values
        present = [values[place] for place in places]
        try:
            if kind is None:
                raise Misfit(present[0], None, why=f"{self._place} have no such column")
            made = self._fitted(name, present, kind)
        except Misfit as error:
            msg = (
                f"column {name!r}: {file} record {numbers[places[error.number]]} has "
                f"{shown(error.value)}: {error}"
            )
            said = f"; the column is {kind} by {self._place}" if error.dtype is not None else ""
            return DatasetError(msg + said, hint=self._advice, column=name, url=file)
        if len(present) == len(values):
            return made
        following = iter(made)
        return [None if value is None else next(following) for value in values]

    def _fitted(self, name: str, present: list[Any], kind: DType | str) -> Column:
        """Raises Misfit."""
        if kind == "":
            return as_column(present)
        types = set(map(type, present))
        if isinstance(kind, str):
            if any(each.__name__ != kind for each in types):
                number = next(number for number, value in enumerate(present) if type(value).__name__ != kind)
                raise Misfit(present[number], None, number, f"{self._place} have {kind} in this column")
            return present
        if any(issubclass(each, str | bytes | Mapping) for each in types):
            number = next(
                number for number, value in enumerate(present) if isinstance(value, str | bytes | Mapping)
            )
            raise Misfit(present[number], kind, number)
        if name in self._given and kind.kind == "f":
            return np.asarray(present, dtype=kind)  # the user's own choice: digits may be lost
        return column_of(present, kind)
