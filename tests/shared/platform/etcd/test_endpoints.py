"""Several endpoints, doubtful members, users, TLS: against real etcds."""

from __future__ import annotations

import asyncio
import shutil
import signal
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from tests.equipment.etcd.with_tls import etcd_process, make_certificates, tls_etcd
from tests.equipment.stopping import stop
from trireme_shared.platform.etcd import (
    Compare,
    Fatal,
    OutcomeUnknown,
    Put,
    Refused,
    Retryable,
    Unauthenticated,
    connect,
)
from trireme_shared.platform.etcd.embedded import EmbeddedEtcd, free_ports
from trireme_shared.platform.runtime import clock
from trireme_shared.protocol.errors import InvalidArgument


@asynccontextmanager
async def client_of(*urls, **options):
    client = connect(urls, **options)
    try:
        yield client
    finally:
        await client.close()


async def test_a_dead_endpoint_is_passed_over_without_a_pause(embedded_etcd):
    dead = f"http://127.0.0.1:{free_ports(1)[0]}"
    async with client_of(dead, embedded_etcd.url) as client:
        begun = clock.monotonic()
        await client.put("/a", b"1")
        assert (await client.get("/a")).value == b"1"
        async with asyncio.timeout(3):
            async for batch in client.watch("/a"):
                assert batch.kvs[0].value == b"1"
                break
        lease = await client.grant(5)
        await lease.revoke()
        assert clock.monotonic() - begun < 1
        assert client.transport.current == 1


async def test_a_frozen_endpoint_is_left_after_one_attempt(embedded_etcd, tmp_path):
    async with client_of(embedded_etcd.url) as direct:
        await direct.put("/a", b"1")
    # an etcd of its own, without the key: it must not be the one that answers
    async with EmbeddedEtcd(tmp_path) as frozen, client_of(frozen.url, embedded_etcd.url) as client:
        stop(frozen.pid)
        begun = clock.monotonic()
        assert (await client.get("/a")).value == b"1"
        assert 1.9 < clock.monotonic() - begun < 3.0
        with pytest.raises(Retryable):
            await client.transport.call("/kv/range", {"key": b"/a"}, 0.0)
        frozen.send(signal.SIGCONT)


async def test_a_write_into_a_frozen_etcd_is_unknown_within_its_time_limit(embedded_etcd):
    async with client_of(embedded_etcd.url) as client:
        await client.put("/a", b"1")
        stop(embedded_etcd.pid)
        begun = clock.monotonic()
        with pytest.raises(OutcomeUnknown, match=r"gave no answer within 0\.5 s") as caught:
            await client.txn([Compare.version("/a", "==", 1)], [Put("/a", b"2")], timeout_s=0.5)
        assert clock.monotonic() - begun < 1
        assert "read back" in caught.value.hint
        embedded_etcd.send(signal.SIGCONT)
        kv = await client.get("/a")
        assert (kv.value, kv.version) in {(b"1", 1), (b"2", 2)}


async def test_a_client_outlives_an_etcd_that_is_not_there_yet(tmp_path):
    async with EmbeddedEtcd(tmp_path) as etcd:
        pass
    async with client_of(etcd.url) as client:
        with pytest.raises(Refused, match="cannot connect to etcd at unix:///"):
            await client.get("/a", timeout_s=0.2)
        waiting = asyncio.create_task(client.put("/a", b"1"))
        try:
            await etcd.start()
            await waiting
            assert (await client.get("/a")).version == 1
        finally:
            await etcd.stop()


async def test_another_cluster_and_an_older_term_are_not_believed(tmp_path):
    old, new, other = (EmbeddedEtcd(tmp_path / name) for name in ("old", "new", "other"))
    await new.start()
    await new.stop()
    shutil.copytree(tmp_path / "new" / "data", tmp_path / "old" / "data")
    try:
        await asyncio.gather(old.start(), other.start(), new.start())
        await new.kill()
        await new.start()
        async with client_of(new.url, old.url, other.url) as client:
            await client.put("/a", b"1")
            await new.kill()
            with pytest.raises(Retryable, match=r"belongs to cluster|raft term") as caught:
                await client.get("/a", timeout_s=1)
            client.transport.current = 1
            with pytest.raises(Retryable, match=r"is at raft term \d, the cluster was seen at \d"):
                await client.transport.call("/kv/range", {"key": b"/a"}, 1.0)
            assert client.transport.current == 2
            with pytest.raises(OutcomeUnknown, match="belongs to cluster"):
                await client.transport.call("/kv/put", {"key": b"/a", "value": b""}, 1.0)
            assert "etcd did not do /kv/range of /a within 1 s" in str(caught.value)
    finally:
        for etcd in (old, new, other):
            await etcd.stop()


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:2379",
        "http://",
        "ftp://h:1",
        "http://h",
        "http://h:x",
        "http://h:1/path",
        "unix://c:0",
        "unix:///folder/",
        f"unix:///{'d' * 107}",
    ],
)
def test_what_is_no_endpoint_is_refused_with_an_example(url):
    with pytest.raises(InvalidArgument, match=r"write it as (http://host:2379|unix:///)|may have 107 bytes"):
        connect([url])


