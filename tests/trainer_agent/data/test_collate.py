"""Batches without a user's collate: tensors where there is one shape, lists of text, else an error with both
values."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trainer_agent.data import default_collate
from trainer_agent.data.shard import RecordShard, Shard
from trireme_shared.protocol.errors import DatasetError


def equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left, right)


def test_arrays_become_tensors_of_their_dtype_and_are_copied():
    pixels = np.arange(6, dtype=np.float32).reshape(3, 2)
    batch = default_collate(
        {"pixels": pixels, "label": np.array([1, 2, 3], np.uint8), "text": ["a", "b", "c"]}
    )
    assert equal(batch["pixels"], torch.tensor([[0.0, 1], [2, 3], [4, 5]]))
    assert equal(batch["label"], torch.tensor([1, 2, 3], dtype=torch.uint8))
    assert batch["text"] == ["a", "b", "c"]
    batch["pixels"].zero_()
    assert pixels[0, 1] == 1


@pytest.mark.parametrize(
    ("values", "tensor"),
    [
        ([1, 2], torch.tensor([1, 2])),
        ([1, 2.5], torch.tensor([1.0, 2.5])),
        ([True, False], torch.tensor([True, False])),
        ([[1, 2], [3, 4]], torch.tensor([[1, 2], [3, 4]])),
        ([[0.5], [1]], torch.tensor([[0.5], [1.0]])),
        (
            [np.zeros(2, np.float64), np.ones(2, np.float64)],
            torch.tensor([[0.0, 0], [1, 1]], dtype=torch.float64),
        ),
        ([torch.ones(2, dtype=torch.bfloat16)] * 2, torch.ones(2, 2, dtype=torch.bfloat16)),
    ],
)
def test_values_of_records_become_tensors(values, tensor):
    batch = default_collate([{"x": value} for value in values])
    assert equal(batch["x"], tensor)


def test_big_endian_arrays_are_turned_round():
    assert equal(
        default_collate({"x": np.array([1, 2], ">i4")})["x"], torch.tensor([1, 2], dtype=torch.int32)
    )


def test_a_minibatch_is_collated_from_its_columns():
    shard = Shard({"x": np.arange(5.0), "s": list("abcde")}, 5)
    batch = default_collate(shard.minibatch(np.array([4, 1])))
    assert equal(batch["x"], torch.tensor([4.0, 1.0], dtype=torch.float64))
    assert batch["s"] == ["e", "b"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([[1, 2], [3, 4, 5]], r"record 0 of the minibatch has shape \(2,\), record 1 has shape \(3,\)"),
        (
            [np.zeros((2, 2)), np.zeros(2)],
            r"record 0 of the minibatch has shape \(2, 2\), record 1 has shape \(2,\)",
        ),
        ([torch.zeros(2), torch.zeros(3)], r"has shape \(2,\), record 1 has shape \(3,\)"),
        ([[[1], [2, 3]], [[1], [2, 3]]], "does not make a tensor"),
        ([1, None], "record 1 of the minibatch has no value, another has int 1"),
        ([None, None], "record 0 of the minibatch has no value"),
        (["a", 1], "record 0 of the minibatch has str 'a', record 1 has int 1"),
    ],
)
def test_what_makes_no_tensor_is_told_with_its_column_and_both_values(values, message):
    with pytest.raises(DatasetError, match=rf"column 'x': .*{message}") as caught:
        default_collate([{"x": value} for value in values])
    assert "collate(records)" in caught.value.hint


def test_a_field_that_a_record_lacks_is_told():
    with pytest.raises(
        DatasetError, match="column 'b': record 1 of the minibatch has no value, another has int 2"
    ):
        default_collate([{"a": 1, "b": 2}, {"a": 1}])


def test_a_dtype_torch_lacks_is_told():
    with pytest.raises(
        DatasetError, match=r"column 'when' holds datetime64\[D\], which torch has no type for"
    ):
        default_collate({"when": np.array(["2026-11-20"], "M8[D]")})


def test_values_that_are_no_numbers_stay_lists():
    batch = default_collate([{"raw": b"1", "extra": {"a": 1}}, {"raw": b"2", "extra": {}}])
    assert batch == {"raw": [b"1", b"2"], "extra": [{"a": 1}, {}]}


def test_a_columns_dtype_is_decided_by_the_task_not_by_the_minibatch():
    shard = RecordShard([{"x": 1}, {"x": 2}, {"x": 2.5}])
    assert default_collate(shard.minibatch(np.array([0, 1])))["x"].dtype == torch.float32
