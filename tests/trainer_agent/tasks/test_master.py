"""What the master is told about a failure."""

from __future__ import annotations

import asyncio
import socket
from contextlib import closing

import pytest

from master_service.api.app import make_app
from master_service.api.server import Server
from tests.equipment.waiting import until
from tests.master_service.cluster import KEYS, MasterCluster, running, spec_of
from tests.trainer_agent.scripts import write_script
from trainer_agent.script.user_module import load
from trainer_agent.tasks.master import HttpMaster, failure_of
from trireme_shared.platform.membership.directory import Directory
from trireme_shared.platform.runtime import http
from trireme_shared.protocol.errors import NotFound, NotLeader, UserCodeError
from trireme_shared.protocol.records import AcquireTask, MasterAddress, UserFailure


def test_a_failure_says_what_happened_where_and_to_whom(tmp_path):
    user = load(
        write_script(tmp_path, loss="def loss(model, batch):\n    raise ValueError('no such label')\n")
    )
    with pytest.raises(UserCodeError) as raised:
        user.call("loss", None, None)
    failure = failure_of(raised.value, task="task 7 (x.npy records 0-15)", trainer="trainer-1")
    assert failure == UserFailure(
        error_type="ValueError",
        message="no such label",
        traceback=raised.value.details["traceback"],
        task="task 7 (x.npy records 0-15)",
        trainer="trainer-1",
    )


async def test_a_trainer_that_fails_before_it_is_registered_is_believed() -> None:
    """Its model cannot be built, say. The same report by somebody without a way to etcd is refused."""
    failure = UserFailure(error_type="ValueError", message="no such file")
    cluster = MasterCluster(spec_of(max_user_failures=2))
    async with running(cluster, "t1") as master:
        with pytest.raises(NotFound, match="no trainer t9 is registered in job j"):
            await master.report_failure("t9", failure)
        server, directory = Server(make_app(master)), Directory(cluster.etcd_of("t9"), KEYS)
        with closing(socket.create_server(("127.0.0.1", 0))) as listener:
            serving = asyncio.ensure_future(server.serve(sockets=[listener]))
            following = asyncio.ensure_future(directory.run())
            address = MasterAddress(
                url=f"http://127.0.0.1:{listener.getsockname()[1]}", term=master.term.number
            )
            await cluster.etcd.put(KEYS.master_address, address.to_bytes())
            await until(lambda: directory.master == address and server.started, "the master's address", 10)
            async with http.session() as client:
                await HttpMaster(directory, client, cluster.etcd_of("t9")).report_failure("t9", failure)
            assert master.job.budget.counts.total == 1
            server.should_exit = True
            await serving
            following.cancel()


async def test_a_trainer_that_waits_for_a_task_turns_to_the_next_leader_at_once() -> None:
    """The first one is silent: it has taken the request and answers nothing."""
    cluster = MasterCluster(spec_of())
    directory = Directory(cluster.etcd_of("t1"), KEYS)
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        following = asyncio.ensure_future(directory.run())
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        await cluster.etcd.put(KEYS.master_address, MasterAddress(url=url, term=1).to_bytes())
        await until(lambda: directory.master is not None, "the first master's address", 10)
        async with http.session() as client:
            ask = AcquireTask(trainer="t1", request="r", generation=1, wait_s=30)
            asking = asyncio.ensure_future(
                HttpMaster(directory, client, cluster.etcd_of("t1")).acquire_task(ask)
            )
            await asyncio.sleep(0.1)
            assert not asking.done()
            await cluster.etcd.put(KEYS.master_address, MasterAddress(url="http://next", term=2).to_bytes())
            with pytest.raises(NotLeader, match="another master leads now"):
                await asyncio.wait_for(asking, 5.0)
        following.cancel()
