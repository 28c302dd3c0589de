"""A queue that follows the first lane, in real processes that are killed: rows of one lane, and never another
bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.end_to_end.local_cluster import (
    cluster_of,
    completed,
    completed_in_spite_of_deaths,
    same_bits,
    spec_of,
)

pytestmark = [pytest.mark.processes, pytest.mark.timeout(360)]
QUEUE = """
class WithQueue(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body
        self.register_buffer("queue", torch.zeros(40, 8))
        self.register_buffer("queue_ptr", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if self.training:
            self.queue[(self.queue_ptr + torch.arange(len(x))) % 40] = x
            self.queue_ptr += len(x)
        return self.body(x) + 0.01 * self.queue.mean()


body = model
buffers = {"queue*": "first"}


def model():
    return WithQueue(body())
"""


def job_in(folder: Path, **changes):
    folder.mkdir()
    spec = spec_of(folder, **changes)
    with Path(spec.script).open("a") as script:
        script.write(QUEUE)
    return spec


async def test_a_killed_trainer_and_a_roll_back_change_no_row_of_the_queue(tmp_path):
    async with cluster_of(job_in(tmp_path / "calm", trainers=1, pservers=1), tmp_path / "calm") as cluster:
        undisturbed = await completed(cluster)
    async with cluster_of(job_in(tmp_path / "killed"), tmp_path / "killed") as cluster:
        found = await completed_in_spite_of_deaths(cluster, "trainer-0", "pserver-1")
    assert same_bits(found, undisturbed)
    rows = {row.tobytes() for row in np.load(tmp_path / "calm" / "data" / "x.npy")}
    assert all(row.numpy().tobytes() in rows for row in found["queue"])
    assert found["queue_ptr"] > 40
