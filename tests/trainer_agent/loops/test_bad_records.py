"""One bad record costs its task and nothing else, whatever it does: each kind once, in both modes. Those that
end the process are in tests/end_to_end/test_deadly_records.py."""

from __future__ import annotations

import re

import pytest

from tests.trainer_agent.cluster import cluster
from tests.trainer_agent.scripts import RECORDS, spec_for, write_script
from trireme_shared.protocol.records import Mode, Phase
from trireme_shared.protocol.records.datasets import MapStyle

BAD, TASK = 55, 6  # in the last task: a step is known to be done by then
PARTS = {
    "dataset": f"""
        import asyncio, sys
        class Lazy:
            def __array__(self, *_, **__): raise OSError("image file is truncated (3 bytes not processed)")
        class Items:
            def __len__(self): return {RECORDS}
            def __getitem__(self, i):
                item = {{"x": torch.rand(5, generator=torch.Generator().manual_seed(i)), "y": i % 3, "n": i}}
                return bad(item) if i == {BAD} and READS else item
        def dataset(): return Items()
    """,
    "loss": f"""
        def loss(model, batch):
            if {BAD} in batch["n"].tolist() and not READS:
                bad(batch)
            return F.cross_entropy(model(batch["x"]), batch["y"])
    """,
}


def raising(error: str) -> str:
    return f"def bad(item):\n    raise {error}\n"


# where it is met, the code, what the cause says
KINDS = {
    "read_error": (
        "read",
        raising("ValueError('broken')"),
        "item 55 of .* cannot be read: ValueError: broken",
    ),
    "read_exit": ("read", raising("SystemExit('no such user')"), "SystemExit: no such user"),
    "read_interrupt": ("read", raising("KeyboardInterrupt"), "KeyboardInterrupt"),
    "read_cancelled": ("read", raising("asyncio.CancelledError"), "CancelledError"),
    "truncated_image": (
        "read",
        "def bad(item):\n    return {**item, 'x': Lazy()}\n",
        "records 54-59 cannot be read: OSError: image file is truncated",
    ),
    "requires_grad": (
        "read",
        "def bad(item):\n    return {**item, 'x': item['x'].requires_grad_()}\n",
        "RuntimeError: Can't call numpy",
    ),
    "wrong_shape": (
        "read",
        "def bad(item):\n    return {**item, 'x': torch.zeros(7)}\n",
        "column 'x': record .* shape",
    ),
    "nothing": ("read", "def bad(item):\n    return {**item, 'x': None}\n", "has no value"),
    "no_item": ("read", "def bad(item):\n    return None\n", "column 'x'"),
    "loss_error": ("loss", raising("ValueError('broken')"), "ValueError: broken"),
    "loss_exit": ("loss", raising("SystemExit('bad record')"), "SystemExit: bad record"),
    "loss_interrupt": ("loss", raising("KeyboardInterrupt"), "KeyboardInterrupt"),
    "loss_generator_exit": ("loss", raising("GeneratorExit"), "GeneratorExit"),
    "loss_cancelled": ("loss", raising("asyncio.CancelledError"), "CancelledError"),
    "memory": ("loss", raising("MemoryError('8 EiB')"), "MemoryError: 8 EiB"),
    "recursion": ("loss", "def bad(item):\n    return bad(item)\n", "RecursionError"),
}


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        *((kind, Mode.SYNC) for kind in KINDS),
        *((kind, Mode.ASYNC) for kind in ("read_exit", "truncated_image", "loss_exit")),
    ],
)
async def test_a_bad_record_discards_its_task_with_its_cause_and_nothing_else(tmp_path, kind, mode):
    where, code, cause = KINDS[kind]
    name = f"bad_{kind}_{mode}".lower()
    script = write_script(tmp_path, name, **PARTS, bad=f"READS = {where == 'read'}\n{code}")
    spec = spec_for(
        script,
        dataset=MapStyle(f"{name}:dataset", records=RECORDS),
        epochs=1,
        mode=mode,
        records_per_task=TASK,
        global_batch_size=3,
        shuffle=False,
        max_discarded_fraction=0.5,
    )
    async with cluster(spec, 1) as made:
        state = await made.ended()
        discarded = made.master.job.training.discarded
    assert (state.phase, state.reason) == (Phase.COMPLETED, "trained, evaluated and exported")
    assert (state.result.trained_records, state.result.discarded_records) == (RECORDS - TASK, TASK)
    assert list(discarded) == [(0, str(BAD // TASK))]
    (lost,) = discarded.values()
    assert re.search(cause, lost.task.cause), lost.task.cause
