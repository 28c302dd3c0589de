"""The user's own reader, by name."""

from __future__ import annotations

from itertools import islice

from shared.datasets.custom_reader import load_custom
from shared.errors import DatasetError, is_interrupt
from shared.records.datasets import Custom
from shared.storage.trouble import trouble_in_user_code
from trainer_agent.data.reader import too_short
from trainer_agent.data.shard import RecordShard, Shard


class CustomReader:
    def __init__(self, dataset: Custom) -> None:
        self._name = dataset.reader
        self._reader = load_custom(dataset.reader)

    def read(self, file: str, first: int, count: int, offset: int | None = None) -> Shard:  # noqa: ARG002
        try:
            records = list(islice(self._reader.read(file, first, count), count))
        except BaseException as error:  # the user's code may raise anything
            if is_interrupt(error):
                raise
            if (trouble := trouble_in_user_code(error, file)) is not None:
                raise trouble from error
            msg = f"{self._name}.read({file!r}, {first}, {count}) failed: {type(error).__name__}: {error}"
            raise DatasetError(msg, hint="correct the reader", url=file) from error
        if len(records) < count:
            raise too_short(file, first, count, first + len(records))
        return RecordShard(records)
