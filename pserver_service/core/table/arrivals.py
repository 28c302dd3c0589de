"""Asynchronous: rows of a push are applied when they arrive, to each slot once.

push of minibatches [start, end) ─► due by the ledger of their slots ─► applied, entered ─► the next version of the tables
                                                              `─► frozen: MOVING, and nothing has happened

A push counts for all slots, also for those without an id in it: whoever asks the ledger which minibatches are there hears the same of all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from pserver_service.core.admission import Push
from pserver_service.core.ledger import Ledger
from shared.tables.hashing import Ids, slots_of
from shared.tables.payload import Rows
from shared.wire.verdict import Verdict

if TYPE_CHECKING:
    from pserver_service.core.table.rows import TableRows  # loads numba

_COUNTED = (Verdict.APPLIED, Verdict.DUPLICATE)


def every_slot(slot_count: int) -> int:
    """As bits."""
    return (1 << slot_count) - 1


def bits_of(slots: Iterable[int]) -> int:
    return sum(1 << slot for slot in set(slots))


def take_arrived(
    rows: TableRows, ledger: Ledger, push: Push, ids: Sequence[Ids], gradients: Sequence[Rows], count: int
) -> Verdict:
    """In place: `rows` and `ledger`. `ids`, `gradients`: of each table, of slots that are here. `count`: records that the gradients are of. DUPLICATE: all
    slots have the minibatches; MOVING: some lack them, and no row takes any now; another refusal: some of them do not take them, the others have
    taken them."""
    verdicts = [ledger.judge(push.header, push.task, position) for position in ledger.rows]
    due = [place for place, verdict in enumerate(verdicts) if verdict is Verdict.APPLIED]
    if due and rows.frozen:
        return Verdict.MOVING
    if due:
        if len(due) < len(verdicts):
            ids, gradients = _of_slots(rows, [ledger.slots[place] for place in due], ids, gradients)
        rows.apply(ids, gradients, count, push.header.lane_zero)
        for place in due:
            ledger.enter(push.header, push.task, ledger.rows[place])
    refused = next((verdict for verdict in verdicts if verdict not in _COUNTED), None)
    return refused or (Verdict.APPLIED if due else Verdict.DUPLICATE)


def _of_slots(
    rows: TableRows, groups: Collection[int], ids: Sequence[Ids], gradients: Sequence[Rows]
) -> tuple[list[Ids], list[Rows]]:
    """Those of these slots (bits)."""
    bits = 0
    for group in groups:
        bits |= group
    own = np.array([bits >> slot & 1 for slot in range(rows.slot_count)], np.bool_)
    chosen = [
        own[slots_of(some, table.spec.seed, rows.slot_count)] for some, table in zip(ids, rows.tables, strict=True)
    ]
    return (
        [some[there] for some, there in zip(ids, chosen, strict=True)],
        [some[there] for some, there in zip(gradients, chosen, strict=True)],
    )
