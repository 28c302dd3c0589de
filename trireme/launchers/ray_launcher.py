"""Masters and host agents on the nodes of a Ray cluster, each an actor that runs one process.

    start ─► placement group: parameter servers and masters spread over nodes, trainers packed
             ─► one actor for each bundle
             node lost ─► Ray places its bundles on other nodes, starts the actors there, and they run their
                          processes again
    stop  ─► SIGTERM, wait, end the actor; its bundle is used by the next `start`, and given back when all of
             its group are free

The actors live as long as the process that started them: Ray ends them with it, and their processes die with
them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Self, cast

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from trireme.launch.processes import Exit, RestartPolicy
from trireme.launchers.launcher import MODULES, ROLES, Launched, OnEvent, Resources, Role
from trireme.launchers.ray_process import RayProcess
from trireme.view.child_events import ChildEvent
from trireme_shared.platform.runtime import clock
from trireme_shared.protocol.errors import PeerError

STRATEGY: Mapping[Role, str] = {"master": "SPREAD", "pserver": "SPREAD", "trainer": "PACK"}
NAMESPACE = "trireme"
CONNECT_S = 10.0
ROOM_S = 20.0  # then it is told that Ray has no room yet
ANSWER_S = 15.0  # of a stopped actor, beyond the grace of its process
FAILED = 1

Settings = Callable[[Role, str], Mapping[str, str]]


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[str]:
    """To the Ray cluster that this machine is a node of; the node's address. `address`: as `ray.init` takes
    it (`auto`, HOST:PORT). Raises PeerError."""
    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        await _check_reachable(os.environ.get("RAY_ADDRESS", address) if address == "auto" else address)
        await asyncio.to_thread(
            ray.init, address=address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False
        )
    except (OSError, ValueError, RuntimeError) as error:  # ConnectionError is an OSError
        hint = (
            "start Ray on this machine (`ray start --address=HEAD:6379`), and give --address as `ray "
            "status` takes it"
        )
        raise PeerError(f"no Ray cluster answers at {address}: {error}", hint=hint) from error
    try:
        yield str(ray.util.get_node_ip_address())
    finally:
        await asyncio.to_thread(ray.shutdown)


async def addresses() -> list[str]:
    """Of all nodes that are alive."""
    nodes = await asyncio.to_thread(ray.nodes)
    return [str(node["NodeManagerAddress"]) for node in nodes if node["Alive"]]


async def _check_reachable(address: str) -> None:
    """Ray itself would try for minutes. Raises OSError, TimeoutError."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        async with asyncio.timeout(CONNECT_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        writer.close()


@dataclass(eq=False)
class _Batch:
    """A placement group. `free`: its bundles without an actor."""

    group: PlacementGroup
    role: Role
    free: list[int]
    size: int


@dataclass(eq=False)
class _Actor:
    id: str
    role: Role
    batch: _Batch
    bundle: int
    handle: Any
    stopping: asyncio.Event = field(default_factory=asyncio.Event, repr=False)
    trouble: str = ""
    kept: asyncio.Task[None] | None = field(default=None, repr=False)


