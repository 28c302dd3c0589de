"""What the master is told about a failure."""

from __future__ import annotations

import pytest

from shared.errors import UserCodeError
from shared.records import UserFailure
from tests.trainer_agent.scripts import write_script
from trainer_agent.script.user_module import load
from trainer_agent.tasks.master import failure_of


def test_a_failure_says_what_happened_where_and_to_whom(tmp_path):
    user = load(write_script(tmp_path, loss="def loss(model, batch):\n    raise ValueError('no such label')\n"))
    with pytest.raises(UserCodeError) as raised:
        user.call("loss", None, None)
    failure = failure_of(raised.value, task="task 7 (x.npy records 0-15)", trainer="trainer-1")
    assert failure == UserFailure(
        error_type="ValueError",
        message="no such label",
        traceback=raised.value.details["traceback"],
        task="task 7 (x.npy records 0-15)",
        trainer="trainer-1",
    )
