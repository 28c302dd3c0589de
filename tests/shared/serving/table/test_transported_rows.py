"""Whole steps through payloads, as trainers and parameter servers send them: tables of different dims in one
request, in each dtype that rows may travel in, against numbers in a dict."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.shared.serving.table.tables import INIT, LAYOUT, SGD, wanted
from trireme_shared.blocks.buffers import DTYPES
from trireme_shared.protocol.errors import BadFrame
from trireme_shared.protocol.records.layout import TableSpec
from trireme_shared.protocol.wire.messages import Verdict
from trireme_shared.serving.core.table.rows import TableRows
from trireme_shared.tables.payload import ids_in, joined, narrowed, rows_in, size_of

DIMS = (1, 3, 16)
LANES = 2
TABLES = tuple(
    TableSpec(name=f"t{dim}", dim=dim, seed=dim, optimizer=SGD.model_copy(update={"lr": 0.25}), init=INIT)
    for dim in DIMS
)
KEYS = st.one_of(st.integers(-3, 6), st.sampled_from([2**63 - 1, -(2**63), 10**15]))
NUMBERS = st.floats(-4.0, 4.0, width=32)
Gradients = Mapping[int, np.ndarray]


def cast(values: np.ndarray, dtype: str | None) -> np.ndarray:
    """There and back."""
    return values if dtype is None else torch.from_numpy(values).to(DTYPES[dtype]).float().numpy()


def drawn(data: st.DataObject, dim: int) -> Gradients:
    """Gradients of some ids; none, too."""
    keys = sorted(data.draw(st.sets(KEYS, max_size=5)))
    first = data.draw(st.lists(NUMBERS, min_size=len(keys), max_size=len(keys)))
    return {
        key: np.float32(number) * np.arange(1, dim + 1, dtype=np.float32) / 3
        for key, number in zip(keys, first, strict=True)
    }


def of_lane(gradients: Gradients, dim: int) -> tuple[np.ndarray, np.ndarray]:
    rows = np.array(list(gradients.values()), np.float32).reshape(len(gradients), dim)
    return np.array(list(gradients), np.int64), rows


@settings(max_examples=60, deadline=None)
@given(data=st.data(), dtype=st.sampled_from([None, "bfloat16", "float16"]))
def test_rows_of_all_tables_come_as_they_are_rounded_and_gradients_too(data, dtype):
    rows = TableRows(LAYOUT.model_copy(update={"tables": TABLES}), LANES, 0)
    expected: list[dict[int, np.ndarray]] = [{} for _ in DIMS]
    for step in range(data.draw(st.integers(1, 3))):
        pushed = [[drawn(data, dim) for dim in DIMS] for _ in range(LANES)]
        for lane, tables in enumerate(pushed):
            parts = [of_lane(gradients, dim) for gradients, dim in zip(tables, DIMS, strict=True)]
            counts = tuple(len(keys) for keys, _ in parts)
            payload = joined([keys for keys, _ in parts], [values for _, values in parts], dtype)
            assert payload.nbytes == size_of(counts, DIMS, ids=True, rows=True, dtype=dtype)
            kept = memoryview(bytearray(payload))
            assert rows.push(step, lane, *rows.read(counts, kept, dtype), 4) is Verdict.APPLIED
        list(rows.steps())
        for number, dim in enumerate(DIMS):
            nothing = np.zeros(dim, np.float32)
            for key in set().union(*(tables[number] for tables in pushed)):
                left, right = (cast(tables[number].get(key, nothing), dtype) for tables in pushed)
                before = expected[number].get(key, np.full(dim, 0.5, np.float32))
                mean = (left + right) * np.float32(0.5)
                expected[number][key] = (before.astype(np.float64) - 0.25 * mean.astype(np.float64)).astype(
                    np.float32
                )
    keys = [np.array(sorted({*found, 77}), np.int64) for found in expected]
    counts = tuple(len(some) for some in keys)
    answer = rows.lookup(rows.version, ids_in(joined(keys), counts, DIMS, rows=False), dtype)
    for number, values in enumerate(rows_in(answer, counts, DIMS, ids=False, dtype=dtype)):
        found = [
            expected[number].get(key, np.full(DIMS[number], 0.5, np.float32)) for key in keys[number].tolist()
        ]
        assert values.dtype == np.float32
        assert np.array_equal(values, cast(np.array(found, np.float32), dtype))


def test_values_that_float16_cannot_hold_are_refused_and_infinite_ones_travel():
    with pytest.raises(OverflowError, match="70000 does not fit float16"):
        joined([], [np.array([[70000.0]], np.float32)], "float16")
    wild = np.array([[np.inf, -np.inf, np.nan, 70000.0]], np.float32)
    for dtype, sent in (("bfloat16", wild), ("float16", wild[:, :3])):
        (found,) = rows_in(narrowed(sent, dtype), (1,), (sent.shape[1],), ids=False, dtype=dtype)
        assert np.array_equal(found, cast(sent, dtype), equal_nan=True)


def test_a_payload_of_another_dtype_than_it_says_has_another_size():
    rows = TableRows(LAYOUT, 1, 0)
    request, _ = wanted(0, np.array([1]), np.array([2]))
    payload = joined(
        [np.array([1]), np.array([2])], [np.ones((1, 2), np.float32), np.ones((1, 3), np.float32)]
    )
    with pytest.raises(BadFrame, match="36 bytes for 2 ids: expected 26"):
        rows.read(request.rows, payload, "bfloat16")
