"""An asynchronous job at two parameter servers: its pushes, its paused checkpoints, and a parameter server
that is replaced."""

from __future__ import annotations

import asyncio

from tests.equipment.waiting import until
from tests.pserver_service.checkpoints import parts
from tests.pserver_service.checkpoints.cluster import KEYS, PserverCluster, stream
from trireme_shared.checkpoints import stored
from trireme_shared.platform.etcd import Delete, Put
from trireme_shared.protocol.records import Mode, Phase, TaskMeta
from trireme_shared.protocol.records.checkpoints import CheckpointCut
from trireme_shared.protocol.records.job import Saving
from trireme_shared.protocol.records.step import LaneZero
from trireme_shared.protocol.wire.messages import InitBlock, PushBlock, PushHeader

META = TaskMeta(epoch=0, digest="d", seed=0, tasks=9).to_bytes()


def push_of(task, start, end, minibatches=4, **fields):
    return PushHeader(
        **{
            "job": parts.JOB,
            "generation": 1,
            "mode": Mode.ASYNC,
            "trainer": parts.TRAINER,
            "task_id": str(task),
            "attempt": 1,
            "start": start,
            "end": end,
            "minibatches": minibatches,
            "lane_zero": LaneZero(
                options=({"lr": 0.1},), scheduler={"state": {"last_epoch": 1}}, number=start
            ),
            **fields,
        }
    )


async def opened(storage, **spec):
    """Two parameter servers of a running asynchronous job, one minibatch trained."""
    cluster = PserverCluster(str(storage), mode="async", **spec)
    await cluster.etcd.put(KEYS.spec, cluster.spec.to_bytes())
    await cluster.etcd.put(KEYS.pservers_desired, b"2")
    await cluster.etcd.put(KEYS.task_meta, META)
    await cluster.write_state(cluster.state)
    for number in range(2):
        await cluster.start(f"ps-{number}")
    values = parts.initial(cluster.layout)
    for index, node in cluster.nodes.items():
        numbers = parts.blocks_of(cluster.layout, index, cluster.slots)
        items = [(InitBlock(block=n), parts.bytes_view(values[n])) for n in numbers]
        header = parts.header_of(cluster.layout, index).model_copy(update={"mode": Mode.ASYNC, "lanes": 1})
        await node.pserver.init(header, stream(items))
    await cluster.etcd.txn([], [Put(KEYS.layout, cluster.layout.to_bytes()), Put(KEYS.init_done, b"t")])
    await push(cluster, 3, 0)
    return cluster


async def push(cluster, task, start):
    answers = []
    for node in cluster.nodes.values():
        if node.process.dead or node.pserver.store is None or not await cluster.informed(node):
            continue
        gradients = parts.gradient(cluster.layout, start, task)
        items = [
            (PushBlock(block=n, count=1), parts.bytes_view(gradients[n])) for n in node.pserver.store.blocks
        ]
        header = push_of(task, start, start + 1, generation=cluster.state.generation)
        answers.append(await node.pserver.push(header, stream(items)))
    return answers


async def paused_checkpoint(cluster, step, *, confirmed=True, operation=""):
    """What the master does once all trainers have paused. Whether it was taken: a death before all have
    copied ends it."""
    state = cluster.state
    uuid = stored.checkpoint_uuid(parts.JOB, state.timeline, cluster.slots.version, step)
    saving = state.model_copy(
        update={
            "phase": Phase.CHECKPOINTING,
            "generation": state.generation + 1,
            "saving": Saving(uuid=uuid, step=step, cut=True),
        }
    )
    cut = CheckpointCut(step=step, timeline=state.timeline, operation=operation)
    await cluster.etcd.txn(
        [], [Put(KEYS.state, saving.to_bytes()), Put(KEYS.checkpoint_cut(uuid), cut.to_bytes())]
    )
    cluster.state = state.model_copy(update={"generation": state.generation + 1, "saved": step})
    writes = [Put(KEYS.state, cluster.state.to_bytes())]
    while any(member.copied != uuid for member in (await cluster.members()).values()):
        if any(node.process.dead for node in cluster.nodes.values()):
            await cluster.etcd.txn([], [*writes, Delete(KEYS.checkpoint_cut(uuid))])
            return False
        await asyncio.sleep(0.01)
    if confirmed:
        copied = cut.model_copy(update={"copied": True})
        writes.append(Put(KEYS.checkpoint_cut(uuid), copied.to_bytes()))
    await cluster.etcd.txn([], writes)
    return True


async def replace(cluster, index, *, counted=True):
    """`counted`: as the master does, note that what it lacks is on record."""
    cluster.nodes[index].process.kill()
    cluster.simulated.forget(cluster.nodes[index].process.name)
    node = await cluster.start(f"ps-{index}-again")
    await until(lambda: node.own_index.record.restored is not None, "it says what it has", 60.0)
    if counted:
        await count_losses(cluster, node)
    return node, node.own_index.record.restored


async def count_losses(cluster, node):
    """What the master does with a parameter server that is back."""
    mends = {str(node.pserver.index): node.pserver.incarnation}
    await cluster.write_state(
        cluster.state.model_copy(update={"mends": mends, "generation": cluster.state.generation + 1})
    )
    await until(
        lambda: node.pserver.store is not None or node.own_index.record.restored.error, "it serves", 60.0
    )
