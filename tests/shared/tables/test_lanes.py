"""Means over lanes have the bits of the dense tree, in which an id that a lane lacks has a zero gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trireme_shared.protocol.lanes import combine
from trireme_shared.tables.lanes import LaneRows, mean_over_lanes, sums_of_ids


def dense_mean(lanes: list[LaneRows], ids: np.ndarray, dim: int) -> tuple[torch.Tensor | None, int]:
    if len(lanes) > 1:
        half = len(lanes) // 2
        left, right = dense_mean(lanes[:half], ids, dim), dense_mean(lanes[half:], ids, dim)
        return combine(*left, *right)
    whole = torch.zeros(len(ids), dim)
    whole[np.searchsorted(ids, lanes[0].ids)] = torch.from_numpy(lanes[0].gradients.copy())
    return (whole if lanes[0].count else None), lanes[0].count


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_lane_without_an_id_counts_as_zero(data: Any) -> None:
    rng, dim = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1))), 3
    lanes = []
    for _ in range(data.draw(st.sampled_from([1, 2, 4, 8]))):
        count = data.draw(st.sampled_from([0, 1, 2, 2, 3, 7]))
        ids = np.array(sorted(data.draw(st.sets(st.integers(-3, 12), max_size=8))) if count else [], np.int64)
        lanes.append(LaneRows(ids, rng.standard_normal((len(ids), dim)).astype(np.float32), count))
    ids, mean = mean_over_lanes(lanes, dim)
    expected, _ = dense_mean(lanes, ids, dim)
    if expected is None:
        assert mean is None
    else:
        assert mean is not None
        assert np.array_equal(mean, expected.numpy())
        assert ids.tolist() == sorted({key for lane in lanes for key in lane.ids.tolist()})


def test_more_ids_than_are_handled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trireme_shared.tables.lanes.MERGED_AT_ONCE", 1000)
    rng = np.random.default_rng(2)
    lanes = [
        LaneRows(np.unique(rng.integers(0, 30_000, 9_000)), np.empty(0, np.float32), 5) for _ in range(4)
    ]
    for lane in lanes:
        lane.gradients = rng.standard_normal((len(lane.ids), 2)).astype(np.float32)
    ids, mean = mean_over_lanes(lanes, 2)
    expected, _ = dense_mean(lanes, ids, 2)
    assert expected is not None
    assert mean is not None
    assert np.array_equal(mean, expected.numpy())


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@settings(max_examples=40, deadline=None)
@given(
    ids=st.lists(st.sampled_from([0, -1, 5, 2**63 - 1, -(2**63), 7]), max_size=300),
    seed=st.integers(0, 2**32 - 1),
)
def test_occurrences_add_up_as_torch_coalesces_them(ids: list[int], seed: int) -> None:
    gradients = np.random.default_rng(seed).standard_normal((len(ids), 5)).astype(np.float32)
    found, sums = sums_of_ids(np.array(ids, np.int64), gradients)
    names = sorted(set(ids))
    places = torch.tensor([[names.index(key) for key in ids]], dtype=torch.int64).reshape(1, -1)
    sparse = torch.sparse_coo_tensor(places, torch.from_numpy(gradients), (len(names), 5)).coalesce()
    assert found.tolist() == names
    assert np.array_equal(sums, sparse.values().numpy())
