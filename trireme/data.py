"""The datasets a script's `dataset()` may return: `trireme.data.Parquet("train-*.parquet")`. They only
describe a dataset: no file is opened, and neither torch nor pyarrow is loaded."""

from __future__ import annotations

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
    "Bytes",
    "Csv",
    "Custom",
    "Dataset",
    "HuggingFace",
    "ImageFolder",
    "IterableStyle",
    "JsonLines",
    "MapStyle",
    "Npy",
    "Parquet",
    "RecordIO",
    "TFRecord",
    "TextLines",
    "WebDataset",
]
