"""Asynchronous jobs whose pushes step with a rate by their age: the bits of the same loop in plain PyTorch,
and each minibatch once."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from master_service.core.queue.streams import EpochOrder
from tests.trainer_agent.cluster import cluster
from tests.trainer_agent.loops.test_async_tables import LOSS, MODEL
from tests.trainer_agent.loops.test_asynchronous import assert_exactly_once, job, spec_of, updates
from tests.trainer_agent.scripts import differing, table_of, write_script
from trainer_agent.data import minibatch_indices, minibatches_in
from trainer_agent.script.user_module import load
from trireme_shared.protocol.lanes import step_seed
from trireme_shared.protocol.records import Phase
from trireme_shared.serving.core.table.rows import TableRows

PLAIN = {"model": "def model():\n    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))\n"}


def one_trainer_in_plain_pytorch(script, spec, *, modulated=True) -> dict[str, torch.Tensor]:
    """It computes `pull_every` minibatches with one set of parameters; each of its pushes makes those older
    by one version."""
    user = load(script)
    torch.manual_seed(spec.seed)
    model = user.call("model")
    optimizer = user.call("optimizer", model)
    rate = optimizer.param_groups[0]["lr"]
    x, y = np.load(script.parent / "x.npy"), np.load(script.parent / "y.npy")
    table, done, seen = table_of(spec), 0, copy.deepcopy(model)
    for position in range(table.tasks):
        task = EpochOrder(table.tasks, spec.seed, 0, shuffle=True).task_at(position)
        first, count = table.locate(task).first, table.locate(task).count
        for number in range(minibatches_in(count, spec.minibatch_size)):
            if done % spec.pull_every == 0:
                seen.load_state_dict(model.state_dict())
            chosen = first + minibatch_indices(
                spec.seed, 0, task, count, spec.minibatch_size, number, shuffle=True
            )
            torch.manual_seed(step_seed(spec.seed, done, 0))
            seen.zero_grad()
            user.call(
                "loss", seen, {"x": torch.from_numpy(x[chosen]), "y": torch.from_numpy(y[chosen])}
            ).backward()
            for own, computed in zip(model.parameters(), seen.parameters(), strict=True):
                own.grad = computed.grad.clone()
            optimizer.param_groups[0]["lr"] = rate / max(1, done % spec.pull_every) if modulated else rate
            optimizer.step()
            done += 1
    return dict(model.state_dict())


@pytest.mark.parametrize("modulated", [True, False])
async def test_one_trainer_that_pulls_seldom_gives_the_bits_of_plain_pytorch_with_the_same_rates(
    tmp_path, modulated
):
    script = write_script(tmp_path, **PLAIN)
    spec = spec_of(script, push_every=1, pull_every=4, epochs=1, lr_staleness_modulation=modulated)
    async with cluster(spec, 1) as made:
        assert (await made.ended()).phase is Phase.COMPLETED
        exported = made.exported()
    assert differing(exported, one_trainer_in_plain_pytorch(script, spec, modulated=modulated)) == []
    assert differing(exported, one_trainer_in_plain_pytorch(script, spec, modulated=not modulated)) != []


async def test_each_minibatch_counts_once_for_blocks_and_rows_although_trainers_are_killed(
    tmp_path, monkeypatch
):
    ahead, apply = [], TableRows.apply

    def applied(self, ids, gradients, count, lane_zero, versions):
        ahead.append(versions)
        return apply(self, ids, gradients, count, lane_zero, versions)

    monkeypatch.setattr(TableRows, "apply", applied)
    script = write_script(tmp_path, model=MODEL, loss=LOSS)
    spec = spec_of(script, push_every=1, pservers=3, lr_staleness_modulation=True)
    async with cluster(spec, 3) as made:
        for victim, update in (("trainer-0-x", 40), ("trainer-1-x", 90)):
            await updates(made, update)
            await made.kill(victim)
        assert (await made.ended()).phase is Phase.COMPLETED
        assert_exactly_once(await job(made), spec)
    assert min(ahead) == 0
    assert max(ahead) > 0  # rows that were looked up before the push of another trainer
