"""Pushes and pulls that are tried again: while whatever sent the last one is still about to hear of its end,
and for how long."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from tests.trainer_agent.virtual_time import virtually
from trainer_agent.data_plane.fleet_client import ASK_S, SHARE, FleetClient, call_limit_s
from trainer_agent.data_plane.pushes import Outbox, Verdict
from trainer_agent.data_plane.step_exchange import ParameterServers
from trireme_shared.platform.runtime import clock
from trireme_shared.protocol.errors import DeadlineExceeded, PeerError
from trireme_shared.protocol.records import Mode, SlotMap
from trireme_shared.protocol.records.step import StepRecord
from trireme_shared.protocol.wire.messages import PulledBlock, PullEnd, PushAnswer, PushBlock, PushHeader

HEADER = PushHeader(job="j", term=0, generation=1, mode=Mode.SYNC, trainer="t", step=0)


class Port:
    """Fails once, while a task of its own still waits for the second block: as aiohttp's writer does."""

    def __init__(self):
        self.writers = []
        self.calls = []

    async def push(self, _, blocks):
        found = [await anext(blocks)]
        self.calls.append(found)
        if not self.writers:
            self.writers.append(asyncio.create_task(anext(blocks)))
            await asyncio.sleep(0)
            raise PeerError("it is gone")
        found += [each async for each in blocks]
        return PushAnswer(applied=len(found), duplicate=0, refused=(), generation=1)


async def test_a_push_that_failed_while_its_sender_waits_for_a_block_is_tried_again():
    async def changed(*_):
        pass

    member = SimpleNamespace(incarnation="ps-0")
    directory = SimpleNamespace(
        pservers={0: member}, state=SimpleNamespace(generation=1), revision=1, changed=changed
    )
    compute = SimpleNamespace(layout=SimpleNamespace(payloads=lambda _: {}))
    port, outbox, suspected = Port(), Outbox(), []
    fleet = FleetClient(directory, lambda _: port, compute.layout, lambda *what: suspected.append(what))
    servers = ParameterServers(fleet, compute)
    outbox.add(PushBlock(block=0, lanes=(0, 1), count=1), memoryview(b"1234"))
    async with asyncio.timeout(10):
        pushing = asyncio.create_task(servers.pushes.push(0, HEADER, outbox))
        while len(port.calls) < 2:
            await asyncio.sleep(0.01)
        outbox.add(PushBlock(block=1, lanes=(0, 1), count=1), memoryview(b"5678"))
        outbox.close()
        assert await pushing is Verdict.ACKNOWLEDGED
        late = await asyncio.gather(*port.writers)
    assert [item.block for item, _ in port.calls[1]] == [0, 1]
    assert [item.block for item, _ in late] == [1]
    assert suspected == [("ps-0", "it is gone")]


class Vectors:
    """One block in one segment."""

    def __init__(self):
        self.layout = SimpleNamespace(
            payloads=lambda _: {}, blocks=lambda: [SimpleNamespace(number=0)], slot_count=1, tables=()
        )
        self.block = memoryview(bytearray(4))

    def staging(self, _):
        return self.block


def servers_at(port, **options):
    async def changed(*_):
        await asyncio.sleep(0.1)

    directory = SimpleNamespace(
        keys=SimpleNamespace(job="j"),
        master=None,
        pservers={0: SimpleNamespace(incarnation="ps-0")},
        slots=SlotMap(version=1, owners=(0,)),
        state=SimpleNamespace(generation=1),
        revision=1,
        changed=changed,
    )
    vectors = Vectors()
    fleet = FleetClient(directory, lambda _: port, vectors.layout, lambda *_: None, **options)
    return ParameterServers(fleet, vectors)


class SlowVersion:
    """Has the version an hour after it was first asked for."""

    def __init__(self):
        self.there = None

    async def pull(self, request, sink, done):
        self.there = clock.monotonic() + 3600 if self.there is None else self.there
        if clock.monotonic() < self.there:
            await asyncio.sleep(request.wait_s)
            return PullEnd(code="TOO_EARLY", message="1 blocks have not reached version 1")
        sink(PulledBlock(block=0))
        done(PulledBlock(block=0))
        return PullEnd(code="OK", record=StepRecord(version=1, positions=()))


def test_a_pull_waits_for_a_version_as_long_as_the_others_compute_it():
    record = virtually(lambda: servers_at(SlowVersion()).pull(1))
    assert record.version == 1


class BreaksOff:
    """Breaks off three times after `after_s`, as a parameter server that got no block for long; then it
    answers."""

    def __init__(self, after_s):
        self.after_s, self.calls = after_s, 0

    async def push(self, _, blocks):
        self.calls += 1
        if self.calls <= 3:
            await asyncio.sleep(self.after_s)
            raise PeerError("no block of a push came")
        return PushAnswer(applied=len([each async for each in blocks]), generation=1)


