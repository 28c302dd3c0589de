"""Steps that are clipped, over every transport: the trainer's ParameterServers finds the norm while it pulls,
on real sockets."""

from __future__ import annotations

import asyncio

import pytest
import torch

from tests.pserver_service.jobs import push_header, stream
from tests.shared.serving.data_plane.servers import TRANSPORTS, server
from tests.shared.serving.data_plane.test_unchanged import COUNTER, LAYOUT, PARAMETERS, SIZES, servers_at
from trireme_shared.blocks.buffers import bytes_of
from trireme_shared.blocks.gradient_norm import Clipping, clip_factor, norm_of, squares_of
from trireme_shared.protocol.wire.messages import PushBlock

__all__ = ["server"]
LIMIT, STEPS = 10.0, 3


def gradients_of(step):
    return {
        n: torch.randn(SIZES[n], generator=torch.Generator().manual_seed(10 * step + n)) * 4.0**-step
        for n in PARAMETERS
    }


def halves(step):
    """Lanes [0, 2) and [2, 4), which have the same gradient; some buffers come as unchanged."""
    for lanes in ((0, 2), (2, 4)):
        for number in SIZES:
            payload = memoryview(b"")
            if number in PARAMETERS:
                payload = bytes_of(gradients_of(step)[number])
            elif number in COUNTER:
                payload = bytes_of(torch.full((SIZES[number],), step + 1))
            yield PushBlock(block=number, lanes=lanes, count=2), payload


@pytest.mark.parametrize("server", TRANSPORTS, indirect=True)
async def test_steps_are_clipped_over_every_transport(server):
    server.pserver.clipping = Clipping(LIMIT)
    values = await server.initialise(LAYOUT)
    servers, factors = servers_at(server.client), []
    for step in range(STEPS):
        pushing = server.client.push(push_header(step), stream(*halves(step)))
        answer, record = await asyncio.gather(pushing, servers.pull(step + 1))
        servers.swap()
        gradients = gradients_of(step)
        norm = norm_of(map(squares_of, gradients.values()))
        factors.append(clip_factor(norm, LIMIT))
        assert (answer.applied, record.version, record.grad_norm) == (2 * len(SIZES), step + 1, norm)
        for number, gradient in gradients.items():
            values[number] -= gradient * factors[-1]
            assert torch.equal(
                torch.frombuffer(servers.vectors.values[number], dtype=torch.float32), values[number]
            )
    assert factors[0] < factors[1] < factors[2] == 1.0
