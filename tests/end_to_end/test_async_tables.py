"""Embedding tables of an asynchronous job in real processes that are killed: each row has each of its
minibatches once, or its server's losses are on record."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from tests.end_to_end.local_cluster import cluster_of, ended, reach_step, spec_of
from tests.end_to_end.scripts import RECORDS
from tests.end_to_end.test_async_recovery import applied, reach_checkpoint
from tests.end_to_end.test_tables import resized
from trainer_agent.tables.files import read_table
from trireme.launch.cluster import LocalCluster
from trireme_shared.protocol.records import Dispatch, JobSpec, JobState, Mode, Phase
from trireme_shared.tables.hashing import slots_of, table_seed

pytestmark = [pytest.mark.processes, pytest.mark.soak, pytest.mark.timeout(240)]
MODEL = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = trireme.nn.Embedding("user", 4, optimizer=trireme.nn.Adam(lr=0.01), init="uniform(0.1)")
        self.tags = trireme.nn.EmbeddingBag("tag", 3, optimizer=trireme.nn.Adagrad(lr=0.05), admit_after=2)
        self.seen = trireme.nn.Embedding("seen", 1, optimizer=trireme.nn.SGD(lr=1.0), init="zeros")
        self.deep = nn.Sequential(nn.Linear(4 + 3 + 8, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x):
        found = (x * 4).floor().long()
        return self.deep(torch.cat([self.user(found[:, 0] * 10**15), self.tags(found[:, 1:4]), x], 1))


def model():
    return Model()
"""
SEEN = ' + model.seen((batch["x"][:, 0] * 1e6).long()).sum()'  # the row of each record is stepped by -1
EPOCHS, MINIBATCH = 8, 8
MINIBATCHES = EPOCHS * RECORDS // MINIBATCH


def counting(folder: Path, **changes: object) -> JobSpec:
    asynchronous = {
        "mode": Mode.ASYNC,
        "global_batch_size": MINIBATCH,
        "lanes": 1,
        "checkpoint_every_seconds": 1.0,
    }
    spec = spec_of(folder, **{"epochs": EPOCHS, "slow_s": 0.1, **asynchronous, **changes})
    script = Path(spec.script)
    plain = script.read_text()
    begin, end = plain.index("def model():"), plain.index("def dataset():")
    text = plain[:begin] + MODEL + plain[end:]
    loss = next(line for line in text.splitlines() if line.startswith("    return F.mse_loss"))
    script.write_text(text.replace(loss, loss + SEEN))
    return spec


async def assert_once(cluster: LocalCluster, state: JobState, *, resized: bool = False) -> None:
    """By the ledgers, and by the rows themselves. `resized`: slots brought along what their parameter servers
    had lost, so these lack at most that."""
    assert state.phase is Phase.COMPLETED, state
    lost = {int(index): count for index, count in state.result.losses.lost.items()}
    assert state.result.losses.skipped == {}
    for index, (lowest, highest) in (await applied(cluster)).items():
        at_most = cluster.spec.checkpoint_kind == "independent" or resized
        assert highest <= MINIBATCHES <= lowest + lost.get(index, 0)
        assert at_most or lowest + lost.get(index, 0) == MINIBATCHES
    table = read_table(state.result.exports["table seen"])
    owners = np.array(cluster.directory.slots.owners)
    owner_of = owners[slots_of(table.ids, table_seed(cluster.spec.seed, "seen"), len(owners))]
    assert len(table.ids) == RECORDS or lost
    for index in sorted(set(owner_of.tolist())):
        missing = EPOCHS + table.values[owner_of == index, 0]
        assert (missing >= 0).all(), "no minibatch came twice"
        assert missing.sum() <= MINIBATCH * lost.get(index, 0)


async def killed_in_turn(cluster: LocalCluster, *kinds: str) -> JobState:
    for number, kind in enumerate(kinds, 1):
        await reach_checkpoint(cluster, number)
        await reach_step(cluster, MINIBATCHES // 8 * number)
        alive = sorted(
            name for name, child in cluster.children.items() if name.startswith(kind) and child.alive
        )
        cluster.kill(alive[0], signal.SIGKILL)
    state = await ended(cluster)
    assert sum(cluster.deaths.values()) >= len(kinds)
    return state


async def test_kills_of_each_kind(tmp_path):
    async with cluster_of(counting(tmp_path, pservers=3), tmp_path, standbys=1) as cluster:
        await assert_once(cluster, await killed_in_turn(cluster, "trainer", "pserver", "master", "trainer"))


async def test_kills_of_trainers_and_parameter_servers_without_a_master(tmp_path):
    async with cluster_of(counting(tmp_path, dispatch=Dispatch.ETCD), tmp_path) as cluster:
        for number, name in enumerate(("trainer-0", "pserver-1"), 1):
            await reach_checkpoint(cluster, 2 * number)
            cluster.kill(name, signal.SIGKILL)
        await assert_once(cluster, await ended(cluster))
        assert cluster.deaths.keys() == {"trainer-0", "pserver-1"}


async def test_a_killed_parameter_server_with_checkpoints_of_its_own(tmp_path):
    async with cluster_of(counting(tmp_path, checkpoint_kind="independent"), tmp_path) as cluster:
        await reach_step(cluster, MINIBATCHES // 3)
        cluster.kill("pserver-0", signal.SIGKILL)
        await assert_once(cluster, await ended(cluster))
        assert cluster.deaths["pserver-0"]


async def test_live_resizes_under_training_cost_no_minibatch(tmp_path):
    async with cluster_of(counting(tmp_path, pservers=1, slow_s=0.3), tmp_path) as cluster:
        await reach_step(cluster, 3)
        await resized(cluster, 3, "live")
        await resized(cluster, 2, "live")
        state = await ended(cluster)
        assert (state.timeline, state.result.losses.lost, cluster.deaths) == (0, {}, {})
        await assert_once(cluster, state)
        assert set(cluster.directory.slots.owners) == {0, 1}


@pytest.mark.parametrize("victim", ["pserver-0", "pserver-1"], ids=["the source dies", "the target dies"])
async def test_a_live_resize_goes_on_after_a_death(tmp_path, victim):
    async with cluster_of(counting(tmp_path, pservers=1, slow_s=0.4), tmp_path) as cluster:
        await reach_checkpoint(cluster, 1)
        await resized(cluster, 3, "live", victim=victim)
        await resized(cluster, 2, "live")
        state = await ended(cluster)
        assert cluster.deaths[victim]
        assert state.timeline == 0, "the others went on"
        await assert_once(cluster, state, resized=True)
        assert set(cluster.directory.slots.owners) == {0, 1}


async def test_everything_killed_and_gone_on_with_another_number_of_parameter_servers(tmp_path):
    async with cluster_of(counting(tmp_path, pservers=3), tmp_path) as cluster:
        await reach_checkpoint(cluster, 2)
        for child in cluster.children.values():
            with suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)
        await asyncio.sleep(0)
    async with cluster_of(counting(tmp_path, pservers=2, trainers=1), tmp_path) as cluster:
        state = await ended(cluster)
        assert state.result.losses.lost == {}
        await assert_once(cluster, state)
