"""What every kind of group has to do: Gloo here, NCCL where there is a GPU for each member."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress

import pytest
import torch

from tests.shared.collective.groups import Groups, Values
from trireme_shared.collective.group import (
    Broken,
    Device,
    EtcdStore,
    Group,
    NcclGroup,
    listening_addresses,
    nccl_is_there,
)

NCCL = pytest.param(NcclGroup, marks=pytest.mark.skipif(not nccl_is_there(), reason="no GPU"))


@pytest.fixture(params=[Group, NCCL], ids=["gloo", "nccl"])
def groups(request):
    made = Groups(2 if request.param is Group else 1, request.param)
    yield made
    made.drop()


def nothing() -> None:
    pass


def test_members_hear_each_others_numbers_and_texts(groups):
    numbers = groups.each(lambda rank: groups.groups[rank].exchange([rank, -7], 5.0))
    assert numbers == [[[rank, -7] for rank in range(groups.size)]] * groups.size
    texts = groups.each(lambda rank: groups.groups[rank].gather_bytes(b"x" * 40 * rank, 5.0))
    assert texts == [[b"x" * 40 * rank for rank in range(groups.size)]] * groups.size
    told = groups.each(lambda rank: groups.groups[rank].tell(b"from 0" if rank == 0 else None, 0, 5.0))
    assert told == [b"from 0"] * groups.size


def test_tensors_are_summed_given_and_shared_out(groups):
    device, size = groups.groups[0].data_device, groups.size
    large = 3 * (4 << 20) // 4 + 5  # in several chunks

    def work(rank: int) -> tuple:
        group, begun = groups.groups[rank], []
        summed = [torch.full((large,), rank + 1.0, device=device), torch.arange(3, device=device)]
        group.allreduce(summed, 10.0, lambda: begun.append(rank))
        given = [torch.full((4,), float(rank), device=device)]
        group.broadcast(given, size - 1, 10.0, nothing)
        parts = torch.arange(size, dtype=torch.float32, device=device) + 10 * rank
        taken = torch.empty_like(parts)
        group.scatter_all(parts, taken, 10.0, nothing)
        gathered = torch.empty_like(parts)
        group.gather_all(taken[:1].contiguous(), gathered, 10.0)
        return summed, given, taken, gathered, begun

    for rank, (summed, given, taken, gathered, begun) in enumerate(groups.each(work)):
        assert summed[0].eq(sum(range(1, size + 1))).all()
        assert summed[1].tolist() == [0, size, 2 * size]
        assert given[0].eq(size - 1).all()
        assert taken.tolist() == [rank + 10 * other for other in range(size)]
        assert gathered.tolist() == list(range(size))
        assert begun == [rank]


def test_a_cut_ends_an_operation_that_waits_for_a_silent_peer_at_once():
    groups = Groups(2)
    try:
        failed: list[float | str] = []

        def wait() -> None:
            try:
                groups.groups[0].allreduce([torch.ones(10)], 30.0, nothing)
            except Broken as error:
                failed.extend([time.monotonic(), str(error)])

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.05)
        cut_at = time.monotonic()
        assert groups.groups[0].cut() >= 1
        thread.join(5.0)
        assert failed[0] - cut_at < 1.0
    finally:
        groups.drop()


def test_cutting_touches_no_other_socket_and_dropping_leaves_none():
    groups = Groups(2)
    other = listening_addresses()
    groups.groups[0].cut()
    assert listening_addresses() == other  # Gloo ends the process if its listening socket breaks
    groups.drop()


def test_many_groups_leave_no_files_and_no_threads():
    for _ in range(3):
        Groups(2).drop()
    before = len(os.listdir("/dev/fd")), threading.active_count()  # noqa: PTH208
    for _ in range(10):
        Groups(2).drop()
    assert len(os.listdir("/dev/fd")) <= before[0] + 1  # noqa: PTH208
    assert threading.active_count() <= before[1]


def test_a_member_that_does_not_come_is_told_within_the_time():
    began = time.monotonic()
    with pytest.raises(Broken, match="could not be built"):
        Missing()
    assert time.monotonic() - began < 5.0


class Missing(Groups):
    """Rank 1 never builds its group."""

    def __init__(self) -> None:
        super().__init__(2, timeout_s=0.5)

    def each(self, work) -> list:
        return [work(0)]


def test_a_member_to_which_nobody_connects_gives_up_within_its_time_limit():
    """The others said where they listen, and went on to the next epoch. Gloo waits five times for its own
    limit."""
    values, devices, limit_s = Values(), [Device("127.0.0.1") for _ in range(2)], 2.0
    peers = [device.address for device in devices]

    def build(rank: int, shelf: Values) -> float:
        began = time.monotonic()
        with suppress(Broken):  # whoever connects itself does not notice
            Group(EtcdStore(shelf, "group/"), rank, 2, devices[rank], peers, limit_s)
        return time.monotonic() - began

    class Leaving(Values):
        """Its member leaves when it would read where the others listen."""

        def put(self, name: str, value: bytes, timeout_s: float) -> None:
            values.put(name, value, timeout_s)

        def take(self, names: list[str], timeout_s: float) -> list[bytes]:
            raise TimeoutError("the epoch is over")

    took = {}
    for rank in range(2):  # which of two connects to the other depends on their addresses
        values.values.clear()
        build(1 - rank, Leaving())
        took[rank] = build(rank, values)
    assert limit_s / 2 < max(took.values()) < 2 * limit_s, took
