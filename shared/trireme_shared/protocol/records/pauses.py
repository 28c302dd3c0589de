"""The records of a paused checkpoint of an asynchronous job, and of the updates a job has lost.

trainers/pause, job/state: saving --every trainer has paused--> cut --every pserver has copied--> confirmed, pause gone
"""

from __future__ import annotations

from pydantic import Field

from trireme_shared.protocol.records.record import Message, Record


class Saving(Record):
    """In the job's state: checkpoint `uuid` (number `step` of the job) is being made. `cut`: all trainers have paused, copy now.
    `operation`: the one that requested it, or was running. `left_out`: trainers that did not pause in time; they are no members
    until the pause is over. `evaluation`, `minibatches`: see CheckpointCut."""

    uuid: str
    step: int
    cut: bool = False
    operation: str = ""
    left_out: tuple[str, ...] = ()
    evaluation: int = 0
    minibatches: int = 0


class Pause(Record):
    """`trainers/pause`: stop after a minibatch; continue when the key is gone. The master's lease holds it, so the master's death
    ends the pause too."""

    uuid: str
    generation: int
    reason: str


class Paused(Record):
    """In `trainers/<id>`: the trainer has paused, all its pushes are acknowledged, and its reader stands here.

    `minibatch`: the next one of the task. `offset`: its first record, counted from the start of `file`. Without a task there is no
    file.
    """

    uuid: str
    epoch: int = 0
    task_id: str = ""
    attempt: int = 0
    minibatch: int = 0
    file: str = ""
    offset: int = 0


class Losses(Record):
    """`tasks/losses`: for each parameter server (its index as text) the minibatches of closed tasks that its blocks never got.
    `lost`: its process came back from an older checkpoint. `skipped`: it could not be reached."""

    lost: dict[str, int] = Field(
        default_factory=dict,
        description="By index of a parameter server: minibatches lost because it came back from an older checkpoint.",
    )
    skipped: dict[str, int] = Field(
        default_factory=dict,
        description="By index of a parameter server: minibatches left out because it could not be reached.",
    )

    def with_lost(self, index: int, lost: int, skipped: int) -> Losses:
        """With new counts for pserver `index` in place of the old ones."""
        return Losses(lost=_set(self.lost, index, lost), skipped=_set(self.skipped, index, skipped))

    def with_skipped(self, skipped: dict[str, int]) -> Losses:
        """With these skipped minibatches added."""
        grown = self
        for index, count in skipped.items():
            grown = Losses(lost=grown.lost, skipped=_set(grown.skipped, index, grown.skipped.get(index, 0) + count))
        return grown


def _set(counts: dict[str, int], index: int | str, count: int) -> dict[str, int]:
    """Counts of zero are left out."""
    rest = {key: value for key, value in counts.items() if key != str(index)}
    return dict(sorted((rest | {str(index): count}).items())) if count else rest


class Torn(Record):
    """A step of `timeline` mixes data of a discarded task with data that replaced it. The job goes back to a checkpoint."""

    timeline: int
    cause: Message
