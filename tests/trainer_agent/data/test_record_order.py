"""The order of records inside a task: the same everywhere, another one for each seed, epoch and task."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_agent.data import minibatch_indices, minibatches_in


@given(
    st.integers(1, 200),
    st.integers(1, 50),
    st.integers(0, 2**63 - 1),
    st.integers(0, 5),
    st.integers(0, 10**9),
    st.booleans(),
)
def test_minibatches_of_a_task_are_a_permutation_of_its_records(count, size, seed, epoch, task, shuffle):
    pieces = [
        minibatch_indices(seed, epoch, task, count, size, number, shuffle=shuffle)
        for number in range(minibatches_in(count, size))
    ]
    assert all(len(piece) == size for piece in pieces[:-1])
    order = np.concatenate(pieces).tolist()
    assert sorted(order) == list(range(count))
    if not shuffle:
        assert order == list(range(count))


def test_the_order_is_a_function_of_seed_epoch_and_task():
    def order(*key: int) -> list[int]:
        return minibatch_indices(*key, 50, 50, 0, shuffle=True).tolist()

    assert order(1, 2, 3) == order(1, 2, 3)
    assert len({tuple(order(*key)) for key in [(1, 2, 3), (0, 2, 3), (1, 0, 3), (1, 2, 0), (3, 2, 1)]}) == 5


def test_the_order_never_changes_between_versions():
    assert minibatch_indices(1, 2, 3, 8, 8, 0, shuffle=True).tolist() == GOLDEN


def test_every_record_is_equally_likely_to_come_first():
    first = [int(minibatch_indices(0, 0, task, 8, 1, 0, shuffle=True)[0]) for task in range(8000)]
    assert np.abs(np.bincount(first, minlength=8) - 1000).max() < 150


@pytest.mark.parametrize("number", [-1, 3])
def test_a_minibatch_outside_the_task_is_refused(number):
    with pytest.raises(IndexError, match=rf"minibatch {number} is outside \[0, 3\): the task has 9 records"):
        minibatch_indices(0, 0, 0, 9, 4, number, shuffle=True)


GOLDEN = [7, 1, 6, 4, 5, 0, 3, 2]
