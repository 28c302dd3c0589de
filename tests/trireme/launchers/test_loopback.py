"""A Ray node with an address of its own machine alone: told, and refused where others would try for ever."""

from __future__ import annotations

import pytest

from trireme.launchers.launcher import told_of_loopback, unreached_etcd
from trireme_shared.protocol.errors import PeerError


def test_a_head_that_other_machines_reach_is_not_spoken_of():
    assert told_of_loopback("10.0.0.5", ["10.0.0.5", "10.0.0.6", "127.0.0.1"]) == ""


def test_a_cluster_of_one_machine_is_told_that_others_cannot_take_part():
    told = told_of_loopback("127.0.0.11", ["127.0.0.11", "127.0.0.12", "::1"])
    assert "this Ray node has the address 127.0.0.11" in told
    assert "--node-ip-address=ADDRESS" in told


def test_nodes_that_cannot_reach_the_head_are_named_before_anything_is_started():
    with pytest.raises(
        PeerError, match=r"has the address 127.0.0.1, so nodes elsewhere \(10.0.0.6\)"
    ) as caught:
        told_of_loopback("127.0.0.1", ["127.0.0.1", "10.0.0.6"])
    assert "--node-ip-address=ADDRESS" in caught.value.hint


@pytest.mark.parametrize(
    ("etcd", "own", "told"),
    [
        ("http://127.0.0.1:2379", "10.0.0.6", True),
        ("http://[::1]:2379,http://localhost:2379", "10.0.0.6", True),
        ("http://127.0.0.1:2379", "127.0.0.1", False),
        ("http://127.0.0.1:2379,http://10.0.0.5:2379", "10.0.0.6", False),
        ("http://10.0.0.5:2379", "10.0.0.6", False),
        ("unix:///tmp/etcd/client:0", "10.0.0.6", False),
        ("", "10.0.0.6", False),
    ],
)
def test_a_node_that_comes_later_says_that_it_cannot_reach_etcd(etcd, own, told):
    assert ("cannot reach etcd at" in unreached_etcd(etcd, own)) == told
