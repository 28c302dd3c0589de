"""Commands right after `trireme up`, and while leaders change: they wait, say for what, and not for ever."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from trireme.cli.cluster.jobs import ask_leader
from trireme.client import AsyncClient
from trireme.pool import cluster_folder
from trireme_shared.platform.membership.etcd_access import EtcdAccess
from trireme_shared.protocol.errors import (
    Conflict,
    DeadlineExceeded,
    NotFound,
    NotLeader,
    PeerError,
    StorageUnreachable,
    TriremeError,
)

NOWHERE = "http://127.0.0.1:9"


@pytest.fixture(autouse=True)
def no_other_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TRIREME_URL", "TRIREME_TOKEN", "TRIREME_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)


async def address(cluster: AsyncClient) -> str:
    return cluster.url


async def test_a_command_right_after_up_waits_for_the_first_leader(tmp_path: Path, capsys) -> None:
    with cluster_folder.opened(tmp_path) as folder:
        asking = asyncio.ensure_future(ask_leader(address, tmp_path, None))
        await asyncio.sleep(0.5)
        assert not asking.done()
        cluster_folder.publish(folder, "http://leader:1", EtcdAccess(urls=("http://etcd:2",)))
        assert await asyncio.wait_for(asking, 30) == "http://leader:1"
    assert "waiting up to 60 s for a master to lead the cluster" in capsys.readouterr().err


async def test_a_command_follows_to_the_next_leader(tmp_path: Path) -> None:
    """One stands by, nothing listens at the next one, the third leads."""
    asked: list[str] = []
    with cluster_folder.opened(tmp_path) as folder:
        cluster_folder.publish(folder, "http://m1", EtcdAccess(urls=("http://etcd:2",)))

        async def ask(cluster: AsyncClient) -> str:
            asked.append(cluster.url)
            cluster_folder.publish(folder, f"http://m{len(asked) + 1}", EtcdAccess(urls=("http://etcd:2",)))
            if len(asked) < 3:
                raise [NotLeader("it stands by"), PeerError("it cannot be reached")][len(asked) - 1]
            return cluster.url

        assert await ask_leader(ask, tmp_path, None) == "http://m3"
    assert asked == ["http://m1", "http://m2", "http://m3"]


async def test_after_the_limit_the_error_says_what_was_waited_for(tmp_path: Path) -> None:
    with (
        cluster_folder.opened(tmp_path),
        pytest.raises(DeadlineExceeded, match=r"waited 0\.2 s for a master to lead"),
    ):
        await ask_leader(address, tmp_path, None, 0.2)


async def test_without_a_cluster_nobody_waits(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no cluster runs"):
        await ask_leader(address, tmp_path, None)


async def test_nobody_waits_for_a_url_at_which_nothing_listens(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="cannot be reached"):
        await asyncio.wait_for(ask_leader(lambda cluster: cluster.get_pool(), tmp_path, NOWHERE), 30)


@pytest.mark.parametrize("error", [Conflict("the name is taken"), StorageUnreachable("no bucket")])
async def test_what_a_leader_refuses_is_told_at_once(tmp_path: Path, error: TriremeError) -> None:
    asked = []

    async def ask(_: AsyncClient) -> None:
        asked.append(1)
        raise error

    with pytest.raises(type(error)):
        await ask_leader(ask, tmp_path, "http://m1")
    assert asked == [1]
