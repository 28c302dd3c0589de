"""The witness of the queue judges what it is told, one transaction at a time."""

from __future__ import annotations

from typing import Any

import pytest

from shared.keys import Keys
from shared.records import JobState, PendingTask, Phase, Record
from tests.simulation.task_checker import TaskChecker

KEYS = Keys("judged")


def put(key: str, record: Record) -> dict[str, Any]:
    return {"kv": {"key": key.encode(), "value": record.to_bytes()}}


def drop(key: str) -> dict[str, Any]:
    return {"type": "DELETE", "kv": {"key": key.encode(), "value": b""}}


def given(attempt: int = 1, trainer: str = "t1") -> dict[str, Any]:
    task = PendingTask(attempt=attempt, trainer=trainer, stream="0", epoch=0, index=0, remaining_s=1.0, request="r")
    return put(KEYS.pending("5"), task)


def state(timeline: int, phase: Phase = Phase.RUNNING) -> dict[str, Any]:
    return put(KEYS.state, JobState(phase=phase, timeline=timeline))


@pytest.fixture
def witness() -> TaskChecker:
    witness = TaskChecker(KEYS)
    assert not list(witness.judge([state(0)]))
    assert not list(witness.judge([given()]))
    return witness


def test_a_finished_task_is_not_given_again(witness):
    assert not list(witness.judge([drop(KEYS.pending("5"))]))
    assert list(witness.judge([given(trainer="t2")])) == ["task 5 of epoch 0 was finished and is given again, to t2"]


def test_a_task_is_not_given_to_two(witness):
    assert list(witness.judge([given(trainer="t2")])) == ["task 5 is at t1 (attempt 1) and given to t2 (1)"]
    assert not list(witness.judge([given(attempt=2, trainer="t3")]))


def test_what_a_way_back_drops_was_not_finished(witness):
    """A start over has no phase of its own: one transaction drops the queue and begins the timeline."""
    assert not list(witness.judge([drop(KEYS.pending("5")), state(3, Phase.WAITING)]))
    assert not list(witness.judge([given(trainer="t2")]))


def test_a_roll_back_drops_the_queue_at_both_of_its_ends(witness):
    assert not list(witness.judge([state(3, Phase.ROLLING_BACK)]))
    assert not list(witness.judge([drop(KEYS.pending("5")), state(3)]))
    assert not list(witness.judge([given(trainer="t2")]))
    assert not list(witness.judge([drop(KEYS.pending("5"))]))
    assert len(list(witness.judge([given()]))) == 1
