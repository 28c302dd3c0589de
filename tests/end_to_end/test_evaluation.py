"""Evaluations while a job of real processes trains, and members are killed in the middle of one."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tests.end_to_end.local_cluster import END_S, cluster_of, ended, evaluations, spec_of
from tests.end_to_end.scripts import RECORDS
from trireme_shared.protocol.evaluations import EvaluationStatus
from trireme_shared.protocol.records import Mode, Phase

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

EPOCHS, EVERY = 5, 20
LONG = 15  # epochs: on a busy machine an evaluation lasts as long as several epochs


async def reach_evaluation(cluster, number):
    """Wait until that evaluation, or a later one, is under way."""
    async with asyncio.timeout(END_S):
        while True:
            found = await cluster.etcd.get(cluster.directory.keys.evaluation_status)
            status = (
                EvaluationStatus.model_validate_json(found.value) if found is not None else EvaluationStatus()
            )
            if status.running is not None and status.running.number >= number:
                return
            await asyncio.sleep(0.02)


def error_of(export: Path, folder: Path) -> float:
    """Mean squared error of an exported model over the evaluation dataset, in plain PyTorch."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1)).eval()
    model.load_state_dict(torch.load(export, weights_only=True))
    x, y = (torch.from_numpy(np.load(folder / "data" / name)) for name in ("x.npy", "y.npy"))
    with torch.no_grad():
        return float(((model(x)[:, 0] - y) ** 2).mean())


async def test_a_trainer_and_a_parameter_server_killed_in_mid_evaluation_of_an_asynchronous_job_lose_none(
    tmp_path,
):
    spec = spec_of(
        tmp_path, slow_s=0.05, mode=Mode.ASYNC, global_batch_size=8, lanes=1, checkpoint_every_seconds=None,
        checkpoint_every_epochs=None, epochs=LONG, evaluate_every=EVERY, keep_best="mse:min",
    )  # fmt: skip
    async with cluster_of(spec, tmp_path) as cluster:
        await reach_evaluation(cluster, 2)
        cluster.kill("trainer-0")
        cluster.kill("pserver-1")
        state = await ended(cluster)
        assert state.phase is Phase.COMPLETED, state
        assert cluster.deaths == {"trainer-0": 1, "pserver-1": 1}
        assert (state.result.trained_records, state.result.discarded_tasks) == (LONG * RECORDS, 0)
        found = await evaluations(cluster)
    assert [one.number for one in found] == list(range(1, len(found) + 1))
    assert len(found) >= 2
    assert all(one.metrics["mse"] > 0 and not one.left_out for one in found)
    assert all(
        first // EVERY < second // EVERY for first, second in pairwise([0, *(one.step for one in found)])
    )
    best = state.result.best
    assert best is not None
    assert best.value == min([*(one.metrics["mse"] for one in found), state.result.metrics["mse"]])
    assert error_of(Path(state.result.exports["best_state_dict"]), tmp_path) == pytest.approx(
        best.value, rel=1e-4
    )
