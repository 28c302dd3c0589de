"""Every record of every kind of dataset is trained exactly once, though a trainer is killed: the model counts
the records it was given."""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path

import pytest
import torch

from tests.trainer_agent.cluster import cluster
from tests.trainer_agent.data.test_made_files import MADE, RECORDS, write_images, write_recordio
from tests.trainer_agent.scripts import spec_for, write_script
from trainer_agent.script.user_module import load
from trireme_shared.protocol.records import Phase

MINIBATCH = 2
EPOCHS = 2
IDS = "".join(f'{{"id": {number}}}\n' for number in range(RECORDS)).encode()

IN_SCRIPT = """
    class Ids(torch.utils.data.Dataset):
        def __len__(self):
            return 24

        def __getitem__(self, number):
            if number >= 24:
                raise IndexError(number)
            return {"id": number}

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter([{"id": number} for number in range(24)])

    class rows:
        count = staticmethod(lambda url: 24)
        read = staticmethod(
            lambda url, first, count: ({"id": number} for number in range(first, first + count))
        )
"""


def recordio(folder: Path) -> None:
    write_recordio(folder / "ids.recordio", [b"%d" % i for i in range(RECORDS)], compressor=1)


def copied(name: str):
    return lambda folder: shutil.copy(MADE / name, folder)


# name: (what dataset() returns, what makes the file, the ids of a batch)
KINDS = {
    "map_style": ("Ids()", None, 'batch["id"]'),
    "iterable_style": ('IterableStyle("{module}:Stream", records=24)', None, 'batch["id"]'),
    "custom_in_script": ('Custom("ids", reader="{module}:rows")', None, 'batch["id"]'),
    "tfrecord": ('TFRecord("{folder}/ids.tfrecord")', copied("ids.tfrecord"), 'batch["id"]'),
    "recordio": (
        'RecordIO("{folder}/ids.recordio")',
        recordio,
        'torch.tensor([int(b) for b in batch["bytes"]])',
    ),
    "hugging_face": (
        'HuggingFace("{folder}/ids_hf", split="train")',
        lambda folder: shutil.copytree(MADE / "ids_hf", folder / "ids_hf"),
        'batch["id"]',
    ),
    "image_folder": (
        'ImageFolder("{folder}/images")',
        lambda folder: write_images(folder / "images"),
        'batch["image"][:, 0, 0, 0].long()',
    ),
    "compressed_lines": (
        'JsonLines("{folder}/ids.jsonl.gz")',
        lambda folder: (folder / "ids.jsonl.gz").write_bytes(gzip.compress(IDS)),
        'batch["id"]',
    ),
    "webdataset": ('WebDataset("{folder}/ids.tar")', copied("ids.tar"), 'batch["png"][:, 0, 0, 0].long()'),
}


@pytest.mark.parametrize("kind", KINDS)
async def test_each_record_is_trained_once_though_a_trainer_is_killed(tmp_path, kind):
    returned, make, ids = KINDS[kind]
    if make is not None:
        make(tmp_path)
    name = f"once_{kind}"  # of its own: a module of one name is loaded once
    returned = returned.format(folder=tmp_path, module=name)
    script = write_script(
        tmp_path,
        name,
        data="    from trireme_shared.protocol.records.datasets import *" + IN_SCRIPT,
        model="""
        class Counts(nn.Module):
            def __init__(self):
                super().__init__()
                self.seen = nn.Parameter(torch.zeros(24))

        def model():
            return Counts()
        """,
        dataset=f"def dataset():\n    return {returned}",
        loss=f"def loss(model, batch):\n    return -model.seen[{ids}].mean()",
        optimizer="def optimizer(model):\n    return torch.optim.SGD(model.parameters(), lr=4.0)",
    )
    spec = spec_for(
        script,
        dataset=load(script).dataset(),
        epochs=EPOCHS,
        lanes=2,
        global_batch_size=2 * MINIBATCH,
        records_per_task=4,
        pservers=1,
    )
    async with cluster(spec, 2) as made:
        await made.version(1)
        await made.kill("trainer-0-x")  # with tasks in its hands
        await made.version(3)
        made.add_trainer("trainer-2-x")
        state = await made.ended()
        assert state.phase is Phase.COMPLETED, state
        # a record adds lr / global_batch_size = 1 each time it is trained
        assert torch.equal(made.exported()["seen"], torch.full((RECORDS,), float(EPOCHS)))
