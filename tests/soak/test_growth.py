"""Growth over a run is seen; noise is not. Percentiles are those that were measured."""

from __future__ import annotations

import os
import socket
from collections import Counter
from contextlib import ExitStack

import pytest

from tests.soak.growth import MIB, Growth, Holds, kinds_of, most_memories
from tests.soak.receipts import percentile
from tests.soak.run import SoakError


def sharing(memories: int) -> Holds:
    """With so many descriptors of shared memory, beside others."""
    return Holds(memories, 32 + memories, 12, 300 * MIB, Counter(memfd=memories, unix=20, tcp=12))


STEADY = [Holds(number, 60 + number % 3, 30, 300 * MIB) for number in range(30)]


def growth(holds: list[Holds], keys: list[int]) -> Growth:
    found = Growth()
    found.keys = keys
    for each in holds:
        found.add("trainer-0", 17, each)
    return found


def test_what_stays_as_it_is_passes_and_is_told():
    found = growth(STEADY, [100, 104, 98] * 10)
    found.check()
    assert "trainer-0: 29 generations, descriptors 61 -> 61, threads 30 -> 30, MiB 300 -> 300" in str(found)
    assert "etcd: 100 keys at first, 100 in the end" in str(found)


@pytest.mark.parametrize(
    ("holds", "keys", "what"),
    [
        ([Holds(number, 60 + number, 30, 300 * MIB) for number in range(30)], [100] * 30, "descriptors 64"),
        ([Holds(number, 60, 30 + number, 300 * MIB) for number in range(30)], [100] * 30, "threads 34"),
        ([Holds(number, 60, 30, (300 + 10 * number) * MIB) for number in range(30)], [100] * 30, "MiB 345"),
        (STEADY, [100 + number * 2 for number in range(30)], "etcd: 109 keys at first, 149"),
    ],
)
def test_what_grows_with_each_generation_is_seen(holds, keys, what):
    with pytest.raises(SoakError, match=what):
        growth(holds, keys).check()


def test_shared_memory_may_grow_as_far_as_lanes_and_trainers_explain():
    """More lanes at once need more regions, which stay: no leak. Beyond that it is one."""
    most = most_memories(trainers=4, lanes=4)
    growth([sharing(11)] * 10 + [sharing(most)] * 20, [100] * 30).check()
    with pytest.raises(SoakError, match=rf"memfd 11 -> {most + 1}"):
        growth([sharing(11)] * 10 + [sharing(most + 1)] * 20, [100] * 30).check()


def test_kinds_of_descriptors_are_told():
    before = kinds_of(os.getpid())
    with ExitStack() as stack:
        for each in (*socket.socketpair(), socket.create_server(("127.0.0.1", 0))):
            stack.enter_context(each)
        stack.callback(os.close, os.memfd_create("x"))
        stack.callback(os.close, os.eventfd(0))
        found = kinds_of(os.getpid())
    assert found - before == Counter(unix=2, tcp=1, memfd=1, eventfd=1)


def test_a_process_that_lived_for_few_faults_says_nothing():
    assert not str(growth(STEADY[:8], [1] * 8))


def test_percentiles_are_values_that_were_measured():
    seconds = [number / 100 for number in range(1, 101)]
    assert [percentile(seconds, share) for share in (50, 90, 99, 100)] == [0.5, 0.9, 0.99, 1.0]
    assert percentile([0.3], 99) == 0.3