class RayLauncher:
    """Use `async with`: its end stops everything. `settings`: the TRIREME_* variables of a process,
    TRIREME_DATA_DIR among them. `resources`: of each process. `grace_s`: for a process to leave. Needs
    `connected`."""

    def __init__(
        self,
        settings: Settings,
        resources: Mapping[Role, Resources],
        grace_s: Mapping[Role, float],
        on_event: OnEvent,
    ) -> None:
        self._settings, self._resources, self._grace_s, self._on_event = (
            settings,
            resources,
            grace_s,
            on_event,
        )
        self._actors: dict[str, _Actor] = {}
        self._batches: list[_Batch] = []
        self._numbers: dict[Role, int] = dict.fromkeys(ROLES, 0)
        self._beside: set[asyncio.Task[None]] = set()
        self._class = ray.remote(RayProcess)

    def __repr__(self) -> str:
        return f"<RayLauncher: {len(self._actors)} actors in {len(self._batches)} placement groups>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for role in ROLES:
            await self.stop([each.id for each in self.list() if each.role == role])
        for task in self._beside:
            task.cancel()
        await asyncio.gather(*self._beside, return_exceptions=True)

    # ------------------------------------------------------------ the interface

    async def start(self, role: Role, count: int) -> Sequence[str]:
        """One actor for each master and each place. Raises PeerError."""
        free = [(batch, bundle) for batch in self._batches if batch.role == role for bundle in batch.free][
            :count
        ]
        try:
            if count > len(free):
                batch = await asyncio.to_thread(self._place, role, count - len(free))
                self._batches.append(batch)
                free += [(batch, bundle) for bundle in batch.free]
                self._run_beside(self._tell_if_there_is_no_room(batch))
            return [await self._run(role, batch, bundle) for batch, bundle in free]
        except RayError as error:
            raise PeerError(f"Ray did not take {count} processes of kind {role}: {error}") from error

    async def stop(self, ids: Collection[str]) -> None:
        gone = [self._actors.pop(each) for each in ids if each in self._actors]
        for actor in gone:
            actor.stopping.set()
        await asyncio.gather(*(self._end(actor) for actor in gone))
        for batch in [each for each in self._batches if len(each.free) == each.size]:
            self._batches.remove(batch)
            with contextlib.suppress(RayError):
                await asyncio.to_thread(remove_placement_group, batch.group)

    def list(self) -> list[Launched]:
        return [Launched(each.id, each.role, 1, each.trouble) for each in self._actors.values()]

    def kill_all(self) -> None:
        """Without asking anybody to leave."""
        for actor in self._actors.values():
            actor.stopping.set()
            with contextlib.suppress(RayError):
                ray.kill(actor.handle)

    # ------------------------------------------------------------ parts

    def _place(self, role: Role, count: int) -> _Batch:
        bundle = self._resources[role].bundle()
        group = placement_group([bundle] * count, strategy=STRATEGY[role])
        return _Batch(group, role, list(range(count)), count)

    async def _run(self, role: Role, batch: _Batch, bundle: int) -> str:
        name = f"{role}-{self._numbers[role]}"
        self._numbers[role] += 1
        batch.free.remove(bundle)
        actor = self._actors[name] = _Actor(name, role, batch, bundle, None)
        actor.handle = await asyncio.to_thread(self._handle_of, actor)
        actor.kept = self._run_beside(self._keep(actor))
        return name

    def _handle_of(self, actor: _Actor) -> Any:
        where = PlacementGroupSchedulingStrategy(
            actor.batch.group,
            placement_group_bundle_index=actor.bundle,
            placement_group_capture_child_tasks=False,
        )
        return self._class.options(
            **self._resources[actor.role].options(),
            max_restarts=-1,
            max_task_retries=-1,  # `run` is called again on the node where the actor was started again
            scheduling_strategy=where,
        ).remote()

    async def _keep(self, actor: _Actor) -> None:
        """The process runs until it is stopped; it is started again when it ends."""
        policy = RestartPolicy()
        while not actor.stopping.is_set():
            since = clock.monotonic()
            run = actor.handle.run.remote(MODULES[actor.role], dict(self._settings(actor.role, actor.id)))
            code, failure = await self._end_of(run)
            if actor.stopping.is_set():
                return
            end = Exit(0, code, clock.monotonic() - since)
            cause = failure or str(end)
            delay_s = policy.delay_s(code, end.lived_s)
            if delay_s is None:
                actor.trouble = f"{actor.id} ended {policy.deaths} times, the last time with {cause}"
                self._on_event(ChildEvent(actor.id, "given_up", cause))
                return
            self._on_event(ChildEvent(actor.id, "died", cause))
            await asyncio.sleep(delay_s)
            if failure and not actor.stopping.is_set():
                await self._renew(actor)

    async def _end_of(self, run: Any) -> tuple[int, str]:
        """Exit code of the process, and "" or why its actor does not run it."""
        try:
            return cast("int", await asyncio.wrap_future(run.future())), ""
        except (RayError, OSError) as error:
            inner = getattr(error, "cause", None)  # without Ray's account of the actor
            cause = inner if isinstance(inner, Exception) else error
            return FAILED, f"{type(cause).__name__}: {cause}"

    async def _renew(self, actor: _Actor) -> None:
        """Another actor instead of one that failed for good."""
        with contextlib.suppress(RayError):
            ray.kill(actor.handle)
        actor.handle = await asyncio.to_thread(self._handle_of, actor)

    async def _end(self, actor: _Actor) -> None:
        grace_s = self._grace_s[actor.role]
        try:
            async with asyncio.timeout(grace_s + ANSWER_S):
                await asyncio.wrap_future(
                    actor.handle.stop.options(max_task_retries=0).remote(grace_s).future()
                )
        except (RayError, TimeoutError) as error:
            self._on_event(
                ChildEvent(actor.id, "died", f"killed: it did not leave within {grace_s:g} s: {error}")
            )
        if actor.kept is not None:
            actor.kept.cancel()
        with contextlib.suppress(RayError):
            await asyncio.to_thread(ray.kill, actor.handle)
        actor.batch.free.append(actor.bundle)

    async def _tell_if_there_is_no_room(self, batch: _Batch) -> None:
        placed = asyncio.wrap_future(batch.group.ready().future())
        try:
            done, _ = await asyncio.wait({placed}, timeout=ROOM_S)
            if not done:
                each = self._resources[batch.role]
                there = ray.available_resources()
                free = Resources({name: there.get(name, 0.0) for name in each.amounts})
                text = (
                    f"Ray has no room yet for {batch.size} with {each} each; {free} are free in all; "
                    "it waits for nodes"
                )
                self._on_event(ChildEvent(f"{batch.role}s", "waiting", text))
        finally:
            placed.cancel()

    def _run_beside(self, work: Any) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)
        return task
