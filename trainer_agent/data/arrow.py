"""Arrow tables -> columns of a shard."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import types

from trainer_agent.data.shard import Column


def columns_of_table(table: pa.Table) -> dict[str, Column]:
    """Numbers and lists of numbers as arrays (missing floats are NaN); lists of several lengths as lists of arrays;
    everything else, and numbers of which some are missing, as lists of Python values."""
    return {name: _column(_array(table.column(name))) for name in table.column_names}


def _array(column: pa.ChunkedArray) -> pa.Array:
    combined = column.combine_chunks()
    return combined if isinstance(combined, pa.Array) else pa.concat_arrays(combined.chunks)


def _column(array: pa.Array) -> Column:
    kind = array.type
    if isinstance(kind, pa.FixedShapeTensorType) and array.null_count == 0:
        return np.asarray(array.to_numpy_ndarray())
    if isinstance(array, pa.ExtensionArray):
        return _column(array.storage)
    if types.is_dictionary(kind):
        return _column(array.dictionary_decode())
    if types.is_floating(kind) or ((types.is_integer(kind) or types.is_boolean(kind)) and array.null_count == 0):
        return np.asarray(array.to_numpy(zero_copy_only=False))
    if types.is_fixed_size_list(kind) and array.null_count == 0:
        return _rows(_column(array.flatten()), np.full(len(array), kind.list_size))
    if (types.is_list(kind) or types.is_large_list(kind)) and array.null_count == 0:
        return _rows(_column(array.flatten()), np.asarray(array.value_lengths()))
    values: list[Any] = array.to_pylist()
    return values


def _rows(flat: Column, lengths: Any) -> Column:
    """`flat` cut into rows: one array if all have the same length."""
    if not isinstance(flat, np.ndarray):
        ends = np.cumsum(lengths).tolist()
        return [flat[end - length : end] for end, length in zip(ends, lengths.tolist(), strict=True)]
    if len(lengths) and (lengths == lengths[0]).all():
        return flat.reshape(len(lengths), int(lengths[0]), *flat.shape[1:])
    return np.split(flat, np.cumsum(lengths)[:-1])