def test_no_endpoint_and_unreadable_certificates_are_refused():
    with pytest.raises(InvalidArgument, match="TRIREME_ETCD"):
        connect([])
    with pytest.raises(InvalidArgument, match="missing"):
        connect(["https://h:1"], ca="missing.pem")


async def test_a_cluster_of_three_goes_on_when_its_leader_is_killed(tmp_path):
    ports = free_ports(6)
    members = [
        (f"n{i}", f"http://127.0.0.1:{ports[i]}", f"http://127.0.0.1:{ports[3 + i]}") for i in range(3)
    ]
    cluster = ",".join(f"{name}={peer}" for name, _, peer in members)
    async with AsyncExitStack() as stack:
        processes = [
            await stack.enter_async_context(etcd_process(tmp_path, name, url, peer, cluster))
            for name, url, peer in members
        ]
        client = await stack.enter_async_context(client_of(*[url for _, url, _ in members]))
        seen = []

        async def follow():
            async for batch in client.watch("/k/", prefix=True):
                seen.extend(event.kv.value for event in batch.events)

        await client.put("/k/0", b"before", timeout_s=20)
        lease = await client.grant(4)
        await client.put("/leased", b"", lease.id)
        status = await client.transport.call("/maintenance/status", {}, 2.0)
        ids = [
            (await one.transport.call("/maintenance/status", {}, 2.0))["header"]["member_id"]
            for one in [await stack.enter_async_context(client_of(url)) for _, url, _ in members]
        ]
        leader = ids.index(status["leader"])
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(follow()), group.create_task(lease.keep_alive())]
            client.transport.current = leader
            await asyncio.sleep(0.3)
            processes[leader].kill()
            begun = clock.monotonic()
            while True:
                try:
                    await client.put("/k/1", b"after")
                    break
                except OutcomeUnknown:
                    continue
            assert clock.monotonic() - begun < 8
            async with asyncio.timeout(5):
                while b"after" not in seen:
                    await asyncio.sleep(0.05)
            assert lease.alive
            assert (await client.get("/leased")).lease == lease.id
            for task in tasks:
                task.cancel()


# ---------------------------------------------------------------- users and TLS


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command to make certificates")
    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder)
    return folder


async def test_tls_with_client_certificates_and_users_whose_tokens_etcd_forgets(certificates):
    def pem(name):
        return str(certificates / name)

    files = {"ca": pem("ca.pem"), "cert": pem("client.pem"), "key": pem("client.key")}
    async with tls_etcd(certificates, "server") as (url, _), client_of(url, **files) as anonymous:
        await anonymous.put("/before", b"1", timeout_s=15)
        async with client_of(url, ca=pem("ca.pem")) as without_certificate:
            with pytest.raises(Retryable):
                await without_certificate.get("/before", timeout_s=0.3)
        for method, body in (
            ("/auth/role/add", {"name": "root"}),
            ("/auth/user/add", {"name": "root", "password": "secret"}),
            ("/auth/user/grant", {"user": "root", "role": "root"}),
            ("/auth/user/add", {"name": "reader", "password": "word"}),
            ("/auth/enable", {}),
        ):
            await anonymous.transport.call(method, body, 2.0)
        with pytest.raises(Unauthenticated):
            await anonymous.get("/before")
        async with client_of(url, user="root", password="wrong", **files) as stranger:
            with pytest.raises(Unauthenticated, match="authentication failed"):
                await stranger.get("/before")
        async with client_of(url, user="reader", password="word", **files) as reader:
            with pytest.raises(Fatal, match="permission denied"):
                await reader.get("/before")
        async with client_of(url, user="root", password="secret", **files) as client:
            assert (await client.get("/before")).value == b"1"
            client.transport.token = "forgotten.1"
            answers = await asyncio.gather(*[client.put("/after", b"2") for _ in range(5)])
            assert len(set(answers)) == 5, "each was done once"
            lease = await client.grant(5)
            await lease.revoke()
            client.transport.token = "forgotten.2"
            async with asyncio.timeout(5):
                async for batch in client.watch("/after"):
                    assert batch.kvs[0].version == 5
                    break


async def test_a_certificate_of_another_host_or_authority_is_refused(certificates):
    files = {"ca": str(certificates / "ca.pem"), "cert": str(certificates / "client.pem")}
    files["key"] = str(certificates / "client.key")
    async with tls_etcd(certificates, "wrong") as (url, process):
        async with client_of(url, **files) as client:
            with pytest.raises(Retryable, match=r"(?i)certificate verify failed|not valid for") as caught:
                async with asyncio.timeout(15):
                    while True:
                        try:
                            await client.get("/a", timeout_s=0.2)
                        except Retryable as error:
                            if "ertificate" in str(error) or process.returncode is not None:
                                raise
                        await asyncio.sleep(0.05)
            assert "127.0.0.1" in str(caught.value)
        async with client_of(url) as distrustful:
            with pytest.raises(Retryable, match=r"(?i)certificate"):
                await distrustful.get("/a", timeout_s=0.2)
