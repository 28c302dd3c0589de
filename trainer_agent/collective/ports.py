"""What one trainer of a collective job needs of its process: a server for its share of the gradients, and a
thread for its optimizer's steps.

    exchange port, UNIX socket ─► ShareServer, in the event loop
    mean gradients ─► Replica.step, in a thread of its own

The event loop answers the other trainers while the user's script computes in another thread. Both need the
interpreter's lock: torch gives it up in its kernels, other Python code after SWITCH_S at most.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from trainer_agent.collective.groups import pserver_of
from trainer_agent.collective.native.exchange import NativePlace
from trainer_agent.collective.native.link import backend_of
from trainer_agent.collective.server import ShareServer
from trainer_agent.collective.state.catching_up import Donor
from trainer_agent.collective.state.giving import HttpDonor, StepIn, add_route, at_once
from trainer_agent.settings import Settings
from trireme_shared.checkpoints.writer import Background, Offload
from trireme_shared.protocol.errors import PeerError
from trireme_shared.protocol.records import Exchange, JobSpec, Strategy, TrainerMember
from trireme_shared.serving.data_plane.server import is_lasting, make_app, serving, socket_path
from trireme_shared.serving.ports import ServerPorts, compile_in_thread
from trireme_shared.serving.transport.shared_memory import RegionAllocator

SWITCH_S = 0.001

T = TypeVar("T")


def no_donors(member: TrainerMember) -> Donor:
    raise PeerError(f"{member.trainer} is not reached")


@dataclass(frozen=True)
class CollectivePorts:
    """`exchange`: where the others reach `server`. `step_in`: where the replica is stepped. `forget_peers`:
    closes connections to all but these trainers. `connect_donor`: to one that gives its state. `background`:
    where checkpoints are written and read. `native`: where native groups listen."""

    server: ShareServer
    exchange: Exchange
    step_in: StepIn = at_once
    forget_peers: Callable[[Collection[str]], None] = lambda _: None
    connect_donor: Callable[[TrainerMember], Donor] = no_donors
    background: Offload = at_once
    native: NativePlace | None = None

    def with_peers(self, forget_peers: Callable[[Collection[str]], None]) -> CollectivePorts:
        return replace(self, forget_peers=forget_peers)


@asynccontextmanager
async def collective_ports(
    settings: Settings, spec: JobSpec, trainer: str
) -> AsyncIterator[CollectivePorts | None]:
    """None for a job with parameter servers. Raises CallerError if the port is taken."""
    if spec.strategy is not Strategy.COLLECTIVE:
        yield None
        return
    given = ServerPorts(RegionAllocator, settings.max_wait_s, prepare_tables=compile_in_thread)
    server = ShareServer(settings.job, trainer, given)
    app = make_app(server, settings.access, stall_s=settings.stall_s, idle_s=settings.idle_s)
    add_route(app, lambda: server.giver)
    uds, tls = socket_path(settings.uds, trainer), settings.tls
    background = Background()

    def connect_donor(member: TrainerMember) -> Donor:
        return HttpDonor(pserver_of(member), settings.own_token, tls=tls.client())

    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, SWITCH_S))
    try:
        # torch has this number for each thread; with more threads than cores theirs would wait for each other
        torch.set_num_threads(spec.threads_per_trainer)
        with ThreadPoolExecutor(1, "step", torch.set_num_threads, (spec.threads_per_trainer,)) as stepping:

            async def step_in(work: Callable[..., T], *arguments: Any) -> T:
                return await asyncio.get_running_loop().run_in_executor(stepping, work, *arguments)

            lenient = is_lasting(settings.uds)
            async with serving(
                app, settings.host, settings.exchange_port, uds, tls.server(), lenient=lenient
            ) as listening:
                url = f"{tls.scheme}://{settings.advertised}:{listening.port}"
                exchange = Exchange(url=url, uds=listening.uds)
                place = (
                    NativePlace(settings.advertised.strip("[]"), backend_of(spec.backend))
                    if spec.exchange == "native"
                    else None
                )
                yield CollectivePorts(
                    server,
                    exchange,
                    step_in,
                    connect_donor=connect_donor,
                    background=background,
                    native=place,
                )
    finally:
        background.close()
        sys.setswitchinterval(before)
