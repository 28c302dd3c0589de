"""Two members that do not reach each other, while both reach etcd and the third: the others go on without one
of them, and it comes back. Connections are real; of the closed way nothing is built, and nothing arrives."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import trireme
from tests.trireme.communicator.test_communicator import etcd
from trireme.communicator_status import Cause
from trireme_shared.collective import background, entering
from trireme_shared.collective.group import Broken, Group
from trireme_shared.collective.reach import CONNECT_S, Reach, reaches

__all__ = ["etcd"]
pytestmark = [pytest.mark.processes, pytest.mark.soak]
HOSTS = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
TTL_S = 2.0
closed: set[frozenset[str]] = set()


def stands(hosts: set[str]) -> bool:
    return any(way <= hosts for way in closed)


class PartedGroup(Group):
    def __init__(self, store, rank, size, device, peers, timeout_s):
        self._hosts = {peer[0] for peer in peers}
        if stands(self._hosts):
            time.sleep(timeout_s)
            raise Broken("the group could not be built: a connection was not made")
        super().__init__(store, rank, size, device, peers, timeout_s)

    def exchange(self, mine, timeout_s):
        deadline = time.monotonic() + timeout_s
        while stands(self._hosts):
            time.sleep(0.01)
            if time.monotonic() > min(deadline, self._cut_at):
                raise Broken("nothing came")
        return super().exchange(mine, timeout_s)


class PartedReach(Reach):
    def __init__(self, etcd, keys, mirror, own, *others):
        async def reached(member):
            hosts = {each.address.partition(":")[0] for each in (own().record, member)}
            return not stands(hosts) and await reaches(member)

        super().__init__(etcd, keys, mirror, own, *others, reached)


@pytest.fixture
def made(etcd, monkeypatch):
    monkeypatch.setattr(entering, "Group", PartedGroup)
    monkeypatch.setattr(background, "Reach", PartedReach)
    closed.clear()

    settings = {"lease_ttl_s": TTL_S, "timeout_s": 8.0, "share_state": False}
    members = [trireme.CollectiveCommunicator("parted", etcd.url, host=host, **settings) for host in HOSTS]
    yield members
    for member in members:
        member.close()


def test_the_others_go_on_without_one_of_two_that_do_not_reach_each_other_until_they_do(made):
    def until(one, size, limit_s):
        """Sums until `size` members add to one; what failed before, and how long it took."""
        failed, began = [], time.monotonic()
        while time.monotonic() < began + limit_s:
            status, value = one.allreduce(1.0, op="SUM")
            if status and value == size:
                return failed, time.monotonic() - began
            if not status:
                failed.append(status)
        raise AssertionError(f"{one!r} was in no group of {size} within {limit_s} s: {failed}")

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda one: until(one, 3, 20.0), made))
        closed.add(frozenset(HOSTS[1:]))
        alone = pool.submit(made[2].allreduce, 1.0, op="SUM")
        going_on = list(pool.map(lambda one: until(one, 2, 20.0), made[:2]))
        for failed, took_s in going_on:
            assert failed == [], "the operation is done again by those who stay"
            assert took_s < 2 * TTL_S + CONNECT_S + 6.0
        status, _ = alone.result(20.0)
        assert status.cause is Cause.TIMEOUT
        assert re.search(r"this process does not reach member-\S+ at 127\.0\.0\.3:", status.reason)
        for one in made[:2]:
            assert one.allreduce(1.0, op="SUM") is not None
        closed.clear()
        list(pool.map(lambda one: until(one, 3, 30.0), made))
