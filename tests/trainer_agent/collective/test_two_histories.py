"""A trainer was frozen with a version that the others have made again, of other records. What it has is not
mixed with what they have."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.equipment.replaced import replaced
from tests.trainer_agent.collective.joining_job import Job, Member
from tests.trainer_agent.collective.test_catching_up import run
from trainer_agent.collective.state import giving
from trainer_agent.collective.state.messages import Portion, StateRequest
from trireme_shared.protocol.errors import Gone
from trireme_shared.protocol.records.step import LanePosition


class OfOtherRecords(Member):
    async def state(self, request: StateRequest) -> Portion:
        portion = await super().state(request)
        record = portion.head.record.model_copy(update={"positions": (LanePosition(lane=0, offset=1),)})
        return replace(portion, head=portion.head.model_copy(update={"record": record}))


def test_a_trainer_that_joins_notices_it():
    async def scenario() -> None:
        job = Job()
        job.members[1].__class__ = OfOtherRecords
        with pytest.raises(Gone, match=r"two trainers have a version \d+, made of different records"):
            await job.join()
        assert job.replica.record is None

    with replaced(giving, "PORTION_BYTES", 1):
        run(scenario)
