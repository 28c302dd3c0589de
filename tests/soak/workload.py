"""What the soak trains: the scripts job.py (examples/charlm) and digits_job.py (examples/digits), their data
and their records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from examples.charlm import corpus
from tests.soak.tally import fingerprint

TEXT_BYTES, CONTEXT = 1 << 15, 128
DIGITS_RECORDS = 512


@dataclass(frozen=True)
class Workload:
    """`prepare` writes the data into a folder; `records`: fingerprints of the records there, as the script
    tells them. `variable` names that folder to the script."""

    script: str
    variable: str
    batch: int
    records_per_task: int
    records_per_epoch: int
    prepare: Callable[[Path], None]
    records: Callable[[Path], Counter[str]]

    @property
    def path(self) -> Path:
        return Path(__file__).with_name(self.script)

    @property
    def steps_per_epoch(self) -> int:
        return self.records_per_epoch // self.batch


def write_text(folder: Path) -> None:
    """What examples/charlm trains on, cut short."""
    for path in corpus.prepare(folder / "whole").values():
        (folder / path.name).write_bytes(path.read_bytes()[:TEXT_BYTES])


def windows(folder: Path) -> Counter[str]:
    text = next(folder.glob("*-train.txt")).read_bytes()
    return Counter(
        fingerprint(text[first : first + CONTEXT + 1]) for first in range(0, len(text) - CONTEXT, CONTEXT)
    )


def write_digits(folder: Path) -> None:
    """scikit-learn's handwritten digits, cut short: DIGITS_RECORDS images. Deterministic."""
    from sklearn.datasets import load_digits  # a second to import, needed once

    found = load_digits()
    pixels = (found.data[:DIGITS_RECORDS] / 16.0).astype(np.float32)
    columns = {
        "pixels": pa.FixedSizeListArray.from_arrays(pa.array(pixels.reshape(-1)), pixels.shape[1]),
        "label": pa.array(found.target[:DIGITS_RECORDS].astype(np.int64)),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name in [*(f"train-{number}.parquet" for number in range(3)), "test.parquet"]:
        rows = slice(0, None, 20) if name == "test.parquet" else slice(int(name[6]), None, 3)
        table = {
            column: values.take(pa.array(range(*rows.indices(DIGITS_RECORDS))))
            for column, values in columns.items()
        }
        pq.write_table(pa.table(table), folder / name, row_group_size=60)


def images(folder: Path) -> Counter[str]:
    found: Counter[str] = Counter()
    for path in folder.glob("train-*.parquet"):
        pixels = pq.read_table(path)["pixels"].combine_chunks().flatten().to_numpy().reshape(-1, 64)
        found.update(fingerprint(row.tobytes()) for row in pixels)
    return found


CHARLM = Workload("job.py", "CHARLM_DATA", 8, 16, TEXT_BYTES // CONTEXT, write_text, windows)
DIGITS_JOB = Workload("digits_job.py", "DIGITS_DATA", 16, 32, DIGITS_RECORDS, write_digits, images)
WORKLOADS: Mapping[str, Workload] = {"charlm": CHARLM, "digits": DIGITS_JOB}
