"""The headers of pushed blocks on a stream."""

from __future__ import annotations

from functools import lru_cache

from shared.lanes import Interval
from shared.wire import codec
from shared.wire.lending import Place
from shared.wire.messages import PushBlock


@lru_cache(maxsize=codec.KNOWN_HEADERS)
def head_of(
    number: int, block: int, lanes: Interval, samples: int, dtype: str | None, size: int, at: Place | None
) -> bytes:
    """What precedes a pushed block; the same in every step."""
    fields: codec.Fields = {"id": number, "block": block, "lanes": lanes, "count": samples}
    return codec.encode_block(fields | ({"dtype": dtype} if dtype else {}) | ({"at": at} if at else {}), size)


def fields_of(number: int, item: PushBlock) -> codec.Fields:
    """Of a block with a result or a version, or of rows; Record.model_dump takes three times as long."""
    fields: codec.Fields = {"id": number, "block": item.block, "lanes": item.lanes, "count": item.count}
    if (result := item.result) is not None:
        fields["result"] = {
            "loss_sum": result.loss_sum,
            "records": result.records,
            "skipped": result.skipped,
            "metrics": result.metrics,
        }
    if item.version is not None:
        fields["version"] = item.version
    if item.rows is not None:
        fields |= {"rows": item.rows, "slots": item.slots}
    return fields | ({"dtype": item.dtype} if item.dtype else {})
