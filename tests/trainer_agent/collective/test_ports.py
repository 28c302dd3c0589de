"""What a trainer's process gives to a collective job: its share is served, and torch has as many threads as
the job says, where it is used."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch

from tests.trainer_agent.scripts import spec_for
from trainer_agent.collective.ports import SWITCH_S, collective_ports
from trainer_agent.data_plane.http import HttpPserver
from trainer_agent.settings import Settings
from trireme_shared.protocol.errors import CallerError
from trireme_shared.protocol.records import JobSpec, PserverMember, Strategy
from trireme_shared.protocol.wire.messages import LedgerQuery


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def spec_in(folder, **values) -> JobSpec:
    return spec_for(folder / "script.py", **values)


async def test_the_share_is_served_and_no_thread_of_torch_waits_for_another_ones_core(tmp_path, two_threads):
    spec = spec_in(tmp_path, strategy=Strategy.COLLECTIVE, pservers=0)
    async with collective_ports(Settings(job=spec.job), spec, "trainer-0-x") as ports:
        assert ports is not None
        assert (torch.get_num_threads(), await ports.step_in(torch.get_num_threads)) == (1, 1)
        assert sys.getswitchinterval() <= SWITCH_S
        member = PserverMember(
            index=-1, url=ports.exchange.url, incarnation="trainer-0-x", host="here", pid=1
        )
        async with HttpPserver(member) as port:
            assert not (await port.info()).ready
            with pytest.raises(CallerError, match="trainer-0-x is a trainer of a collective job"):
                await port.ledger(LedgerQuery(epoch=0, task_id="1"))
    assert sys.getswitchinterval() > SWITCH_S


async def test_a_job_with_parameter_servers_needs_none(tmp_path):
    async with collective_ports(Settings(job="test"), spec_in(tmp_path), "trainer-0-x") as ports:
        assert ports is None
