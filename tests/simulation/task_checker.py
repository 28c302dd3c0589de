"""Checks the queue: no task is at two trainers unless it was given twice, and no finished task is given
again.

It reads all events, one transaction at a time. A task that is requeued and given again in one transaction, or
that moves with its lane, has a later attempt: the next one, or one more for each time that it was given in a
transaction (a master commits in groups). A transaction that rolls the job back, to a checkpoint or to its
beginning, drops what is pending; such tasks are not finished, and finished ones are given once more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from trireme_shared.protocol.keys import Keys
from trireme_shared.protocol.records import JobState, PendingTask, Phase


def _lost_one(held: PendingTask, given: PendingTask) -> bool:
    return given.attempts[0] == held.attempts[0] and set(given.others) < set(held.others)


class TaskChecker:
    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._pending: dict[str, PendingTask] = {}
        self._done: set[tuple[int, str]] = set()
        self._state = JobState()

    def check(self, events: Sequence[dict[str, Any]]) -> Iterator[str]:
        """What is wrong with one transaction."""
        goes_back = self._goes_back(events)
        if goes_back:
            self._done.clear()
        pending, back = self._keys.pending(""), (self._keys.requeued(""), self._keys.discarded(""))
        kept = set()
        for event in events:
            key = event["kv"]["key"].decode()
            if event.get("type") != "DELETE" and key.startswith(back):
                kept.add(self._keys.name_of(key).partition("@")[0])
        for event in events:
            key = event["kv"]["key"].decode()
            if not key.startswith(pending):
                continue
            task_id = self._keys.name_of(key)
            held = self._pending.get(task_id)
            if event.get("type") == "DELETE":
                del self._pending[task_id]
                if task_id not in kept and held is not None:
                    self._done.add((held.epoch, task_id))
                continue
            given = PendingTask.model_validate_json(event["kv"]["value"])
            # put back and given again in one transaction, taken over with its lane, or given twice: a later
            # attempt; else an earlier attempt has ended, and the newest goes on
            if held is not None and given.attempt <= held.attempt and not _lost_one(held, given):
                yield (
                    f"task {task_id} is at {held.trainer} (attempt {held.attempt}) and given to "
                    f"{given.trainer} ({given.attempt})"
                )
            if (given.epoch, task_id) in self._done:
                yield (
                    f"task {task_id} of epoch {given.epoch} was finished and is given again, to "
                    f"{given.trainer}"
                )
            self._pending[task_id] = given
        if goes_back:
            self._done.clear()

    def _goes_back(self, events: Sequence[dict[str, Any]]) -> bool:
        """Whether another timeline begins, or the rollback to it ends: queues are written in both."""
        for event in events:
            if event["kv"]["key"].decode() == self._keys.state and event.get("type") != "DELETE":
                before, self._state = self._state, JobState.model_validate_json(event["kv"]["value"])
                return before.timeline != self._state.timeline or before.phase is Phase.ROLLING_BACK
        return False
