"""A job that is attacked from all sides while it trains: the same bits, and no memory or file is lost to the
attackers."""

from __future__ import annotations

import asyncio

import psutil
import pytest

from tests.end_to_end import attackers
from tests.end_to_end.local_cluster import cluster_of, completed, reach_step, same_bits, spec_of
from trireme.launch.cluster import LocalCluster
from trireme_shared.platform.security.tokens import Role, TokenFolder
from trireme_shared.protocol.records import PserverMember

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

IDLE, SLOW, STREAMS = 500, 20, 60  # idle connections to each of four ports: 2,000
SLOW_S = 4.0
# a parameter server cuts strangers after 10 s and looks once a second, a master after 10 to 20 s
CUT_S = 14.0
GROWTH = 1.2
OPEN = ("get /healthz", "get /readyz")


def sizes(cluster: LocalCluster) -> dict[str, tuple[float, int]]:
    """MiB that are resident, and open files, of masters and parameter servers."""
    found = {}
    for name, child in cluster.children.items():
        if child.alive and name.startswith(("master", "pserver")):
            process = psutil.Process(child.pid)
            found[name] = (process.memory_info().rss / 2**20, process.num_fds())
    return found


async def test_attacks_from_all_sides_change_no_bit_and_take_nothing(tmp_path, undisturbed):
    tokens = TokenFolder(tmp_path / "run")
    tokens.prepare("")
    async with cluster_of(spec_of(tmp_path), tmp_path, tokens=tokens) as cluster:
        await reach_step(cluster, 5, tokens.token(Role.ADMIN))
        master = await cluster.master_url()
        members: list[PserverMember] = list(cluster.directory.pservers.values())
        pservers, member = [each.url for each in members], tokens.token(Role.MEMBER)
        urls = [master, master, *pservers]
        before = sizes(cluster)
        answers = await asyncio.gather(
            attackers.idle(urls, IDLE, CUT_S),
            attackers.slow([master, *pservers], SLOW, SLOW_S),
            attackers.bombs([master], tokens.token(Role.ADMIN)),
            attackers.bombs(pservers, member),
            attackers.strangers(
                master,
                tokens.token(Role.ADMIN),
                {"none": "", "wrong": "trireme_admin_0000", "viewer": tokens.token(Role.VIEWER)},
            ),
            *(
                attackers.frames(each, uds, member, seed=seed, count=STREAMS)
                for seed, each in enumerate(members)
                for uds in ("", each.uds)
            ),
        )
        refused = answers[4]
        assert set(refused["none"]) == set(refused["wrong"]) == {"401", *OPEN}
        # a viewer may read, and get a login code, which gives what its token gives; a made-up code is a 401
        served = {name for name in refused["viewer"] if not name.startswith("get ")}
        assert served == {"401", "403", "post /v1/login-codes"}
        assert refused["viewer"]["401"] == 1
        assert not any(each[status] for each in answers[2:4] for status in ("500", "502"))
        assert answers[0]["cut"] >= 2 * IDLE, "by the parameter servers"
        await asyncio.sleep(1.0)
        after = sizes(cluster)
        assert before.keys() == after.keys()
        assert not cluster.deaths
        assert same_bits(await completed(cluster), undisturbed)
        for name, (mib, files) in after.items():
            assert mib < before[name][0] * GROWTH, name
            assert files < before[name][1] + 30, name
