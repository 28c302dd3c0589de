"""REST tells base from delta, and what a delta builds on."""

from __future__ import annotations

import asyncio

from tests.master_service.api.client import client_of
from tests.master_service.cluster import KEYS, MasterCluster, Storage, running
from tests.master_service.control.restoring import checkpoint, spec
from trireme_shared.protocol.records.checkpoints import CheckpointLatest, CheckpointPart, PartLink


def part(step: int, pserver: int, *chain: int) -> CheckpointPart:
    links = tuple(
        PartLink(uuid=f"at-{old}", step=old, file=f"p{pserver}", checksum="c", bytes=100) for old in chain
    )
    return CheckpointPart(
        step=step,
        timeline=0,
        pserver=pserver,
        incarnation="x",
        file=f"p{pserver}",
        checksum="c",
        bytes=10,
        chain=links,
    )


async def test_a_checkpoint_tells_its_kind_its_bases_and_what_it_needs() -> None:
    cluster = MasterCluster(spec(), Storage())
    async with running(cluster, "t1") as master, client_of(master) as client:
        await checkpoint(cluster, 40, 30, 20)
        manifest = cluster.storage.manifests["at-40"]
        parts = (part(40, 0, 20, 30), part(40, 1, 30))
        cluster.storage.manifests["at-40"] = manifest = manifest.model_copy(update={"parts": parts})
        kept = (await cluster.etcd.get(KEYS.latest)).value
        latest = CheckpointLatest.model_validate_json(kept)
        refs = (latest.kept[0].model_copy(update={"on": manifest.on}), *latest.kept[1:])
        seen = master.job.members.latest
        await cluster.etcd.put(KEYS.latest, latest.model_copy(update={"kept": refs}).to_bytes())
        while master.job.members.latest is seen or master.job.members.latest.kept != refs:
            await asyncio.sleep(0.01)
        listed = (await client.get("/v1/checkpoints")).json()["checkpoints"]
        found = (await client.get("/v1/checkpoints/at-40")).json()
        whole = (await client.get("/v1/checkpoints/at-20")).json()
    assert [(one["kind"], one["builds_on"]) for one in listed] == [
        ("delta", ["at-30"]),
        ("base", []),
        ("base", []),
    ]
    assert (found["kind"], found["bases"], found["deltas"]) == ("delta", ["at-20", "at-30"], 2)
    assert (found["size_bytes"], found["needed_bytes"]) == (20, 20 + 100 * 3)
    assert (whole["kind"], whole["bases"], whole["deltas"]) == ("base", [], 0)
