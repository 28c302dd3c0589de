"""As test_blast_radius.py, of what runs processes: the tasks of a host agent (in virtual time, with processes
that are objects), of a launcher and of a gateway."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.equipment.etcd.simulated import SimulatedEtcd
from tests.equipment.virtual_loop import run_virtually
from tests.equipment.waiting import until
from tests.master_service.cluster import spec_of
from tests.simulation.strikes import ERRORS, names_in, strike, tasks_of
from trireme.containers import gateway as gateway_module
from trireme.launch.processes import Child, Exit, RestartPolicy, spawn
from trireme.launch.supervision import ClusterSettings, SupervisedProcesses
from trireme.pool.host_agent import HostAgent
from trireme.pool.place import Host, Place
from trireme.pool.registration import HostFolder, PlaceKeys
from trireme.pool.settings import Settings
from trireme.view.child_events import ChildEvent
from trireme_shared.platform.etcd import Etcd
from trireme_shared.platform.membership.etcd_access import EtcdAccess
from trireme_shared.protocol.keys import ClusterKeys, Keys
from trireme_shared.protocol.records.cluster import Assignment

NOBODYS_PID = 1 << 23  # and above: the kernel gives smaller ones


class Running:
    """A process that runs until it gets a signal."""

    numbers = count(NOBODYS_PID)

    def __init__(self) -> None:
        self.pid = next(self.numbers)
        self.returncode: int | None = None
        self._ended = asyncio.Event()

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int, /) -> None:
        self.returncode = 0 if number == signal.SIGTERM else -number
        self._ended.set()


class Agent:
    """A host agent with four places on a simulated etcd: two of job a, one of job b, one idle."""

    def __init__(self, folder: Path) -> None:
        self.etcd = Etcd(SimulatedEtcd().transport("agent"))
        settings = Settings(name="h", trainers=3, pservers=1, etcd="http://unused:1", data_dir=folder)
        self.agent, self.keys = HostAgent(settings, self.etcd), ClusterKeys()
        kinds = {"trainer": 3, "pserver": 1}
        members = [self.agent.member(kind, number) for kind, most in kinds.items() for number in range(most)]  # type: ignore[arg-type]
        self.places = PlaceKeys(self.etcd, self.keys, members, 5.0)
        environment = {"PATH": os.environ["PATH"]}
        self.host = Host("h", self.etcd, self.keys, HostFolder(folder), environment, self._start, 5.0)
        self.agent.places = [
            Place(each, self.host, self.agent.reporter(self.places, each)) for each in members
        ]
        self.incarnation = members[0].incarnation

    async def _start(self, *_: Any) -> Running:
        return Running()

    async def _keep(self) -> None:
        """Its sockets: nothing is to be done."""
        await asyncio.Event().wait()

    def pids(self) -> dict[str, int]:
        return {
            place.member: place.child.pid for place in self.agent.places if place.child and place.child.alive
        }

    async def assign(self, kind: Any, number: int, job: str) -> None:
        spec = spec_of(job=job)
        await self.etcd.put(Keys(job).spec, spec.to_bytes())
        work = Assignment(job=job, epoch=1, incarnation=self.incarnation)
        await self.etcd.put(self.keys.assignment(kind, f"h-{kind}-{number}"), work.to_bytes())

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[asyncio.Task[int]]:
        stopping = asyncio.Event()
        await self.places.claim(10.0)
        serving = asyncio.ensure_future(self.agent.serve(self.host, self.places, self._keep, stopping))
        try:
            for kind, number, job in (("pserver", 0, "a"), ("trainer", 0, "a"), ("trainer", 1, "b")):
                await self.assign(kind, number, job)
            await until(lambda: len(self.pids()) == 3, "the processes to run")
            await asyncio.sleep(3)
            yield serving
        finally:
            stopping.set()
            await asyncio.wait([serving])


def cases(group: str) -> Iterator[Any]:
    for name in names_in([group]):
        for kind in ERRORS:
            yield pytest.param(name, kind, id=f"{name}-{kind}")


def test_the_table_has_each_task_of_a_host_agent(tmp_path: Path) -> None:
    async def main() -> set[str]:
        agent = Agent(tmp_path)
        async with agent.serving():
            return set(tasks_of(None))

    assert (
        run_virtually(main) - {"test_the_table_has_each_task_of_a_host_agent.main"}
        <= names_in(["host agent"]).keys()
    )


@pytest.mark.parametrize(("name", "kind"), list(cases("host agent")))
def test_an_error_in_a_task_of_a_host_agent_ends_at_most_one_place(
    tmp_path: Path, name: str, kind: str
) -> None:
    async def main() -> None:
        agent = Agent(tmp_path)
        async with agent.serving() as serving:
            before = agent.pids()
            found = tasks_of(None).get(name)
            assert found, f"{name} was not there to be struck: take it out of the table"
            strike(found[0], kind)
            await asyncio.sleep(60)
            assert not serving.done(), "the agent has ended"
            now = agent.pids()
            assert now.keys() == before.keys()
            again = [place for place in now if now[place] != before[place]]
            assert len(again) <= (1 if names_in(["host agent"])[name].startswith("its place") else 0), again
            await agent.assign("trainer", 2, "c")
            await until(lambda: "h-trainer-2" in agent.pids(), "another assignment to be followed")
            member = await agent.etcd.get(agent.keys.member("trainer", "h-trainer-2"))
            assert member is not None, "the places stay registered"
            await until(lambda: agent.places.alive, "the places' lease")
        assert serving.result() == 0

    run_virtually(main)


# ------------------------------------------------------------ a launcher

NO_ETCD = ClusterSettings(etcd=EtcdAccess(("http://127.0.0.1:1",)))


class Launcher(SupervisedProcesses[None]):
    """One child, which sleeps."""

    grace_s = {"trainer": 1.0}  # noqa: RUF012  never changed

    def __init__(self, folder: Path) -> None:
        self.events: list[ChildEvent] = []
        super().__init__(folder, NO_ETCD, spawn, self.events.append)

    @property
    def url(self) -> str:
        return ""

    @property
    def way_without_etcd(self) -> str:
        return ""

    async def _start(self) -> None:
        await self._add("trainer", "sleeper", {})

    def _restarts(self, child: Child) -> RestartPolicy:
        return RestartPolicy()

    async def _is_over(self, child: Child, end: Exit) -> bool:
        return False

    async def _mourn(self, child: Child, end: Exit) -> None:
        pass


@pytest.mark.processes
@pytest.mark.parametrize("kind", ERRORS)
async def test_an_error_beside_a_launcher_ends_neither_it_nor_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Whatever runs there is run by `run_beside`."""
    (tmp_path / "sleeper.py").write_text("import time\ntime.sleep(1000)\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    async with Launcher(tmp_path / "run") as launcher:
        child = launcher.children["trainer-0"]
        pid = child.pid
        (name,) = (name.replace("SupervisedProcesses", "Launcher") for name in names_in(["launcher"]))
        await until(lambda: name in tasks_of(None), "a moment in which it waits")
        strike(tasks_of(None)[name][0], kind)
        await until(lambda: any(event.what == "waiting" for event in launcher.events), "the error to be told")
        assert (child.pid, child.alive) == (pid, True)
        child.send(signal.SIGKILL)
        await until(lambda: child.starts == 2, "the child to be started again")
        assert not launcher.final.done()


# ------------------------------------------------------------ a gateway


@pytest.mark.processes
@pytest.mark.parametrize("kind", ERRORS)
async def test_a_gateway_goes_on_looking_for_the_leader(kind: str) -> None:
    """It went on with the leader that it knew last, for good."""
    body = b'{"status": "ok"}'
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head.encode() + body)
        writer.close()

    stopping = asyncio.Event()
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as master:
        port = master.sockets[0].getsockname()[1]
        settings = gateway_module.Settings(masters=f"127.0.0.1:{port}", host="127.0.0.1", port=0)
        gateway = gateway_module.Gateway(settings)
        running = asyncio.ensure_future(gateway.run(stopping))
        await until(lambda: gateway.leader, "the leader to be found")
        (name,) = names_in(["gateway"])
        await until(lambda: name in tasks_of(None), "a moment in which it waits")
        strike(tasks_of(None)[name][0], kind)
        master.close()
        await until(lambda: not gateway.leader, "the leader to be missed")
        assert not running.done()
        stopping.set()
        assert await running == 0
