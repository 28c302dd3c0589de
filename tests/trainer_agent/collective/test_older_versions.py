"""Versions that only a spare can need which is far behind are kept within limits; those that others need are
kept whatever they take."""

from __future__ import annotations

import pytest

from tests.equipment.replaced import replaced
from trainer_agent.collective import mean_blocks
from trainer_agent.collective.mean_blocks import KEPT_BYTES, MOST_KEPT, OlderVersions


def kept_after(versions: int, size: int) -> OlderVersions:
    """The last two versions are needed."""
    kept = OlderVersions(1)
    for version in range(1, versions + 1):
        kept.add(size)
        kept.forget_before(version - 1)
    return kept


@pytest.mark.parametrize(
    ("size", "first"),
    [
        (KEPT_BYTES + 1, 999),  # those that are needed, however large they are
        (KEPT_BYTES, 998),
        (KEPT_BYTES // 4, 995),
        (0, 999 - MOST_KEPT),
    ],
)
def test_the_last_ones_that_go_into_the_limits_stay(size, first):
    assert kept_after(1000, size).first == first


def test_none_is_forgotten_before_it_is_not_needed_any_more():
    kept = OlderVersions(1)
    for _ in range(500):
        kept.add(KEPT_BYTES)
        assert kept.forget_before(1) == 1
    assert kept.forget_before(400) == 399
    assert kept.forget_before(300) == 399


def test_a_large_version_makes_room_for_itself():
    with replaced(mean_blocks, "KEPT_BYTES", 100):
        kept = OlderVersions(1)
        for size in (10, 10, 10, 90, 10):
            kept.add(size)
        assert kept.forget_before(4) == 1
        assert kept.forget_before(5) == 3  # 10 + 90
        assert kept.forget_before(6) == 4  # 90 + 10
