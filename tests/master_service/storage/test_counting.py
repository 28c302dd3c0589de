"""Counting a dataset once: what is wrong with it is told with its URL and what to do; the table is kept and
checked."""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from master_service.core.queue.file_table import TableFile
from master_service.storage.job_storage import (
    CountingStopped,
    FileStorage,
    PartialCounts,
    count_records,
    load,
    save,
)
from tests.equipment.etcd.simulated import SimulatedEtcd
from tests.equipment.waiting import until
from trainer_agent.script.inspect import first_records
from trireme.script_source import digests_of
from trireme_shared.datasets.dataset_files import stamp_of
from trireme_shared.platform.etcd import Etcd
from trireme_shared.platform.membership.local_script import LocalScripts
from trireme_shared.platform.storage import files
from trireme_shared.protocol.errors import DatasetError, NotFound
from trireme_shared.protocol.records import JobSpec
from trireme_shared.protocol.records.datasets import Bytes, Csv, Custom, JsonLines, Npy, Parquet, TextLines


def test_offsets_are_the_bytes_where_tasks_start(tmp_path):
    content = b'a,b\r\n1,"x\r\ny"\r\n\r\n2,z\r\n3,w'
    (tmp_path / "x.csv").write_bytes(content)
    table = count_records(Csv(str(tmp_path / "x.csv")), 2)
    offsets = content.index(b'1,"x'), content.index(b"3,w")
    assert table.files == (TableFile(path := str(tmp_path / "x.csv"), 3, offsets, stamp_of(path)),)


def test_a_file_larger_than_a_chunk_is_counted_like_its_lines(tmp_path):
    lines = [f"{i}:" + "x" * (i * 7919 % 300) for i in range(20_000)]
    path = tmp_path / "big.txt"
    path.write_text("\n".join(lines) + "\n")
    table = count_records(TextLines(str(path)), 999)
    content = path.read_bytes()
    assert path.stat().st_size > 2 << 20
    assert table.records == len(lines)
    for task in range(table.tasks):
        place = table.locate(task)
        assert content[place.offset :].split(b"\n", 1)[0] == lines[place.first].encode()


