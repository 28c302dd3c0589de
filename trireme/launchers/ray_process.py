"""One master or host agent in an actor of Ray: this runs on the node that Ray chose for it.

The process listens on the address of its node, and dies with the actor. If the node is lost, Ray starts the
actor elsewhere and calls `run` again there.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import ray

from trireme.launch.processes import PYTHON_MODULE, Process, inherited_environment, spawn
from trireme.launchers.launcher import unreached_etcd
from trireme_shared.platform.security import private_files

LOG = "process.log"


class RayProcess:
    """Made into an actor by ray_launcher.py. All methods run in the actor's event loop."""

    def __init__(self) -> None:
        self._process: Process | None = None
        self._stopping = False

    async def run(self, module: str, settings: Mapping[str, str]) -> int:
        """`python -m module` with these TRIREME_* variables; its exit code when it has ended.
        TRIREME_DATA_DIR gets its log. Raises OSError, also if this node cannot reach etcd where it is."""
        if self._stopping:
            return 0
        address = ray.util.get_node_ip_address()
        if unreached := unreached_etcd(settings.get("TRIREME_ETCD", ""), address):
            raise ConnectionError(unreached)
        here = {"TRIREME_HOST": address, "TRIREME_NODE": address}
        environment = {**inherited_environment(), **settings, **here}
        with _log(Path(settings["TRIREME_DATA_DIR"])) as log:
            self._process = await spawn([*PYTHON_MODULE, module], environment, log, log)
        return await self._process.wait()

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, then SIGKILL after `grace_s` seconds."""
        self._stopping = True
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s):
                await process.wait()
        except TimeoutError:
            process.send_signal(signal.SIGKILL)
            await process.wait()


def _log(folder: Path) -> IO[bytes]:
    private_files.make_own_folder(folder.parent)
    private_files.make_own_folder(folder)
    return private_files.open_private(folder / LOG, "ab")
