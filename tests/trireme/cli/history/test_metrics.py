"""`trireme metrics`: of a job that has ended, from its storage; of one that runs, from its master, also
through its death."""

from __future__ import annotations

import asyncio
import csv
import io
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from master_service.api import render
from master_service.control.series_keeper import Origin, SeriesKeeper
from master_service.storage.series_files import StoredSeries, read_all
from tests.equipment.stored_series import step, store
from tests.equipment.virtual_loop import run_virtually
from trireme.cli import exit_codes
from trireme.cli.history import metrics as command
from trireme.cli.history.metrics import OfStorage, Row
from trireme.launch import resume, run_folder
from trireme_shared.protocol.errors import PeerError
from trireme_shared.protocol.records import JobSpec, MetricBatch
from trireme_shared.protocol.records.datasets import TextLines

STEPS = 10


@pytest.fixture(autouse=True)
def no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRIREME_URL", raising=False)


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """With a run of two epochs that has ended; its metrics lie in two files, of two masters."""
    folder = tmp_path / "digits"
    folder.mkdir()

    for term, steps in ((1, range(4)), (2, range(3, STEPS))):
        asyncio.run(store(folder, steps, term))
    spec = JobSpec(job="digits", script="/s.py", storage=str(folder), dataset=TextLines("x"))
    (folder / "spec.json").write_text(spec.model_dump_json())
    run_folder.write_json(folder / run_folder.RUN_FILE, {"job": "digits", "url": "http://127.0.0.1:9"})
    run_folder.write_json(folder / resume.RESULT_FILE, {"job": "digits", "phase": "COMPLETED"})
    return tmp_path


def shown(capsys: pytest.CaptureFixture[str], data_dir: Path, form: Any, *names: str, **options: Any) -> str:
    assert command.metrics(None, data_dir, None, names, form, **options) == exit_codes.OK
    return capsys.readouterr().out


