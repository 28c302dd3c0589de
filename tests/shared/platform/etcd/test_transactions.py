"""Conformance: keys, ranges, transactions, limits, history. Simulated and real etcd must agree."""

from __future__ import annotations

import asyncio

import pytest

from trireme_shared.platform.etcd import Compacted, Compare, Delete, Fatal, Get, LimitExceeded, Put
from trireme_shared.platform.etcd.operations import MAX_BYTES, RANGE, TXN, prefix_end, request_op


async def test_a_key_counts_its_revisions_and_versions(world, etcd):
    key = world.key + "a"
    assert await etcd.get(key) is None
    first = await etcd.put(key, b"1")
    second = await etcd.put(key, b"2")
    assert second == first + 1
    kv = await etcd.get(key)
    assert (kv.key, kv.value, kv.create_revision, kv.mod_revision, kv.version, kv.lease) == (
        *(key, b"2"),
        *(first, second, 2, 0),
    )
    assert await etcd.delete(key) == 1
    assert await etcd.delete(key) == 0
    again = await etcd.put(key, b"3")
    kv = await etcd.get(key)
    assert (kv.create_revision, kv.version) == (again, 1)
    assert again == second + 2, "a delete is one revision, a delete of nothing is none"


async def test_keys_are_text_and_values_are_bytes(world, etcd):
    for name, value in {"é/漢": b"\x00\xff", "empty": b"", 'quote"\\': "漢".encode()}.items():
        await etcd.put(world.key + name, value)
        kv = await etcd.get(world.key + name)
        assert (kv.key, kv.value) == (world.key + name, value)


@pytest.mark.parametrize(
    ("prefix", "end"),
    [
        (b"a", b"b"),
        (b"/ps/", b"/ps0"),
        (b"a\xff", b"b"),
        (b"a\xff\xff", b"b"),
        (b"\xff", b"\0"),
        (b"", b"\0"),
    ],
)
def test_the_end_of_a_prefix_carries(prefix, end):
    assert prefix_end(prefix) == end


async def test_a_range_of_a_prefix_that_ends_in_ff_finds_its_keys_only(world, etcd):
    raw = world.key.encode()
    for tail in (b"a\xfe", b"a\xff", b"a\xff\x01", b"b"):
        await etcd.transport.call("/kv/put", {"key": raw + tail, "value": tail}, 2.0)
    body = {"key": raw + b"a\xff", "range_end": prefix_end(raw + b"a\xff")}
    answer = await etcd.transport.call(RANGE, body, 2.0)
    assert [kv["value"] for kv in answer["kvs"]] == [b"a\xff", b"a\xff\x01"]


async def test_ranges_are_ordered_and_can_be_limited_counted_and_stripped(world, etcd):
    for name in "cabd":
        await etcd.put(f"{world.key}{name}", name.encode())
    revision = (await etcd.get(world.key + "d")).mod_revision

    everything = await etcd.range(world.key, prefix=True)
    assert [kv.value for kv in everything.kvs] == [b"a", b"b", b"c", b"d"]
    assert (everything.count, everything.more, everything.revision) == (4, False, revision)
    part = await etcd.range(world.key + "b", world.key + "d")
    assert [kv.value for kv in part.kvs] == [b"b", b"c"]
    limited = await etcd.range(world.key, prefix=True, limit=3)
    assert (len(limited.kvs), limited.count, limited.more) == (3, 4, True)
    counted = await etcd.range(world.key, prefix=True, count_only=True)
    assert (counted.kvs, counted.count) == ((), 4)
    stripped = await etcd.range(world.key, prefix=True, keys_only=True)
    assert [(kv.key[-1], kv.value) for kv in stripped.kvs] == [("a", b""), ("b", b""), ("c", b""), ("d", b"")]
    assert stripped.kvs[0].mod_revision == revision - 2
    assert (await etcd.range(world.key + "x", prefix=True)).count == 0


async def test_compares_hold_as_their_relation_says(world, etcd):
    key, missing = world.key + "a", world.key + "missing"
    created = await etcd.put(key, b"m")
    lease = await etcd.grant(60)
    modified = await etcd.put(key, b"m", lease.id)
    cases = []
    for make, held in ((Compare.create, created), (Compare.mod, modified), (Compare.version, 2)):
        for delta in (-1, 0, 1):
            for relation, truth in (
                ("==", delta == 0),
                ("!=", delta != 0),
                (">", delta < 0),
                ("<", delta > 0),
            ):
                cases.append((make(key, relation, held + delta), truth))
    for value in (b"l", b"m", b"n"):
        for relation, truth in (
            ("==", value == b"m"),
            ("!=", value != b"m"),
            (">", value < b"m"),
            ("<", value > b"m"),
        ):
            cases.append((Compare.value(key, relation, value), truth))
    cases += [
        (Compare.lease(key, "==", lease.id), True),
        (Compare.lease(key, "!=", lease.id), False),
        (Compare.lease(key, "==", 0), False),
        (Compare.create(missing, "==", 0), True),
        (Compare.create(missing, ">", 0), False),
        (Compare.mod(missing, "==", 0), True),
        (Compare.version(missing, "<", 1), True),
        (Compare.lease(missing, "==", 0), True),
        (Compare.value(missing, "==", b""), False),
        (Compare.value(missing, "!=", b"x"), False),
    ]
    results = await asyncio.gather(*[etcd.txn([compare], []) for compare, _ in cases])
    assert [r.succeeded for r in results] == [truth for _, truth in cases]
    assert (await etcd.txn([cases[-1][0], Compare.create(missing, "==", 0)], [])).succeeded is False, (
        "all must hold"
    )
    await lease.revoke()