def test_progress_tells_files_counted_and_files(tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text("x\n")
    told = []
    count_records(TextLines(str(tmp_path / "*.txt")), 1, lambda *numbers: told.append(numbers))
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_heads_of_npy_files_are_read_in_several_threads_whatever_runs_in_between(tmp_path, monkeypatch):
    """CPython 3.11 counts the nesting of `ast` for all threads in one place; collecting garbage may switch
    threads there."""
    for number in range(1000):
        np.save(tmp_path / f"{number}.npy", np.zeros((2, 1)))
    switch, threshold, interval = lambda *_: sum(range(50)), gc.get_threshold(), sys.getswitchinterval()
    monkeypatch.setattr("master_service.storage.job_storage.THREADS", 8)
    monkeypatch.setattr("master_service.storage.job_storage.cores", lambda: 8)
    gc.callbacks.append(switch)
    gc.set_threshold(5)
    sys.setswitchinterval(1e-6)
    try:
        assert count_records(Npy(str(tmp_path / "*.npy"), columns=("x",)), 10).records == 2000
    finally:
        sys.setswitchinterval(interval)
        gc.set_threshold(*threshold)
        gc.callbacks.remove(switch)


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (lambda d: Parquet(f"{d}/none-*.parquet"), "none-*.parquet matches no file"),
        (lambda d: Csv(f"{d}/none.csv"), "none.csv does not exist"),
        (lambda d: TextLines(f"{d}/garbage.txt", f"{d}/none.txt"), "none.txt does not exist"),
        (lambda d: Parquet(f"{d}/garbage.txt"), "garbage.txt cannot be read as Parquet: "),
        (lambda d: Npy(f"{d}/garbage.txt"), "garbage.txt cannot be read as .npy: "),
        (lambda d: Npy(f"{d}/number.npy"), "number.npy holds a single number, not rows of numbers"),
        (lambda d: Npy(f"{d}/objects.npy"), "objects.npy holds Python objects, not rows of numbers"),
        (lambda d: TextLines(f"{d}/lines.txt.zip"), "lines.txt.zip is an archive of files, not lines"),
        (
            lambda d: TextLines("nosuch://bucket/x"),
            "nosuch://bucket/x cannot be read as a place of files: no way to open",
        ),
        (
            lambda d: Csv(f"{d}/open_quote.csv"),
            "open_quote.csv: the record at byte 4 opens a quote that is never closed",
        ),
        (lambda d: TextLines(f"{d}/empty.txt"), "empty.txt is empty: 1 files with 0 records"),
        (lambda d: Csv(f"{d}/header.csv"), "header.csv is empty: 1 files with 0 records"),
        (lambda d: JsonLines(f"{d}/blank.jsonl"), "blank.jsonl is empty: 1 files with 0 records"),
        (
            lambda d: Bytes(f"{d}/garbage.txt", record_bytes=100),
            "garbage.txt is empty: 1 files with 0 records",
        ),
        (lambda d: Parquet(f"{d}/empty.parquet"), "empty.parquet is empty: 1 files with 0 records"),
        (lambda d: Npy(f"{d}/two.npy", f"{d}/three.npy", aligned=True), "three.npy has 3 rows, "),
        (lambda d: Npy(f"{d}/two.npy", f"{d}/three.npy"), "three.npy would be called 'three', those of "),
        (lambda d: Npy(f"{d}/two.npy", columns=("a", "b")), "columns names 2 arrays, but there are 1 files"),
        (
            lambda d: Custom("x", reader="no_such_module_anywhere:reader"),
            "no_such_module_anywhere:reader cannot be imported",
        ),
        (lambda d: Custom("x", reader="math:pi"), "the reader math:pi has no method 'count'"),
    ],
)
def test_errors_name_the_url_and_what_to_do(tmp_path, dataset, message):
    (tmp_path / "garbage.txt").write_text("no magic here")
    (tmp_path / "lines.txt.zip").write_bytes(b"\x1f\x8b")
    (tmp_path / "open_quote.csv").write_text('a,b\n1,"x\n2,y\n')
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "header.csv").write_text("a,b\n")
    (tmp_path / "blank.jsonl").write_text("\n  \n")
    pq.write_table(pa.table({"a": pa.array([], pa.int64())}), tmp_path / "empty.parquet")
    np.save(tmp_path / "number.npy", np.float32(3))
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object))
    np.save(tmp_path / "two.npy", np.zeros(2))
    np.save(tmp_path / "three.npy", np.zeros(3))
    with pytest.raises(DatasetError) as caught:
        count_records(dataset(tmp_path), 10)
    assert message in caught.value.message
    assert caught.value.hint


