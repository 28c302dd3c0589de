"""The next task's records are read while this one is computed, in both modes, and no bit depends on it.
Computing a task waits here until the next one is being read: without reading ahead it would wait for ever."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from tests.trainer_agent.cluster import trained
from tests.trainer_agent.scripts import RECORDS, spec_for, train_plainly, write_script
from trainer_agent.loops.asynchronous import ReadingPace
from trainer_agent.script.user_module import load

TASK_RECORDS, BATCH, EPOCHS, LIMIT_S = 20, 4, 2, 6.0
TASKS = RECORDS // TASK_RECORDS
MINIBATCHES = TASK_RECORDS // BATCH


class Watched:
    """What the script of a test reads and computes. `at`: before which minibatch of a task it waits.
    `across`: for the next epoch's first task too."""

    def __init__(self, at: int, *, across: bool, record_s: float = 0.0) -> None:
        self._at, self._across, self._record_s = at, across, record_s
        self._tasks = self._minibatches = 0
        self.waited_in_vain: list[str] = []
        self._read = threading.Condition()

    def reads(self, number: int) -> None:
        """A record."""
        time.sleep(self._record_s)
        with self._read:
            self._tasks += number % TASK_RECORDS == 0
            self._read.notify_all()

    def computes(self) -> None:
        """A minibatch. It is noted if the next task is not being read."""
        task, minibatch = divmod(self._minibatches, MINIBATCHES)
        self._minibatches += 1
        is_last = task + 1 == EPOCHS * TASKS if self._across else (task + 1) % TASKS == 0
        if minibatch != self._at or is_last:
            return
        begun = task + 2 + 1  # with the first record, which is looked at before all others
        with self._read:
            if not self._read.wait_for(lambda: self._tasks >= begun, LIMIT_S):
                self.waited_in_vain.append(f"task {task} is computed: only {self._tasks - 1} are read")


watched: Watched | None = None

PARTS = {
    "dataset": f"""
        import sys
        import numpy as np
        test = sys.modules[{__name__!r}]
    """
    """
        class Rows(torch.utils.data.Dataset):
            def __init__(self):
                self.x, self.y = np.load({folder!r} + "/x.npy"), np.load({folder!r} + "/y.npy")

            def __len__(self):
                return len(self.x)

            def __getitem__(self, number):
                if test.watched is not None:
                    test.watched.reads(number)
                return {"x": self.x[number], "y": self.y[number]}

        def dataset():
            return Rows()
    """,
    "loss": """
        def loss(model, batch):
            if test.watched is not None:
                test.watched.computes()
            return F.cross_entropy(model(batch["x"]), batch["y"])
    """,
}


def spec_of(tmp_path, name, monkeypatch, **values):
    """The first records of a dataset, and some later ones, are read alone, and none here: computing waits for
    them."""
    monkeypatch.setattr("trainer_agent.data.in_code.PROBED", 0)
    monkeypatch.setattr("trainer_agent.data.in_code.LOOK_EVERY", 1000)
    script = write_script(tmp_path, name, **PARTS)
    return spec_for(
        script,
        dataset=load(script).dataset(),
        epochs=EPOCHS,
        global_batch_size=BATCH,
        records_per_task=TASK_RECORDS,
        **values,
    )


async def test_a_lane_reads_its_next_task_from_the_first_minibatch_of_this_one_on(tmp_path, monkeypatch):
    spec = spec_of(tmp_path, "ahead_sync", monkeypatch)
    expected = train_plainly(tmp_path / "ahead_sync.py", spec)
    watches = Watched(0, across=True)
    monkeypatch.setattr(f"{__name__}.watched", watches)
    found = await trained(spec)
    assert watches.waited_in_vain == []
    assert all(torch.equal(found[name], value) for name, value in expected.items())


async def test_an_asynchronous_trainer_takes_the_next_task_as_early_as_reading_needs(tmp_path, monkeypatch):
    spec = spec_of(tmp_path, "ahead_async", monkeypatch, mode="async")
    watches = Watched(MINIBATCHES - 2, across=False, record_s=0.05)
    monkeypatch.setattr(f"{__name__}.watched", watches)
    await trained(spec)
    assert watches.waited_in_vain == []


@pytest.mark.parametrize(
    ("read_s", "minibatch_s", "expected"),
    [(0.0, 1.0, []), (1.0, 1.0, [1]), (4.0, 1.0, [1, 2, 3, 4, 5]), (100.0, 1.0, list(range(1, 17)))],
)
def test_the_next_task_is_asked_for_when_it_takes_as_long_to_read_as_this_one_goes_on(
    monkeypatch, read_s, minibatch_s, expected
):
    now = 0.0
    monkeypatch.setattr("trainer_agent.loops.asynchronous.clock.monotonic", lambda: now)
    ahead = ReadingPace()
    with ahead.reading():
        now = read_s
    assert not any(ahead.is_due(left) for left in range(1, 17)), "it is not known how long a minibatch takes"
    ahead.trained(2, 2 * minibatch_s)
    assert [left for left in range(1, 17) if ahead.is_due(left)] == expected
    assert ahead.pushed == 2
