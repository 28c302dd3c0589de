"""The best parameters are exported beside the last ones; who comes then still gets the last ones."""

from __future__ import annotations

from typing import Any

import torch

from tests.trainer_agent.collective.cluster import cluster
from tests.trainer_agent.scripts import spec_for, write_script
from trainer_agent.collective.state.messages import StateRequest
from trireme_shared.protocol.records import JobSpec, Phase, Strategy
from trireme_shared.protocol.records.datasets import Npy

A = "trainer-0-x"
EVALUATE = """
    def evaluate(model, batch):
        return {"loss_sum": float(F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum"))}

    def metrics(sums):
        return {"loss": sums["loss_sum"]}
"""


def spec_of(tmp_path: Any) -> JobSpec:
    script = write_script(
        tmp_path, evaluate=EVALUATE, evaluation="def evaluation_dataset(): return dataset()"
    )
    data = Npy(f"{tmp_path}/x.npy", f"{tmp_path}/y.npy", aligned=True)
    common: dict[str, Any] = {"lanes": 1, "global_batch_size": 12, "records_per_task": 12, "epochs": 6}
    return spec_for(
        script,
        strategy=Strategy.COLLECTIVE,
        pservers=0,
        evaluation_dataset=data,
        evaluate_every=5,
        keep_best="loss:max",
        **common,
    )


async def test_who_comes_after_the_best_parameters_were_exported_gets_the_last_ones(tmp_path):
    async with cluster(spec_of(tmp_path), 1) as made:
        state = await made.ended()
        assert state.phase is Phase.COMPLETED, state
        best = torch.load(f"{made.spec.storage}/export/best/model.pt", weights_only=True)
        last = made.exported()
        assert any(not torch.equal(best[name], last[name]) for name in last), "the last ones are the best"
        layout, giver = made.computes[A].layout, made.shares[A].giver
        assert giver is not None
        numbers = tuple(block.number for block in layout.blocks())
        found: dict[int, bytes] = {}
        while missing := tuple(number for number in numbers if number not in found):
            request = StateRequest(
                job=made.spec.job, term=0, generation=0, timeline=state.timeline, blocks=missing
            )
            portion = await giver.give(request)
            found |= {part.block: bytes(payload) for part, payload in portion.parts if not part.name}
        given = b"".join(found[number] for number in numbers)
    assert last["0.weight"].numpy().tobytes() in given
    assert best["0.weight"].numpy().tobytes() not in given
