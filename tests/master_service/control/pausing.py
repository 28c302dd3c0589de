"""Members that answer pauses, as the master sees them: by their keys in etcd."""

from __future__ import annotations

import asyncio
from typing import Any

from master_service.leadership.master import Master
from pserver_service.checkpoints.copies import TELL_S
from tests.equipment.waiting import until
from tests.master_service.cluster import KEYS, MasterCluster, spec_of
from trireme_shared.protocol.records import JobState, Phase, PserverMember, TrainerMember
from trireme_shared.protocol.records.checkpoints import CheckpointCut
from trireme_shared.protocol.records.job import Paused


def spec(**values: Any) -> Any:
    return spec_of(
        **({"checkpoint_kind": "coordinated", "checkpoint_every_seconds": None, "pservers": 2} | values)
    )


async def put_field(
    cluster: MasterCluster, key: str, kind: type[TrainerMember | PserverMember], **said: Any
) -> None:
    found = await cluster.etcd.get(key)
    assert found is not None
    member = kind.model_validate_json(found.value).model_copy(update=said)
    await cluster.etcd.put(key, member.to_bytes(), found.lease)


async def pause(cluster: MasterCluster, trainer: str, uuid: str) -> None:
    await put_field(cluster, KEYS.trainer(trainer), TrainerMember, paused=Paused(uuid=uuid))


async def copy(cluster: MasterCluster, index: int, uuid: str) -> None:
    await put_field(cluster, KEYS.pserver(index), PserverMember, copied=uuid)


async def copy_slowly(cluster: MasterCluster, index: int, seconds: float = 1000.0) -> None:
    """It says how far it is, as often as a parameter server does."""
    for blocks in range(1, 1 + int(seconds / TELL_S)):
        await asyncio.sleep(TELL_S)
        await put_field(cluster, KEYS.pserver(index), PserverMember, copying=blocks)


async def checkpointing(master: Master, limit_s: float = 60.0) -> JobState:
    await until(lambda: master.job.state.phase is Phase.CHECKPOINTING, "a checkpoint to begin", limit_s)
    return master.job.state


async def cutting(cluster: MasterCluster, master: Master, limit_s: float = 60.0) -> str:
    """The uuid of the next checkpoint, once t1 has paused and the cut is made."""
    saving = (await checkpointing(master, limit_s)).saving
    assert saving is not None
    await pause(cluster, "t1", saving.uuid)
    await until(lambda: master.job.state.saving and master.job.state.saving.cut, "the cut")
    return saving.uuid


async def cut_of(cluster: MasterCluster, uuid: str) -> CheckpointCut | None:
    found = await cluster.etcd.get(KEYS.checkpoint_cut(uuid))
    return CheckpointCut.model_validate_json(found.value) if found else None


def names(master: Master) -> list[str]:
    return [event.name for event in master.events.after(0, 1000)]
