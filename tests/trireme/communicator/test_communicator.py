"""`trireme.CollectiveCommunicator`: several in the threads of one process, over a real etcd. Real processes:
tests/soak/communicator."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import trireme
from trireme.communicator_status import Cause
from trireme_shared.collective import background, group
from trireme_shared.platform.etcd import connect
from trireme_shared.platform.etcd.embedded import EmbeddedEtcd
from trireme_shared.platform.membership.etcd_access import EtcdAccess
from trireme_shared.protocol.errors import InvalidArgument, PeerError
from trireme_shared.protocol.keys import ClusterKeys, Keys

pytestmark = [pytest.mark.processes]


class Loop:
    """An event loop in a thread, which keeps the etcd of all tests of this module."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()

    def run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(30)

    def end(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


@pytest.fixture(scope="module")
def etcd():
    folder = tempfile.mkdtemp(prefix="trireme-etcd-")
    loop = Loop()
    embedded = EmbeddedEtcd(folder, unsafe_no_fsync=True)
    loop.run(embedded.start())
    yield embedded
    loop.run(embedded.stop())
    loop.end()
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def members(etcd, count: int, job: str, **settings):
    """(each, communicators): `each(work)` calls work(communicator, place) in all at once."""
    given = {"timeout_s": 20.0, "share_state": False, "min_members": count} | settings
    with ThreadPoolExecutor(count + 2) as pool:
        made = list(pool.map(lambda _: trireme.CollectiveCommunicator(job, etcd.url, **given), range(count)))
        try:
            yield (lambda work: list(pool.map(work, made, range(count)))), made
        finally:
            list(pool.map(lambda each: each.close(), made))


def test_means_and_sums_broadcasts_and_barriers(etcd):
    with members(etcd, 3, "all") as (each, made):
        for status, mean in each(
            lambda one, place: one.allreduce({"w": torch.full((2,), float(place))}, weight=place)
        ):
            assert status == trireme.SUCCEEDED
            assert status.weight == 3.0
            assert mean["w"].tolist() == [pytest.approx(5 / 3)] * 2
        assert {one.rank for one in made} == {0, 1, 2}
        assert {one.size for one in made} == {3}
        assert len({one.epoch for one in made}) == 1
        for status, total in each(lambda one, place: one.allreduce(np.full(2, place), op="SUM")):
            assert (bool(status), total.tolist()) == (True, [3, 3])
        given = each(lambda one, place: one.broadcast({"from": one.rank, "place": place}, root=1))
        assert len({str(value) for _, value in given}) == 1
        assert given[0][1]["from"] == 1
        assert all(each(lambda one, place: one.barrier()))


@pytest.mark.parametrize("others", [None, [np.zeros(9), "x"]])
def test_what_the_others_give_to_a_broadcast_is_not_looked_at_if_it_can_be_sent(etcd, others):
    with members(etcd, 2, "given", share_state=True) as (each, _):
        assert all(status.joined for status in each(lambda one, _: one.barrier())), "nobody has a state yet"
        for given in ("of the oldest one", "of the one that has it"):
            states = each(lambda one, _, given=given: one.broadcast(others if one.rank else given))
            assert states == [(trireme.SUCCEEDED, given)] * 2
        for root in (None, 0):
            with pytest.raises(InvalidArgument, match="neither a tensor, an array nor a number"):
                each(lambda one, _, root=root: one.broadcast(object(), root))


def many(elements: int) -> list[torch.Tensor]:
    """5000 tensors; number 3000 has so many elements."""
    return [torch.ones(elements if number == 3000 else 1) for number in range(5000)]


@pytest.mark.parametrize(
    ("one", "other", "told"),
    [
        (
            lambda c: c.allreduce(torch.ones(2)),
            lambda c: c.allreduce(torch.ones(3)),
            ["float32 [2]", "float32 [3]"],
        ),
        (lambda c: c.allreduce(torch.ones(2)), lambda c: c.allreduce(np.ones(2)), ["float32", "float64"]),
        (lambda c: c.allreduce(1.0), lambda c: c.allreduce(1.0, op="SUM"), ["MEAN", "SUM"]),
        (lambda c: c.allreduce(1.0), lambda c: (c.barrier(), None), ["allreduce", "barrier"]),
        (lambda c: c.broadcast(1.0, root=0), lambda c: c.broadcast(1.0, root=1), ["rank 0", "rank 1"]),
        (
            lambda c: c.allreduce(many(2)),
            lambda c: c.allreduce(many(3)),
            ["[3000]: float32 [2]", "[3000]: float32 [3]"],
        ),
    ],
)
def test_different_calls_fail_by_name_in_all_members_and_the_group_goes_on(etcd, one, other, told):
    with members(etcd, 2, "mismatch") as (each, _):
        each(lambda c, place: c.barrier())
        began = time.monotonic()
        found = each(lambda c, place: (one, other)[place](c))
        assert time.monotonic() - began < 10.0, "it was told, not waited for until timeout_s"
        assert [status == trireme.FAILED for status, _ in found] == [True, True]
        assert {status.cause for status, _ in found} == {Cause.MISMATCH}
        assert len({status.reason for status, _ in found}) == 1
        assert all(word in found[0][0].reason for word in told)
        assert [value.item() for _, value in each(lambda c, place: c.allreduce(torch.tensor(4.0)))] == [
            4.0,
            4.0,
        ]


def test_members_that_were_made_differently_are_told_so(etcd):
    with members(etcd, 1, "unfit", min_members=2) as (each, _):
        other = trireme.CollectiveCommunicator(
            "unfit", etcd.url, reduction="canonical", min_members=2, timeout_s=20
        )
        with ThreadPoolExecutor(1) as pool:
            there = pool.submit(other.barrier)
            (here,) = each(lambda c, place: c.barrier())
            assert here.cause is there.result().cause is Cause.MISMATCH
            assert here.reason == there.result().reason
            assert "reduction is" in here.reason
        other.close()


def test_a_new_member_gets_the_oldest_ones_state_before_anything_else(etcd):
    with members(etcd, 1, "joining", share_state=True) as (_, (old,)):
        assert old.joined
        (status, _) = old.allreduce(1.0)
        assert status == trireme.SUCCEEDED  # alone: nobody needs anything
        with (
            trireme.CollectiveCommunicator("joining", etcd.url, timeout_s=20) as new,
            ThreadPoolExecutor(1) as pool,
        ):

            def loop(one, state):
                for _ in range(100):
                    status, value = (
                        one.broadcast(state) if one.joined else one.allreduce(torch.tensor(state["x"]))
                    )
                    if isinstance(value, dict):
                        state = value
                    elif status and one.size == 2:
                        return state, value.item()
                    time.sleep(0.01)
                return None

            joining = pool.submit(loop, new, {"x": 1.0})
            assert loop(old, {"x": 7.0}) == joining.result(20) == ({"x": 7.0}, 7.0)
            assert (old.rank, new.rank) == (0, 1)


def test_who_leaves_is_missed_by_nobody_and_a_cut_group_is_built_anew(etcd):
    with members(etcd, 3, "leaving", min_members=1) as (_, made):

        def until_whole(one, size):
            while True:
                status, value = one.allreduce(1.0, op="SUM")
                assert status
                if value == size:
                    return one.epoch

        with ThreadPoolExecutor(3) as pool:
            (before,) = set(pool.map(lambda one: until_whole(one, 3), made))
            for own in {place for one in made for place in group.listening_addresses()}:
                group.cut_connections(own, set())
            (after,) = set(pool.map(lambda one: until_whole(one, 3), made))
            assert after > before
            made[0].close()
            assert len(set(pool.map(lambda one: until_whole(one, 2), made[1:]))) == 1
        assert made[0].barrier().cause is Cause.CLOSED


def test_who_does_not_come_is_waited_for_no_longer_than_allowed_and_the_call_may_be_repeated(etcd):
    with members(etcd, 2, "late", timeout_s=2.0) as (each, made):
        each(lambda one, place: one.barrier())
        began = time.monotonic()
        status, value = made[0].allreduce(1.0)
        assert (status.cause, value) == (Cause.TIMEOUT, None)
        assert 1.9 < time.monotonic() - began < 4.0
        found = each(lambda one, place: one.allreduce(3.0 + place))
        assert [(bool(status), value) for status, value in found] == [(True, 3.5), (True, 3.5)]


def test_fewer_members_than_min_members_are_the_reason_and_no_older_trouble(etcd):
    with members(etcd, 1, "few", min_members=2, timeout_s=1.0) as (_, (alone,)):
        status = alone.barrier()
        assert status.cause is Cause.TIMEOUT
        assert status.reason == "not done within 1 s: min_members is 2, and 1 process is there"
    with members(etcd, 3, "fewer", timeout_s=2.0) as (each, made):
        assert all(each(lambda one, place: one.barrier()))
        with ThreadPoolExecutor(2) as pool:
            begun = [pool.submit(one.allreduce, torch.ones(3)) for one in made[:2]]
            time.sleep(0.2)
            made[2].close()
            for status, _ in [each.result() for each in begun]:
                assert status.reason == "not done within 2 s: min_members is 3, and 2 processes are there"


def left_of(etcd, job: str) -> list[str]:
    keys = Keys(job)

    async def left():
        client = EtcdAccess((etcd.url,)).connect()
        try:
            return [kv.key for kv in (await client.range(keys.prefix, prefix=True)).kvs]
        finally:
            await client.close()

    return [key for key in asyncio.run(left()) if key != keys.collective_epoch]


def test_keys_are_gone_with_the_members(etcd):
    with members(etcd, 2, "keys") as (each, _):
        each(lambda one, place: one.barrier())
        assert left_of(etcd, "keys")
    assert left_of(etcd, "keys") == []


@pytest.mark.parametrize("registered", [True, False])
def test_a_constructor_that_is_interrupted_leaves_no_member(etcd, registered, monkeypatch):
    class Interrupted(threading.Event):
        def wait(self, timeout=None):
            if registered:
                assert super().wait(timeout)
            raise KeyboardInterrupt

    replaced = SimpleNamespace(Thread=threading.Thread, Condition=threading.Condition, Event=Interrupted)
    monkeypatch.setattr(background, "threading", replaced)
    with pytest.raises(KeyboardInterrupt):
        trireme.CollectiveCommunicator("interrupted", etcd.url)
    assert "trireme-communicator" not in [thread.name for thread in threading.enumerate()]
    assert left_of(etcd, "interrupted") == []


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"reduction": "tree"}, "reduction is 'tree'"),
        ({"transport_dtype": "int8"}, "transport_dtype is 'int8'"),
        ({"backend": "mpi"}, "backend is 'mpi'"),
        ({"lease_ttl_s": 1.0}, "lease_ttl_s 1 must be at least 2"),
        ({"lease_ttl_s": float("nan")}, "lease_ttl_s nan must be"),
        ({"lease_ttl_s": float("inf")}, "lease_ttl_s inf must be"),
        ({"timeout_s": 0}, "timeout_s 0 must be above 0"),
        ({"timeout_s": float("inf")}, "timeout_s inf must be above 0"),
        ({"timeout_s": float("nan")}, "timeout_s nan must be above 0"),
        ({"timeout_s": 1e12}, "at most 31536000"),
        ({"timeout_s": None}, "timeout_s None must be"),
        ({"timeout_s": "60"}, "timeout_s '60' must be"),
        ({"min_members": 0}, "min_members is 0"),
        ({"min_members": 1.5}, "min_members is 1.5"),
        ({"min_members": True}, "min_members is True"),
        ({"min_members": "2"}, "min_members is '2'"),
        ({"host": 7}, "host is 7"),
        ({"etcd": 2379}, "etcd is 2379"),
        ({"etcd": [2379]}, "etcd is [2379]"),
        ({"etcd": b"http://127.0.0.1:1"}, "etcd is b'http"),
        ({"job": 5}, "the job is 5"),
        ({"job": b"j"}, "the job is b'j'"),
        ({"etcd": ""}, "no etcd is named"),
        ({"job": "a/b"}, "the job is 'a/b'"),
        ({"job": "Big Group"}, "the nearest one is big-group"),
        ({"job": "my_job"}, "the nearest one is my-job"),
        ({"job": "jobs"}, "are keys of a cluster itself"),
    ],
)
def test_wrong_arguments_are_named(settings, told, monkeypatch):
    monkeypatch.delenv("TRIREME_ETCD", raising=False)
    with pytest.raises(InvalidArgument) as error:
        trireme.CollectiveCommunicator(**{"job": "j", "etcd": "http://127.0.0.1:1"} | settings)
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda one: one.broadcast(1.0, root=True), "root is True"),
        (lambda one: one.broadcast(1.0, root=0.0), "root is 0.0"),
        (lambda one: one.broadcast(1.0, root="0"), "root is '0'"),
        (lambda one: one.broadcast(1.0, root=-1), "root is -1"),
        (lambda one: one.allreduce(1.0, weight=None), "weight is None"),
        (lambda one: one.allreduce(1.0, weight="2"), "weight is '2'"),
        (lambda one: one.allreduce(1.0, weight=torch.ones(2)), "weight is tensor([1., 1.])"),
        (lambda one: one.allreduce(1.0, weight=float("nan")), "weight is nan"),
        (lambda one: one.allreduce(1.0, op="SUM", weight=2), "weight is 2"),
    ],
)
def test_wrong_arguments_of_operations_are_named_before_anything_begins(call, told, monkeypatch):
    monkeypatch.setattr(background.Background, "start", lambda self, limit_s: None)
    with (
        trireme.CollectiveCommunicator("j", "http://127.0.0.1:1") as one,
        pytest.raises(InvalidArgument) as error,
    ):
        call(one)
    assert told in str(error.value)


