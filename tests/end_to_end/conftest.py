from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.end_to_end.command import Command, command_in
from tests.end_to_end.local_cluster import FORK_SERVERS, cluster_of, completed, spec_of
from tests.end_to_end.once import made_once
from trireme.launch.run_folder import PREFIX
from trireme_shared.platform.security.private_files import sweep_socket_folders


@pytest.fixture
def trireme(tmp_path: Path) -> Iterator[Command]:
    with command_in(tmp_path) as command:
        yield command
    sweep_socket_folders(PREFIX)  # the folders of sockets of launchers that the test killed


@pytest.fixture(scope="session", autouse=True)
def fork_servers() -> Iterator[None]:
    with FORK_SERVERS:
        yield


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """What the job of local_cluster.py gives with one trainer, one parameter server, and no deaths."""

    async def run(folder: Path) -> dict[str, torch.Tensor]:
        async with cluster_of(spec_of(folder, trainers=1, pservers=1), folder) as cluster:
            return await completed(cluster)

    return made_once("faults", tmp_path_factory, lambda folder: asyncio.run(run(folder)))
