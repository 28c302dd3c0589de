"""Arrow tables -> columns of a shard."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import types

from trainer_agent.data.shard import Column


def columns_of_table(table: pa.Table) -> dict[str, Column]:
    """Numbers and lists of numbers as arrays (missing floats are NaN); lists of several lengths as lists of arrays; everything else as
    lists of Python values. A column of which values are missing is a list with None in their places, and the others keep their dtype."""
    return {name: _column(_array(table.column(name))) for name in table.column_names}


def _array(column: pa.ChunkedArray) -> pa.Array:
    combined = column.combine_chunks()
    return combined if isinstance(combined, pa.Array) else pa.concat_arrays(combined.chunks)


def _column(array: pa.Array) -> Column:
    kind = array.type
    is_number = types.is_floating(kind) or types.is_integer(kind) or types.is_boolean(kind)
    if is_number and (array.null_count == 0 or types.is_floating(kind)):
        return np.asarray(array.to_numpy(zero_copy_only=False))
    if isinstance(kind, pa.FixedShapeTensorType) and array.null_count == 0:
        return np.asarray(array.to_numpy_ndarray())
    if isinstance(array, pa.ExtensionArray):
        return _column(array.storage)
    if types.is_dictionary(kind):
        return _column(array.dictionary_decode())
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if array.null_count and (is_list or is_number):
        return _with_gaps(_column(array.drop_null()), array.is_valid().to_pylist())
    if types.is_fixed_size_list(kind):
        return _rows(_column(array.flatten()), np.full(len(array), kind.list_size))
    if is_list:
        return _rows(_column(array.flatten()), np.asarray(array.value_lengths()))
    values: list[Any] = array.to_pylist()
    return values


def _with_gaps(present: Column, valid: list[bool]) -> list[Any]:
    """The values with None where none is. Numbers stay numpy's, so that their dtype does not depend on what is missing."""
    values = iter(present)
    return [next(values) if there else None for there in valid]


def _rows(flat: Column, lengths: Any) -> Column:
    """`flat` cut into rows: one array if all have the same length."""
    if not isinstance(flat, np.ndarray):
        ends = np.cumsum(lengths).tolist()
        rows = [flat[end - length : end] for end, length in zip(ends, lengths.tolist(), strict=True)]
        return [np.asarray(row) if row and all(isinstance(each, np.generic) for each in row) else row for row in rows]
    if len(lengths) and (lengths == lengths[0]).all():
        return flat.reshape(len(lengths), int(lengths[0]), *flat.shape[1:])
    return np.split(flat, np.cumsum(lengths)[:-1])
