"""scikit-learn's handwritten digits (1797 images, 8 x 8, bundled with the package) as Parquet files.

    data/train-0.parquet ... train-2.parquet   4 of 5 images, in row groups of 120
    data/test.parquet                          each fifth image

Deterministic; any number of processes may prepare the same folder at once.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

TRAIN_FILES = 3
ROW_GROUP_ROWS = 120


def prepare(folder: Path) -> Path:
    """Write the files that do not exist yet; returns the folder."""
    names = [*(f"train-{number}.parquet" for number in range(TRAIN_FILES)), "test.parquet"]
    if all((folder / name).exists() for name in names):
        return folder
    from sklearn.datasets import load_digits  # noqa: PLC0415  a second to import, needed once

    digits = load_digits()
    pixels = (digits.data / 16.0).astype(np.float32)
    labels = digits.target.astype(np.int64)
    is_test = np.arange(len(labels)) % 5 == 4
    train = np.array_split(np.flatnonzero(~is_test), TRAIN_FILES)
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in zip(names, [*train, np.flatnonzero(is_test)], strict=True):
        columns = {
            "pixels": pa.FixedSizeListArray.from_arrays(pa.array(pixels[rows].reshape(-1)), pixels.shape[1]),
            "label": pa.array(labels[rows]),
        }
        temporary = folder / f".{name}.{os.getpid()}.tmp"
        pq.write_table(pa.table(columns), temporary, row_group_size=ROW_GROUP_ROWS)
        temporary.replace(folder / name)
    return folder


def read(folder: Path, names: str) -> list[dict[str, Any]]:
    """All records of the files, for loops without Trireme."""
    table = pa.concat_tables(pq.read_table(path) for path in sorted(folder.glob(names)))
    pixels = np.array(table["pixels"].combine_chunks().flatten()).reshape(-1, 64)
    return [
        {"pixels": row, "label": label} for row, label in zip(pixels, table["label"].to_pylist(), strict=True)
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parent / "data")
    print(prepare(parser.parse_args().folder))
