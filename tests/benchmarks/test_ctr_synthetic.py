"""Samples follow what about.json says: the planted model reaches the ceiling and nobody exceeds it, ids
follow Zipf's law, memory stays the same."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from benchmarks.scripts.ctr_synthetic import (
    CRITEO,
    FIELDS,
    PIECE,
    About,
    Ceiling,
    effects,
    generate,
    piece,
    rows_of_fields,
    scores_of,
    tables,
    zipf,
)
from trainer_agent.script.user_module import load
from trireme.plain import plain_spec, run

SAMPLES, TESTED, ROWS = PIECE + 2000, 20_000, 3_000
CLICKS = Path(__file__).parents[2] / "examples" / "deepfm" / "clicks.py"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clicks") / "new"
    return folder, generate(folder, SAMPLES, TESTED, ROWS, seed=3)


def read(folder: Path, part: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    table = pq.read_table(sorted(folder.glob(f"{part}-*.parquet")))
    ids, dense = (
        table[name].combine_chunks().flatten().to_numpy().reshape(len(table), -1) for name in ("ids", "dense")
    )
    return ids, dense, table["clicked"].to_numpy()


def auc(scores: np.ndarray, clicked: np.ndarray) -> float:
    """By ranks; for scores without ties."""
    ranks = scores.argsort().argsort() + 1
    ups = clicked.sum()
    return float((ranks[clicked == 1].sum() - ups * (ups + 1) / 2) / (ups * (len(clicked) - ups)))


def test_the_planted_model_reaches_the_ceiling_that_is_told(made):
    folder, said = made
    ids, dense, clicked = read(folder, "test")
    about = About(said["seed"], said["zipf"], tuple(said["rows"]))
    found = auc(scores_of(about, ids, dense), clicked)
    assert found == pytest.approx(said["auc_of_planted_model"], abs=1e-3)
    assert found == pytest.approx(said["auc_ceiling"], abs=0.015)  # 4 standard errors
    assert 0.7 < said["auc_ceiling"] < 0.85
    assert json.loads((folder / "about.json").read_text()) == json.loads(json.dumps(said))


def test_without_the_ids_the_ceiling_is_out_of_reach(made):
    folder, said = made
    ids, dense, clicked = read(folder, "test")
    about = About(said["seed"], said["zipf"], tuple(said["rows"]))
    others = np.roll(ids, 1, axis=0)
    assert auc(scores_of(about, others, dense), clicked) < said["auc_ceiling"] - 0.05


def test_clicks_come_as_often_as_the_planted_model_says():
    about = About(4, 1.1, rows_of_fields(ROWS))
    found = piece(about, "train", 0)
    for low, high in ((-9, -2), (-2, -1), (-1, 0), (0, 9)):
        chosen = (found["score"] >= low) & (found["score"] < high)
        chances = 1 / (1 + np.exp(-found["score"][chosen].astype(float)))
        assert abs(found["clicked"][chosen].sum() - chances.sum()) < 5 * np.sqrt(
            (chances * (1 - chances)).sum()
        )


def test_deepfm_learns_from_such_data(made, monkeypatch):
    folder, said = made
    monkeypatch.setenv("CLICKS_DATA", str(folder))
    user = load(CLICKS)
    spec = plain_spec(user, {"global_batch_size": 512, "seed": 1})
    found = run(user, spec).metrics["auc"]
    assert 0.65 < found < said["auc_ceiling"]


@pytest.mark.parametrize(("exponent", "most"), [(1.1, 50), (1.0, 1_000), (0.6, 7), (2.5, 10**9)])
def test_ids_follow_zipfs_law(exponent, most):
    drawn = zipf(np.random.default_rng(5), exponent, most, 200_000)
    assert (drawn.min(), drawn.max() <= most) == (1, True)
    shown = min(most, 40)
    weights = np.arange(1, min(most, 10**7) + 1) ** -float(exponent)
    chances = weights[:shown] / weights.sum()
    counts = np.bincount(drawn[drawn <= shown], minlength=shown + 1)[1:]
    seen, expected = (
        np.append(counts, len(drawn) - counts.sum()),
        np.append(chances, max(1 - chances.sum(), 0)) * len(drawn),
    )
    kept = expected > 5
    deviations = np.square(seen - expected)[kept] / expected[kept]
    assert deviations.sum() < kept.sum() + 5 * np.sqrt(2 * kept.sum())  # chi-squared


def test_popular_ids_of_a_field_follow_it_too_and_each_field_has_ids_of_its_own():
    about = About(0, 1.1, rows_of_fields(ROWS))
    ids = piece(about, "train", 0)["ids"]
    assert ids.shape == (PIECE, FIELDS)
    for field, (first, most) in enumerate(zip(about.first.tolist(), about.rows, strict=True)):
        assert first <= ids[:, field].min() <= ids[:, field].max() < first + most
    widest = int(np.argmax(about.rows))
    counts = np.sort(np.unique(ids[:, widest], return_counts=True)[1])[::-1]
    ratio = counts[0] / counts[15]
    assert ratio == pytest.approx(16**1.1, rel=0.2)


def test_fields_have_as_many_ids_as_criteos_in_proportion():
    assert rows_of_fields(sum(CRITEO)) == CRITEO
    assert sum(rows_of_fields(1_000_000)) == pytest.approx(1_000_000, rel=1e-3)


def test_the_effect_of_an_id_depends_on_nothing_but_the_seed_and_the_id():
    ids = np.arange(100_000)
    found = effects(ids, 1)
    assert np.array_equal(effects(ids[::-1], 1)[::-1], found)
    assert abs(np.corrcoef(found[:, 0], effects(ids, 2)[:, 0])[0, 1]) < 0.02
    assert np.abs(found.mean(0)).max() < 0.02
    assert found.var(0) == pytest.approx(1, abs=0.02)
    assert np.abs(np.corrcoef(found.T) - np.eye(4)).max() < 0.02


def test_the_same_arguments_give_the_same_samples_and_fewer_are_the_first_of_more(made, tmp_path):
    folder, _ = made
    generate(tmp_path / "again", PIECE + 1000, 10, ROWS, seed=3)
    for before, after in zip(read(folder, "train"), read(tmp_path / "again", "train"), strict=True):
        assert np.array_equal(before[: PIECE + 1000], after)
    assert not np.array_equal(read(folder, "test")[0][:10], read(folder, "train")[0][:10])


def test_memory_does_not_depend_on_how_many_samples_there_are():
    about = About(0, 1.1, rows_of_fields(ROWS))

    def most(pieces: int) -> int:
        tracemalloc.start()
        for _ in tables(about, "train", pieces * PIECE, Ceiling()):
            pass
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    assert most(2) < 1.1 * most(1) + (8 << 20)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"samples": 0}, "--samples is 0 and --test-samples 10: both must be at least 1"),
        ({"rows": 3}, "--rows is 3: it must be from 52 to 2147483648"),
        ({"exponent": 0.0}, "--zipf is 0.0: it must be above 0 and at most 4"),
        ({"seed": -1}, "--seed is -1: it must not be negative"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path, wrong, said):
    with pytest.raises(ValueError, match=said):
        generate(tmp_path / "new", **({"samples": 10, "test_samples": 10, "rows": ROWS} | wrong))
    assert not (tmp_path / "new").exists()


def test_a_folder_with_data_is_left_alone(made):
    folder, _ = made
    with pytest.raises(ValueError, match="has Parquet files already"):
        generate(folder, 10, 10, ROWS)