def test_numbers_of_other_types_are_numbers(etcd):
    settings = {"timeout_s": np.float32(20), "lease_ttl_s": 5, "min_members": np.int64(1)}
    with members(etcd, 1, "numbers", **settings) as (_, (one,)):
        status, value = one.allreduce(3.0, weight=torch.tensor(2))
        assert (status.weight, value) == (2.0, 3.0)
        assert one.broadcast("x", root=np.int64(0)) == (trireme.SUCCEEDED, "x")


@pytest.mark.parametrize(
    ("key", "what"),
    [(ClusterKeys().job("digits"), "a job of the cluster"), (Keys("digits").spec, "a run")],
)
def test_a_name_that_a_job_uses_is_refused_but_to_its_own_script(etcd, key, what, monkeypatch):
    client = Loop()

    async def put(value: bytes | None) -> None:
        access = connect([etcd.url])
        await (access.put(key, value) if value is not None else access.delete(key))
        await access.close()

    try:
        client.run(put(b"{}"))
        with pytest.raises(PeerError, match=f"the name digits is in use: it is {what}") as refused:
            trireme.CollectiveCommunicator("digits", etcd.url, timeout_s=20)
        assert refused.value.hint == ""
        monkeypatch.setenv("TRIREME_JOB", "digits")
        with members(etcd, 1, "digits") as (_, (one,)):
            assert one.barrier()
    finally:
        client.run(put(None))
        client.end()


def test_without_etcd_it_is_told_within_the_time():
    with pytest.raises(PeerError, match="no communicator"):
        trireme.CollectiveCommunicator("j", "http://127.0.0.1:1", timeout_s=0.5)


def test_a_status_is_one_of_two_things():
    status = trireme.Status(succeeded=False, cause=Cause.TIMEOUT, reason="late")
    assert status == trireme.FAILED != trireme.SUCCEEDED
    assert not status
    assert len({status, trireme.FAILED, trireme.SUCCEEDED}) == 2
    assert repr(status) == "FAILED(timeout: late)"
