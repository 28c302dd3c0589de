"""Payloads in shared memory: what moves, who may overwrite what, and peers that mean no good."""

import asyncio
import fcntl
import gc
import mmap
import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack, suppress

import pytest
import torch

from tests.pserver_service.jobs import pull_request, push_header
from tests.shared.serving.data_plane.servers import LAYOUT, SIZES, STALL_S, TOKEN, Flat, gradients, server
from tests.shared.serving.data_plane.streams import (
    all_given_back,
    block,
    opening,
    over_shm,
    raw_stream,
    reference,
    versions,
)
from trainer_agent.data_plane.stream import Connections
from trainer_agent.settings import Settings
from trireme_shared.blocks.buffers import bytes_of
from trireme_shared.platform.runtime.http import own_network
from trireme_shared.protocol.errors import InvalidArgument, Unauthorized
from trireme_shared.protocol.records import PserverMember
from trireme_shared.protocol.wire import codec
from trireme_shared.protocol.wire.messages import PushBlock
from trireme_shared.serving.transport.shared_memory import (
    REGION_BYTES,
    Offer,
    Region,
    RegionAllocator,
    peer_of,
)
from trireme_shared.serving.transport.stream import FrameStream, socket_of

__all__ = ["server"]
SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


async def step(server, number=0, value=1.0):
    flat = Flat()
    pushing = server.client.push(push_header(number), gradients(value))
    pulling = server.client.pull(pull_request(number + 1, SIZES, wait_s=5), flat.sink)
    answer, end = await asyncio.gather(pushing, pulling)
    assert (answer.applied, end.code) == (4, "OK")
    return flat.values


# ---------------------------------------------------------------- what moves


@over_shm
async def test_payloads_do_not_go_through_the_stream(server, monkeypatch):
    values, came = await server.initialise(), []
    updated = FrameStream.buffer_updated
    monkeypatch.setattr(
        FrameStream, "buffer_updated", lambda self, count: came.append(count) or updated(self, count)
    )
    found = await step(server)
    assert all(torch.equal(found[k], values[k] - 1) for k in SIZES)
    assert sum(came) < 8_000, "the payloads of a step are 1,600,000 bytes"
    await all_given_back(server)


@over_shm
async def test_memory_that_cannot_be_had_or_read_is_done_without(server, monkeypatch):
    values = await server.initialise()

    def refused(*_):
        raise InvalidArgument("another PID namespace")

    monkeypatch.setattr("trireme_shared.serving.transport.shared_memory.open_offered", refused)
    found = await step(server)
    assert not server.client.stream.memory.on
    assert all(torch.equal(found[k], values[k] - 1) for k in SIZES)
    monkeypatch.undo()

    def none(*_):
        raise OSError("no memfd")

    monkeypatch.setattr(os, "memfd_create", none)
    with pytest.raises(OSError, match="no memfd"):
        Region.create(1)
    pool = server.pserver.new_pool()
    assert pool.take("float32", 16).home is None


@over_shm
async def test_a_gradient_that_nobody_waits_for_keeps_its_memory(server):
    """The pserver may still read it there: it is not overwritten, other memory is used."""
    await server.initialise()
    await step(server)
    (region,) = server.client.regions
    assert not region.lost

    async def half():
        yield PushBlock(block=0, lanes=(0, 4), count=4), bytes_of(torch.ones(SIZES[0]))
        await asyncio.sleep(30)

    pushing = asyncio.ensure_future(server.client.push(push_header(1), half()))
    async with asyncio.timeout(5):
        while versions(server)[0] == 1:
            await asyncio.sleep(0.01)
    pushing.cancel()
    with suppress(asyncio.CancelledError):
        await pushing
    assert region.lost
    assert server.client.regions == []
    answer = await server.client.push(push_header(1), gradients())
    assert (answer.applied, answer.duplicate) == (3, 1)
    (other,) = server.client.regions
    assert other is not region