def test_a_custom_readers_exception_is_told_with_its_name(tmp_path, monkeypatch):
    (tmp_path / "failing_reader.py").write_text(
        "class reader:\n  read = None.__class__\n  @staticmethod\n  def count(url): return 1 // 0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DatasetError, match=r"failing_reader:reader.count\('u'\) failed: ZeroDivisionError"):
        count_records(Custom("u", reader="failing_reader:reader"), 1)


async def test_custom_readers_beside_the_script_and_in_it_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    reader = "class reader:\n  read = None.__class__\n  @staticmethod\n  def count(url): return 3\n"
    for name in ("beside_the_script", "script_with_reader"):
        (tmp_path / f"{name}.py").write_text(reader)
    script, storage = str(tmp_path / "script_with_reader.py"), str(tmp_path / "storage")
    for name in ("beside_the_script", "script_with_reader"):
        dataset = Custom("u", reader=f"{name}:reader")
        spec = JobSpec.model_validate({"job": "j", "script": script, "storage": storage, "dataset": dataset})
        table = await FileStorage(spec).count(dataset, 2)
        assert [(file.path, file.records) for file in table.files] == [("u", 3)]


@pytest.mark.parametrize("storage", ["{}/storage", "memory://storage/job"])
def test_a_saved_table_is_loaded_by_its_digest(tmp_path, storage):
    (tmp_path / "a.txt").write_text("1\n2\n3")
    table = count_records(TextLines(str(tmp_path / "a.txt")), 2)
    place = storage.format(tmp_path)
    url = save(table, place)
    assert url.endswith(f"/dataset-{table.digest}.json")
    assert load(place, table.digest) == table


def test_the_digest_depends_on_paths_counts_offsets_and_task_size(tmp_path):
    def digest(name: str, content: str, task_records: int) -> str:
        (tmp_path / name).write_text(content)
        return count_records(TextLines(str(tmp_path / name)), task_records).digest

    found = [
        digest("a", "1\n2\n3", 2),
        digest("b", "1\n2\n3", 2),
        digest("a", "1\n2\n", 2),
        digest("a", "11\n2\n3", 2),
    ]
    found.append(digest("a", "1\n2\n3", 3))
    assert len(set(found)) == 5
    assert digest("a", "1\n2\n3", 2) == found[0]


def test_a_table_that_was_changed_is_refused_with_both_digests(tmp_path):
    fsspec.filesystem("memory").pipe_file(
        "/s/dataset-0123456789abcdef.json", b'{"format": 1, "task_records": 1, "files": []}'
    )
    with pytest.raises(
        DatasetError, match=r"dataset-0123456789abcdef.json has the digest \w{12}, not 0123456789ab"
    ):
        load("memory://s", "0123456789abcdef")


def test_a_table_that_is_missing_or_damaged_is_refused_with_its_url(tmp_path):
    with pytest.raises(NotFound, match=r"dataset-00.json does not exist"):
        load(str(tmp_path), "00")
    (tmp_path / "dataset-00.json").write_text("{")
    with pytest.raises(DatasetError, match=r"dataset-00.json cannot be read as a file table"):
        load(str(tmp_path), "00")


def test_storage_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "a.txt").write_text("1")
    table = count_records(TextLines(str(tmp_path / "a.txt")), 2)
    with pytest.raises(DatasetError, match="the file table cannot be written to"):
        save(table, str(tmp_path / "file"))


@pytest.mark.parametrize("kind", [Parquet, Npy, Csv, JsonLines, TextLines])
def test_a_file_without_bytes_has_no_records_in_any_format(tmp_path, kind):
    empty, full = tmp_path / "a" / "x", tmp_path / "b" / "x"
    for path in (empty, full):
        path.parent.mkdir()
    empty.touch()
    with pytest.raises(DatasetError, match="x is empty: 1 files with 0 records"):
        count_records(kind(str(empty)), 4)
    with pytest.raises(DatasetError, match="x has no records"):
        first_records(kind(str(empty)), 4)
    if kind is Parquet:
        pq.write_table(pa.table({"a": [1.0, 2.0]}), full)
    elif kind is Npy:
        with full.open("wb") as file:
            np.save(file, np.zeros((2, 3)))
    else:
        full.write_text(
            '{"a": 1}\n{"a": 2}\n' if kind is JsonLines else "a\n1\n2\n" if kind is Csv else "1\n2\n"
        )
    both = kind(str(empty), str(full))
    assert [(file.path, file.records) for file in count_records(both, 4).files] == [
        (str(empty), 0),
        (str(full), 2),
    ]
    assert len(first_records(both, 4)) == 2


