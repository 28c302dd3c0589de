"""A completed job gets more epochs: it ends as one that had them from the start, also when members die on the
way."""

from __future__ import annotations

import csv
import io
import json

import pytest
import torch

from tests.end_to_end.local_cluster import (
    EPOCHS,
    cluster_of,
    completed,
    ended,
    reach_step,
    same_bits,
    spec_of,
)
from tests.end_to_end.scripts import EVALUATION, OPTIMIZER, RECORDS, write_script
from tests.end_to_end.test_async_recovery import MINIBATCHES, applied, async_spec
from trainer_agent.script.user_module import load
from trireme import plain
from trireme_shared.protocol.records import Phase

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

CONFIG = """
config = trireme.Config(
    epochs=2, global_batch_size=32, lanes=1, seed=3, records_per_task=16, block_bytes=256, trainers=1,
    evaluate_every="epoch", keep_best="mse:min",
)
"""
SCHEDULER = """
def scheduler(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
"""


async def test_with_a_death_it_gives_the_bits_of_a_job_that_had_all_epochs_from_the_start(
    tmp_path, undisturbed
):
    async with cluster_of(spec_of(tmp_path, epochs=3), tmp_path) as cluster:
        await completed(cluster)
    async with cluster_of(spec_of(tmp_path), tmp_path) as cluster:
        await reach_step(cluster, 5 * RECORDS // 32)
        cluster.kill("pserver-1")
        assert same_bits(await completed(cluster), undisturbed)
        assert cluster.deaths["pserver-1"] == 1


@pytest.mark.soak
async def test_an_asynchronous_job_counts_each_minibatch_once(tmp_path):
    spec = async_spec(tmp_path, checkpoint_every_seconds=None)
    async with cluster_of(spec.model_copy(update={"epochs": 2}), tmp_path) as cluster:
        assert (await ended(cluster)).result.trained_records == 2 * RECORDS
    async_spec(tmp_path)  # slow again
    async with cluster_of(spec, tmp_path) as cluster:
        await reach_step(cluster, MINIBATCHES * 3 // 10)
        cluster.kill("trainer-0")
        state = await ended(cluster)
        assert state.phase is Phase.COMPLETED, state
        assert state.result.trained_records == EPOCHS * RECORDS
        assert set((await applied(cluster)).values()) == {(MINIBATCHES, MINIBATCHES)}


def test_scheduler_metrics_evaluations_and_the_best_model_go_on(trireme, tmp_path):
    script = write_script(tmp_path, config=CONFIG, optimizer=OPTIMIZER + SCHEDULER, evaluation=EVALUATION)
    first = trireme.run("run", script, "--pservers", 1)
    assert first.code == 0, first.err
    done = trireme.run("run", script, "--pservers", 1, "--epochs", 4, "--json")
    assert done.code == 0, done.err
    assert "job script is completed: it goes on (2 -> 4 epochs)" in done.err
    result = json.loads(done.out)
    user = load(str(script))
    alone = plain.run(user, plain.plain_spec(user, {"epochs": 4}))
    assert same_bits(torch.load(result["exports"]["state_dict"], weights_only=True), alone.model.state_dict())
    assert same_bits(torch.load(result["exports"]["best_state_dict"], weights_only=True), alone.best_state)
    assert (result["records"], result["steps"]) == (4 * RECORDS, alone.steps)
    assert result["metrics"] == alone.metrics
    assert [each["loss"] for each in result["loss_by_epoch"]] == pytest.approx(alone.losses)
    rows = list(csv.DictReader(io.StringIO(trireme.run("metrics", "--csv").out)))
    for name in ("loss", "lr"):
        assert [int(row["step"]) for row in rows if row["metric"] == name] == list(range(alone.steps)), name
    evaluated = {int(row["step"]): float(row["mean"]) for row in rows if row["metric"] == "evaluation.mse"}
    assert {each.step: each.metrics["mse"] for each in alone.evaluations}.items() <= evaluated.items()
    again = trireme.run("run", script, "--pservers", 1, "--epochs", 4)
    assert "job script is completed; --epochs with a higher number trains it longer" in again.err
    fewer = trireme.run("run", script, "--pservers", 1)
    assert (fewer.code, "a job can only get more epochs than its 4" in fewer.err) == (4, True), fewer.err
