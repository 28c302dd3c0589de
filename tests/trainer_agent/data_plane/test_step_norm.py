"""A trainer finds the norm of a step's gradient from all parameter servers, or from one that was told it
already."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace

import pytest
import torch

from tests.equipment.cluster.direct_ports import DirectPserver
from tests.equipment.replaced import replaced
from tests.pserver_service.jobs import (
    JOB,
    PLAIN,
    init_header,
    item,
    layout_of,
    payload_of,
    pull_request,
    pulled,
    push_header,
    stream,
    values_of,
)
from tests.trainer_agent.virtual_time import virtually
from trainer_agent.data_plane.fleet_client import FleetClient
from trainer_agent.data_plane.pulls import StepNormFinder
from trainer_agent.data_plane.step_exchange import ParameterServers
from trireme_shared.blocks.gradient_norm import Clipping
from trireme_shared.protocol.errors import Gone, InvalidArgument, PeerError
from trireme_shared.protocol.records import SlotMap
from trireme_shared.protocol.records.assignments import slot_of
from trireme_shared.protocol.records.step import StepRecord
from trireme_shared.protocol.wire.messages import InitBlock, StepNorm
from trireme_shared.serving.pserver import Pserver

LAYOUT = layout_of(64, optimizer=PLAIN)  # 4 blocks of 16
OWNERS = tuple(slot % 2 for slot in range(LAYOUT.slot_count))
NORM = math.sqrt(64 * 4.0)


class Vectors:
    layout = LAYOUT

    def __init__(self):
        self.next = {n: bytearray(block.bytes) for n, block in enumerate(LAYOUT.blocks())}

    def staging(self, block):
        return memoryview(self.next[block])


async def whole_step():
    """Two parameter servers that have all data of step 0, and a trainer's exchange with them."""
    owner = {block.number: OWNERS[slot_of(block.number, LAYOUT.slot_count)] for block in LAYOUT.blocks()}
    assert set(owner.values()) == {0, 1}
    pservers = [Pserver(JOB, f"ps-{index}", index) for index in (0, 1)]
    for index, pserver in enumerate(pservers):
        pserver.clipping = Clipping(1.0)
        mine = [
            (InitBlock(block=n), payload_of(v)) for n, v in values_of(LAYOUT).items() if owner[n] == index
        ]
        await pserver.init(init_header(LAYOUT, pserver=index), stream(*mine))
        gradients = [item(n, torch.full((16,), 2.0)) for n in owner if owner[n] == index]
        await pserver.push(push_header(0), stream(*gradients))

    async def changed(*_):
        await asyncio.sleep(0.1)

    directory = SimpleNamespace(
        keys=SimpleNamespace(job=JOB),
        master=None,
        pservers={index: SimpleNamespace(index=index, incarnation=f"ps-{index}") for index in (0, 1)},
        slots=SlotMap(version=1, owners=OWNERS),
        state=SimpleNamespace(generation=1),
        revision=1,
        changed=changed,
    )
    fleet = FleetClient(
        directory, lambda member: DirectPserver(pservers[member.index]), LAYOUT, lambda *_: None
    )
    servers = ParameterServers(fleet, Vectors())
    return pservers, servers, [[n for n in owner if owner[n] == index] for index in (0, 1)]


def test_the_norm_of_all_blocks_is_found_and_told():
    async def main():
        pservers, servers, _ = await whole_step()
        record = await servers.pull(1)
        return record.grad_norm, [pserver.store.lowest for pserver in pservers]

    assert virtually(main) == (NORM, [1, 1])


async def torn():
    """One parameter server was told the norm and has made the step; who told it died before it told the
    other."""
    pservers, servers, blocks = await whole_step()
    norm = StepNorm(timeline=0, step=0, norm=NORM)
    assert (await pulled(pservers[0], pull_request(1, blocks[0], norm=norm)))[1].code == "OK"
    return (await servers.pull(1)).grad_norm, [pserver.store.lowest for pserver in pservers]


def test_a_step_that_one_parameter_server_has_made_is_made_by_the_other():
    assert virtually(torn) == (NORM, [1, 1])


def test_without_the_norm_of_the_version_such_a_step_is_never_made():
    with (
        replaced(StepNormFinder, "learn_of_version", lambda *_: None),
        pytest.raises(Gone, match="version 1 is not made"),
    ):
        virtually(torn)


def test_a_connection_that_breaks_behind_the_last_block_loses_no_norm():
    async def main():
        pservers, servers, blocks = await whole_step()
        await pulled(pservers[0], pull_request(1, blocks[0], norm=StepNorm(timeline=0, step=0, norm=NORM)))
        pull, broken = DirectPserver.pull, []

        async def breaking(self, request, sink, placed=None):
            end = await pull(self, request, sink, placed)
            if end.code == "OK" and not broken:
                broken.append(request.blocks)
                raise PeerError("it is gone")
            return end

        with replaced(DirectPserver, "pull", breaking):
            record = await servers.pull(1)
        return broken == [tuple(blocks[0])], record.grad_norm

    assert virtually(main) == (True, NORM)


def finder(**options):
    return StepNormFinder(7, **{"fails": True, **options})


def test_what_an_older_timeline_says_does_not_count():
    found = finder()
    found.add(1, [(0, 9.0)], (0, 1))
    found.add(2, [(0, 4.0)], (0, 1))
    found.add(1, [(1, 9.0)], (0, 1))
    assert found.norm is None
    found.add(2, [(1, 5.0)], (0, 1))
    assert found.norm == StepNorm(timeline=2, step=7, norm=3.0)
    found.learn_of_version(1, StepRecord(version=8, positions=(), grad_norm=9.0))
    assert found.norm.norm == 3.0


@pytest.mark.parametrize("squares", [math.inf, math.nan])
def test_a_norm_that_is_not_finite_fails_the_job_unless_it_is_said_otherwise(squares):
    with pytest.raises(InvalidArgument, match=r"norm of the gradient of step 7 is (inf|nan)"):
        finder().add(1, [(0, squares)], (0,))
    other = finder(fails=False)
    other.add(1, [(0, squares)], (0,))
    assert not math.isfinite(other.norm.norm)
