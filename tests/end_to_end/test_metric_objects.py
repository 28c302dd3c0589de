"""Metrics that are no sums, in a job of real processes whose trainer is killed in mid-evaluation: the values
of an undisturbed run, and of plain PyTorch."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tests.end_to_end.local_cluster import cluster_of, ended, evaluations, spec_of
from tests.end_to_end.test_evaluation import reach_evaluation
from trainer_agent.script.user_module import load
from trireme import plain
from trireme.metrics import AUC
from trireme_shared.protocol.errors import TooLarge
from trireme_shared.protocol.records import JobSpec, Phase

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

EPOCHS, EVERY = 6, 12
OBJECTS = """
import time

import torch

import trireme.metrics


class Kept:
    def __init__(self):
        self._defaults = {"scores": [], "labels": []}
        self._reductions = {"scores": "cat", "labels": "cat"}
        self.reset()

    def reset(self):
        self.scores, self.labels = [], []

    def update(self, scores, labels):
        self.scores.append(scores.double())
        self.labels.append(labels)

    def compute(self):
        scores, labels = torch.cat(self.scores), torch.cat(self.labels)
        ones, zeros = scores[labels], scores[~labels]
        return {"exact": (ones[:, None] > zeros).double().mean(), "first": scores[0], "records": len(scores)}


def evaluation_dataset():
    return dataset()


def evaluation_metrics():
    return {"auc": trireme.metrics.AUC(logits=True), "kept": Kept()}


def evaluate(model, batch, metrics):
    time.sleep(0.05 if (HERE / "slow").exists() else 0)
    scores, labels = model(batch["x"])[:, 0], batch["y"] > 0
    metrics["auc"].update(scores, labels)
    # random: it cannot be compressed
    drawn = torch.rand(REPEATED, len(scores), dtype=torch.float64) if REPEATED > 1 else 0
    metrics["kept"].update((scores + drawn).reshape(-1), labels.repeat(REPEATED))
"""


def job(folder: Path, trainers: int, repeated: int = 1, **more) -> JobSpec:
    folder.mkdir()
    spec = spec_of(folder, epochs=EPOCHS, evaluate_every=EVERY, trainers=trainers, **more)
    script = Path(spec.script)
    kept = script.read_text().split("\ndef evaluation_dataset")[0]
    script.write_text(f"{kept}\n{OBJECTS}\nREPEATED = {repeated}\n")
    return spec


async def found_in(spec: JobSpec, folder: Path, *, kill: bool) -> tuple[list, dict, Path]:
    async with cluster_of(spec, folder) as cluster:
        if kill:
            await reach_evaluation(cluster, 2)
            cluster.kill("trainer-0")
        state = await ended(cluster)
        assert state.phase is Phase.COMPLETED, state
        assert cluster.deaths["trainer-0"] == kill
        while_training = [(one.number, one.step, one.metrics) for one in await evaluations(cluster)]
        return while_training, state.result.metrics, Path(state.result.exports["state_dict"])


async def test_a_trainer_killed_in_mid_evaluation_changes_no_bit_of_a_metric_that_is_no_sum(tmp_path):
    quiet = await found_in(job(tmp_path / "quiet", 1), tmp_path / "quiet", kill=False)
    disturbed = await found_in(job(tmp_path / "killed", 2), tmp_path / "killed", kill=True)
    assert disturbed[:2] == quiet[:2]
    while_training, metrics, export = disturbed
    assert [number for number, *_ in while_training] == [1, 2]
    assert metrics.keys() == {"auc", "kept.exact", "kept.first", "kept.records"}
    assert metrics["kept.records"] == 192
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1)).eval()
    model.load_state_dict(torch.load(export, weights_only=True))
    x, y = (torch.from_numpy(np.load(tmp_path / "killed" / "data" / name)) for name in ("x.npy", "y.npy"))
    whole, batches = AUC(logits=True), []
    with torch.no_grad():
        batches = [model(part)[:, 0] for part in x.split(8)]
    for scores, labels in zip(batches, y.split(8), strict=True):
        whole.update(scores, labels > 0)
    scores = torch.cat(batches).double()
    assert metrics["auc"] == whole.compute()
    assert metrics["kept.first"] == float(scores[0])
    assert metrics["kept.exact"] == float((scores[y > 0][:, None] > scores[y <= 0]).double().mean())
    assert abs(metrics["auc"] - metrics["kept.exact"]) <= whole.error_bound()


async def test_a_metric_that_keeps_too_much_ends_the_job_by_name_in_all_ways_to_run_it(tmp_path):
    spec = job(tmp_path / "large", 2, repeated=200, pservers=1)
    async with cluster_of(spec, tmp_path / "large") as cluster:
        state = await ended(cluster)
    assert state.phase is Phase.FAILED, state
    told = (
        r"the metric kept of the evaluation has \d+ bytes (after \d tasks|in one task), "
        "at most 204800 bytes"
    )
    for text in (told, r"it keeps values of every record \(scores, labels\)", r"trireme\.metrics\.AUC"):
        assert re.search(text, state.reason), state
    user = load(spec.script)
    alone = spec.with_fields(lanes=1, evaluate_every=None, epochs=1)
    with pytest.raises(TooLarge, match=told):
        plain.run(user, alone)
