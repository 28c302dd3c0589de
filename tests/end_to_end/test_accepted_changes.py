"""A job goes on with other hyperparameters than before: they are refused with both values, or accepted, and
then each step has the bits of plain PyTorch whose options change at that step."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from tests.end_to_end.local_cluster import cluster_of, ended, reach_step, same_bits, slowable_loss, spec_of
from tests.end_to_end.scripts import RECORDS, write_script
from trainer_agent.model.flat import plan
from trainer_agent.model.gradient_tree import GradientClipper
from trainer_agent.script.user_module import UserModule, load
from trireme import plain
from trireme_shared.datasets.random_state import drawing
from trireme_shared.protocol.records import JobSpec, Phase
from trireme_shared.protocol.records.job_choices import AcceptedChange

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

CONFIG = """
config = trireme.Config(
    epochs=2, global_batch_size=32, lanes=1, seed=3, records_per_task=64, block_bytes=256, trainers=1
)
"""
MODEL = """
def model():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
"""
BEFORE = """
def optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=0.01)


def scheduler(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
"""
AFTER = """
def optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=0.003, betas=(0.8, 0.99), weight_decay=0.1)


def scheduler(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
"""
CHANGES = (
    "global_batch_size 32 -> 64, clip_grad_norm None -> 0.5, optimizer lr 0.01 -> 0.003, "
    "optimizer betas [0.9, 0.999] -> [0.8, 0.99], optimizer weight_decay 0 -> 0.1, "
    "scheduler step_size 5 -> 4, scheduler gamma 0.9 -> 0.5"
)


class Plain:
    """A loop of plain PyTorch, with the records in the order of a job with one lane."""

    def __init__(self, user: UserModule, spec: JobSpec) -> None:
        self._user, self._spec = user, spec
        self.model: nn.Module = drawing(spec.seed, user.call, "model")
        self._optimizer: torch.optim.Optimizer = user.call("optimizer", self.model)
        self._plan = plan(self.model, self._optimizer, spec.block_bytes, spec.slot_count)
        self._table = plain.count(spec, lambda _: None).table
        self.steps = 0

    def train(self, user: UserModule, spec: JobSpec, epochs: range, until: int | None = None) -> None:
        """With the options that the optimizer and the scheduler of `user` have in each step. `until`: this
        step is not made any more."""
        options = user.call("optimizer", nn.Linear(1, 1))
        scheduler = user.call("scheduler", options)
        vars(options)["_opt_called"] = True  # nothing steps it
        for _ in range(self.steps):
            scheduler.step()
        for minibatch in self.minibatches(spec, epochs):
            if self.steps == until:
                return
            self._optimizer.zero_grad()
            user.call("loss", self.model, plain.batch_of(user, minibatch, torch.device("cpu"))).backward()
            if spec.clip_grad_norm is not None:
                # not PyTorch's own: the last digits of its norm differ (docs/script.md)
                clipper = GradientClipper(self._plan, spec.clip_grad_norm, torch.device("cpu"))
                clipper.clip([each.grad for each in self.model.parameters()])
            now = {name: value for name, value in options.param_groups[0].items() if name != "params"}
            self._optimizer.param_groups[0].update(now)
            self._optimizer.step()
            scheduler.step()
            self.steps += 1

    def minibatches(self, spec: JobSpec, epochs: range) -> Iterator:
        for epoch in epochs:
            yield from plain.epoch_minibatches(spec, self._table, epoch)


@pytest.mark.parametrize("strategy", ["parameter_server", pytest.param("collective", marks=pytest.mark.soak)])
def test_accepted_changes_give_the_bits_of_plain_pytorch_that_changes_its_options(
    trireme, tmp_path, strategy
):
    script = write_script(tmp_path, config=CONFIG, model=MODEL, optimizer=BEFORE)
    first = trireme.run("run", script, "--strategy", strategy)
    assert first.code == 0, first.err
    user = load(str(script))
    spec = plain.plain_spec(user, {})
    alone = Plain(user, spec)
    alone.train(user, spec, range(2))
    write_script(tmp_path, config=CONFIG, model=MODEL, optimizer=AFTER)
    asked = ["run", script, "--strategy", strategy, "--global-batch-size", 64, "--set", "clip_grad_norm=0.5"]
    refused = trireme.run(*asked, "--epochs", 4)
    assert refused.code == 4, refused.err
    # a scheduler keeps its form in a job with more epochs, if nobody says something else
    without_scheduler = CHANGES.partition(", scheduler")[0]
    assert f"5 changes are asked for: {without_scheduler}" in refused.err
    assert "--accept-changes goes on from the last checkpoint" in refused.err
    nothing = trireme.run(*asked, "--accept-changes")
    assert (nothing.code, "give more --epochs as well" in nothing.err) == (4, True), nothing.err
    done = trireme.run(*asked, "--epochs", 4, "--accept-changes", "--json")
    assert done.code == 0, done.err
    assert f"it goes on (2 -> 4 epochs, {CHANGES})" in done.err
    user = load(str(script))
    alone.train(user, plain.plain_spec(user, {"global_batch_size": 64, "clip_grad_norm": 0.5}), range(2, 4))
    result = json.loads(done.out)
    trained = torch.load(result["exports"]["state_dict"], weights_only=True)
    assert (result["records"], alone.steps) == (4 * RECORDS, 12 + 6)
    assert same_bits(trained, alone.model.state_dict())
    (accepted,) = result["history"]
    assert (accepted["number"], accepted["options"], accepted["text"]) == (1, 1, CHANGES)
    assert json.loads(trireme.run("status", "--json").out)["history"] == [accepted]
    events = [json.loads(line) for line in trireme.run("events", "--json").out.splitlines()]
    (told,) = [event for event in events if event["name"] == "settings_changed"]
    assert (told["fields"]["step"], told["fields"]["changes"]) == (12, CHANGES)
    again = trireme.run(*asked, "--epochs", 4)
    assert (again.code, "job script is completed" in again.err) == (0, True), again.err


async def test_an_interrupted_job_takes_them_from_its_checkpoint_on_also_after_a_death(tmp_path):
    spec = spec_of(
        tmp_path,
        lanes=1,
        trainers=1,
        records_per_task=32,
        checkpoint_every_steps=5,
        checkpoint_every_epochs=None,
        evaluation_dataset=None,
    )
    loss = slowable_loss(tmp_path / "data" / "slow", 0.03)
    script = write_script(tmp_path / "data", model=MODEL, loss=loss, optimizer=BEFORE)
    before = load(str(script))
    async with cluster_of(spec, tmp_path) as cluster:
        await reach_step(cluster, 7)  # its steps are clipped from here on
    write_script(tmp_path / "data", model=MODEL, loss=loss, optimizer=AFTER)
    change = AcceptedChange(number=1, options=1, time="2026-11-30T00:00:00Z", text="lr")
    changed = spec.with_fields(clip_grad_norm=0.5, history=(change,))
    async with cluster_of(changed, tmp_path) as cluster:
        since = await cluster.saved_step()
        await reach_step(cluster, since + 10)
        cluster.kill("pserver-1")
        state = await ended(cluster)
        assert state.phase is Phase.COMPLETED, state
        assert cluster.deaths["pserver-1"] == 1
    alone = Plain(before, spec)
    alone.train(before, spec, range(spec.epochs), until=since)
    epoch, done = divmod(since, RECORDS // 32)
    assert done, "the change comes within an epoch"
    rest = Rest(alone, done)
    rest.train(load(str(script)), changed, range(epoch, spec.epochs))
    trained = torch.load(state.result.exports["state_dict"], weights_only=True)
    assert same_bits(trained, alone.model.state_dict())


class Rest(Plain):
    """Goes on with what another loop has, behind `done` minibatches of the first epoch."""

    def __init__(self, other: Plain, done: int) -> None:
        vars(self).update(vars(other))
        self._done = done

    def minibatches(self, spec: JobSpec, epochs: range) -> Iterator:
        for number, minibatch in enumerate(super().minibatches(spec, epochs)):
            if number >= self._done:
                yield minibatch
