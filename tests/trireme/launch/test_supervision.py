"""Supervised children that end: whom their policy starts again, how soon, and what follows if the others
cannot go on without one."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest

from tests.equipment.waiting import until
from trireme.launch import bounded_logs, supervision
from trireme.launch.bounded_logs import keep_bounded
from trireme.launch.processes import Child, ClusterError, Exit, RestartPolicy, spawn
from trireme.launch.supervision import ClusterSettings, SupervisedProcesses
from trireme.view.child_events import ChildEvent
from trireme_shared.platform.membership.etcd_access import EtcdAccess
from trireme_shared.platform.runtime import clock

DELAY_S = 0.4
NO_ETCD = ClusterSettings(etcd=EtcdAccess(("http://127.0.0.1:1",)))


class Processes(SupervisedProcesses[None]):
    """One child, which ends with exit code 0 at once (`this`) or with 1 (a module that does not exist)."""

    grace_s = {"trainer": 1.0}  # noqa: RUF012  never changed

    def __init__(self, folder: Path, module: str, policy: RestartPolicy, needed: str = "") -> None:
        self.events: list[tuple[float, ChildEvent]] = []
        super().__init__(folder, NO_ETCD, spawn, lambda event: self.events.append((clock.monotonic(), event)))
        self._module, self._policy, self._needed = module, policy, needed
        self.left: set[str] = set()

    @property
    def url(self) -> str:
        return ""

    @property
    def way_without_etcd(self) -> str:
        return ""

    async def _start(self) -> None:
        await self._add("trainer", self._module, {})

    def _restarts(self, child: Child) -> RestartPolicy:
        return self._policy

    def _why_not_without(self, child: Child) -> str:
        return self._needed

    async def _is_over(self, child: Child, end: Exit) -> bool:
        return False

    def _is_unwanted(self, child: Child) -> bool:
        return child.name in self.left

    async def _mourn(self, child: Child, end: Exit) -> None:
        pass

    def seen(self, what: str) -> list[float]:
        return [at for at, event in self.events if event.what == what]

    async def until(self, what: str) -> None:
        async with asyncio.timeout(20):
            while not self.seen(what):
                await asyncio.sleep(0.01)


@pytest.mark.parametrize(("policy", "module"), [("never", "no_such_module_here"), ("on_failure", "this")])
async def test_a_child_that_is_not_started_again_ends_the_run_if_the_others_need_it(tmp_path, policy, module):
    async with Processes(
        tmp_path, module, RestartPolicy(policy), "1 of the job's trainers are left"
    ) as processes:
        with pytest.raises(
            ClusterError, match=rf"and restart_policy is {policy}: 1 of the job's trainers are left"
        ):
            await asyncio.wait_for(processes.final, 20)
        assert (len(processes.seen("given_up")), processes.seen("restarted")) == (1, [])


async def test_the_others_go_on_without_a_child_that_is_not_started_again(tmp_path):
    async with Processes(tmp_path, "this", RestartPolicy("on_failure")) as processes:
        await processes.until("given_up")
        await asyncio.sleep(0.3)
        assert not processes.final.done()
        assert processes.children["trainer-0"].starts == 1


async def test_a_child_is_started_again_after_the_jobs_delay_at_the_earliest(tmp_path):
    async with Processes(tmp_path, "this", RestartPolicy("always", DELAY_S)) as processes:
        await processes.until("restarted")
        assert processes.seen("restarted")[0] - processes.seen("left")[0] >= DELAY_S


async def test_a_child_that_leaves_while_it_waits_to_be_started_again_is_not_started(tmp_path):
    """It had just died when a resize chose it; it stayed as one too many."""
    async with Processes(tmp_path, "this", RestartPolicy("always", DELAY_S)) as processes:
        await processes.until("left")
        processes.left.add("trainer-0")
        await asyncio.sleep(2 * DELAY_S)
        assert processes.seen("restarted") == []


async def test_the_logs_of_a_run_are_kept_in_bounds(tmp_path, monkeypatch):
    monkeypatch.setattr(bounded_logs, "LOOK_S", 0.01)
    monkeypatch.setattr(supervision, "keep_bounded", partial(keep_bounded, log_bytes=100))
    async with Processes(tmp_path, "this", RestartPolicy("never")) as processes:
        await processes.until("given_up")
        log = tmp_path / "logs" / "trainer-0.log"
        log.write_bytes(b"x" * 200)
        await until(lambda: log.stat().st_size == 0, "it to begin again")
        assert (tmp_path / "logs" / "trainer-0.log.1").stat().st_size == 200
