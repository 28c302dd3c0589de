"""Data like Criteo's, of any size: who clicks on what, 26 fields of ids and 13 numbers a sample.

    python benchmarks/scripts/ctr_synthetic.py FOLDER [--samples 1000000] [--test-samples 100000] [--rows
    20000000] [--zipf 1.1] [--seed 0]

    FOLDER/train-00000.parquet, ...    ids: 26 int64; dense: 13 float32; clicked: 0 or 1, float32
    FOLDER/test-00000.parquet, ...     the same, of other samples
    FOLDER/about.json                  all settings, rows of each field, rate of clicks, the ceiling of AUC

`--rows` ids are divided over the fields as Criteo's are: some fields have millions, some have three. Within a
field ids follow Zipf's law, and popular ones are anywhere. No id is in two fields, so one table can hold all.

Labels come from a planted model: a weight and a vector for each id, a pure function of (seed, id), whose
products in pairs add up as in a factorization machine, and a linear part of the numbers with one product of
two of them. A sample is clicked with the probability that this model says. So nobody can rank samples better
than by that probability: the AUC of doing so is the ceiling, and is printed.

Samples are made and written in pieces: memory does not depend on how many there are. The same arguments give
the same samples.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

FIELDS, DENSE = 26, 13
CRITEO = (  # ids of each field in Criteo's public data set
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
LEAST, MOST_ROWS = 2, 1 << 31
PIECE = 1 << 16  # samples made at once; a row group of a file
PIECES_IN_FILE = 16
VECTOR = 3
SPREAD = 2_654_435_761  # a prime: times a number of an id, modulo their count, gives each id once
# of weights, of products of vectors; chosen for about 0.8 and a click of four
SCALE, PAIRS, BIAS = 0.16, 0.02, -1.4
BUCKETS = 1 << 14
PARTS = {"train": 0, "test": 1}


@dataclass(frozen=True)
class About:
    """What decides the samples."""

    seed: int
    zipf: float
    rows: tuple[int, ...]

    @property
    def first(self) -> np.ndarray:
        """int64 (FIELDS,): where each field's ids begin."""
        return np.concatenate([[0], np.cumsum(self.rows)[:-1]])


def rows_of_fields(total: int) -> tuple[int, ...]:
    """About `total` ids, divided as Criteo's."""
    share = total / sum(CRITEO)
    return tuple(max(LEAST, round(count * share)) for count in CRITEO)


def zipf(rng: np.random.Generator, exponent: float, most: int, count: int) -> np.ndarray:
    """int64 (count,) in [1, most], each k with a chance proportional to k ** -exponent. Rejection-inversion
    (Hörmann and Derflinger 1996): no table of `most` numbers. exponent > 0."""
    flat = abs(exponent - 1) < 1e-9

    def area(x):
        return np.log(x) if flat else np.expm1((1 - exponent) * np.log(x)) / (1 - exponent)

    def inverse(y):
        return np.exp(y) if flat else np.exp(np.log1p(y * (1 - exponent)) / (1 - exponent))

    low, high = area(1.5) - 1, area(most + 0.5)
    sure = 2 - inverse(area(2.5) - 2.0**-exponent)
    found: list[np.ndarray] = []
    missing = count
    while missing:
        u = high + rng.random(missing) * (low - high)
        x = inverse(u)
        k = np.clip(np.floor(x + 0.5), 1, most)
        taken = k[(k - x <= sure) | (u >= area(k + 0.5) - k**-exponent)]
        found.append(taken)
        missing -= len(taken)
    return np.concatenate(found).astype(np.int64)


def effects(ids: np.ndarray, seed: int) -> np.ndarray:
    """float32 (*shape, 1 + VECTOR): uniform numbers of mean 0 and variance 1, a pure function of (seed,
    id)."""
    mixed = ids.astype(np.uint64) + np.uint64((seed * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) % 2**64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    mixed ^= mixed >> np.uint64(31)
    parts = mixed[..., None].view(np.uint16)
    return ((parts.astype(np.float32) + 0.5) / 65536 - 0.5) * np.float32(12**0.5)


def scores_of(about: About, ids: np.ndarray, dense: np.ndarray) -> np.ndarray:
    """float32 (n,): the logarithm of the odds of a click. `ids`: int64 (n, FIELDS). `dense`: float32 (n,
    DENSE)."""
    planted = effects(ids, about.seed)
    strength = np.linspace(1.5, 0.5, FIELDS, dtype=np.float32)  # fields matter differently
    vectors = planted[..., 1:] * strength[:, None]
    pairs = (np.square(vectors.sum(1)) - np.square(vectors).sum(1)).sum(1) / 2
    slopes = np.linspace(0.25, -0.25, DENSE, dtype=np.float32)
    numbers = dense @ slopes + np.float32(0.3) * dense[:, 0] * dense[:, 1]
    return BIAS + SCALE * (planted[..., 0] @ strength) + PAIRS * pairs + numbers


def piece(about: About, part: str, number: int, samples: int = PIECE) -> dict[str, np.ndarray]:
    """Samples of one piece: ids, dense, clicked, and the planted `score`."""
    rng = np.random.default_rng((about.seed, PARTS[part], number))
    ranks = np.stack([zipf(rng, about.zipf, most, PIECE) for most in about.rows], axis=1)[:samples]
    places = ((ranks.astype(np.uint64) * np.uint64(SPREAD)) % np.array(about.rows, np.uint64)).astype(
        np.int64
    )
    ids, dense = places + about.first, rng.standard_normal((PIECE, DENSE), np.float32)[:samples]
    score = scores_of(about, ids, dense)
    clicked = (rng.random(PIECE)[:samples] < chance(score)).astype(np.float32)
    return {"ids": ids, "dense": dense, "clicked": clicked, "score": score}


def chance(scores: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-scores.astype(np.float64)))


