"""Readers: the records of a task, as minibatches and batches.

open_dataset(spec.dataset).read(task.file, task.first, task.count, task.offset) ──► Shard
shard.minibatch(minibatch_indices(seed, epoch, task, len(shard), size, number, shuffle=…)) ──► default_collate ──► batch
"""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_never

from trainer_agent.data.arrays import BytesReader, NpyReader
from trainer_agent.data.collate import default_collate
from trainer_agent.data.images import ImageFolderReader
from trainer_agent.data.in_code import CustomReader, IterableStyleReader, MapStyleReader
from trainer_agent.data.lines import LineReader
from trainer_agent.data.reader import Blaming, Reader, TypedByFirstRecord
from trainer_agent.data.record_files import RecordIOReader, TFRecordReader, WebDatasetReader
from trainer_agent.data.shard import Minibatch, Shard, evaluation_seed, minibatch_in, minibatch_indices, minibatches_in
from trireme_shared.datasets.dataset_files import CountedFiles
from trireme_shared.protocol.records.datasets import (
    Bytes,
    Csv,
    Custom,
    Dataset,
    HuggingFace,
    ImageFolder,
    IterableStyle,
    JsonLines,
    MapStyle,
    Npy,
    Parquet,
    RecordIO,
    TextLines,
    TFRecord,
    WebDataset,
)

__all__ = [
    "Blaming",
    "Minibatch",
    "Reader",
    "Shard",
    "default_collate",
    "evaluation_seed",
    "minibatch_in",
    "minibatch_indices",
    "minibatches_in",
    "open_dataset",
]


def open_dataset(dataset: Dataset, seed: int = 0, changed: Callable[[str], object] | None = None) -> Blaming:
    """The reader of a dataset. `seed`: of the job, for random numbers that the user's own readers and objects draw. `changed`: is told of a file
    that is not the counted one, which is then read all the same; None: it is refused. Nothing is opened yet. Raises DatasetError if a Custom reader
    cannot be imported."""
    reader = _reader_of(dataset, seed)
    if isinstance(dataset, Custom | MapStyle | IterableStyle):
        reader = TypedByFirstRecord(dataset, reader)
    return Blaming(reader, CountedFiles(dataset), changed)


def _reader_of(dataset: Dataset, seed: int) -> Reader:
    match dataset:
        case Parquet():
            from trainer_agent.data.parquet import ParquetReader  # noqa: PLC0415  pyarrow only where it is needed

            return ParquetReader(dataset)
        case Csv():
            from trainer_agent.data.arrow import CsvReader  # noqa: PLC0415

            return CsvReader(dataset)
        case TextLines() | JsonLines():
            return LineReader(dataset)
        case Bytes():
            return BytesReader(dataset)
        case Npy():
            return NpyReader(dataset)
        case Custom():
            return CustomReader(dataset, seed)
        case MapStyle():
            return MapStyleReader(dataset, seed)
        case IterableStyle():
            return IterableStyleReader(dataset, seed)
        case TFRecord():
            return TFRecordReader(dataset)
        case RecordIO():
            return RecordIOReader(dataset)
        case WebDataset():
            return WebDatasetReader(dataset)
        case HuggingFace():
            from trainer_agent.data.arrow import HuggingFaceReader  # noqa: PLC0415

            return HuggingFaceReader(dataset)
        case ImageFolder():
            return ImageFolderReader(dataset)
        case _:
            assert_never(dataset)
