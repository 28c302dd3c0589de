"""Parameter servers without a network: trained by direct pushes, their snapshots written and loaded as a
job's would be."""

from __future__ import annotations

from functools import partial

import torch

from pserver_service.checkpoints.ledger_text import ledger_metadata
from pserver_service.recovery import load_store
from trireme_shared.blocks.snapshot import Snapshot
from trireme_shared.checkpoints import stored, writer
from trireme_shared.checkpoints.schedule import Schedule
from trireme_shared.platform.etcd import Put
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import Mode, SlotMap, TaskMeta, TrainerList
from trireme_shared.protocol.records.assignments import slot_of, spread
from trireme_shared.protocol.records.checkpoints import CheckpointPart, CheckpointRef, Manifest
from trireme_shared.protocol.records.layout import Layout, OptimizerSpec, Segment
from trireme_shared.protocol.records.step import LanePosition, LaneZero, StepRecord
from trireme_shared.protocol.wire.messages import InitHeader, PushBlock, PushHeader
from trireme_shared.serving.core.ledger import AsyncSnapshot
from trireme_shared.serving.core.store import Store
from trireme_shared.serving.core.stores import store_of

JOB = "ctr"
LANES = 2
TRAINER = "t"  # the only member that trains
OPTIMIZERS = {
    "SGD": OptimizerSpec(
        name="SGD", defaults={"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}, groups=({},)
    ),
    "plain SGD": OptimizerSpec(name="SGD", defaults={"lr": 0.1}, groups=({},)),
    "Adam": OptimizerSpec(name="Adam", defaults={"lr": 0.01, "amsgrad": True}, groups=({},)),
    "AdamW": OptimizerSpec(
        name="AdamW", defaults={"lr": 0.01, "weight_decay": 0.1, "fused": True}, groups=({},)
    ),
    "Adagrad": OptimizerSpec(
        name="Adagrad", defaults={"lr": 0.1, "initial_accumulator_value": 0.5}, groups=({},)
    ),
    "Lion": OptimizerSpec(name="Lion", defaults={"lr": 0.01, "weight_decay": 0.1}, groups=({},)),
    "NAdam": OptimizerSpec(name="NAdam", defaults={"lr": 0.01}, groups=({},)),
}


def layout_of(optimizer: str = "Adam", elements: int = 150) -> Layout:
    """Parameters, a float buffer and an integer one: 10, 2 and 1 blocks of 64 bytes."""
    segments = (
        Segment(kind="param", dtype="float32", elements=elements, group=0),
        Segment(kind="buffer", dtype="float32", elements=20),
        Segment(kind="buffer", dtype="int64", elements=3),
    )
    return Layout(
        segments=segments, block_bytes=64, digest="d1", optimizer=OPTIMIZERS[optimizer], slot_count=128
    )


def listed(keys: Keys, generation: int, names: tuple[str, ...]) -> list[Put]:
    """What a master writes when these are the trainers from `generation` on."""
    trainers = TrainerList(generation=generation, lanes=LANES, names=names)
    change = TrainerList().change_to(trainers)
    return [Put(keys.trainer_list, trainers.to_bytes()), Put(keys.trainers_change, change.to_bytes())]


def slot_map(pservers: int, version: int = 1) -> SlotMap:
    return SlotMap(version=version, owners=spread(128, pservers))


def positions(version: int) -> tuple[LanePosition, ...]:
    return tuple(LanePosition(lane=lane, index=version, offset=lane) for lane in range(LANES))


def initial(layout: Layout) -> dict[int, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {block.number: _numbers(block.elements, block.dtype, generator) for block in layout.blocks()}


def gradient(layout: Layout, step: int, lane: int) -> dict[int, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + lane)
    return {block.number: _numbers(block.elements, block.dtype, generator) for block in layout.blocks()}


def _numbers(count: int, dtype: str, generator: torch.Generator) -> torch.Tensor:
    if dtype == "int64":
        return torch.randint(0, 99, (count,), generator=generator)
    return torch.randn(count, generator=generator)


def bytes_view(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(torch.uint8).numpy())


def header_of(layout: Layout, index: int = 0) -> InitHeader:
    record = StepRecord(version=0, positions=positions(0))
    return InitHeader(
        job=JOB, generation=0, mode=Mode.SYNC, lanes=LANES, layout=layout, pserver=index, record=record
    )


def blocks_of(layout: Layout, index: int, slots: SlotMap) -> list[int]:
    return [b.number for b in layout.blocks() if slots.owners[slot_of(b.number, layout.slot_count)] == index]


def fresh(layout: Layout, pservers: int, schedule: Schedule | None = None) -> list[Store]:
    values, slots = initial(layout), slot_map(pservers)
    stores = []
    for index in range(pservers):
        store = store_of(header_of(layout, index), schedule)
        for number in blocks_of(layout, index, slots):
            store.add_block(number, bytes_view(values[number]))
        store.seal()
        stores.append(store)
    return stores


def push_header(step: int, lane: int, **fields) -> PushHeader:
    options = ({"lr": 0.1 / (step + 1)},)
    return PushHeader(
        **{
            "job": JOB,
            "generation": 1,
            "mode": Mode.SYNC,
            "trainer": TRAINER,
            "step": step,
            "positions": (positions(step + 1)[lane],),
            "lane_zero": LaneZero(options=options, scheduler={"last_epoch": step}) if lane == 0 else None,
            **fields,
        }
    )


def train(layout: Layout, stores: list[Store], first: int, last: int) -> None:
    """Steps [first, last), every store at once."""
    for step in range(first, last):
        for lane in range(LANES):
            gradients = gradient(layout, step, lane)
            for store in stores:
                push = store.admit(push_header(step, lane))
                for number in store.blocks:
                    item = PushBlock(block=number, lanes=(lane, lane + 1), count=3 + lane)
                    assert store.apply(push, item, bytes_view(gradients[number])) == "APPLIED"


def state_of(stores: list[Store]) -> dict[str, bytes]:
    """Every bit that further training depends on."""
    found = {}
    for store in stores:
        for number, block in store.blocks.items():
            found[f"{number}"] = bytes(block.current.view)
            found[f"{number} version"] = str(block.version).encode()
            for name, tensor in block.optimizer_state().items():
                found[f"{number} {name}"] = (
                    bytes(bytes_view(tensor.reshape(-1))) + str(tuple(tensor.shape)).encode()
                )
    return dict(sorted(found.items()))


def snapshots(stores: list[Store]) -> list[Snapshot]:
    taken = [store.take_snapshot() for store in stores]
    assert all(taken)
    return taken


def metadata_of(uuid: str, snapshot: Snapshot) -> dict[str, str]:
    return {"uuid": uuid} | ledger_metadata(snapshot)


def save(
    storage: str,
    layout: Layout,
    taken: list[Snapshot],
    slots: SlotMap,
    uuid: str = "u1",
    checksum: str = "xxh3-128",
) -> CheckpointRef:
    """Write a checkpoint as a job's parameter servers would, without etcd."""
    parts, record, asynchronous = [], taken[0].record, isinstance(taken[0], AsyncSnapshot)
    for index, snapshot in enumerate(taken):
        file = f"pserver-{index}.x.safetensors"
        summary = writer.write_part(
            f"{stored.folder(storage, uuid)}/{file}",
            partial(metadata_of, uuid, snapshot),
            snapshot,
            (),
            checksum,
        )
        parts.append(
            CheckpointPart(
                pserver=index,
                incarnation="x",
                step=record.version,
                timeline=0,
                file=file,
                checksum=summary.checksum,
                bytes=summary.bytes,
                rows_version=snapshot.rows_version if isinstance(snapshot, AsyncSnapshot) else None,
            )
        )
    manifest = Manifest(
        job=JOB,
        uuid=uuid,
        step=record.version,
        timeline=0,
        term=1,
        generation=1,
        mode=Mode.ASYNC if asynchronous else Mode.SYNC,
        queue={"meta": TaskMeta(epoch=0, digest="d", seed=0, tasks=9).model_dump_json()}
        if asynchronous
        else {},
        lanes=LANES,
        seed=0,
        spec_digest="s",
        timestamp="now",
        slots=slots,
        layout=layout,
        record=record,
        parts=tuple(parts),
    )
    name = writer.write_manifest(storage, manifest)
    return CheckpointRef(uuid=uuid, step=record.version, timeline=0, manifest=name)


def load(
    storage: str,
    ref: CheckpointRef,
    pservers: int,
    schedule: Schedule | None = None,
    digest: str = "d1",
    version: int = 1,
) -> list[Store]:
    """By slot map `version`."""
    slots = slot_map(pservers, version)
    return [load_store(storage, JOB, digest, ref, index, slots, schedule)[0] for index in range(pservers)]
