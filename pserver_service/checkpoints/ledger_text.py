"""A ledger inside a part of a checkpoint: text in the file's metadata, under the file's checksum.

Blocks are named by their position in `SavedPart.blocks`; behind them come groups of slots with rows of
embedding tables (`rows`, bits in hexadecimal). A value that is the same for all of them is written once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from trireme_shared.blocks.snapshot import Snapshot
from trireme_shared.protocol.errors import BadFrame
from trireme_shared.protocol.records.layout import ROWS
from trireme_shared.protocol.wire.messages import EpochLedger
from trireme_shared.serving.core.ledger import AsyncSnapshot, SavedEpoch, SavedLedger, SavedTask

LEDGER = "ledger"


def ledger_metadata(snapshot: Snapshot) -> dict[str, str]:
    """What an asynchronous part says of its ledger; nothing for a synchronous one."""
    if not isinstance(snapshot, AsyncSnapshot):
        return {}
    return {LEDGER: to_text(snapshot.ledger, [number for number in snapshot.blocks if number != ROWS])}


def to_text(ledger: SavedLedger, blocks: Sequence[int]) -> str:
    """With the numbers of the blocks, in the order of their positions."""
    document = {
        "blocks": list(blocks),
        "rows": [f"{bits:x}" for bits in ledger.slots],
        "epochs": {
            str(epoch): {
                "applied": _short(saved.applied),
                "open": {
                    str(task): [entry.minibatches, _short(entry.next)] for task, entry in saved.open.items()
                },
                "closed": {str(chunk): f"{bits:x}" for chunk, bits in saved.closed.items()},
                "duplicates": saved.duplicates,
            }
            for epoch, saved in ledger.epochs.items()
        },
        "old": [entry.model_dump() for entry in ledger.old],
    }
    return json.dumps(document, separators=(",", ":"))


def from_text(text: str) -> tuple[SavedLedger, tuple[int, ...]]:
    """The ledger and its blocks. Raises BadFrame."""
    try:
        document = json.loads(text)
        blocks = tuple(int(number) for number in document["blocks"])
        slots = tuple(int(bits, 16) for bits in document.get("rows", ()))
        epochs = {
            int(epoch): _epoch(saved, len(blocks) + len(slots)) for epoch, saved in document["epochs"].items()
        }
        old = tuple(EpochLedger.model_validate(entry) for entry in document["old"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        msg = f"the ledger of {len(text)} characters cannot be read: {error!r}"
        raise BadFrame(msg) from error
    return SavedLedger(epochs, old, slots), blocks


def _epoch(saved: Mapping[str, Any], positions: int) -> SavedEpoch:
    return SavedEpoch(
        applied=_long(saved["applied"], positions),
        open={
            int(task): SavedTask(int(entry[0]), _long(entry[1], positions))
            for task, entry in saved["open"].items()
        },
        closed={int(chunk): int(bits, 16) for chunk, bits in saved["closed"].items()},
        duplicates=int(saved["duplicates"]),
    )


def _short(values: Sequence[int]) -> list[int] | int:
    return values[0] if len(set(values)) == 1 else list(values)


def _long(value: Any, positions: int) -> tuple[int, ...]:
    values = (int(value),) * positions if isinstance(value, int) else tuple(int(each) for each in value)
    if len(values) != positions:
        msg = f"{len(values)} values for {positions} blocks and groups of slots"
        raise ValueError(msg)
    return values