@pytest.mark.parametrize("transport", ["shm", "unix"])
def test_a_transport_that_is_asked_for_is_not_replaced_by_another_one(transport):
    member = PserverMember(
        index=3, url="http://127.0.0.1:1", incarnation="i", host="elsewhere", pid=1, uds="/tmp/x"
    )
    connections = Connections(Settings(job="j", transport=transport), stall_s=10.0)
    with pytest.raises(
        InvalidArgument, match=f"TRIREME_TRANSPORT is {transport}, but pserver-3 on elsewhere has no"
    ):
        connections(member)


@pytest.mark.parametrize(
    ("network", "here"), [(own_network(), True), ("", True), ("of another machine/4026531840", False)]
)
def test_a_unix_socket_of_another_network_is_not_used_though_its_file_is_seen_and_the_host_has_the_same_name(
    tmp_path, network, here
):
    path = tmp_path / "pserver.sock"
    path.touch()
    member = PserverMember(
        index=0,
        url="http://10.0.0.1:1",
        incarnation="i",
        host=socket.gethostname(),
        pid=1,
        uds=str(path),
        network=network,
    )
    assert socket_of(member) == (str(path) if here else "")


def test_a_large_model_needs_few_regions():
    chunks, homes = RegionAllocator(), []
    for _ in range(64):
        memory, home = chunks(REGION_BYTES)
        assert memory.data_ptr() % 64 == 0
        homes.append(home)
    assert len({home[0] for home in homes}) < 20
    assert len({(id(region), offset) for region, offset in homes}) == 64


# ---------------------------------------------------------------- what is offered


class Odd:
    """Things that a process can offer which are not what they should be."""

    def __init__(self, stack: ExitStack, tmp_path) -> None:
        self._stack, self._path = stack, tmp_path

    def kept(self, fd: int) -> int:
        self._stack.callback(os.close, fd)
        return fd

    def memfd(self, size=mmap.PAGESIZE, seals=SEALS, flags=0) -> int:
        fd = self.kept(os.memfd_create("odd", os.MFD_ALLOW_SEALING | flags))
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        return fd

    def file(self) -> int:
        path = self._path / "memfd:odd (deleted)"
        path.write_bytes(bytes(mmap.PAGESIZE))
        return self.kept(os.open(path, os.O_RDWR))

    def pipe(self) -> int:
        ends = os.pipe()
        self.kept(ends[1])
        return self.kept(ends[0])


def said(fd, size=mmap.PAGESIZE, name="odd", memory=0) -> Offer:
    return Offer(memory=memory, fd=fd, name=name, size=size)


LARGE = 1 << 21  # more than the layout's 800,000 bytes; a huge page
OFFERS = {
    "another size than it has": lambda odd: said(odd.memfd(), size=2 * mmap.PAGESIZE),
    "larger than the layout": lambda odd: said(odd.memfd(LARGE), size=LARGE),
    "empty": lambda odd: said(odd.memfd(0), size=0),
    "may shrink": lambda odd: said(odd.memfd(seals=fcntl.F_SEAL_SEAL | fcntl.F_SEAL_GROW)),
    "may grow": lambda odd: said(odd.memfd(seals=fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK)),
    "no seals": lambda odd: said(odd.memfd(seals=0)),
    "another name": lambda odd: said(odd.memfd(), name="even"),
    "huge pages": lambda odd: said(odd.memfd(LARGE, flags=os.MFD_HUGETLB), size=LARGE),
    "a pipe": lambda odd: said(odd.pipe()),
    "a file of that name": lambda odd: said(odd.file()),
    "a device": lambda odd: said(odd.kept(os.open("/dev/zero", os.O_RDONLY))),
    "a folder": lambda odd: said(odd.kept(os.open("/proc", os.O_RDONLY))),
    "not open": lambda _: said(999_999),
    "below zero": lambda _: said(-1),
    "beyond all": lambda _: said(1 << 62),
}


