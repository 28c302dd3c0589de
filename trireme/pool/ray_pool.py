"""A cluster on the nodes of a Ray cluster: masters and host agents are actors there; etcd, unless there is
one, runs on this machine."""

from __future__ import annotations

import glob
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from trireme.launch.processes import ClusterError
from trireme.launchers.launcher import ROLES, Resources, Role, told_of_loopback
from trireme.launchers.ray_launcher import RayLauncher, addresses, connected
from trireme.pool.local_pool import DRAIN_S, LocalPool, PoolRequest
from trireme.view.child_events import ChildEvent
from trireme_shared.platform.security.tokens import Role as TokenRole
from trireme_shared.platform.security.tokens import TokenTable

FOLDER = Path("/tmp/trireme-ray")  # noqa: S108  on each node; named in the documentation


@dataclass(frozen=True, slots=True)
class RayRequest:
    """`address`: of the Ray cluster. `resources`: of each process. `node_dir`: logs and scripts on each node
    go below it."""

    address: str = "auto"
    resources: Mapping[Role, Resources] = field(default_factory=lambda: {role: Resources() for role in ROLES})
    node_dir: Path = FOLDER


class RayPool(LocalPool):
    """As LocalPool, with the processes elsewhere."""

    start_timeout_s = 600.0  # Ray may have to add nodes first

    def __init__(
        self,
        request: PoolRequest,
        ray: RayRequest,
        folder: Path,
        *,
        on_event: Callable[[ChildEvent], None] = lambda _: None,
    ) -> None:
        super().__init__(request, folder, on_event=on_event)
        self._ray = ray
        self._launcher: RayLauncher | None = None

    def __repr__(self) -> str:
        return f"<RayPool {self.url or 'without leader'}: {self._launcher!r}>"

    @property
    def logs(self) -> str:
        return f"{self._ray.node_dir} on the nodes"

    def kill_all(self) -> None:
        if self._launcher is not None:
            self._launcher.kill_all()
        super().kill_all()

    async def _start(self) -> None:
        own = self.embedded.host = await self._opened.enter_async_context(connected(self._ray.address))
        if told := told_of_loopback(own, await addresses()):
            self._record(ChildEvent("Ray", "waiting", told))
        await super()._start()

    async def _start_masters(self) -> None:
        grace_s = dict.fromkeys(ROLES, DRAIN_S + 10.0)
        launcher = RayLauncher(self._settings_of, self._ray.resources, grace_s, self._on_launcher_event)
        self._launcher = await self._opened.enter_async_context(launcher)
        await launcher.start("master", 1 + self.settings.standbys)

    async def _start_hosts(self) -> None:
        assert self._launcher is not None
        counts: tuple[tuple[Role, int], ...] = (
            ("pserver", self.request.pservers),
            ("trainer", self.request.trainers),
        )
        for role, count in counts:
            if count:
                await self._launcher.start(role, count)
        self._size_with(self._launcher, beside=False)

    def _settings_of(self, role: Role, name: str) -> dict[str, str]:
        folder = self._ray.node_dir / name
        own = {
            "TRIREME_NAME": name,
            "TRIREME_DATA_DIR": str(folder),
            "TRIREME_SOURCES": str(folder / "sources"),
            "TRIREME_DRAIN_SECONDS": str(DRAIN_S),
        }
        common = self._common()
        if role == "master":
            port = self.settings.port if name == "master-0" else 0
            # of members on the master's node
            logs = json.dumps([f"{glob.escape(str(self._ray.node_dir))}/*/logs"])
            served = {
                "TRIREME_STORAGE": self.request.storage,
                "TRIREME_PORT": str(port),
                "TRIREME_LOGS": logs,
            }
            return {**common, **own, **served}
        places = {"TRIREME_TRAINERS": int(role == "trainer"), "TRIREME_PSERVERS": int(role == "pserver")}
        cores = {"TRIREME_CORES": self._ray.resources[role].cores}
        return {**common, **own, **{key: str(count) for key, count in (places | cores).items()}}

    def _token_settings(self) -> dict[str, str]:
        """The nodes do not see the files here: they get the token of members, and the table, which is no
        secret, by value."""
        tokens = self.settings.tokens
        if tokens is None:
            return {}
        table = TokenTable(tokens=tuple(tokens.records())).model_dump_json()
        return {"TRIREME_TOKEN": tokens.token(TokenRole.MEMBER), "TRIREME_TOKENS": table}

    def _on_launcher_event(self, event: ChildEvent) -> None:
        self._record(event)
        if event.what == "given_up" and event.child.startswith("master-"):
            self._end_with(
                ClusterError(f"{event.child} cannot run on Ray: {event.cause}", child=event.child, tail="")
            )
