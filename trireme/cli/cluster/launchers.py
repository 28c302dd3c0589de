"""What `trireme up` is told about its launcher, and the cluster that it asks for."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from trireme.launchers.launcher import ROLES, Resources
from trireme.pool.local_pool import LocalPool, PoolRequest
from trireme.settings import Setting, UsageError
from trireme.view.child_events import ChildEvent

KINDS = ("local", "ray", "none")


@dataclass(frozen=True, slots=True)
class LauncherRequest:
    """The command line; what was not given is None. `resources`: by role, as text."""

    kind: str = "local"
    max_trainers: int | None = None
    max_pservers: int | None = None
    address: str | None = None
    node_dir: Path | None = None
    resources: Mapping[str, str | None] = field(default_factory=dict)

    def given_for_ray(self) -> list[str]:
        """Options that only Ray understands."""
        given = {"--address": self.address, "--node-dir": self.node_dir}
        given |= {f"--{role}-resources": text for role, text in self.resources.items()}
        return [option for option, value in given.items() if value is not None]


def check_places(request: LauncherRequest, trainers: int | None, pservers: int | None) -> None:
    """`trainers`, `pservers`: as given, None: not. Raises UsageError."""
    if request.kind not in KINDS:
        raise UsageError(f"--launcher {request.kind}: give one of {', '.join(KINDS)}")
    most = {"trainers": (trainers, request.max_trainers), "pservers": (pservers, request.max_pservers)}
    if request.kind == "none" and any(count is not None for pair in most.values() for count in pair):
        raise UsageError(
            "--launcher none starts no places: leave --trainers, --pservers and their --max- out"
        )
    for name, (least, limit) in most.items():
        if least is not None and limit is not None and limit < least:
            raise UsageError(f"--max-{name} {limit} is less than --{name} {least}")
    nobody = trainers == 0 and pservers == 0 and not (request.max_trainers or request.max_pservers)
    if request.kind != "none" and nobody:
        raise UsageError("--trainers 0 --pservers 0: a cluster needs places for its members")
    if request.kind != "ray" and (given := request.given_for_ray()):
        raise UsageError(f"{', '.join(given)}: only for --launcher ray")


def check_settings(request: LauncherRequest, settings: Mapping[str, Setting]) -> None:
    """What Ray needs of the settings that all clusters have. Raises UsageError."""
    if request.kind != "ray":
        return
    if "storage" not in settings:
        hint = "a URL, or a path that all nodes share"
        raise UsageError(
            "--launcher ray needs --storage: members on all nodes write the files of jobs there", hint=hint
        )
    for name in ("host", "advertise"):
        if name in settings:
            raise UsageError(
                f"--{name} is not for --launcher ray: members have the addresses of their Ray nodes"
            )


def pool_of(
    request: LauncherRequest, asked: PoolRequest, folder: Path, on_event: Callable[[ChildEvent], None]
) -> LocalPool:
    """Raises InvalidArgument, UsageError."""
    if request.kind != "ray":
        return LocalPool(asked, folder, on_event=on_event)
    # Ray would print a stack trace at the SIGTERM of `trireme down`
    os.environ.setdefault("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1")
    try:
        from trireme.pool.ray_pool import FOLDER, RayPool, RayRequest  # noqa: PLC0415  Ray is an extra
    except ImportError as error:
        raise UsageError(
            f"--launcher ray: Ray cannot be imported ({error})", hint="pip install 'trireme[ray]'"
        ) from error
    texts = {role: request.resources.get(role) for role in ROLES}
    ray = RayRequest(
        address=request.address or "auto",
        resources={
            role: Resources() if text is None else Resources.parse(text, f"--{role}-resources")
            for role, text in texts.items()
        },
        node_dir=(request.node_dir or FOLDER).absolute(),
    )
    return RayPool(asked, ray, folder, on_event=on_event)