@over_shm
@pytest.mark.parametrize("what", OFFERS)
async def test_an_odd_offer_is_refused_and_the_stream_goes_on_without(server, tmp_path, what):
    await server.initialise()
    with ExitStack() as stack:
        offer = OFFERS[what](Odd(stack, tmp_path))
        async with raw_stream(server) as raw:
            raw.send_map({"id": 1, "call": "share", "message": {"offers": [offer.model_dump()]}})
            assert (await raw.next())["error"]["code"] == "INVALID_ARGUMENT"
            raw.send(opening(2) + block(2, 0))
            raw.send_map({"id": 2, "end": True})
            assert (await raw.next())["message"]["applied"] == 1
    await all_given_back(server)


@over_shm
async def test_who_offers_nonsense_a_number_twice_or_too_much_is_refused(server):
    await server.initialise()
    region = Region.create(mmap.PAGESIZE)
    async with raw_stream(server) as raw:
        for first in (0, 0):
            raw.send_map(
                {"id": 1, "call": "share", "message": {"offers": [region.offer(first).model_dump()]}}
            )
        assert (await raw.next())["end"]
        assert (await raw.next())["error"]["code"] == "TOO_LARGE"
        many = [region.offer(number).model_dump() for number in range(1, 300)]
        raw.send_map({"id": 1, "call": "share", "message": {"offers": many}})
        assert (await raw.next())["error"]["code"] == "TOO_LARGE"
        raw.send_map({"id": 1, "call": "share", "message": {"offers": "all of it"}})
        assert (await raw.next())["error"]["code"] == "BAD_FRAME"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_memory_is_not_shared_with_another_user():
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("")  # an abstract name, which every user may connect to
        listening.listen()
        said = (
            "import socket; s = socket.socket(socket.AF_UNIX); "
            f"s.connect({listening.getsockname()!r}); s.recv(1)"
        )
        with subprocess.Popen(
            ["python3", "-c", said], user=65534, cwd="/", env={"PATH": os.defpath}
        ) as child:
            connection, _ = listening.accept()
            with connection, pytest.raises(Unauthorized, match="the peer runs as user 65534"):
                peer_of(connection)
            connection.close()
            child.wait(10)


# ---------------------------------------------------------------- what is referred to


@over_shm
@pytest.mark.parametrize(
    ("at", "code"),
    [
        ((7, 0, 64), "BAD_FRAME"),
        ((0, 0, 1 << 40), "INVALID_ARGUMENT"),
        ((0, 1 << 62, 64), "INVALID_ARGUMENT"),
        ((0, -64, 64), "INVALID_ARGUMENT"),
        ((0, 0, -64), "INVALID_ARGUMENT"),
        ((0, 802_816, 64), "INVALID_ARGUMENT"),
        ((0, 4, 64), "INVALID_ARGUMENT"),
        ((0, 0), "BAD_FRAME"),
        ((0, 0.0, 64), "BAD_FRAME"),
        ((0, True, 64), "BAD_FRAME"),
        ("0, 0, 64", "BAD_FRAME"),
        ({"memory": 0}, "BAD_FRAME"),
        ((0, 0, 524_288), "TOO_LARGE"),
    ],
)
async def test_a_reference_to_what_is_not_there_changes_no_block_and_ends_the_stream(server, at, code):
    await server.initialise()
    region = Region.create(LAYOUT.vector_bytes)
    async with raw_stream(server) as raw:
        raw.send_map({"id": 1, "call": "share", "message": {"offers": [region.offer(0).model_dump()]}})
        assert (await raw.next())["end"]
        raw.send(opening() + reference(at=at))
        assert (await raw.next())["error"]["code"] == code
        async with asyncio.timeout(5):
            await raw.over.wait()
    assert versions(server) == [0, 0, 0, 0]
    await all_given_back(server)


