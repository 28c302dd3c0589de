"""A minibatch of one record at the end of a file: with BatchNorm an error that says what to do; with
drop_last it is left out."""

from __future__ import annotations

import numpy as np
import pytest

from tests.trainer_agent.cluster import cluster, trained
from tests.trainer_agent.scripts import differing, spec_for, write_script
from trainer_agent.script.user_module import load
from trireme.plain import plain_spec, run
from trireme_shared.protocol.errors import UserCodeError
from trireme_shared.protocol.records import Phase

BATCH_NORM = "def model():\n    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))\n"
ONE_LEFT = {"global_batch_size": 59, "lanes": 1, "records_per_task": None, "epochs": 2}


def script(folder):
    return write_script(folder, model=BATCH_NORM)


def test_one_record_with_batch_norm_names_drop_last(tmp_path):
    user = load(script(tmp_path))
    with pytest.raises(
        UserCodeError,
        match=r"Expected more than 1 value per channel .*; BatchNorm cannot train .* set drop_last=True",
    ):
        run(user, plain_spec(user, {"global_batch_size": 59}))


async def test_the_job_fails_with_the_same_words(tmp_path):
    async with cluster(spec_for(script(tmp_path), **ONE_LEFT), 1) as made:
        state = await made.ended()
    assert state.phase is Phase.FAILED
    assert "set drop_last=True" in state.reason


@pytest.mark.parametrize("values", [{}, {"mode": "async"}], ids=["sync", "async"])
async def test_with_drop_last_it_is_left_out_and_counted(tmp_path, values):
    async with cluster(spec_for(script(tmp_path), **ONE_LEFT, **values, drop_last=True), 1) as made:
        assert (await made.ended()).phase is Phase.COMPLETED
        assert made.master.job.records_done == 2 * 59
        assert made.master.job.summary().records_left_out == 1
        told = [
            event.message for event in made.master.events.after(0, 100) if event.name == "records_left_out"
        ]
    assert told == [
        (
            "drop_last leaves out 1 of 60 records in each epoch: the ends of files, which do not fill "
            "a minibatch of 59"
        )
    ]


async def test_one_lane_has_the_bits_of_a_process_of_ones_own(tmp_path):
    path, lines = script(tmp_path), []
    user = load(path)
    result = run(user, plain_spec(user, {"global_batch_size": 59}, ["drop_last=true"]), lines.append)
    assert (result.steps, result.records) == (1, 59)
    assert lines[0].startswith("drop_last leaves out 1 of 60 records in each epoch")
    ours = await trained(spec_for(path, **ONE_LEFT | {"epochs": 1}, drop_last=True, seed=0))
    assert differing(ours, dict(result.model.state_dict())) == []
    assert np.load(tmp_path / "x.npy").shape == (60, 5)
