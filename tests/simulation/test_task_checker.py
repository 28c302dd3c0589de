"""The task checker reads events one transaction at a time and tells which break a rule."""

from __future__ import annotations

from typing import Any

import pytest

from tests.simulation.task_checker import TaskChecker
from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import JobState, PendingTask, Phase, Record

KEYS = Keys("checked")


def put(key: str, record: Record) -> dict[str, Any]:
    return {"kv": {"key": key.encode(), "value": record.to_bytes()}}


def drop(key: str) -> dict[str, Any]:
    return {"type": "DELETE", "kv": {"key": key.encode(), "value": b""}}


def given(attempt: int = 1, trainer: str = "t1") -> dict[str, Any]:
    task = PendingTask(
        attempt=attempt, trainer=trainer, stream="0", epoch=0, index=0, remaining_s=1.0, request="r"
    )
    return put(KEYS.pending("5"), task)


def state(timeline: int, phase: Phase = Phase.RUNNING) -> dict[str, Any]:
    return put(KEYS.state, JobState(phase=phase, timeline=timeline))


@pytest.fixture
def checker() -> TaskChecker:
    checker = TaskChecker(KEYS)
    assert not list(checker.check([state(0)]))
    assert not list(checker.check([given()]))
    return checker


def test_a_finished_task_is_not_given_again(checker):
    assert not list(checker.check([drop(KEYS.pending("5"))]))
    assert list(checker.check([given(trainer="t2")])) == [
        "task 5 of epoch 0 was finished and is given again, to t2"
    ]


def test_a_task_is_not_given_to_two(checker):
    assert list(checker.check([given(trainer="t2")])) == ["task 5 is at t1 (attempt 1) and given to t2 (1)"]
    assert not list(checker.check([given(attempt=2, trainer="t3")]))


def test_a_task_may_be_given_twice_in_one_transaction(checker):
    """To a trainer that asked in two steps, one after the other: only the second attempt is written."""
    assert not list(checker.check([given(attempt=3, trainer="t2")]))
    assert len(list(checker.check([given(attempt=2, trainer="t1")]))) == 1


def test_what_a_way_back_drops_was_not_finished(checker):
    """A start over has no phase of its own: one transaction drops the queue and begins the timeline."""
    assert not list(checker.check([drop(KEYS.pending("5")), state(3, Phase.WAITING)]))
    assert not list(checker.check([given(trainer="t2")]))


def test_a_roll_back_drops_the_queue_at_both_of_its_ends(checker):
    assert not list(checker.check([state(3, Phase.ROLLING_BACK)]))
    assert not list(checker.check([drop(KEYS.pending("5")), state(3)]))
    assert not list(checker.check([given(trainer="t2")]))
    assert not list(checker.check([drop(KEYS.pending("5"))]))
    assert len(list(checker.check([given()]))) == 1


def test_a_task_may_be_given_by_the_transaction_that_ends_a_roll_back(checker):
    """A master commits in groups: the queue is dropped in one transaction, the end of the rollback and a task
    are in a later one."""
    assert not list(checker.check([state(3, Phase.ROLLING_BACK)]))
    assert not list(checker.check([drop(KEYS.pending("5"))]))
    assert not list(checker.check([state(3), given(attempt=2)]))
