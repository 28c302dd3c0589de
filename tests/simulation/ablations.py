"""Safeguards, each of which can be switched off: the simulation must then find a broken promise (style.md,
17).

Each is the product's own small function, replaced while the block runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from master_service.core.changes import DropPending
from master_service.core.queue.task_queue import TaskQueue
from master_service.core.state.series import WholeSteps
from master_service.masterless.shared_job import SharedWriter
from master_service.store.writer import MasterWriter
from tests.equipment.replaced import replaced
from trainer_agent.data_plane.row_lookups import RowRouter
from trireme_shared.blocks.buffers import Buffer
from trireme_shared.checkpoints import schedule, stored
from trireme_shared.protocol.records import StepMetrics
from trireme_shared.protocol.records.layout import ROWS
from trireme_shared.protocol.wire.messages import PushHeader, Verdict
from trireme_shared.serving.block_server import BlockServer
from trireme_shared.serving.core.blocks import Accumulator, BlockState
from trireme_shared.serving.core.calls import OpenPull
from trireme_shared.serving.core.history import Results
from trireme_shared.serving.core.ledger import Ledger
from trireme_shared.serving.core.store import Store
from trireme_shared.serving.core.table.rows import TableRows
from trireme_shared.serving.pserver import Pserver
from trireme_shared.serving.table_loader import TableLoader
from trireme_shared.tables.memory import Numbers
from trireme_shared.tables.snapshot import SlotGroup, TableSnapshot, new_lock
from trireme_shared.tables.table import Table, joined


def no_term_fence() -> Any:
    """A master writes whether or not it still holds the lock."""
    return replaced(MasterWriter, "fence", lambda *_: [])


def no_commit_chain() -> Any:
    """A trainer of a masterless job writes whether or not somebody else committed since it decided."""
    return replaced(SharedWriter, "fence", lambda _, lock: [lock.compare()] if lock else [])


def no_attempt_fence() -> Any:
    """Any report about a task is taken, whoever sends it and however late."""
    apply, sign_of_life = TaskQueue.apply, TaskQueue.sign_of_life

    def applied(self: TaskQueue, change: Any, now: float) -> None:
        if not (isinstance(change, DropPending) and change.task_id not in self.pending):
            apply(self, change, now)

    def seen(self: TaskQueue, task_id: str, *report: Any) -> bool:
        return task_id in self.pending and sign_of_life(self, task_id, *report)

    return _both(
        replaced(TaskQueue, "check_attempt", lambda *_: None),
        replaced(TaskQueue, "apply", applied),
        replaced(TaskQueue, "sign_of_life", seen),
    )


def no_generation_fence() -> Any:
    """Pushes of trainers that were put out are applied."""
    return replaced(BlockServer, "is_stale", lambda *_: False)


def no_tree_dedup() -> Any:
    """A node that is in the tree already is added again."""
    return replaced(Accumulator, "covers", lambda *_: False)


def no_ledger_dedup() -> Any:
    """A minibatch that a block has is applied to it again; the ledger itself stays as it is."""
    judge, enter = Ledger.judge, Ledger.enter

    def judged(self: Ledger, push: PushHeader, task: int, block: int) -> Verdict:
        verdict = judge(self, push, task, block)
        return Verdict.APPLIED if verdict is Verdict.DUPLICATE else verdict

    def entered(self: Ledger, push: PushHeader, task: int, block: int) -> None:
        detail = self.detail_of(push.epoch)
        if detail is not None and task in detail.open and detail.open[task].next[block] == push.start:
            enter(self, push, task, block)

    return _both(replaced(Ledger, "judge", judged), replaced(Ledger, "enter", entered))


def no_saved_ledger() -> Any:
    """A parameter server comes back with its values, and forgets which minibatches are in them."""

    def loaded(cls: type[Ledger], blocks: Sequence[Any], rows: Sequence[tuple[Any, int, int]] = ()) -> Ledger:
        return cls(len(blocks), [bits for _, _, bits in rows])

    return replaced(Ledger, "loaded", classmethod(loaded))


def no_previous_version() -> Any:
    """A block keeps only its newest values."""
    pull = BlockState.pull

    def pulled(self: BlockState, version: int) -> Buffer | Verdict:
        return pull(self, version) if version >= self.version else Verdict.GONE

    return replaced(BlockState, "pull", pulled)


def no_kept_results() -> Any:
    """Parameter servers forget a step's result with its version."""
    return _both(replaced(Results, "portion", lambda *_: ()), replaced(Results, "of", lambda *_: ()))


def no_order_of_steps() -> Any:
    """A master takes whatever steps it is told, known ones again and with gaps."""

    def portion(self: WholeSteps, steps: Sequence[StepMetrics], _: int | None) -> Sequence[StepMetrics]:
        self.next = max([self.next, *(share.step + 1 for share in steps)])
        return steps

    return replaced(WholeSteps, "portion", portion)