@over_shm
@pytest.mark.parametrize(
    "sent", [reference(), reference(payload=b"1234"), codec.encode({"id": 1, "took": 1})]
)
async def test_who_shares_nothing_refers_to_nothing_and_takes_nothing(server, sent):
    await server.initialise()
    async with raw_stream(server) as raw:
        raw.send(opening() + sent)
        assert (await raw.next())["error"]["code"] == "BAD_FRAME"
    await all_given_back(server)


@over_shm
async def test_references_may_overlap_change_and_be_of_a_wrong_size_at_their_own_risk(server):
    values = await server.initialise()
    region = Region.create(LAYOUT.vector_bytes)
    torch.frombuffer(region, dtype=torch.float32).fill_(1.0)
    size = SIZES[0] * 4
    async with raw_stream(server) as raw:
        raw.send_map({"id": 1, "call": "share", "message": {"offers": [region.offer(0).model_dump()]}})
        assert (await raw.next())["end"]
        raw.send(opening() + reference(at=(0, 0, size)) + reference(index=1, at=(0, 64, size)))
        raw.send(reference(index=2, at=(0, 0, 64)) + codec.encode({"id": 1, "end": True}))
        answer = (await raw.next())["message"]
        assert (answer["applied"], [refusal["code"] for refusal in answer["refused"]]) == (
            2,
            ["LAYOUT_MISMATCH"],
        )
    for index in (0, 1):
        assert torch.equal(server.pserver.store.blocks[index].current.tensor, values[index] - 1)
    await all_given_back(server)


@over_shm
async def test_a_pull_that_does_not_say_what_it_took_is_cut_off(server):
    await server.initialise()
    async with raw_stream(server) as raw:
        raw.send_map({"id": 1, "call": "share", "message": {}})
        assert len((await raw.next())["message"]["offers"]) == 1
        raw.send_map({"id": 2, "call": "pull", "message": codec.plain(pull_request(0, SIZES))})
        assert (await raw.next())["end"], "the trainer has what it asked for before it says so"
        found = await raw.next(limit_s=10 * STALL_S)
        assert f"took no block that it was lent for {STALL_S:g} s" in found["error"]["message"]
        assert [tuple(header["at"])[2] for header in raw.blocks] == [
            4 * elements for elements in SIZES.values()
        ]
        await all_given_back(server)


@over_shm
@pytest.mark.parametrize("count", [5, 0, -1, "all", True])
async def test_a_pull_cannot_take_more_than_it_was_lent(server, count):
    await server.initialise()
    async with raw_stream(server) as raw:
        raw.send_map({"id": 1, "call": "share", "message": {}})
        await raw.next()
        raw.send_map({"id": 2, "call": "pull", "message": codec.plain(pull_request(0, SIZES))})
        raw.send_map({"id": 2, "took": count})
        assert (await raw.next())["end"]
        assert (await raw.next())["error"]["code"] == "BAD_FRAME"
        await all_given_back(server)


@over_shm
async def test_a_trainer_killed_in_a_push_leaves_whole_blocks_and_no_memory_behind(server):
    values = await server.initialise()
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.shared.serving.data_plane.dying_pusher",
        server.url,
        server.member.uds,
        TOKEN,
    )
    try:
        async with asyncio.timeout(60):
            while versions(server) != [1, 1, 0, 0]:
                await asyncio.sleep(0.02)
        (name,) = {line.split("memfd:")[1] for line in mappings(child.pid) if "memfd:trireme-" in line}
        assert any(name in line for line in mappings("self")), "it is read where it lies"
    finally:
        child.send_signal(signal.SIGKILL)
        await child.wait()
    await all_given_back(server)
    for index in (0, 1):
        assert torch.equal(server.pserver.store.blocks[index].current.tensor, values[index] - 1)
    async with asyncio.timeout(5):
        while any(name in line for line in mappings("self")):
            gc.collect()
            await asyncio.sleep(0.02)


def mappings(process) -> list[str]:
    with open(f"/proc/{process}/maps") as lines:  # noqa: PTH123
        return lines.read().splitlines()
