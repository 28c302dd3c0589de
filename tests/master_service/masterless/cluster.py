"""Dispatchers on a simulated etcd in virtual time: a masterless job without its trainers' computing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from master_service.masterless.dispatcher import Dispatcher
from tests.equipment.queue_violations import violations
from tests.equipment.waiting import until
from tests.master_service.cluster import MasterCluster, done
from trireme_shared.protocol.records import Stage, Task


class MasterlessCluster(MasterCluster):
    """Each trainer's etcd is known by its name to `simulated.cut`. `running`: the trainers' tasks by name."""

    running: dict[str, asyncio.Future[None]]

    def dispatcher(self, name: str) -> Dispatcher:
        dispatcher: Dispatcher = self.make_master(name, name, f"http://{name}", Dispatcher)
        return dispatcher

    def kill(self, name: str, running: asyncio.Future[None]) -> None:
        """As SIGKILL does: nothing is said to etcd any more, and its port is closed."""
        self.simulated.cut(name)
        running.cancel()
        self.dead.add(f"http://{name}")


@asynccontextmanager
async def dispatching(cluster: MasterlessCluster, *names: str) -> AsyncIterator[dict[str, Dispatcher]]:
    """Trainers that are members and whose job runs; a killed one stays away."""
    dispatchers = {name: cluster.dispatcher(name) for name in names}
    stopping = asyncio.Event()
    cluster.running = {name: asyncio.ensure_future(each.run(stopping)) for name, each in dispatchers.items()}
    try:
        await cluster.initialise(*names)
        await until(lambda: all(_runs(each, names) for each in dispatchers.values()), "the job to run")
        yield dispatchers
        for name, each in dispatchers.items():
            for queue in each.job.queues.values() if not cluster.running[name].done() else ():
                assert list(violations(queue)) == []
    finally:
        stopping.set()
        await asyncio.wait(cluster.running.values())
        for each in cluster.running.values():
            if not each.cancelled():
                each.result()


def _runs(dispatcher: Dispatcher, names: tuple[str, ...]) -> bool:
    return dispatcher.view.is_open and set(dispatcher.job.trainers.names) == set(names)


async def work(
    cluster: MasterlessCluster, dispatcher: Dispatcher, given: list[Task], *, pause_s: float = 0.0
) -> None:
    """Take and finish tasks until training is over; every task taken is noted."""
    while dispatcher.job.state.stage is Stage.TRAIN:
        answer = await dispatcher.acquire_task(cluster.ask(dispatcher, dispatcher.name))
        if answer.task is None:
            await asyncio.sleep(0.05)
            continue
        if answer.task.kind != "TRAIN":
            return
        given.append(answer.task)
        await asyncio.sleep(pause_s)
        await dispatcher.complete_task(answer.task.task_id, done(answer.task, dispatcher.name))


def sweeper_of(dispatchers: dict[str, Dispatcher]) -> str:
    return next(name for name, each in dispatchers.items() if each.sweeps)
