"""What files say of their records before these are read: columns and types. All files of a dataset must say the same, and a job whose files
differ fails while its records are counted, not in the middle of an epoch.

footer, header, head ─► {column: type} of each file ─check─► DatasetError: file, column, both types

Formats without a schema (JSON lines, TFRecord, tars, a user's own) are compared by the trainers, column by column, if the script has no
`collate` of its own: with one their records may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from master_service.core.queue.file_table import TableFile
from trireme_shared.datasets import mapped_files
from trireme_shared.platform.storage import files
from trireme_shared.platform.storage.compressed import scanning
from trireme_shared.protocol.errors import DatasetError
from trireme_shared.protocol.records.datasets import Csv, Dataset, HuggingFace, Npy, Parquet

if TYPE_CHECKING:
    import pyarrow as pa

CSV_RECORDS = 100  # of each file that are parsed

Head = Mapping[str, str]


class Heads:
    """Of one dataset. `note` and `check_rows` are called by the threads that count; a file that nobody noted is read by `check`."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._noted: dict[str, Head] = {}
        self._rows: Callable[[str], Head] | None = None
        if isinstance(dataset, Csv):
            self._rows = _csv_rows(dataset)

    def note(self, file: str, head: Head) -> None:
        self._noted[file] = head

    def arrow(self, file: str, schema: pa.Schema) -> None:
        """Note the columns of an Arrow schema that the dataset has."""
        assert isinstance(self._dataset, Parquet | HuggingFace)
        chosen = self._dataset.columns or schema.names
        self.note(file, {name: _kind(schema.field(name).type) for name in chosen if name in schema.names})

    def array(self, file: str, shape: Sequence[int], dtype: Any) -> None:
        """Note the rows of an array."""
        self.note(file, {"row": f"{dtype.newbyteorder('=')} of shape {tuple(shape[1:])}"})

    def rows(self, file: str) -> None:
        """Note the columns of a CSV file, whose first rows must have the dataset's types. Raises DatasetError."""
        assert self._rows is not None
        self.note(file, self._rows(file))

    def check(self, counted: Sequence[TableFile]) -> None:
        """Raises DatasetError for the first file that differs from the first one with records."""
        if isinstance(self._dataset, Npy) and self._dataset.aligned:
            return
        if not isinstance(self._dataset, Parquet | HuggingFace | Npy | Csv):
            return
        with_records = [file.path for file in counted if file.records]
        for file in with_records:
            if file not in self._noted:
                self._read(file)
            first = self._noted[with_records[0]]
            if self._noted[file] != first:
                raise self._difference(with_records[0], first, file, self._noted[file])

    def _read(self, file: str) -> None:
        if isinstance(self._dataset, Csv):
            self.rows(file)
        elif isinstance(self._dataset, Npy):
            with files.reading(file, ".npy"), files.open_read(file) as source:
                shape, _, dtype = mapped_files.read_npy_head(source)
            self.array(file, shape, dtype)
        elif isinstance(self._dataset, Parquet):
            import pyarrow.parquet as pq  # noqa: PLC0415  only where it is needed

            with files.reading(file, "Parquet"), files.open_read(file) as source:
                self.arrow(file, pq.read_schema(source))
        else:
            from trireme_shared.datasets.mapped_files import read_arrow  # noqa: PLC0415

            self.arrow(file, read_arrow(file).schema)

    def _difference(self, first_file: str, first: Head, file: str, head: Head) -> DatasetError:
        for name in (*first, *head):
            if head.get(name) == first.get(name):
                continue
            if name not in head or name not in first:
                lacking, having = (file, first_file) if name not in head else (first_file, file)
                msg = f"{lacking} has no column {name!r}, and {having} has it"
                hint = f"give all files the same columns, or choose those that all have: columns=({self._common(first, head)})"
            elif isinstance(self._dataset, Npy):
                msg = f"the rows of {file} are {head[name]}, those of {first_file} {first[name]}"
                hint = "save them alike: numpy.save(path, array.astype(...))"
            else:
                msg = f"column {name!r} is {head[name]} in {file} and {first[name]} in {first_file}"
                hint = f"write it with one type in all files, or choose other columns: columns=({self._common(first, head)})"
            return DatasetError(msg, hint=hint, url=file, column=name)
        raise AssertionError  # they differ

    def _common(self, first: Head, head: Head) -> str:
        return "".join(f'"{name}", ' for name in first if head.get(name) == first[name]).rstrip()


def _csv_rows(dataset: Csv) -> Callable[[str], Head]:
    from trireme_shared.datasets.csv_columns import CsvColumns  # noqa: PLC0415  pyarrow only where it is needed
    from trireme_shared.datasets.line_scan import read_raw  # noqa: PLC0415

    columns = CsvColumns(dataset)

    def read(file: str) -> Head:
        with files.reading(file, "CSV"), scanning(file) as source:
            header = columns.header(file, source)
            raw = read_raw(source, dataset, file, header.start, CSV_RECORDS)
            chosen = dataset.columns or header.names
            types = columns.types()
            if all(name in types for name in chosen):
                columns.table(file, raw, header.names, 0)
            return {name: str(types.get(name, "")) for name in sorted(chosen)}

    return read


def _kind(kind: pa.DataType) -> str:
    """The type as batches show it: spellings of one type (`string`, `large_string`, a dictionary of strings) are one kind."""
    from pyarrow import types  # noqa: PLC0415

    if types.is_dictionary(kind):
        return _kind(kind.value_type)
    if types.is_fixed_size_list(kind):
        return f"list of {kind.list_size} {_kind(kind.value_type)}"
    if types.is_list(kind) or types.is_large_list(kind):
        return f"list of {_kind(kind.value_type)}"
    if types.is_struct(kind):
        return f"struct of {', '.join(f'{field.name}: {_kind(field.type)}' for field in kind)}"
    if types.is_string(kind) or types.is_large_string(kind):
        return "string"
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        return "binary"
    if types.is_timestamp(kind):
        return "timestamp"
    return "decimal" if types.is_decimal(kind) else str(kind)