@pytest.mark.parametrize("storage", ["{}/storage", "memory://partial/job"])
def test_counting_that_was_stopped_goes_on_with_what_is_unchanged(tmp_path, storage):
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.txt").write_text("1\n2\n3\n")
    dataset, place = TextLines(str(tmp_path / "*.txt")), storage.format(tmp_path)
    whole = count_records(dataset, 2)
    first = PartialCounts(place, dataset, 2)
    for name in ("a", "b"):
        first.counted(str(tmp_path / f"{name}.txt"), lambda url: TableFile(url, 3, (0, 4)))
    first.stop.set()
    with pytest.raises(CountingStopped):
        count_records(dataset, 2, None, first)
    first.keep(now=True)
    (tmp_path / "b.txt").write_text("1\n2\n3\n4\n")
    second = PartialCounts(place, dataset, 2)
    second.load()
    counted = list[str]()

    def count(url: str) -> TableFile:
        counted.append(Path(url).name)
        return TableFile(url, 1)

    found = [second.counted(file.path, count).records for file in whole.files]
    assert (counted, found) == (["b.txt", "c.txt"], [3, 1, 1])
    table = count_records(dataset, 2, None, PartialCounts(place, dataset, 2))
    assert [file.records for file in table.files] == [3, 4, 3]
    assert PartialCounts(place, dataset, 3).counted(whole.files[0].path, count).records == 1, (
        "of another task size"
    )


async def test_readers_of_one_name_beside_the_scripts_of_two_jobs_are_two(tmp_path, monkeypatch):
    """A leader counts for many jobs in one process."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    dataset, counts = Custom("u", reader="script_of_a_job:reader"), []
    for records in (3, 5):
        script = tmp_path / str(records) / "script_of_a_job.py"
        script.parent.mkdir()
        reader = f"class reader:\n  read = print\n  @staticmethod\n  def count(url): return {records}\n"
        script.write_text(reader)
        spec = JobSpec.model_validate(
            {"job": "j", "script": "s", "storage": str(tmp_path), "dataset": dataset}
        )

        async def find(_: str, script=script) -> Path:
            return script

        counts.append((await FileStorage(spec, find).count(dataset, 2)).records)
    assert counts == [3, 5]


async def test_a_master_that_is_stopped_while_it_counts_ends_soon_and_keeps_its_counts(tmp_path, monkeypatch):
    for number in range(40):
        (tmp_path / f"{number:02}.txt").write_text("1\n2\n3\n")
    stamp = files.stamp

    def slow(url: str) -> str:
        time.sleep(0.1)
        return stamp(url)

    monkeypatch.setattr(files, "stamp", slow)
    dataset, place = TextLines(str(tmp_path / "*.txt")), str(tmp_path / "storage")
    spec = JobSpec.model_validate({"job": "j", "script": "s.py", "storage": place, "dataset": dataset})
    counting = asyncio.ensure_future(FileStorage(spec).count(dataset, 2))
    await asyncio.sleep(0.5)
    counting.cancel()
    await asyncio.wait([counting])

    def kept() -> list[Path]:
        return list((tmp_path / "storage").glob("counting-*.json"))

    await until(kept, "what was counted to be kept", 2)
    monkeypatch.setattr(files, "stamp", stamp)
    table = await FileStorage(spec).count(dataset, 2)
    assert (len(table.files), table.records) == (40, 120)
    assert kept() == []


async def test_the_module_of_a_reader_that_changed_since_the_job_was_created_is_not_imported(tmp_path):
    (tmp_path / "own_reader.py").write_text("raise AssertionError('it was imported')")
    script = tmp_path / "train.py"
    script.write_text("")
    dataset = Custom("u", reader="own_reader:reader")
    sources = digests_of(script, ["own_reader"])
    spec = JobSpec(
        job="j", script=str(script), storage=str(tmp_path / "job"), dataset=dataset, sources=sources
    )
    scripts = LocalScripts(Etcd(SimulatedEtcd().transport("master")), "trireme")
    storage = FileStorage(spec, lambda path: scripts.find(path, spec.sources))
    with pytest.raises(DatasetError, match="it was imported"):
        await storage.count(dataset, 1)
    (tmp_path / "own_reader.py").write_text("reader = None")
    with pytest.raises(DatasetError, match=r"own_reader\.py has changed since the job was created"):
        await storage.count(dataset, 1)
