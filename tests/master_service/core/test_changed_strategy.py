"""A job that was a collective one goes on with parameter servers, and the other way round."""

from __future__ import annotations

import pytest

from master_service.core.changes import DesirePservers
from master_service.core.decisions.recovery import back_to
from trireme_shared.protocol.records import JobSpec, JobState, SlotMap, Strategy
from trireme_shared.protocol.records.checkpoints import CheckpointRef

REF = CheckpointRef(uuid="u", step=4, timeline=0, manifest="m")
DATA = {"kind": "text_lines", "urls": ("-",)}


def spec_of(strategy: Strategy, pservers: int) -> JobSpec:
    return JobSpec(job="j", script="s.py", dataset=DATA, storage="/s", strategy=strategy, pservers=pservers)


@pytest.mark.parametrize("before", [None, SlotMap(version=3, owners=(0,) * 1024)])
def test_parameter_servers_get_slots_of_their_own(before):
    changes = back_to(
        spec_of(Strategy.PARAMETER_SERVER, 2), JobState(generation=5), before, REF, "why"
    ).changes
    placed = [change for change in changes if isinstance(change, SlotMap)]
    assert [(slots.version, slots.wanted) for slots in placed] == [(4 if before else 1, 2)]
    assert DesirePservers(2) in changes


def test_a_collective_job_needs_none_of_them():
    before = SlotMap(version=3, owners=(0, 1) * 512)
    changes = back_to(spec_of(Strategy.COLLECTIVE, 0), JobState(generation=5), before, REF, "why").changes
    assert [type(change) for change in changes] == [JobState]
