"""A member's own key is kept equal to the record that it wants, on virtual time and a simulated etcd."""

from __future__ import annotations

import asyncio
import functools
import random
from contextlib import asynccontextmanager

import pytest

from shared.errors import PeerError
from shared.etcd import Etcd
from shared.etcd.transport import TXN
from shared.membership.own_key import OwnKey
from shared.records import PserverMember
from tests.equipment.etcd.simulated import SimulatedEtcd
from tests.equipment.virtual_loop import VirtualLoop
from tests.equipment.virtual_loop import run as run_virtual

KEY, TTL_S = "/members/a", 5.0


def virtual(test):
    @functools.wraps(test)
    def wrapped():
        rng = random.Random(7)
        run_virtual(VirtualLoop(rng), test(SimulatedEtcd()), rng)

    del wrapped.__wrapped__
    return wrapped


@asynccontextmanager
async def held(world: SimulatedEtcd):
    """A claimed key that is held, and a reader of what etcd has."""
    etcd, observer = Etcd(world.transport("a")), Etcd(world.transport("observer"))
    own = OwnKey(etcd, PserverMember(index=0, url="", incarnation="a", host="h", pid=1))
    assert await own.claim(KEY, TTL_S)

    async def written() -> PserverMember:
        found = await observer.get(KEY)
        return PserverMember.model_validate_json(found.value)

    async with asyncio.TaskGroup() as group:
        holding = group.create_task(own.hold())
        yield own, written
        holding.cancel()


@virtual
async def test_what_is_set_is_written(world):
    async with held(world) as (own, written):
        own.set(copied="u1")
        own.set(trouble="full")
        await asyncio.sleep(1.0)
        assert await written() == own.record
        assert (own.record.copied, own.record.trouble) == ("u1", "full")


@virtual
async def test_what_is_set_while_etcd_is_away_is_written_once_it_is_back_with_the_new_lease(world):
    async with held(world) as (own, written):
        before = own.record.lease
        world.stop()
        own.set(copied="u1")
        await asyncio.sleep(4 * TTL_S)
        own.set(trouble="full")
        world.start()
        await asyncio.sleep(TTL_S)
        assert await written() == own.record
        assert (own.record.copied, own.record.trouble, own.record.lease == before) == ("u1", "full", False)


@virtual
async def test_a_write_that_failed_is_not_made_later(world):
    async with held(world) as (own, written):
        world.stop()
        with pytest.raises(PeerError):
            await own.write(copied="u1")
        world.start()
        own.set(trouble="full")
        await asyncio.sleep(3 * TTL_S)
        assert await written() == own.record
        assert (own.record.copied, own.record.trouble) == ("", "full")


@virtual
async def test_a_write_whose_answer_is_lost_is_said_to_have_failed(world):
    async with held(world) as (own, _):
        world.lose_answer(client="a", method=TXN)
        with pytest.raises(PeerError):
            await own.write(copied="u1")
        assert await own.write(copied="u1")


@virtual
async def test_a_key_that_was_deleted_is_lost_and_not_written_again(world):
    etcd = Etcd(world.transport("other"))
    async with held(world) as (own, _):
        await etcd.delete(KEY)
        own.set(copied="u1")
        assert not await own.write(copied="u2")
        await asyncio.sleep(3 * TTL_S)
        assert await etcd.get(KEY) is None
