"""The user's own reader, by name."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile

from trainer_agent.data.drawing import Drawing
from trainer_agent.data.reader import too_short
from trainer_agent.data.shard import Record, RecordShard, Shard
from trireme_shared.datasets.user_modules import load_custom
from trireme_shared.platform.storage.files import trouble_in_user_code
from trireme_shared.protocol.errors import DatasetError, InvalidArgument, is_interrupt
from trireme_shared.protocol.records.datasets import Custom


class CustomReader:
    """`seed`: of the job."""

    def __init__(self, dataset: Custom, seed: int) -> None:
        self._name = dataset.reader
        self._reader = load_custom(dataset.reader)
        self._drawing = Drawing(dataset.reader, seed)

    def read(self, file: str, first: int, count: int, offset: int | None = None) -> Shard:  # noqa: ARG002
        source: Iterator[Record] | None = None

        def record(_: int) -> Record | None:
            nonlocal source
            if source is None:  # a reader may read all of its records here
                source = iter(self._reader.read(file, first, count))
            return next(source, None)

        try:
            made = self._drawing.each(file, range(first, first + count), record)
            records = [found for found in takewhile(lambda found: found is not None, made) if found is not None]
        except BaseException as error:  # the user's code may raise anything
            if is_interrupt(error) or isinstance(error, InvalidArgument):
                raise
            if (trouble := trouble_in_user_code(error, file)) is not None:
                raise trouble from error
            msg = f"{self._name}.read({file!r}, {first}, {count}) failed: {type(error).__name__}: {error}"
            raise DatasetError(msg, hint="correct the reader", url=file) from error
        if len(records) < count:
            raise too_short(file, first, count, first + len(records))
        return RecordShard(records)
