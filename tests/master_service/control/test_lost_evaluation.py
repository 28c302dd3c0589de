"""An evaluation whose checkpoint was lost with a trainer holds nobody up once it cannot come any more."""

from __future__ import annotations

from typing import Any

import pytest

from tests.equipment.virtual_loop import run_virtually
from tests.equipment.waiting import until
from tests.master_service.cluster import KEYS, MasterCluster, leading, spec_of
from trireme_shared.protocol.records import AcquireTask, Holding, Mode, SlotMap, Strategy
from trireme_shared.protocol.records.checkpoints import CheckpointLatest, CheckpointRef
from trireme_shared.protocol.records.datasets import TextLines

SETTINGS: dict[str, Any] = {
    "mode": Mode.SYNC,
    "strategy": Strategy.COLLECTIVE,
    "pservers": 0,
    "lanes": 2,
    "global_batch_size": 4,
    "evaluation_dataset": TextLines("b.txt"),
    "evaluate_every": 2,
    "recovery_timeout_s": 100.0,
}


@pytest.mark.parametrize(("final", "limit_s"), [(True, 5.0), (False, 110.0)])
def test_once_the_last_version_is_saved_no_earlier_one_is_waited_for(*, final: bool, limit_s: float) -> None:
    async def main() -> None:
        cluster = MasterCluster(spec_of(**SETTINGS))
        async with leading(cluster.master()) as master:
            await cluster.add_trainer("a")
            await cluster.etcd.put(KEYS.layout, b"{}")
            await cluster.etcd.put(KEYS.init_done, b"a")
            await cluster.say("a", holds=Holding(timeline=0))
            await until(lambda: "a" in master.job.trainers, "a to be listed")
            last = CheckpointRef(uuid="at-5", step=5, timeline=0, manifest="m")
            common = {"uuid": "at-5", "step": 5, "timeline": 0, "term": 1, "timestamp": "", "manifest": "m"}
            latest = CheckpointLatest(
                **common, slots=SlotMap(version=1, owners=(0,)), kept=(last,), final=final
            )
            await cluster.etcd.put(KEYS.latest, latest.to_bytes())
            await until(lambda: master.job.members.latest, "the checkpoint to be seen")
            generation = master.job.state.generation
            ask = AcquireTask(trainer="a", request="r", generation=generation, beside=True, epoch=2)
            assert (await master.acquire_task(ask)).answer == "wait"
            assert master.job.evaluation.settled == 0
            await until(lambda: master.job.evaluation.settled == 2, "evaluation 2 to be left out", limit_s)
            assert "its checkpoint was not written" in master.job.evaluation.recent[-1].left_out

    run_virtually(main)
