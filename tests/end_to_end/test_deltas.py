"""A chain of 20 delta checkpoints in real processes: it loads at another number of parameter servers to the
same bits, and so does what `trireme table feed` wrote of it."""

from __future__ import annotations

import asyncio
import io
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from tests.end_to_end.local_cluster import cluster_of, ended, spec_of
from tests.end_to_end.test_tables import resized
from trainer_agent.tables import files
from trainer_agent.tables.files import write_tables
from trireme.cli.tables import feed
from trireme.launch.cluster import LocalCluster
from trireme_shared.checkpoints import stored
from trireme_shared.platform.etcd.reading import must_read
from trireme_shared.protocol.records import JobSpec, Phase
from trireme_shared.protocol.records.checkpoints import CheckpointLatest, Manifest

pytestmark = [pytest.mark.processes, pytest.mark.soak, pytest.mark.timeout(240)]
MODEL = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = trireme.nn.Embedding("user", 64, optimizer=trireme.nn.Adam(lr=0.05), evict_after_steps=40)
        self.item = trireme.nn.Embedding("item", 4, max_rows=1024, admit_after=2, evict_after_steps=4)
        self.deep = nn.Linear(64 + 4 + 8, 1)

    def forward(self, x):
        user, item = self.user((x[:, 0] * 1e6).long()), self.item((x[:, 1] * 50).long())
        return self.deep(torch.cat([user, item, x], 1))


def model():
    return Model()
"""
LIMIT_S = 150.0
DELTAS = 20


def job_in(folder: Path, **changes: object) -> JobSpec:
    chosen = {"epochs": 20, "slow_s": 0.1, "checkpoint_every_steps": 1, "deltas_per_base": 100, "trainers": 1}
    spec = spec_of(folder, **{**chosen, **changes})
    script = Path(spec.script)
    plain = script.read_text()
    script.write_text(plain[: plain.index("def model():")] + MODEL + plain[plain.index("def dataset():") :])
    return spec


async def latest(cluster: LocalCluster) -> Manifest | None:
    found = await cluster.etcd.get(cluster.directory.keys.latest)
    if found is None:
        return None
    ref = must_read(CheckpointLatest, found.key, found.value).kept[0]
    return await asyncio.to_thread(stored.read_manifest, cluster.spec.storage, cluster.spec.job, ref)


async def with_deltas(cluster: LocalCluster, pservers: int, count: int) -> None:
    """Once the newest checkpoint has a part of each of so many parameter servers, with so many in its
    chain."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            manifest = await latest(cluster)
            parts = manifest.parts if manifest is not None else ()
            if len(parts) == pservers and min(len(part.chain) for part in parts) >= count:
                return
            await asyncio.sleep(0.1)


async def trained(cluster: LocalCluster) -> dict[str, bytes]:
    """Files of tables and of parameters."""
    state = await ended(cluster)
    assert state.phase is Phase.COMPLETED, state
    return {name: Path(path).read_bytes() for name, path in state.result.exports.items()}


async def undisturbed(folder: Path) -> dict[str, bytes]:
    spec = job_in(folder, pservers=1, deltas_per_base=0, checkpoint_every_steps=None, slow_s=0.0)
    async with cluster_of(spec, folder) as cluster:
        return await trained(cluster)


def fed(url: str, out: Path) -> int:
    with redirect_stdout(io.StringIO()):
        return feed.feed(None, None, url, str(out), 2.0, as_json=True)


def test_a_base_and_20_deltas_go_on_at_another_number_of_servers_and_feed_serving(tmp_path):
    out = tmp_path / "feed"

    async def main() -> dict[str, bytes]:
        async with cluster_of(job_in(tmp_path), tmp_path) as cluster:
            feeding = asyncio.create_task(asyncio.to_thread(fed, await cluster.master_url(), out))
            await with_deltas(cluster, 2, DELTAS)
            await resized(cluster, 3, "restart")
            await with_deltas(cluster, 3, 2)
            found = await trained(cluster)
            assert await feeding == 0
            return found

    found = asyncio.run(main())
    (tmp_path / "one").mkdir()
    expected = asyncio.run(undisturbed(tmp_path / "one"))
    assert found == expected
    folders = [url for _, url in files.complete(str(out))]
    assert len(folders) > 3
    for name in ("user", "item"):
        [url] = write_tables([files.advanced(None, name, folders)], str(tmp_path / "served")).values()
        assert Path(url).read_bytes() == expected[f"table {name}"], name