def test_the_table_has_the_last_values_of_a_job_that_has_ended(
    data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    header, loss, rate = (line.split() for line in shown(capsys, data_dir, "table").splitlines())
    assert header == ["metric", "step", "last", "lowest", "highest", "trend"]
    assert loss[:5] == ["loss", "9", "0.003906", "0.003906", "2"]
    assert rate[:5] == ["lr", "9", "0.1", "0.1", "0.1"]
    header, loss, _ = (line.split() for line in shown(capsys, data_dir, "table", by="epoch").splitlines())
    assert (header[1], loss[:3]) == ("epoch", ["loss", "2", f"{2 / 2**5 * (2 - 2**-4) / 5:.4g}"])


def test_csv_and_json_have_each_step_once_with_all_digits(
    data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = [2.0 / 2**number for number in range(STEPS)]
    rows = list(csv.DictReader(io.StringIO(shown(capsys, data_dir, "csv", "loss"))))
    assert [(row["metric"], int(row["step"]), float(row["mean"])) for row in rows] == [
        ("loss", number, loss) for number, loss in enumerate(losses)
    ]
    document = json.loads(shown(capsys, data_dir, "json", "l*"))
    assert [each["name"] for each in document["metrics"]] == ["loss", "lr"]
    assert [point["mean"] for point in document["metrics"][0]["points"]] == losses
    document = json.loads(shown(capsys, data_dir, "json", "loss", by="epoch"))
    [only] = document["metrics"]
    assert [(point["epoch"], point["step"], point["last_step"]) for point in only["points"]] == [
        (0, 0, 4),
        (1, 5, 9),
    ]
    lines = [json.loads(line) for line in shown(capsys, data_dir, "json", "loss", follow=True).splitlines()]
    assert [line["mean"] for line in lines] == losses  # over: it does not wait for more


def test_a_chart_shows_losses_and_what_the_script_measures(
    data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown(capsys, data_dir, "plot")
    assert text.startswith("loss (last 0.003906, lowest 0.003906, highest 2)\n")
    assert "lr" not in text
    assert shown(capsys, data_dir, "plot", "lr").startswith("lr (")


def test_a_metric_that_is_not_there_is_told_with_those_that_are(
    data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.metrics(None, data_dir, None, ["accuracy"], "table") == exit_codes.NOT_FOUND
    assert "has no metric accuracy; it has: loss, lr" in capsys.readouterr().err
    assert command.metrics(None, data_dir, None, [], "plot", follow=True) == exit_codes.USAGE  # no terminal
    assert "--csv" in capsys.readouterr().err
    assert command.metrics("other", data_dir, None, [], "table") == exit_codes.NOT_FOUND


def test_an_asynchronous_job_has_no_metrics_by_epoch(tmp_path: Path) -> None:
    async def epochs() -> list[Row]:
        keeper = SeriesKeeper(StoredSeries(str(tmp_path)), 1)
        running = asyncio.ensure_future(keeper.run())
        while keeper.taken.next is None:
            await asyncio.sleep(0.01)
        keeper.note(MetricBatch(trainer="trainer-0", steps=(step(0),)))
        await keeper.store()
        running.cancel()
        await asyncio.wait([running])
        stored = OfStorage(await read_all(StoredSeries(str(tmp_path))))
        assert len(await stored.points("loss")) == 1
        return await stored.epochs("loss")

    assert asyncio.run(epochs()) == []


def test_a_run_ends_with_a_chart_of_its_loss(data_dir: Path, tmp_path: Path) -> None:
    assert asyncio.run(command.loss_chart(str(data_dir / "digits"))).startswith("loss (last 0.003906")
    assert asyncio.run(command.loss_chart(str(tmp_path / "nothing"))) == ""


class Master:
    """Of a job of which one more step is known with each question; dies once. Ends with the last step."""

    def __init__(self, stored: OfStorage) -> None:
        self.stored, self.asked = stored, 0

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[command.Found]:
        self.asked += 1
        if self.asked == 5:
            raise PeerError("nobody leads")
        yield command.Found("digits", self, over=self.asked > STEPS)

    async def summaries(self) -> list[Row]:
        return await self.stored.summaries()

    async def points(self, name: str, first: int = 0, most: int | None = None) -> list[Row]:
        return [row for row in await self.stored.points(name, first, most) if row["step"] < self.asked]

    async def epochs(self, name: str, first: int = 0) -> list[Row]:
        return []


def test_followed_metrics_come_once_also_through_a_change_of_the_master(data_dir: Path) -> None:
    stored = asyncio.run(read_all(StoredSeries(str(data_dir / "digits"))))
    master, seen, portions = Master(OfStorage(stored)), [], []

    def write(name: str, rows: Iterable[Row]) -> None:
        taken = [row["step"] for row in rows]
        portions.append(len(taken))
        seen.extend(taken)

    run_virtually(lambda: command.follow_points(master.opened, ["loss"], write))
    assert seen == list(range(STEPS))
    assert portions[:3] == [0, 1, 1]  # a step is told when there is a later one: its value may still change


class GoingBack:
    """A master as it answers by REST. With each look two more steps are known; where `back` says, the job
    goes back instead: to a step at a look, in the middle of the look's questions if `torn`. What is known of
    steps that are to be trained again is left out."""

    def __init__(self, back: dict[int, int], *, torn: bool) -> None:
        self._back, self._torn = dict(back), torn
        self._timeline, self._origin, self._next, self._looks = 0, 0, 0, 0
        self._keeper = SeriesKeeper(None, 1, origin=lambda: Origin(self._timeline, self._origin, None))

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[command.Found]:
        self._looks += 1
        if self._looks not in self._back:
            self._train()
        elif not self._torn:
            self._go_back()
        yield command.Found("digits", self, over=self._next >= STEPS)

    def _train(self) -> None:
        steps = [
            step(number).model_copy(update={"timeline": self._timeline})
            for number in (self._next, self._next + 1)
        ]
        self._keeper.note(MetricBatch(trainer="trainer-0", steps=tuple(steps), whole=True))
        self._next += 2

    def _go_back(self) -> None:
        self._timeline, self._origin = self._timeline + 1, self._back.pop(self._looks)
        self._next = self._origin
        if not self._origin:  # a report that begins with step 0 is taken: nothing is known before its end
            self._keeper.note(MetricBatch(trainer="trainer-0", steps=(), whole=True))

    @property
    def _kept(self) -> render.KeptMetrics:
        keeper = self._keeper
        return render.KeptMetrics(
            keeper.table,
            keeper.epochs,
            keeper.known,
            self._timeline,
            self._origin if self._timeline else None,
        )

    async def summaries(self) -> list[Row]:
        return [each.model_dump() for each in render.series_page(self._keeper.table, 100, "").series]

    async def points(self, name: str, first: int = 0, most: int | None = None) -> list[Row]:
        if self._looks in self._back:
            self._go_back()
        return [
            each.model_dump()
            for each in render.series_points(self._kept, name, first, 2**62, most or 5000).points
        ]

    async def epochs(self, name: str, first: int = 0) -> list[Row]:
        return []


@pytest.mark.parametrize("torn", [False, True])
@pytest.mark.parametrize("back", [{4: 3}, {4: 0}, {2: 0, 5: 4, 6: 3}])
def test_followed_metrics_come_once_also_when_the_job_goes_back(back: dict[int, int], torn: bool) -> None:
    master, seen = GoingBack(back, torn=torn), list[tuple[str, int, float]]()

    def write(name: str, rows: Iterable[Row]) -> None:
        seen.extend((name, row["step"], row["mean"]) for row in rows)

    run_virtually(lambda: command.follow_points(master.opened, ["loss"], write))
    assert [(at, mean) for _, at, mean in seen[:STEPS]] == [
        (number, 2.0 / 2**number) for number in range(STEPS)
    ]
    assert len({at for _, at, _ in seen}) == len(seen)


def test_a_table_is_drawn_also_while_the_job_goes_back(data_dir: Path) -> None:
    """Of a long series the last bucket is asked for once more: it may be gone by then."""
    stored = OfStorage(asyncio.run(read_all(StoredSeries(str(data_dir / "digits")))))

    class Gone:
        summaries, epochs = stored.summaries, stored.epochs

        async def points(self, name: str, first: int = 0, most: int | None = None) -> list[Row]:
            return [] if first else await stored.points(name, first, 3)

    async def shown_now() -> str:
        @asynccontextmanager
        async def opened() -> AsyncIterator[command.Found]:
            yield command.Found("digits", Gone(), over=False)

        return await command.drawn(opened, ["loss"], "table")

    assert asyncio.run(shown_now()).splitlines()[1].split()[:2] == ["loss", "9"]
