"""A checkpoint of which this process has written its part, and the manifest that it gets once all parts are there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from trireme_shared.checkpoints import stored
from trireme_shared.checkpoints.async_cut import Cut
from trireme_shared.protocol.evaluations import evaluation_of, evaluations_before, results_count
from trireme_shared.protocol.records import JobSpec, Mode, SlotMap
from trireme_shared.protocol.records.checkpoints import CheckpointPart, Manifest
from trireme_shared.protocol.records.layout import Layout
from trireme_shared.protocol.records.step import StepRecord


@dataclass(frozen=True, slots=True)
class PendingCheckpoint:
    """A checkpoint with this process's part, which `index` names, and what its manifest says beside the parts. `cut`: of a paused one."""

    uuid: str
    index: int
    file: str
    timeline: int
    slots: SlotMap
    layout: Layout
    mode: Mode
    lanes: int
    record: StepRecord
    restored: str
    cut: Cut | None = None

    @property
    def order(self) -> tuple[int, int]:
        return self.timeline, self.record.version

    @property
    def operation(self) -> str:
        """The operation that asked for it, or was under way; "" if there was none."""
        if self.cut is not None:
            return self.cut.operation
        return self.record.asked.operation if self.record.asked is not None else ""

    def evaluation(self, spec: JobSpec) -> int:
        """Number of the evaluation that is due at its version; 0: none."""
        if self.cut is not None:
            return self.cut.evaluation
        return evaluation_of(self.record, spec.evaluate_every, spec.epochs) or 0

    def evaluated_before(self, spec: JobSpec) -> int | None:
        """How many evaluations are due at versions before it, if the job's result depends on them; else None."""
        return evaluations_before(self.record, spec.evaluate_every) if results_count(spec) else None

    def manifest(
        self, job: str, spec: JobSpec, parts: Iterable[CheckpointPart], *, term: int, generation: int, timestamp: str
    ) -> Manifest:
        return Manifest(
            job=job,
            uuid=self.uuid,
            step=self.record.version,
            timeline=self.timeline,
            term=term,
            generation=generation,
            mode=self.mode,
            lanes=self.lanes,
            seed=spec.seed,
            spec_digest=stored.spec_digest(spec),
            timestamp=timestamp,
            slots=self.slots,
            layout=self.layout,
            record=self.record,
            parts=tuple(parts),
            queue=self.cut.queue if self.cut is not None else {},
            readers=self.cut.readers if self.cut is not None else {},
            evaluation=self.cut.evaluation if self.cut is not None else 0,
        )