def test_a_push_has_no_time_limit_while_its_step_is_computed():
    async def scenario():
        port, outbox = BreaksOff(900), Outbox()
        outbox.add(PushBlock(block=0, lanes=(0, 1), count=1), memoryview(b"1234"))
        pushing = asyncio.create_task(servers_at(port).pushes.push(0, HEADER, outbox))
        await asyncio.sleep(3600)
        outbox.close()
        return await pushing

    assert virtually(scenario) is Verdict.ACKNOWLEDGED


def test_a_push_that_nobody_takes_ends_with_what_was_tried():
    async def scenario():
        class Gone:
            async def push(self, *_):
                raise PeerError("nobody there")

        outbox = Outbox()
        outbox.add(PushBlock(block=0, lanes=(0, 1), count=1), memoryview(b"1234"))
        outbox.close()
        return await servers_at(Gone()).pushes.push(0, HEADER, outbox)

    with pytest.raises(
        DeadlineExceeded,
        match=r"gave up after 60\d s: pushing step 0 to pserver-0; the last answer: nobody there",
    ):
        virtually(scenario)


class Counted:
    """Answers at once; counts."""

    def __init__(self):
        self.calls = 0

    async def push(self, _, blocks):
        self.calls += 1
        return PushAnswer(applied=len([each async for each in blocks]), generation=1)

    async def pull(self, _, sink, done):
        self.calls += 1
        done(PulledBlock(block=0))
        return PullEnd(code="OK", record=StepRecord(version=1, positions=()))


def test_a_trainer_that_may_have_lost_its_lease_neither_pushes_nor_pulls_until_it_is_certain():
    async def scenario():
        port, certain, outbox = Counted(), asyncio.Event(), Outbox()
        outbox.add(PushBlock(block=0, lanes=(0, 1), count=1), memoryview(b"1234"))
        outbox.close()
        servers = servers_at(port, certain=certain.wait)
        async with asyncio.TaskGroup() as group:
            push, pull = (
                group.create_task(servers.pushes.push(0, HEADER, outbox)),
                group.create_task(servers.pull(1)),
            )
            await asyncio.sleep(3600)
            before = port.calls
            certain.set()
        return before, push.result(), pull.result().version, port.calls

    assert virtually(scenario) == (0, Verdict.ACKNOWLEDGED, 1, 2)


class SilentPort:
    """Says nothing for as long as `silent`, within `limit_s` of each call, as the ports over HTTP and streams
    do."""

    def __init__(self, limit_s):
        self.silent, self._limit_s, self.calls = True, limit_s, []

    async def _answer(self, kind, answer):
        self.calls.append((kind, clock.monotonic()))
        if self.silent:
            await asyncio.sleep(self._limit_s)
            raise DeadlineExceeded("nothing moved", silent_s=self._limit_s)
        return answer

    async def push(self, _, blocks):
        answer = PushAnswer(applied=1, duplicate=0, refused=(), generation=1)
        return await self._answer("push", answer)

    async def info(self):
        return await self._answer("info", SimpleNamespace(ready=True))


def test_a_silent_pserver_is_skipped_at_once_and_asked_now_and_then_until_it_answers():
    async def main():
        port = SilentPort(call_limit_s(SimpleNamespace(skip_after_seconds=2.0), 30.0))
        servers = servers_at(port)
        outbox = Outbox()
        outbox.add(PushBlock(block=0, lanes=(0, 1), count=1), memoryview(b"1234"))
        outbox.close()
        for wanted_s in (2.0, 0.0, 0.0):
            began = clock.monotonic()
            assert await servers.pushes.push(0, HEADER, outbox, 2.0) is Verdict.SKIPPED
            assert clock.monotonic() - began == pytest.approx(wanted_s, abs=0.01)
        await asyncio.sleep(SHARE * ASK_S)
        began = clock.monotonic()
        assert await servers.pushes.push(0, HEADER, outbox, 2.0) is Verdict.SKIPPED
        assert clock.monotonic() - began == pytest.approx(ASK_S, abs=0.01)
        port.silent = False
        assert await servers.pushes.push(0, HEADER, outbox, 2.0) is Verdict.SKIPPED, (
            "it is not asked all the time"
        )
        await asyncio.sleep(SHARE * ASK_S)
        assert await servers.pushes.push(0, HEADER, outbox, 2.0) is Verdict.ACKNOWLEDGED
        assert [kind for kind, _ in port.calls] == ["push", "info", "info", "push"]

    virtually(main)
