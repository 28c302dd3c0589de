"""`python -m trireme.host`: a host agent. It offers this machine's places to a cluster and runs what the
leader assigns to them.

exit 0: asked to stop, all children have left; 1: an error; 75: another agent of this name has taken its
places; 2: configuration
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from trireme.pool.host_agent import HostAgent
from trireme.pool.settings import Settings
from trireme_shared.platform.runtime import output, service, telemetry

RELEASE_S = 30.0


def main() -> int:
    argparse.ArgumentParser(
        prog="python -m trireme.host",
        description="A host of a Trireme cluster: offers places for trainers and parameter servers, and runs "
        "the processes of the "
        "jobs that get them. All settings come from the environment: TRIREME_ETCD, TRIREME_ROOT, "
        "TRIREME_TRAINERS and "
        "TRIREME_PSERVERS (numbers of places; default: a trainer for each GPU, else for each core "
        "but one, and one parameter "
        "server), TRIREME_NAME (default: the host's name), TRIREME_NODE (the machine's name in the "
        "pool), TRIREME_CORES (that the places share), "
        "TRIREME_DATA_DIR (logs and scripts), TRIREME_HOST, "
        "TRIREME_PORT (of /healthz, /readyz and /metrics), TRIREME_ADVERTISE, TRIREME_TOKEN, "
        "TRIREME_DRAIN_SECONDS, TRIREME_AGENT_TTL_S, TRIREME_LOG_LEVEL, TRIREME_LOG_BYTES (of one log) "
        "and TRIREME_LOGS_BYTES (of all together). Other TRIREME_* "
        "variables reach its children.",
    ).parse_args()
    settings = Settings.from_environment()
    output.patient()
    telemetry.configure(level=settings.log_level, service="host", member=settings.name)
    settings.look_up_own_name()
    # parameter servers leave before trainers
    return service.run(
        lambda stopping: _serve(settings, stopping), drain_s=2 * settings.drain_seconds + RELEASE_S
    )


async def _serve(settings: Settings, stopping: asyncio.Event) -> int:
    etcd = settings.connect()
    try:
        return await HostAgent(settings, etcd).run(stopping)
    finally:
        await etcd.close()


if __name__ == "__main__":
    sys.exit(main())
