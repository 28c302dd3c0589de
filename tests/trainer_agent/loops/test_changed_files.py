"""A file of the dataset that is replaced by one of the same size while the job runs, or before it goes on, is
never trained: the job says so."""

from __future__ import annotations

import re
from contextlib import nullcontext

import numpy as np
import pytest

from tests.trainer_agent.cluster import cluster
from tests.trainer_agent.scripts import RECORDS, spec_for, write_script
from trireme import plain
from trireme_shared.protocol.records import FailureCause, Mode, Phase

REPLACING = """
    from pathlib import Path
    left = [12]
    def loss(model, batch):
        left[0] -= 1
        if left[0] == 0:  # in the second epoch
            path = Path({folder!r}) / "NAME.npy"
            content = path.read_bytes()
            path.write_bytes(content[:-8] + bytes([content[-8] ^ 1]) + content[-7:])
        return F.cross_entropy(model(batch["x"]), batch["y"])
"""
TOLD = (
    r"\.npy is not the file whose records were counted when the job began: it is 2 files with digest "
    r"\w+, counted was 2 files with digest"
)


@pytest.mark.parametrize("mode", [Mode.SYNC, Mode.ASYNC])
@pytest.mark.parametrize("name", ["x", "y"])  # the file table has the first of the aligned files
async def test_a_file_that_is_replaced_while_the_job_runs_ends_it_by_name(tmp_path, mode, name):
    script = write_script(tmp_path, f"replacing_{mode}_{name}".lower(), loss=REPLACING.replace("NAME", name))
    spec = spec_for(script, epochs=50, mode=mode, max_discarded_fraction=0.5)
    async with cluster(spec, 1) as made:
        state = await made.ended()
        discarded = made.master.job.training.discarded
    assert (state.phase, state.cause) == (Phase.FAILED, FailureCause.DATASET)
    assert re.search(TOLD, state.reason), state.reason
    assert not discarded


@pytest.mark.parametrize("mode", [Mode.SYNC, Mode.ASYNC])
async def test_a_job_that_only_reports_trains_it_and_tells_once(tmp_path, mode):
    script = write_script(tmp_path, f"reporting_{mode}".lower(), loss=REPLACING.replace("NAME", "x"))
    spec = spec_for(script, epochs=4, mode=mode, changed_files="report")
    async with cluster(spec, 1) as made:
        state = await made.ended()
        told = [event.message for event in made.master.job.events.after(0, 1000) if event.name == "warning"]
    assert (state.phase, state.result.trained_records) == (Phase.COMPLETED, 4 * RECORDS)
    assert len(told) == 1
    assert re.search(TOLD, told[0])
    assert "changed_files" in told[0]


async def test_a_trainer_that_comes_after_the_replacement_refuses_it_too(tmp_path):
    script = write_script(tmp_path, "later")
    async with cluster(spec_for(script), 0) as made:
        await made.directory.wait_for(lambda view: view.plan is not None, 10, "the counted dataset")
        np.save(tmp_path / "x.npy", np.zeros((RECORDS, 5), np.float32))
        made.add_trainer("trainer-0-x")
        state = await made.ended()
    assert state.phase is Phase.FAILED
    assert re.search(TOLD, state.reason), state.reason


HELD_OUT = """
    import shutil
    for name in "xy": shutil.copyfile({folder!r} + f"/{name}.npy", {folder!r} + f"/held_{name}.npy")
    def evaluation_dataset():
        return Npy({folder!r} + "/held_x.npy", {folder!r} + "/held_y.npy", columns=("x", "y"), aligned=True)
"""


@pytest.mark.parametrize(
    ("name", "settings"),
    [("x", ()), ("held_x", ()), ("held_x", ("changed_files=report",))],
    ids=["trained", "held out", "told"],
)
def test_plain_training_refuses_it_as_a_job_does(tmp_path, monkeypatch, capsys, name, settings):
    script = f"plainly_{name}_{len(settings)}"
    write_script(tmp_path, script, loss=REPLACING.replace("NAME", name), held_out=HELD_OUT)
    monkeypatch.syspath_prepend(tmp_path)
    __import__(script)
    given = ("global_batch_size=8", "records_per_task=16", "evaluate_every=8", *settings)
    arguments = ["--no-check", "--epochs", "4", *(each for setting in given for each in ("--set", setting))]
    with nullcontext() if settings else pytest.raises(SystemExit):
        plain.train(script, arguments)
    said = capsys.readouterr().err
    assert re.search(TOLD, said), said
    assert ("is trained all the same" in said) == bool(settings)
