"""`python -m trireme.masterless`: one trainer of a masterless job (`dispatch: etcd`). It trains, keeps the
task queue and may sweep.

Settings are those of `python -m trainer_agent`, and TRIREME_SPEC: a JSON file for the trainer that opens the
job. The services do not import each other; here a dispatcher in the same process takes the place of the
trainer's master.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from pydantic import Field

from master_service.masterless.dispatcher import Dispatcher
from master_service.settings import read_spec
from trainer_agent import settings as trainer_settings
from trainer_agent.tasks.master import MasterPort
from trireme_shared.platform.runtime import service, telemetry
from trireme_shared.platform.runtime.process_setup import fix_hash_seed
from trireme_shared.protocol.errors import InvalidArgument
from trireme_shared.protocol.records import Dispatch, JobSpec


class Settings(trainer_settings.Settings):
    """`spec`: path of the JobSpec as JSON. `sweep_ttl_s`: TTL of the sweeper's lease, so how long a dead
    sweeper is waited for."""

    spec: Path | None = None
    sweep_ttl_s: float = Field(default=3.0, ge=2.0)


def main() -> int:
    argparse.ArgumentParser(
        prog="python -m trireme.masterless",
        description="One trainer of a masterless Trireme job. All settings come from the environment: "
        "TRIREME_JOB (required), "
        "TRIREME_ETCD, TRIREME_SPEC (JSON file of the job), TRIREME_TOKEN, TRIREME_HOST, "
        "TRIREME_PORT, TRIREME_ADVERTISE, "
        "TRIREME_NAME, TRIREME_SWEEP_TTL_S, TRIREME_LOG_LEVEL.",
    ).parse_args()
    settings = Settings.from_environment()
    telemetry.configure(level=settings.log_level, service="trainer", job=settings.job)
    settings.look_up_own_name()
    return service.run(lambda stopping: _serve(settings, stopping))


async def _serve(settings: Settings, stopping: asyncio.Event) -> int:
    # loads torch, so only after the settings were checked
    from trainer_agent.process import TrainerContext, serve  # noqa: PLC0415

    spec = _read_spec(settings.spec) if settings.spec else None

    @asynccontextmanager
    async def dispatching(context: TrainerContext) -> AsyncIterator[MasterPort]:
        dispatcher = Dispatcher(
            context.etcd,
            context.directory.keys,
            name=context.trainer,
            url=context.url,
            spec=spec,
            ttl_s=settings.sweep_ttl_s,
        )
        left = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(dispatcher.run(left))
            try:
                yield dispatcher
            finally:
                left.set()

    return await serve(settings, stopping, dispatching, Dispatch.ETCD)


def _read_spec(path: Path) -> JobSpec:
    spec = read_spec(path)
    if spec.dispatch is not Dispatch.ETCD:
        msg = (
            f"TRIREME_SPEC={path} has dispatch: {spec.dispatch}; start `python -m master_service` and "
            "`python -m trainer_agent`"
        )
        raise InvalidArgument(msg)
    return spec


if __name__ == "__main__":
    fix_hash_seed()
    sys.exit(main())
