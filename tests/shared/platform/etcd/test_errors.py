"""Every shape and code of etcd's errors has one meaning."""

from __future__ import annotations

import pytest

from trireme_shared.platform.etcd import (
    Compacted,
    Fatal,
    LeaseLost,
    LimitExceeded,
    NoSpace,
    OutcomeUnknown,
    Retryable,
    Unauthenticated,
    etcd3_transport,
)
from trireme_shared.platform.etcd.errors import of_answer
from trireme_shared.platform.etcd.operations import GRANT, KEEP_ALIVE, PUT, RANGE, TXN, is_write
from trireme_shared.protocol.errors import CallerError, PeerError, from_map

MEANINGS = [
    ("etcdserver: mvcc: required revision has been compacted", 11, Compacted, Compacted),
    ("etcdserver: requested lease not found", 5, LeaseLost, LeaseLost),
    ("etcdserver: mvcc: database space exceeded", 8, NoSpace, NoSpace),
    ("etcdserver: request is too large", 3, LimitExceeded, LimitExceeded),
    ("etcdserver: too many operations in txn request", 3, LimitExceeded, LimitExceeded),
    ("etcdserver: duplicate key given in txn request", 3, LimitExceeded, LimitExceeded),
    ("etcdserver: invalid auth token", 16, Unauthenticated, Unauthenticated),
    ("etcdserver: user name is empty", 3, Unauthenticated, Unauthenticated),
    ("etcdserver: revision of auth store is old", 3, Unauthenticated, Unauthenticated),
    ("etcdserver: authentication failed, invalid user ID or password", 3, Unauthenticated, Unauthenticated),
    ("etcdserver: permission denied", 7, Fatal, Fatal),
    ("etcdserver: mvcc: required revision is a future revision", 11, Fatal, Fatal),
    ("etcdserver: no leader", 14, Retryable, Retryable),
    ("etcdserver: too many requests", 8, Retryable, Retryable),
    ("etcdserver: rpc not supported for learner", 14, Retryable, Retryable),
    ("not a primary lessor", 2, Retryable, Retryable),
    ('connection error: desc = "transport: Error while dialing dial tcp"', 14, Retryable, Retryable),
    ("etcdserver: request timed out", 14, Retryable, OutcomeUnknown),
    ("etcdserver: leader changed", 14, Retryable, OutcomeUnknown),
    ("etcdserver: server stopped", 14, Retryable, OutcomeUnknown),
    ("transport is closing", 14, Retryable, OutcomeUnknown),
    ("context deadline exceeded", 4, Retryable, OutcomeUnknown),
]


@pytest.mark.parametrize("shape", ["gateway v1", "gateway v2", "stream", "stream v2"])
@pytest.mark.parametrize(("text", "code", "of_read", "of_write"), MEANINGS)
def test_an_error_means_the_same_in_every_shape(shape, text, code, of_read, of_write):
    document = {
        "gateway v1": {"error": text, "code": code, "message": text},
        "gateway v2": {"code": code, "message": text, "details": []},
        "stream": {"error": {"grpc_code": code, "http_code": 503, "message": text, "http_status": "x"}},
        "stream v2": {"error": {"code": code, "message": text, "details": []}},
    }[shape]
    for write, kind in ((False, of_read), (True, of_write)):
        error = of_answer(document, 400, where="etcd /kv/put at http://h:1", write=write)
        assert type(error) is kind
        assert text in str(error)
        assert "http://h:1" in str(error)


@pytest.mark.parametrize("document", ["<html>Bad gateway</html>", {}, {"error": {}}, None, []])
def test_a_server_error_that_says_nothing_leaves_a_write_unknown(document):
    assert type(of_answer(document, 502, where="x", write=True)) is OutcomeUnknown
    assert type(of_answer(document, 502, where="x", write=False)) is Retryable


def test_errors_say_whose_fault_they_are_and_cross_the_wire():
    for kind in (Retryable, OutcomeUnknown, NoSpace):
        assert issubclass(kind, PeerError)
    for kind in (Compacted, LeaseLost, Unauthenticated, LimitExceeded, Fatal):
        assert issubclass(kind, CallerError)
        assert type(from_map(kind("x").to_map())) is kind


def test_only_what_changes_something_is_a_write():
    get, put = {"request_range": {}}, {"request_put": {}}
    assert not is_write(RANGE, {})
    assert not is_write(KEEP_ALIVE, {})
    assert not is_write(TXN, {"success": [get], "failure": [get]})
    assert is_write(TXN, {"success": [get], "failure": [put]})
    assert is_write(PUT, {})
    assert is_write(GRANT, {})


def test_the_codec_carries_bytes_and_all_64_bits():
    body = {
        "key": b"\x00\xff",
        "lease": 2**63 - 1,
        "success": [{"request_put": {"value": b""}}],
        "count_only": True,
    }
    assert etcd3_transport.encode(body) == (
        b'{"key":"AP8=","lease":9223372036854775807,"success":[{"request_put":{"value":""}}],'
        b'"count_only":true}'
    )
    answer = (
        b'{"header":{"revision":"9223372036854775807"},"kvs":[{"key":"AP8=","value":"","lease":"-1"}],'
        b'"token":"12"}'
    )
    assert etcd3_transport.decode(answer) == {
        "header": {"revision": 2**63 - 1},
        "kvs": [{"key": b"\x00\xff", "value": b"", "lease": -1}],
        "token": "12",
    }
    for broken in (b"", b"{", b'{"key":"?"}', b"\xff"):
        with pytest.raises(ValueError):
            etcd3_transport.decode(broken)
