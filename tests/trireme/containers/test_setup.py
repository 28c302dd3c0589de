"""A real etcd gets its users: root, one for Trireme's keys alone, and one that may only log in."""

from __future__ import annotations

import pytest

from tests.equipment.etcd.real import embedded_etcd
from trireme.containers.setup import HEALTH, Settings, turn_on
from trireme_shared.platform.etcd import Unauthenticated, connect
from trireme_shared.platform.etcd.embedded import EmbeddedEtcd
from trireme_shared.platform.security import etcd_users
from trireme_shared.protocol.errors import CallerError, DeadlineExceeded, Unauthorized

__all__ = ["embedded_etcd"]


async def test_only_the_user_of_our_keys_may_use_them_and_nothing_else(embedded_etcd: EmbeddedEtcd) -> None:
    url = embedded_etcd.url
    settings = Settings(etcd=(url,))
    half = connect([url])  # an earlier setup got so far
    await etcd_users.make(
        lambda method, body: half.transport.call(method, body, 5.0), etcd_users.users("r")[:2]
    )
    await half.close()
    await turn_on(settings, "r", "first")
    await turn_on(settings, "r", "first")
    await turn_on(settings, "r", "second")  # the password was lost, root's was not
    member, nobody = connect([url], user="trireme", password="second"), connect([url])
    health = connect([url], user=HEALTH, password=HEALTH)
    try:
        await member.put("/trireme/a", b"1")
        with pytest.raises(CallerError, match="permission denied"):
            await member.get("/other")
        with pytest.raises(CallerError, match="permission denied"):
            await member.transport.call("/auth/user/add", {"name": "x", "password": "x"}, 5.0)
        with pytest.raises(CallerError, match="permission denied"):
            await health.get("/trireme/a")
        with pytest.raises(Unauthenticated):
            await nobody.get("/trireme/a")
        assert (await member.get("/trireme/a")).value == b"1"
        with pytest.raises(Unauthorized, match=r"another|cannot use"):
            await turn_on(settings, "another", "third")
        assert (await member.get("/trireme/a")).value == b"1", "a refused setup changes nothing"
    finally:
        for client in (member, nobody, health):
            await client.close()


async def test_without_etcd_it_gives_up_in_time() -> None:
    settings = Settings(etcd=("http://127.0.0.1:9",), setup_limit_s=0.5)
    with pytest.raises(DeadlineExceeded, match=r"waited 0.5 s for etcd"):
        await turn_on(settings, "r", "p")