def no_lanes_without_ids() -> Any:
    """A lane whose push has no ids counts as missing."""
    push = TableRows.push

    def pushed(self: TableRows, step: int, lane: int, ids: Any, gradients: Any, count: int) -> Verdict:
        there = any(len(some) for some in ids)
        return push(self, step, lane, ids, gradients, count) if there else Verdict.DUPLICATE

    return replaced(TableRows, "push", pushed)


def no_rows_before_the_ledger() -> Any:
    """Asynchronous: the ledger advances although the rows of the minibatch were not applied."""
    apply = TableRows.apply

    def applied(self: TableRows, ids: Sequence[Any], gradients: Sequence[Any], *more: Any) -> Any:
        return apply(self, [some[:0] for some in ids], [some[:0] for some in gradients], *more)

    return replaced(TableRows, "apply", applied)


def no_pushes_without_rows() -> Any:
    """Asynchronous: a parameter server hears nothing of a minibatch that has no rows there."""
    parts = RowRouter.row_parts

    def some(self: RowRouter, routes: Any, lane: Any) -> Any:
        return {index: part for index, part in parts(self, routes, lane).items() if any(part.counts)}

    return replaced(RowRouter, "row_parts", some)


def no_rows_in_checkpoints() -> Any:
    """Checkpoints have the blocks alone."""
    return replaced(
        TableLoader, "load", lambda self, url, part, other: stored.read_part(url, self.ref, part, other)
    )


def no_kept_chains() -> Any:
    """What a kept checkpoint builds on is deleted as any other."""
    return replaced(schedule, "chain_of", lambda ref, _: {ref.uuid})


def no_wait_for_rows() -> Any:
    """A pull ends when its blocks are there, whatever the tables have."""
    begun = OpenPull.__init__

    def without(self: OpenPull, *arguments: Any) -> None:
        begun(self, *arguments)
        self.stepped(ROWS, self.version or 0)

    return replaced(OpenPull, "__init__", without)


def no_rows_of_the_version_before() -> Any:
    """A lookup at the version before reads the newest rows."""
    lookup = Table.lookup
    return replaced(Table, "lookup", lambda self, ids, out, version=None: lookup(self, ids, out))


def no_roll_back_of_rows() -> Any:
    """A parameter server that the job's way back finds alive keeps the rows that it has."""
    drop, restore = Pserver.drop, Pserver.restore
    kept: WeakKeyDictionary[Pserver, list[Table]] = WeakKeyDictionary()

    def dropped(self: Pserver, generation: int) -> None:
        if self.store is not None and self.store.rows is not None:
            kept[self] = self.store.rows.tables
        drop(self, generation)

    def restored(self: Pserver, store: Store, timeline: int, checkpoint: str) -> None:
        if store.rows is not None and self in kept:
            for table in kept[self]:
                table.start_at(store.rows.version)
            store.rows.tables = kept[self]
        restore(self, store, timeline, checkpoint)

    return _both(replaced(BlockServer, "drop", dropped), replaced(Pserver, "restore", restored))


def no_copy_on_write() -> Any:
    """A checkpoint has rows as they are when they are written, not as they were at its version."""

    class WithoutCopies(TableSnapshot):
        def __init__(self, table: Table, lock: Any) -> None:
            super().__init__(table, lock)
            self.table = table

        def records(self, group: SlotGroup, into: memoryview | None = None) -> tuple[Numbers, bool]:
            records, finite = super().records(group, into)
            now = joined([self.table.read_slot(slot) for slot in range(group.first, group.last)], self.width)
            content = dict(zip(now.ids.tolist(), now.content, strict=True))
            for record in records:
                if (there := content.get(int(record[0]))) is not None:
                    record.view(np.float32)[4 : 4 + self.width] = there
            return records, finite

    return replaced(
        TableRows, "copies", lambda self: [WithoutCopies(table, new_lock()) for table in self.tables]
    )


def _both(*blocks: contextlib.AbstractContextManager[None]) -> contextlib.ExitStack:
    stack = contextlib.ExitStack()
    for block in blocks:
        stack.enter_context(block)
    return stack


ABLATIONS: dict[str, Callable[[], Any]] = {
    "term": no_term_fence,
    "commit chain": no_commit_chain,
    "attempt": no_attempt_fence,
    "generation": no_generation_fence,
    "tree": no_tree_dedup,
    "ledger": no_ledger_dedup,
    "saved ledger": no_saved_ledger,
    "results": no_kept_results,
    "order of steps": no_order_of_steps,
    "lanes without ids": no_lanes_without_ids,
    "rows before the ledger": no_rows_before_the_ledger,
    "pushes without rows": no_pushes_without_rows,
    "rows in checkpoints": no_rows_in_checkpoints,
    "wait for rows": no_wait_for_rows,
    "rows of the version before": no_rows_of_the_version_before,
    "roll-back of rows": no_roll_back_of_rows,
    "kept chains": no_kept_chains,
}
