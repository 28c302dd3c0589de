"""What waits at a parameter server for the norm of a step's whole gradient, in jobs that clip.

    blocks: all data is there -> held, not stepped ──norm──> stepped, the version's record is made
    rows of tables, which nothing clips: stepped ──norm──> the version's record is made

So whoever tells a version, commits it or hands it over knows the norm that made it. A pull that finds anything waiting ends with HELD, and comes
again with the norm.
"""

from __future__ import annotations

from shared.serving.core.store import Store
from shared.wire.messages import StepNorm


def learn_norm(store: Store, told: StepNorm | None, timeline: int) -> None:
    """For what is held in that step of `timeline`, the job's. Raises InvalidArgument."""
    if told is None or told.timeline != timeline or not store.clipping.holds:
        return
    if told.step == store.held_step or do_rows_wait(store, told.step + 1):
        store.clipping.check(told.step, told.norm)
        store.history.learn_norm(told.step, told.norm)


def settle(store: Store, number: int) -> bool:
    """Step a block that is held, if the norm is known; answers whether it was stepped."""
    state = store.blocks[number]
    norm = store.history.norm(state.version) if state.held else None
    if norm is None:
        return False
    state.settle(store.clipping.factor(norm), store.options(state.version, state.place))
    store.stepped(state)
    return True


def do_rows_wait(store: Store, version: int | None) -> bool:
    """Whether the rows have made this version, and it has no record yet."""
    rows = store.rows
    made = rows is not None and store.clipping.holds and rows.version == version
    return made and version is not None and store.history.record(version) is None


def settle_rows(store: Store) -> bool:
    """Make the record of the version that the rows have made, unless that waits for the norm; answers whether it was made."""
    rows = store.rows
    if rows is None or (store.clipping.holds and store.history.norm(rows.version - 1) is None):
        return False
    store.stepped(rows)
    return True