async def test_a_transaction_is_one_revision_and_reads_its_own_writes_in_order(world, etcd):
    a, b, old = world.key + "a", world.key + "b", world.key + "old"
    before = await etcd.put(old, b"0")
    result = await etcd.txn(
        [Compare.create(a, "==", 0)],
        [Get(a), Put(a, b"1"), Put(b, b"2"), Get(world.key, prefix=True), Delete(old), Get(old)],
        [Get(a)],
    )
    assert (result.succeeded, result.revision) == (True, before + 1)
    assert result.range(0).kvs == ()
    assert [(kv.value, kv.mod_revision) for kv in result.range(3).kvs] == [
        *((b"1", before + 1), (b"2", before + 1), (b"0", before)),
    ]
    assert (result.results[1], result.results[4]) == (None, 1)
    assert result.range(5).kvs == ()


async def test_a_lost_compare_takes_the_other_branch_and_changes_nothing_else(world, etcd):
    key = world.key + "a"
    revision = await etcd.put(key, b"mine")
    lost = await etcd.txn([Compare.create(key, "==", 0)], [Put(key, b"theirs")], [Get(key)])
    assert (lost.succeeded, lost.revision) == (False, revision)
    assert lost.range(0).first.value == b"mine"
    nothing = await etcd.txn([], [Delete(world.key + "missing"), Get(key)])
    assert (nothing.succeeded, nothing.revision, nothing.results[0]) == (True, revision, 0)


async def test_an_old_revision_can_be_read_until_it_is_compacted(world, etcd):
    key = world.key + "a"
    first = await etcd.put(key, b"1")
    await etcd.put(world.key + "b", b"x")
    await etcd.delete(key)
    last = await etcd.put(key, b"2")
    assert [kv.value for kv in (await etcd.range(key, revision=first)).kvs] == [b"1"]
    assert (await etcd.range(key, revision=last - 1)).kvs == ()
    assert (await etcd.range(world.key, prefix=True, revision=last - 1)).count == 1

    with pytest.raises(Fatal, match="future"):
        await etcd.range(key, revision=last + 1000)
    await etcd.compact(last - 1)
    with pytest.raises(Compacted):
        await etcd.range(key, revision=first)
    assert (await etcd.range(key, revision=last - 1)).kvs == ()
    with pytest.raises(Compacted):
        await etcd.compact(last - 1)
    assert (await etcd.get(key)).value == b"2"


def _too_many(key):
    return [], [Put(f"{key}{n}", b"") for n in range(129)]


def _put_twice(key):
    return [], [Put(key, b"1"), Put(key, b"2")]


def _put_and_deleted(key):
    return [], [Put(key + "x", b"1"), Delete(key, prefix=True)]


def _too_many_compares(key):
    return [Compare.create(f"{key}{n}", "==", 0) for n in range(129)], []


@pytest.mark.parametrize("make", [_too_many, _put_twice, _put_and_deleted, _too_many_compares])
async def test_what_exceeds_etcds_limits_is_refused_before_it_is_sent_and_by_etcd_too(world, etcd, make):
    compares, success = make(world.key)
    with pytest.raises(LimitExceeded):
        await etcd.txn(compares, success)
    body = {
        "compare": [c.body() for c in compares],
        "success": [request_op(op) for op in success],
        "failure": [],
    }
    with pytest.raises(LimitExceeded):
        await etcd.transport.call(TXN, body, 2.0)
    assert (await etcd.range(world.key, prefix=True)).count == 0


async def test_128_operations_and_a_mebibyte_are_within_the_limits(world, etcd):
    result = await etcd.txn([], [Put(f"{world.key}{n}", b"x" * 8000) for n in range(128)])
    assert len(result.results) == 128
    assert (await etcd.range(world.key, prefix=True, count_only=True)).count == 128


async def test_a_value_above_the_limit_is_refused_before_it_is_sent_and_by_etcd_too(world, etcd):
    with pytest.raises(LimitExceeded, match="keep big state out"):
        await etcd.put(world.key, bytes(MAX_BYTES + 1))
    with pytest.raises(LimitExceeded, match=r"holds 1\d* bytes"):
        await etcd.txn([], [Put(f"{world.key}{n}", bytes(MAX_BYTES // 2)) for n in range(2)])
    with pytest.raises(LimitExceeded):
        await etcd.transport.call("/kv/put", {"key": world.key.encode(), "value": bytes(1_700_000)}, 5.0)


async def test_concurrent_compare_and_put_never_loses_an_increment(world, etcd):
    key = world.key + "counter"
    await etcd.put(key, b"0")

    async def increment(client):
        for _ in range(10):
            while True:
                kv = await client.get(key)
                new = str(int(kv.value) + 1).encode()
                if (await client.txn([Compare.mod(key, "==", kv.mod_revision)], [Put(key, new)])).succeeded:
                    break

    await asyncio.gather(*[increment(world.client(f"c{n}")) for n in range(5)])
    assert (await etcd.get(key)).value == b"50"
