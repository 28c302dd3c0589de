"""Addresses of etcd with a user and a password in them: no text, log or file shows these."""

from __future__ import annotations

import pytest

from trireme.client.exchange import Masters
from trireme.communicator import access_of
from trireme.view.job_address import address_of, client_of, open_job
from trireme_shared.platform.etcd import connect
from trireme_shared.platform.etcd.embedded import free_ports
from trireme_shared.platform.etcd.errors import Refused
from trireme_shared.platform.membership.etcd_access import EtcdAccess
from trireme_shared.platform.runtime.telemetry import without_user
from trireme_shared.protocol.errors import InvalidArgument


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("http://user:secret@h:1", "http://h:1"),
        ("http://h:1", "http://h:1"),
        ("http://u:se/cr@et@h:1, https://u:secret@g:2", "http://h:1, https://g:2"),
        ("user:secret@h:1", "h:1"),
        ("etcd+http://u:secret@h:1,http://u:secret@g:1/job", "etcd+http://h:1,http://g:1/job"),
        ("unix:///tmp/a@b", "unix:///tmp/a@b"),
        ("etcd+unix:///tmp/a@b/job", "etcd+unix:///tmp/a@b/job"),
    ],
)
def test_what_stands_before_the_host_is_left_out(given: str, shown: str) -> None:
    assert without_user(given) == shown


def test_whoever_keeps_the_address_keeps_no_password() -> None:
    access = EtcdAccess(("http://user:secret@h:1", "http://g:2"))
    assert "secret" not in f"{access!r} {access} {access.facts()} {access.environment()}"
    assert access == EtcdAccess(("http://h:1", "http://g:2"))


async def test_errors_and_logs_of_a_client_have_no_password(capsys) -> None:
    urls = [f"http://user:secret@127.0.0.1:{port}" for port in free_ports(2)]
    client = connect(urls)
    try:
        with pytest.raises(Refused) as caught:
            await client.transport.call("/kv/range", {"key": b"/a"}, 1.0)
    finally:
        await client.close()
    assert "cannot connect to etcd at http://127.0.0.1:" in caught.value.message
    logged = "".join(capsys.readouterr())
    assert "endpoint_changed" in logged
    assert "secret" not in caught.value.message + repr(client.transport) + logged


@pytest.mark.parametrize(
    "url", ["http://user:secret@h", "user:secret@h:1", "http://user:se/secret@h", "ftp://u:secret@h:1"]
)
def test_an_address_that_cannot_be_is_told_without_its_password(url: str) -> None:
    with pytest.raises(InvalidArgument, match="is not an etcd endpoint") as caught:
        connect([url])
    assert "secret" not in caught.value.message


async def test_a_masterless_job_is_named_without_the_password() -> None:
    url = "etcd+http://user:secret@h:1"
    assert address_of(f"{url}/job", "job") == "etcd+http://h:1/job"
    told = []
    for ask in (client_of, Masters):
        with pytest.raises(InvalidArgument, match="no master can answer this") as caught:
            ask(f"{url}/job")
        told.append(caught.value.message)
    with pytest.raises(InvalidArgument, match="names no masterless job") as caught:
        async with open_job(f"{url}/"):
            pass
    assert "secret" not in "".join([*told, caught.value.message])


def test_a_communicator_that_gets_something_else_than_addresses_does_not_show_them() -> None:
    with pytest.raises(InvalidArgument, match="it is an address or several") as caught:
        access_of(["http://user:secret@h:1", 7])  # type: ignore[list-item]
    assert "secret" not in caught.value.message
