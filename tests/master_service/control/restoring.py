"""A synchronous job with checkpoints in memory that it can be restored from, and operations on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from master_service.leadership.master import Master
from tests.equipment.waiting import until
from tests.master_service.cluster import KEYS, MasterCluster, Storage, spec_of
from trireme_shared.platform.etcd import Etcd
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import JobState, Mode, Phase, SlotMap
from trireme_shared.protocol.records.checkpoints import CheckpointLatest, CheckpointRef, Manifest
from trireme_shared.protocol.records.layout import Layout, OptimizerSpec
from trireme_shared.protocol.records.operations import CheckpointRequest, Operation
from trireme_shared.protocol.records.step import LanePosition, StepRecord

SLOTS = SlotMap(version=1, owners=(0, 1) * 64)
LAYOUT = Layout(
    digest="d",
    segments=(),
    block_bytes=256,
    slot_count=128,
    optimizer=OptimizerSpec(name="SGD", defaults={}, groups=()),
)


def spec(**values: Any) -> Any:
    return spec_of(
        **({"mode": Mode.SYNC, "lanes": 2, "pservers": 2, "slot_count": 128, "global_batch_size": 4} | values)
    )


class Stored(Protocol):
    """Where checkpoints are known."""

    etcd: Etcd
    storage: Storage


async def checkpoint(
    cluster: Stored,
    *steps: int,
    positions: Sequence[LanePosition] = (),
    keys: Keys = KEYS,
    mode: Mode = Mode.SYNC,
) -> None:
    """Finished checkpoints of these steps, the newest first."""
    refs = tuple(CheckpointRef(uuid=f"at-{step}", step=step, timeline=0, manifest="m") for step in steps)
    where = tuple(positions) or tuple(LanePosition(lane=lane, index=1) for lane in range(2))
    for ref in refs:
        cluster.storage.manifests[ref.uuid] = Manifest(
            job="j",
            uuid=ref.uuid,
            step=ref.step,
            timeline=0,
            term=1,
            generation=1,
            mode=mode,
            lanes=2,
            seed=0,
            spec_digest="",
            timestamp="",
            slots=SLOTS,
            layout=LAYOUT,
            record=StepRecord(version=ref.step, positions=where),
            parts=(),
        )
    latest = CheckpointLatest(
        uuid=refs[0].uuid,
        step=refs[0].step,
        timeline=0,
        term=1,
        timestamp="",
        manifest="m",
        slots=SLOTS,
        kept=refs,
    )
    await cluster.etcd.put(keys.latest, latest.to_bytes())


async def rolling_back(master: Master, checkpoint: str) -> JobState:
    def due() -> bool:
        state = master.job.state
        return state.phase is Phase.ROLLING_BACK and state.checkpoint == checkpoint

    await until(due, f"a rollback to {checkpoint}")
    return master.job.state


def names(master: Master) -> list[str]:
    return [event.name for event in master.events.after(0, 1000)]


async def request_of(cluster: MasterCluster) -> CheckpointRequest | None:
    found = await cluster.etcd.get(KEYS.checkpoint_request)
    return CheckpointRequest.model_validate_json(found.value) if found else None


async def commit(cluster: MasterCluster, step: int, *, operation: str = "", final: bool = False) -> None:
    """What the parameter servers do."""
    await checkpoint(cluster, step)
    found = await cluster.etcd.get(KEYS.latest)
    assert found is not None
    latest = CheckpointLatest.model_validate_json(found.value)
    await cluster.etcd.put(
        KEYS.latest, latest.model_copy(update={"operation": operation, "final": final}).to_bytes()
    )


async def create(master: Master, key: str = "k", limit_s: float = 600.0) -> Operation:
    return await master.term.operations.create_checkpoint(key, "asked by a test", limit_s)


async def ended(master: Master, operation: Operation) -> Operation:
    await until(
        lambda: not master.term.operations.get(operation.operation_id).running, "the operation's end", 700
    )
    return master.term.operations.get(operation.operation_id)
