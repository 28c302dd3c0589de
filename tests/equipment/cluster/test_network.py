"""The simulated network does what TCP between processes does, and nothing else."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.equipment.cluster.network import STEADY, Conditions, Network, Pipe
from tests.equipment.virtual_loop import Process, VirtualLoop, run
from trireme_shared.protocol.errors import Conflict, DeadlineExceeded, PeerError


class Counter:
    def __init__(self):
        self.seen = []

    async def add(self, item):
        self.seen.append(item)
        return len(self.seen)

    async def refuse(self):
        raise Conflict("no", what=3)

    async def read(self, pipe):
        async for item in pipe:
            self.seen.append(item)
        return len(self.seen)

    async def hang(self):
        await asyncio.sleep(1e5)


def simulate(scenario, conditions=STEADY, seed=1):
    rng = random.Random(seed)

    async def main():
        network, client, server, service = Network(rng), Process("client"), Process("server"), Counter()
        network.conditions = conditions
        network.listen("there", server, service)
        await client.spawn(scenario(network, client, server, service))

    run(VirtualLoop(rng), main(), rng)


def test_a_call_returns_or_raises_what_the_service_did():
    async def scenario(network, client, server, service):
        assert await network.call("there", lambda s: s.add("x"), timeout_s=1) == 1
        with pytest.raises(Conflict) as caught:
            await network.call("there", lambda s: s.refuse(), timeout_s=1)
        assert caught.value.details == {"what": 3}

    simulate(scenario)


def test_a_lost_request_is_not_executed_and_a_lost_reply_is():
    async def scenario(network, client, server, service):
        with pytest.raises(PeerError):
            await network.call("there", lambda s: s.add("x"), timeout_s=1)
        await asyncio.sleep(5)
        assert service.seen == (["x"] if network.conditions.lose_reply else [])

    simulate(scenario, Conditions(lose_request=1.0))
    simulate(scenario, Conditions(lose_reply=1.0))


def test_a_doubled_request_is_executed_twice_and_answered_once():
    async def scenario(network, client, server, service):
        assert await network.call("there", lambda s: s.add("x"), timeout_s=1) == 1
        await asyncio.sleep(5)
        assert service.seen == ["x", "x"]

    simulate(scenario, Conditions(double=1.0))


def test_a_partition_delays_what_was_sent_until_it_heals():
    async def scenario(network, client, server, service):
        network.cut(client, server)
        with pytest.raises(DeadlineExceeded):
            await network.call("there", lambda s: s.add("x"), timeout_s=3)
        assert service.seen == []
        network.mend(server, client)
        await asyncio.sleep(1)
        assert service.seen == ["x"]

    simulate(scenario)


def test_a_dead_process_refuses_and_resets():
    async def scenario(network, client, server, service):
        hanging = asyncio.ensure_future(network.call("there", lambda s: s.hang(), timeout_s=100))
        await asyncio.sleep(1)
        assert not await network.refuses("there")
        server.kill()
        network.killed(server)
        with pytest.raises(PeerError, match="reset"):
            await hanging
        assert await network.refuses("there")
        with pytest.raises(PeerError, match="refused"):
            await network.call("there", lambda s: s.add("x"), timeout_s=1)

    simulate(scenario)


def test_a_frozen_process_is_silent_and_answers_when_it_wakes():
    async def scenario(network, client, server, service):
        server.freeze()
        asyncio.get_running_loop().call_later(5, server.thaw)
        assert not await network.refuses("there")
        assert await network.call("there", lambda s: s.add("x"), timeout_s=10) == 1

    simulate(scenario)


def test_a_stream_keeps_its_order_and_breaks_in_the_middle():
    async def scenario(network, client, server, service):
        pipe = Pipe(network, lambda item: item)
        reply = asyncio.ensure_future(
            network.call("there", lambda s: s.read(pipe), timeout_s=10, pipes=(pipe,))
        )
        with pytest.raises(PeerError) if network.conditions.break_stream else contextlib_null():
            for number in range(20):
                await pipe.put(number)
            pipe.close()
            assert await reply == 20
        await asyncio.sleep(1)
        assert service.seen == list(range(len(service.seen)))
        assert len(service.seen) < 20 or not network.conditions.break_stream
        reply.cancel()
        await asyncio.gather(reply, return_exceptions=True)

    simulate(scenario)
    simulate(scenario, Conditions(break_stream=1.0), seed=3)


def test_streams_of_a_killed_caller_break():
    async def scenario(network, client, server, service):
        other = Process("other")

        async def push():
            pipe = Pipe(network, lambda item: item)
            call = asyncio.ensure_future(
                network.call("there", lambda s: s.read(pipe), timeout_s=10, pipes=(pipe,))
            )
            await pipe.put(1)
            await call

        task = other.spawn(push())
        await asyncio.sleep(1)
        other.kill()
        network.killed(other)
        await asyncio.sleep(1)
        assert service.seen == [1]
        assert network.crashes == []
        other.dead = False
        other.release()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    simulate(scenario)


def contextlib_null():
    import contextlib

    return contextlib.nullcontext()
