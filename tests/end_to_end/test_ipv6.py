"""A run whose members have no IPv4 address."""

from __future__ import annotations

import socket

import psutil
import pytest

from tests.end_to_end.command import wait_for, wait_for_step
from tests.end_to_end.scripts import UNHURRIED_LOSS, write_script
from trireme_shared.platform.security import access

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]


@pytest.mark.parametrize("strategy", ["parameter_server", "collective"])
def test_a_run_at_an_ipv6_address_listens_at_no_other(trireme, tmp_path, strategy):
    script = write_script(tmp_path, loss=UNHURRIED_LOSS)
    process = trireme.begin(
        "run", script, "--host", "::1", "--trainers", 2, "--strategy", strategy, "--epochs", 3
    )
    wait_for(process, r"master http://\[::1\]:\d+")
    wait_for_step(trireme, 1)
    listening = [
        (each.name(), found.laddr)
        for each in trireme.family()
        for found in each.net_connections("inet")
        if found.status == psutil.CONN_LISTEN
    ]
    assert listening
    assert {address.ip for _, address in listening} == {"::1"}, listening
    done = trireme.end_of(process)
    assert (done.code, "COMPLETED" in done.out) == (0, True), done.err


def test_a_name_with_ipv6_addresses_alone_can_be_listened_at(monkeypatch):
    found = [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", 0, 0, 0))]
    monkeypatch.setattr(access.socket, "getaddrinfo", lambda *_, **__: found)
    assert access.family_of("six.test") is socket.AF_INET6
    found.append((socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0)))
    assert access.family_of("both.test") is socket.AF_INET
