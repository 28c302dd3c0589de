"""A table of 50 million rows at one parameter server, which grows by 100,000 ids a step: it holds the memory
that was said beforehand, and a lookup of another process is never held up for more than 20 ms of work. `-s`
shows the figures."""

from __future__ import annotations

import pytest

from benchmarks.table_size import grow

pytestmark = [pytest.mark.processes, pytest.mark.soak, pytest.mark.timeout(1500)]


def test_fifty_million_rows_hold_the_memory_and_the_pauses_that_were_promised():
    found = grow(50_000_000, 100_000, 16, "adagrad-row")
    assert found.rows == 50_000_000
    assert found.table_bytes <= found.predicted
    assert found.peak <= found.predicted
    assert len(found.lookups["OK"]) > 1000
    assert max(found.portions) < 0.020  # processor time: other processes may be on this machine


def test_a_full_table_of_five_million_rows_stays_exactly_full():
    found = grow(8_000_000, 100_000, 16, "adagrad-row", max_rows=5_000_000)
    assert found.rows == 5_000_000
    assert found.peak <= found.predicted
    assert max(found.portions) < 0.020
