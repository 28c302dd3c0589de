"""Errors of the user's code or storage: the job goes on, or ends with one clear reason."""

from __future__ import annotations

import asyncio

from tests.trainer_agent.cluster import cluster
from tests.trainer_agent.scripts import differing, spec_for, write_script
from trireme_shared.protocol.errors import ResourceExhausted
from trireme_shared.protocol.records import Phase
from trireme_shared.protocol.records.datasets import MapStyle

POISONED = """
def loss(model, batch):
    if (batch["x"][:, 0] == POISON).any():
        raise ValueError("poisoned record")
    return F.cross_entropy(model(batch["x"]), batch["y"])
"""


async def test_an_error_in_the_first_step_fails_the_job_with_the_users_traceback_and_task(tmp_path):
    script = write_script(tmp_path, loss="def loss(model, batch):\n    return batch['nothing']\n")
    async with cluster(spec_for(script, lanes=2), 2) as made:
        state = await made.ended()
        codes = [await asyncio.wait_for(task, 10) for task in made.running.values()]
    assert (state.phase, codes) == (Phase.FAILED, [1, 1])
    assert (state.failure.error_type, state.failure.message) == ("KeyError", "'nothing'")
    assert "return batch['nothing']" in state.failure.traceback
    assert "trainer_agent" not in state.failure.traceback
    assert f"{tmp_path}/x.npy records " in state.failure.task


async def test_a_lane_skips_a_task_that_always_fails(tmp_path):
    poison = "import numpy as np\nPOISON = float(np.load({folder!r} + '/x.npy')[-1][0])\n"
    script = write_script(tmp_path, loss=POISONED, poison=poison)
    common = {
        "lanes": 2,
        "records_per_task": 10,
        "max_discarded_fraction": 0.5,
        "max_user_failures": 99,
        "shuffle": False,
    }
    found = []
    for trainers in (1, 2):
        spec = spec_for(script, **common, storage=str(tmp_path / str(trainers)))
        async with cluster(spec, trainers) as made:
            state = await made.ended()
            assert state.phase is Phase.COMPLETED, state
            assert (state.result.discarded_tasks, state.result.discarded_records) == (2, 20)
            found.append(made.exported())
    assert differing(*found) == []


async def test_an_error_in_the_evaluation_is_reported_with_its_task(tmp_path):
    script = write_script(tmp_path, evaluation="def evaluate(model, batch):\n    return 1 / 0\n")
    spec = spec_for(script, evaluation_dataset=spec_for(script).dataset)
    async with cluster(spec, 1) as made:
        state = await made.ended()
    assert (state.phase, state.failure.error_type) == (Phase.FAILED, "ZeroDivisionError")
    assert state.failure.task.startswith("task evaluate-")


async def test_a_model_that_cannot_be_written_fails_the_job_with_the_place_and_the_cause(tmp_path):
    spec = spec_for(write_script(tmp_path), epochs=1)
    async with cluster(spec, 1) as made:
        await made.directory.wait_for(lambda view: view.init_done, 20, "parameters")
        (tmp_path / "storage" / "export").write_text("a file where a folder should be")
        state = await made.ended()
    assert (state.phase, state.failure.task) == (Phase.FAILED, "task export-0")
    assert state.failure.message.startswith(f"the model cannot be written to {tmp_path}/storage/export: ")


async def test_what_a_machine_lacks_for_long_ends_the_trainer_with_the_cause_and_no_task_fails(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("trainer_agent.waiting.FIRST_S", 0.001)
    monkeypatch.setattr("trainer_agent.tasks.source.READ_LIMIT_S", 0.01)
    items = """
        import errno
        class Items:
            def __len__(self): return 60
            def __getitem__(self, i): raise OSError(errno.EMFILE, "Too many open files")
        def dataset(): return Items()
    """
    script = write_script(tmp_path, "full_machine", dataset=items)
    spec = spec_for(script, dataset=MapStyle("full_machine:dataset", records=60), max_discarded_fraction=0.5)
    async with cluster(spec, 1) as made:
        (outcome,) = [await asyncio.wait_for(task, 20) for task in made.running.values()]
        told = [
            event.message for event in made.master.job.events.after(0, 100) if event.name == "user_failure"
        ]
        discarded = made.master.job.training.discarded
    assert isinstance(outcome, ResourceExhausted)
    assert not discarded
    assert len(told) == 1
    assert "the limit of open files is reached" in told[0]
