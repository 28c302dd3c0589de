"""Embedding tables in real processes: no bit of rows, parameters or evaluations depends on who is killed, or
on how many own the rows."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from tests.end_to_end.local_cluster import (
    RECORDS,
    cluster_of,
    ended,
    evaluations,
    reach_step,
    same_bits,
    spec_of,
)
from trireme.launch.cluster import LocalCluster
from trireme.view.job_address import client_of
from trireme_shared.platform.runtime import ids
from trireme_shared.protocol.errors import DeadlineExceeded, PeerError
from trireme_shared.protocol.records import JobSpec, Phase

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]
MODEL = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = trireme.nn.Embedding("user", 4, optimizer=trireme.nn.Adam(lr=0.05), init="uniform(0.1)")
        self.tags = trireme.nn.EmbeddingBag("tag", 3, optimizer=trireme.nn.Adagrad(lr=0.1), admit_after=2)
        self.deep = nn.Sequential(nn.Linear(4 + 3 + 8, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1))

    def forward(self, x):
        found = (x * 4).floor().long()
        return self.deep(torch.cat([self.user(found[:, 0] * 10**15), self.tags(found[:, 1:4]), x], 1))


def model():
    return Model()
"""
LIMIT_S = 120.0
Trained = tuple[
    dict[str, torch.Tensor], dict[str, bytes], dict[str, float], list[tuple[int, dict[str, float]]]
]
TABLES = {f"{best}table {name}" for best in ("", "best_") for name in ("user", "tag")}


def with_tables(folder: Path, **changes: object) -> JobSpec:
    # the first one: its rows come from its checkpoint
    evaluated = {"evaluate_every": 6, "keep_best": "mse:max"}
    spec = spec_of(
        folder, **{"epochs": 6, "slow_s": 0.05, "checkpoint_every_steps": 4, **evaluated, **changes}
    )
    script = Path(spec.script)
    plain = script.read_text()
    begin = plain.index("def model():")
    script.write_text(plain[:begin] + MODEL + plain[plain.index("def dataset():") :])
    return spec


async def trained(cluster: LocalCluster, *, gone_back: bool = False) -> Trained:
    """Parameters, files of tables, metrics, evaluations. `gone_back`: it must have loaded a checkpoint."""
    state = await ended(cluster)
    assert state.phase is Phase.COMPLETED, state
    assert (state.timeline > 0) == gone_back, state
    assert (state.result.trained_records, state.result.discarded_tasks) == (cluster.spec.epochs * RECORDS, 0)
    exports = state.result.exports
    tables = {name: Path(path).read_bytes() for name, path in exports.items() if "table " in name}
    assert tables.keys() == TABLES, exports
    assert tables["best_table user"] != tables["table user"]
    done = [(one.step, one.metrics) for one in await evaluations(cluster)]
    assert state.result.best.step == 6
    return torch.load(exports["state_dict"], weights_only=True), tables, state.result.metrics, done


def assert_same(found: Trained, expected: Trained, live_resizes: int = 0) -> None:
    """An evaluation is left out if a live resize falls on its version."""
    assert same_bits(found[0], expected[0])
    assert found[1:3] == expected[1:3]
    done, due = found[3], expected[3]
    assert done == [one for one in due if one in done]
    assert len(due) - len(done) <= live_resizes, (done, due)


