"""Servers and worlds for the conformance suite."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio

from tests.equipment.etcd.real import embedded_etcd
from tests.shared.platform.etcd.worlds import (
    REAL,
    Outcomes,
    RealWorld,
    Scenario,
    SimulatedWorld,
    World,
    run_everywhere,
)
from trireme_shared.platform.etcd import Etcd
from trireme_shared.platform.etcd.embedded import EmbeddedEtcd

__all__ = ["embedded_etcd"]
AT_ONCE = 6


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def servers() -> AsyncIterator[Callable[[str], EmbeddedEtcd]]:
    """One server of each binary for all tests that leave it running."""
    folder = tempfile.mkdtemp(prefix="trireme-etcd-")
    running = {name: EmbeddedEtcd(f"{folder}/{name}", binary=binary) for name, binary in REAL.items()}
    try:
        for server in running.values():
            await server.start()
        yield running.__getitem__
    finally:
        for server in running.values():
            await server.stop()
        shutil.rmtree(folder)


@pytest_asyncio.fixture(params=["simulated", *REAL])
async def world(
    request: pytest.FixtureRequest, servers: Callable[[str], EmbeddedEtcd]
) -> AsyncIterator[World]:
    """A world whose etcd stays up."""
    world = (
        SimulatedWorld() if request.param == "simulated" else RealWorld(request.param, servers(request.param))
    )
    try:
        yield world
    finally:
        await world.close()


@pytest.fixture
def etcd(world: World) -> Etcd:
    return world.client()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def outcomes(
    request: pytest.FixtureRequest,
    servers: Callable[[str], EmbeddedEtcd],
    tmp_path_factory: pytest.TempPathFactory,
) -> Outcomes:
    """Runs every selected `everywhere` scenario, some at a time, and tells how each ended."""
    functions = [getattr(item, "function", None) for item in request.session.items]
    scenarios = [function.scenario for function in functions if hasattr(function, "scenario")]
    folder = tmp_path_factory.mktemp("scenarios")
    places = asyncio.Semaphore(AT_ONCE)

    async def run(scenario: Scenario) -> None:
        async with places:
            await run_everywhere(scenario, servers, folder)

    ends = await asyncio.gather(*[run(scenario) for scenario in scenarios], return_exceptions=True)
    return dict(zip(scenarios, ends, strict=True))