class Ceiling:
    """Of AUC, over samples that come in pieces. `expected`: of ranking them by their chance, over all labels
    that they could have had; `found`: by the same, with those that they have."""

    def __init__(self) -> None:
        self.samples = 0
        self._chances = np.zeros((2, BUCKETS))  # of no click, of a click, by score
        self._labels = np.zeros((2, BUCKETS))

    def add(self, score: np.ndarray, clicked: np.ndarray) -> None:
        bucket = np.clip((score + 16) * (BUCKETS / 32), 0, BUCKETS - 1).astype(np.int64)
        for sums, weight in ((self._chances, chance(score)), (self._labels, clicked)):
            sums[0] += np.bincount(bucket, 1 - weight, BUCKETS)
            sums[1] += np.bincount(bucket, weight, BUCKETS)
        self.samples += len(score)

    @property
    def rate(self) -> float:
        return float(self._labels[1].sum() / self.samples)

    @property
    def expected(self) -> float:
        return _auc(*self._chances)

    @property
    def found(self) -> float:
        return _auc(*self._labels)


def _auc(others: np.ndarray, clicked: np.ndarray) -> float:
    below = np.cumsum(others) - others / 2
    return float((clicked * below).sum() / (clicked.sum() * others.sum()))


def tables(about: About, part: str, samples: int, ceiling: Ceiling) -> Iterator[pa.Table]:
    for number, first in enumerate(range(0, samples, PIECE)):
        made = piece(about, part, number, min(PIECE, samples - first))
        ceiling.add(made["score"], made["clicked"])
        lists = {"ids": FIELDS, "dense": DENSE}
        columns = {
            name: pa.FixedSizeListArray.from_arrays(pa.array(made[name].reshape(-1)), width)
            for name, width in lists.items()
        }
        yield pa.table({**columns, "clicked": pa.array(made["clicked"])})


def write(folder: Path, part: str, about: About, samples: int) -> Ceiling:
    ceiling, writer = Ceiling(), None
    for number, table in enumerate(tables(about, part, samples, ceiling)):
        if number % PIECES_IN_FILE == 0:
            if writer is not None:
                writer.close()
            name = f"{part}-{number // PIECES_IN_FILE:05}.parquet"
            writer = pq.ParquetWriter(folder / name, table.schema, compression="lz4", use_dictionary=False)
        writer.write_table(table, row_group_size=PIECE)
    if writer is not None:
        writer.close()
    return ceiling


def generate(
    folder: Path, samples: int, test_samples: int, rows: int, exponent: float = 1.1, seed: int = 0
) -> dict:
    """Write all files; returns what about.json says. Raises ValueError."""
    if samples < 1 or test_samples < 1:
        raise ValueError(f"--samples is {samples} and --test-samples {test_samples}: both must be at least 1")
    if not FIELDS * LEAST <= rows <= MOST_ROWS:
        raise ValueError(f"--rows is {rows}: it must be from {FIELDS * LEAST} to {MOST_ROWS}")
    if not 0 < exponent <= 4:
        raise ValueError(f"--zipf is {exponent}: it must be above 0 and at most 4")
    if seed < 0:
        raise ValueError(f"--seed is {seed}: it must not be negative")
    if any(folder.glob("*.parquet")):
        raise ValueError(f"{folder} has Parquet files already: give an empty folder, or remove them")
    folder.mkdir(parents=True, exist_ok=True)
    about = About(seed, exponent, rows_of_fields(rows))
    train, test = (
        write(folder, part, about, count) for part, count in (("train", samples), ("test", test_samples))
    )
    said = asdict(about) | {"total_rows": sum(about.rows), "samples": samples, "test_samples": test_samples}
    said |= {"click_rate": train.rate, "auc_ceiling": test.expected, "auc_of_planted_model": test.found}
    (folder / "about.json").write_text(json.dumps(said, indent=1) + "\n")
    return said


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--test-samples", type=int, default=100_000)
    parser.add_argument("--rows", type=int, default=20_000_000, help="ids of all fields together")
    parser.add_argument("--zipf", type=float, default=1.1, metavar="EXPONENT")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    try:
        said = generate(given.folder, given.samples, given.test_samples, given.rows, given.zipf, given.seed)
    except ValueError as error:
        parser.error(str(error))
    print(
        f"{said['samples']:,} samples and {said['test_samples']:,} for tests, "
        f"{said['total_rows']:,} ids in {FIELDS} fields: {given.folder}\n"
        f"clicked: {said['click_rate']:.3f} of all\n"
        f"ceiling of AUC on the test samples: {said['auc_ceiling']:.4f} (the planted model has "
        f"{said['auc_of_planted_model']:.4f})"
    )


if __name__ == "__main__":
    main()