@pytest.fixture(scope="module")
def one_of_each(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """1 trainer, 1 parameter server, undisturbed."""
    folder = tmp_path_factory.mktemp("one")

    async def main() -> Trained:
        async with cluster_of(with_tables(folder, trainers=1, pservers=1, slow_s=0.0), folder) as cluster:
            found = await trained(cluster)
            assert len(found[3]) == (cluster.spec.epochs * RECORDS // 32 - 1) // 6
            return found

    return asyncio.run(main())


@pytest.mark.soak
def test_kills_of_each_kind_cost_no_bit(tmp_path, one_of_each):
    async def main() -> Trained:
        async with cluster_of(with_tables(tmp_path, pservers=3), tmp_path, standbys=1) as cluster:
            for step, kind in ((5, "trainer"), (10, "pserver"), (14, "master")):
                await reach_step(cluster, step)
                alive = sorted(
                    name for name, child in cluster.children.items() if name.startswith(kind) and child.alive
                )
                cluster.kill(alive[0], signal.SIGKILL)
            found = await trained(cluster, gone_back=True)
            assert sum(cluster.deaths.values()) >= 3
            return found

    assert_same(asyncio.run(main()), one_of_each)


async def call(cluster: LocalCluster, invoke):
    """Of whoever leads."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            with suppress(PeerError, DeadlineExceeded):
                async with client_of(await cluster.master_url()) as client:
                    return await invoke(client)
            await asyncio.sleep(0.1)


async def resized(cluster: LocalCluster, pservers: int, strategy: str, **kill: str) -> None:
    """`kill`: whom, as soon as the first group has moved."""
    job, asked = cluster.spec.job, {"key": ids.new_id("test"), "pservers": pservers, "strategy": strategy}
    name = (await call(cluster, lambda client: client.create_resize(job, **asked))).operation_id
    found, killed = None, not kill
    async with asyncio.timeout(LIMIT_S):
        while found is None or found.state == "RUNNING":
            wait_s = 1.0 if killed else 0.05
            found = await call(
                cluster, lambda client, wait_s=wait_s: client.get_resize(job, name, wait_s=wait_s)
            )
            if not killed and found.phase == "MIGRATING" and found.groups_moved:
                cluster.kill(kill["victim"], signal.SIGKILL)
                killed = True
    assert found.phase == "COMMITTED", found
    assert killed
    assert strategy == "restart" or found.groups_moved, found


def test_a_resize_moves_rows_live_or_by_restart_and_costs_no_bit(tmp_path, one_of_each):
    async def main() -> Trained:
        async with cluster_of(with_tables(tmp_path, trainers=1, pservers=1), tmp_path) as cluster:
            await reach_step(cluster, 3)
            await resized(cluster, 3, "live")
            await resized(cluster, 2, "restart")
            return await trained(cluster, gone_back=True)

    assert_same(asyncio.run(main()), one_of_each, live_resizes=1)


@pytest.mark.soak
def test_live_resizes_under_training_go_back_nowhere(tmp_path, one_of_each):
    async def main() -> Trained:
        async with cluster_of(with_tables(tmp_path, pservers=1), tmp_path) as cluster:
            await reach_step(cluster, 3)
            await resized(cluster, 3, "live")
            await resized(cluster, 2, "live")
            return await trained(cluster)

    assert_same(asyncio.run(main()), one_of_each, live_resizes=2)


@pytest.mark.soak
@pytest.mark.parametrize("victim", ["pserver-0", "pserver-1"], ids=["the source dies", "the target dies"])
def test_a_live_resize_goes_on_after_a_death_and_costs_no_bit(tmp_path, one_of_each, victim):
    async def main() -> Trained:
        async with cluster_of(with_tables(tmp_path, pservers=1, slow_s=0.1), tmp_path) as cluster:
            await reach_step(cluster, 3)
            await resized(cluster, 3, "live", victim=victim)
            await resized(cluster, 2, "live")
            return await trained(cluster, gone_back=True)

    assert_same(asyncio.run(main()), one_of_each, live_resizes=2)


@pytest.mark.soak
def test_everything_killed_and_gone_on_with_another_number_of_parameter_servers(tmp_path, one_of_each):
    async def killed() -> None:
        async with cluster_of(with_tables(tmp_path, pservers=3), tmp_path) as cluster:
            await reach_step(cluster, 12)
            for child in cluster.children.values():
                with suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGKILL)

    async def main() -> Trained:
        async with cluster_of(with_tables(tmp_path, trainers=1, pservers=2), tmp_path) as cluster:
            return await trained(cluster, gone_back=True)

    asyncio.run(killed())
    assert_same(asyncio.run(main()), one_of_each)
