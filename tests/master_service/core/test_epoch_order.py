"""The order of an epoch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from master_service.core.queue.streams import EpochOrder, stream_length


@given(n=st.integers(1, 300), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 1000))
def test_order_is_a_permutation_and_position_is_its_inverse(n: int, seed: int, epoch: int) -> None:
    order = EpochOrder(n, seed, epoch)
    tasks = [order.task_at(position) for position in range(n)]
    assert sorted(tasks) == list(range(n))
    assert [order.position_of(task) for task in tasks] == list(range(n))


@given(n=st.integers(1, 10**9), seed=st.integers(0, 2**63 - 1), data=st.data())
def test_a_billion_tasks_need_no_table(n: int, seed: int, data: st.DataObject) -> None:
    order = EpochOrder(n, seed, 3)
    position = data.draw(st.integers(0, n - 1))
    assert order.position_of(order.task_at(position)) == position


def test_order_is_a_function_of_seed_and_epoch() -> None:
    def tasks(seed: int, epoch: int) -> list[int]:
        order = EpochOrder(50, seed, epoch)
        return [order.task_at(position) for position in range(50)]

    assert tasks(1, 0) == tasks(1, 0)
    assert len({tuple(tasks(seed, epoch)) for seed in range(5) for epoch in range(5)}) == 25


def test_order_moves_tasks_about_evenly() -> None:
    """Mean distance of a uniform permutation is n / 3."""
    n = 3000
    for epoch in range(3):
        order = EpochOrder(n, 7, epoch)
        mean = sum(abs(order.task_at(position) - position) for position in range(n)) / n
        assert 0.30 * n < mean < 0.37 * n


def test_without_shuffling_the_order_is_the_datasets() -> None:
    order = EpochOrder(10, 5, 2, shuffle=False)
    assert [order.task_at(position) for position in range(10)] == list(range(10))
    assert order.position_of(7) == 7


def test_positions_outside_are_refused() -> None:
    with pytest.raises(IndexError, match=r"position 10 is outside \[0, 10\)"):
        EpochOrder(10, 0, 0).task_at(10)


@given(n=st.integers(0, 500), streams=st.integers(1, 64))
def test_stream_lengths_are_those_of_slices(n: int, streams: int) -> None:
    assert [stream_length(n, streams, s) for s in range(streams)] == [
        len(range(n)[s::streams]) for s in range(streams)
    ]
