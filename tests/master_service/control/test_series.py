"""Metrics by step survive their master and a return to a checkpoint, and a storage that does not answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from master_service.control import series_keeper
from master_service.control.series_keeper import FLUSH_S, SeriesKeeper
from master_service.core.changes import Decision
from master_service.core.state.series import Value
from master_service.leadership.master import Master
from master_service.storage.series_files import StoredSeries
from tests.equipment.replaced import replaced
from tests.equipment.virtual_loop import Process, run_virtually
from tests.equipment.waiting import until
from tests.master_service.api.client import check_problem, client_of
from tests.master_service.cluster import MasterCluster, leading, running, spec_of
from trireme_shared.protocol.errors import StorageUnreachable
from trireme_shared.protocol.records import JobResult, MetricBatch, Phase, StepMetrics, StepTimes


class Files:
    """In memory. `away`: nothing answers."""

    def __init__(self) -> None:
        self.contents: dict[str, bytes] = {}
        self.away = False

    def _check(self) -> None:
        if self.away:
            raise ConnectionError("the storage is away")

    async def names(self) -> list[str]:
        self._check()
        return sorted(self.contents)

    async def read(self, name: str) -> bytes:
        self._check()
        return self.contents[name]

    async def write(self, name: str, content: bytes) -> None:
        self._check()
        self.contents[name] = content

    async def remove(self, names: Iterable[str]) -> None:
        self._check()
        for name in names:
            del self.contents[name]


class World:
    def __init__(self) -> None:
        self.cluster = MasterCluster(spec_of())
        self.files = self.cluster.storage.series = Files()

    async def report(self, master: Master, *steps: int, loss: float | None = None, timeline: int = 0) -> None:
        shares = tuple(
            StepMetrics(
                step=step,
                epoch=0,
                timeline=timeline,
                records=2,
                loss_sum=2.0 * (step if loss is None else loss),
            )
            for step in steps
        )
        await master.report_metrics(MetricBatch(trainer="t1", steps=shares))

    async def ready(self, master: Master) -> None:
        await until(lambda: master.job.state.phase is Phase.RUNNING, "the job to run")


async def losses(master: Master) -> dict[int, float]:
    async with client_of(master) as client:
        found = (await client.get("/v1/metric-series/loss")).json()
    return {point["step"]: point["mean"] for point in found["points"]}


def known(master: Master) -> bool:
    try:
        return bool(master.term.series.table)
    except StorageUnreachable:
        return False


@asynccontextmanager
async def killed(world: World) -> AsyncIterator[tuple[Process, Master]]:
    """A master with a job that runs, in a process of its own; what is left of it is cleared away at the
    end."""
    process, master = Process("m1"), world.cluster.master("m1")
    running = process.spawn(master.run(asyncio.Event()))
    await until(lambda: master.current_term is not None, "m1 to lead")
    await world.cluster.initialise("t1")
    await world.ready(master)
    yield process, master
    process.dead = False
    process.release()
    running.cancel()
    await asyncio.wait([running])


def test_metrics_outlive_a_master_that_is_killed_and_one_that_ends() -> None:
    async def main() -> None:
        world = World()
        async with killed(world) as (process, first):
            await process.spawn(world.report(first, 0, 1))
            await until(lambda: world.files.contents, "a file", 2 * FLUSH_S)
            process.kill()
            async with leading(world.cluster.master("m2")) as second:
                await until(lambda: known(second) and second.job.members.trainers, "the stored metrics")
                assert await losses(second) == {0: 0.0, 1: 1.0}
                await world.report(second, 2)
            async with leading(world.cluster.master("m3")) as third:
                await until(lambda: known(third), "the stored metrics")
                assert await losses(third) == {0: 0.0, 1: 1.0, 2: 2.0}
            assert len(world.files.contents) == 2

    run_virtually(main)


def test_what_is_reported_before_the_stored_metrics_are_known_is_added_to_them() -> None:
    async def main() -> None:
        world = World()
        async with running(world.cluster, "t1") as first:
            await until(lambda: known(first), "the metrics")
            await world.report(first, 0, 1)
        world.files.away = True
        async with leading(world.cluster.master("m2")) as second, client_of(second) as client:
            await until(lambda: second.job.members.trainers, "the trainer")
            await world.report(second, 2, 3)
            problem = check_problem(await client.get("/v1/metric-series/loss"), 503, "STORAGE_UNREACHABLE")
            assert "the storage is away" in problem["detail"]
            world.files.away = False
            await until(lambda: known(second), "the stored metrics")
            assert await losses(second) == {step: float(step) for step in range(4)}
            world.files.away = True
            await world.report(second, 4)
            await asyncio.sleep(2 * FLUSH_S)  # cannot be written, and is tried again
            world.files.away = False
        async with leading(world.cluster.master("m3")) as third:
            await until(lambda: known(third), "the stored metrics")
            assert await losses(third) == {step: float(step) for step in range(5)}

    run_virtually(main)


def test_steps_that_are_trained_again_take_the_place_of_those_before_also_at_the_next_master() -> None:
    async def main() -> None:
        world = World()
        async with running(world.cluster, "t1") as first:
            await world.report(first, *range(6))
            back = first.job.state.model_copy(update={"timeline": first.job.state.generation + 1})
            await first.writer.decide(lambda *_: Decision(None, (back,)))
            first.metrics.rewind(3)
            assert sorted(await losses(first)) == [0, 1, 2]
            await world.report(first, 3, 4, loss=50.0, timeline=back.timeline)
            await world.report(first, 5)  # late, of the timeline before
            assert await losses(first) == {0: 0.0, 1: 1.0, 2: 2.0, 3: 50.0, 4: 50.0}
        async with leading(world.cluster.master("m2")) as second:
            await until(lambda: known(second) and second.job.members.trainers, "the stored metrics")
            await world.report(second, 5, loss=50.0, timeline=back.timeline)
            assert await losses(second) == {0: 0.0, 1: 1.0, 2: 2.0, 3: 50.0, 4: 50.0, 5: 50.0}

    run_virtually(main)


def test_a_bounded_number_of_files_is_kept() -> None:
    async def main() -> None:
        world = World()
        with replaced(series_keeper, "FILES", 4):
            async with running(world.cluster, "t1") as master:
                for step in range(20):
                    await world.report(master, step)
                    await asyncio.sleep(FLUSH_S + 0.1)
                    assert len(world.files.contents) <= 5
            async with leading(world.cluster.master("m2")) as second:
                await until(lambda: known(second), "the stored metrics")
                assert await losses(second) == {step: float(step) for step in range(20)}

    run_virtually(main)


def test_the_metrics_of_the_evaluation_are_a_series_at_the_last_step() -> None:
    async def main() -> None:
        world = World()
        async with running(world.cluster, "t1") as master, client_of(master) as client:
            await until(lambda: known(master), "the metrics")
            await world.report(master, 7)
            result = JobResult(metrics={"accuracy": 0.75})
            ended = master.job.state.model_copy(update={"phase": Phase.COMPLETED, "result": result})
            await master.writer.decide(lambda *_: Decision(None, (ended,)))
            listed = (await client.get("/v1/metric-series")).json()["series"]
            assert [(each["name"], each["first_step"], each["points"]) for each in listed] == [
                ("evaluation.accuracy", 7, 1),
                ("loss", 7, 1),
            ]
            [point] = (await client.get("/v1/metric-series/evaluation.accuracy")).json()["points"]
            assert (point["step"], point["mean"], point["weight"]) == (7, 0.75, 1.0)
            check_problem(await client.get("/v1/metric-series/none"), 404, "NOT_FOUND")
            for query in ("points=0", "points=5001", "from_step=-1"):
                refused = await client.get(f"/v1/metric-series/loss?{query}")
                check_problem(refused, 422, "INVALID_ARGUMENT")

    run_virtually(main)


def test_what_a_script_logs_is_reported_and_queried_by_rest() -> None:
    async def main() -> None:
        world = World()
        async with running(world.cluster, "t1") as master, client_of(master) as client:
            await until(lambda: known(master), "the metrics")
            value = {"total": 3.0, "weight": 2.0, "least": 1.0, "most": 2.0}
            share = {"step": 4, "epoch": 0, "loss_sum": 1.0, "records": 1, "metrics": {"accuracy": value}}
            body = {"trainer": "t1", "steps": [share]}
            for _ in range(2):  # with a key it counts once
                told = await client.post("/v1/metric-batches", json=body, headers={"Idempotency-Key": "k"})
                assert told.status_code == 200, told.text
            [point] = (await client.get("/v1/metric-series/accuracy")).json()["points"]
            assert point == {
                "step": 4,
                "last_step": 4,
                "epoch": None,
                "mean": 1.5,
                "least": 1.0,
                "most": 2.0,
                "weight": 2.0,
            }
            for wrong in ({"a b": value}, {"a": {**value, "weight": 0}}, {f"m{n}": value for n in range(33)}):
                refused = await client.post(
                    "/v1/metric-batches", json={**body, "steps": [{**share, "metrics": wrong}]}
                )
                check_problem(refused, 422, "INVALID_ARGUMENT")

    run_virtually(main)


async def whole(
    master: Master, *steps: int, timeline: int = 0, lost: int | None = None, store: bool = False
) -> tuple[int | None, int]:
    shares = tuple(
        StepMetrics(step=step, epoch=0, timeline=timeline, records=2, loss_sum=2.0 * step) for step in steps
    )
    taken = await master.report_metrics(
        MetricBatch(trainer="t1", steps=shares, whole=True, lost_before=lost, store=store)
    )
    return taken.next, taken.stored


def test_whole_steps_count_once_in_order_and_a_new_master_says_what_it_lacks() -> None:
    async def main() -> None:
        world = World()
        async with killed(world) as (process, first):
            await until(lambda: known(first), "the metrics")
            assert await process.spawn(whole(first, 0, 1)) == (2, 0)
            assert await process.spawn(whole(first, 1, 2, 2, 5)) == (3, 0), "5 has to wait for 3 and 4"
            assert await process.spawn(whole(first, store=True)) == (3, 3)
            assert await process.spawn(whole(first, 3)) == (4, 3)
            process.kill()
            async with leading(world.cluster.master("m2")) as second:
                await until(lambda: known(second) and second.job.members.trainers, "the stored metrics")
                assert await whole(second, 4) == (3, 3)
                assert await whole(second, 3, 4) == (5, 3)
                assert await whole(second, 8, lost=7) == (7, 3), "5 and 6 are lost, 7 is not"
                assert await whole(second, 7, 8, store=True) == (9, 9)
                assert await losses(second) == {step: float(step) for step in (0, 1, 2, 3, 4, 7, 8)}
                sums = {
                    number: epoch.sums["loss"].total for number, epoch in second.term.series.epochs.items()
                }
                total = 2.0 * (0 + 1 + 2 + 3 + 4 + 7 + 8)
                assert sums == {0: total}
                async with client_of(second) as client:
                    [point] = (await client.get("/v1/metric-series/loss?by=epoch")).json()["points"]
                    expected = {"step": 0, "last_step": 8, "epoch": 0, "mean": total / 14, "weight": 14.0}
                    assert point == expected | {"least": 0.0, "most": 8.0}
                    [epoch] = (await client.get("/v1/metrics?metric=epoch_loss")).json()["points"]
                    assert epoch == {"number": 0, "loss": total / 14, "records": 14, "skipped": 0}, (
                        "of both masters"
                    )
                    check_problem(await client.get("/v1/metric-series/none?by=epoch"), 404, "NOT_FOUND")
                    assert (await client.get("/v1/metric-series/loss?by=epoch&from_step=1")).json()[
                        "points"
                    ] == []

    run_virtually(main)


def test_whole_steps_go_back_with_the_job_also_where_the_next_master_learns_of_it() -> None:
    async def main() -> None:
        world = World()
        async with running(world.cluster, "t1") as first:
            await until(lambda: known(first), "the metrics")
            await whole(first, *range(6), store=True)
            await whole(first, 6)
            back = first.job.state.model_copy(
                update={"timeline": first.job.state.generation + 1, "checkpoint": "gone"}
            )
            await first.writer.decide(lambda *_: Decision(None, (back,)))
            assert await whole(first, 3, timeline=back.timeline, lost=None) == (4, 3)
        async with leading(world.cluster.master("m2")) as second:
            await until(lambda: known(second) and second.job.members.trainers, "the stored metrics")
            assert await whole(second, 4, timeline=back.timeline) == (5, 4)
            assert await losses(second) == {step: float(step) for step in range(5)}
            sums = {number: epoch.sums["loss"].total for number, epoch in second.term.series.epochs.items()}
            assert sums == {0: 2.0 * (0 + 1 + 2 + 3 + 4)}

    run_virtually(main)


def test_a_write_that_is_cut_short_loses_nothing_that_the_end_of_the_term_writes() -> None:
    async def main() -> None:
        world = World()
        write = world.files.write

        async def slow(name: str, content: bytes) -> None:
            await write(name, content)
            await asyncio.sleep(1.0)

        async with running(world.cluster, "t1") as first:
            await until(lambda: known(first), "the metrics")
            world.files.write = slow
            await whole(first, 0, 1)
            await asyncio.sleep(FLUSH_S + 0.2)
            assert world.files.contents
            await whole(first, 2)
        async with leading(world.cluster.master("m2")) as second:
            await until(lambda: known(second) and second.job.members.trainers, "the stored metrics")
            assert await whole(second) == (3, 3)
            assert await losses(second) == {0: 0.0, 1: 1.0, 2: 2.0}

    run_virtually(main)


def test_learning_rates_times_speed_and_minibatches_left_out_are_series_of_the_job() -> None:
    async def main() -> None:
        world = World()
        world.cluster = MasterCluster(spec_of(on_nonfinite="skip"))
        async with running(world.cluster, "t1") as master:
            await until(lambda: known(master), "the metrics")
            for step, lr in enumerate([(0.5,), (0.25,), (0.25, 0.125)]):
                share = StepMetrics(step=step, epoch=0, loss_sum=1.0, records=2, skipped=step, lr=lr)
                times = StepTimes(step=step, seconds=2.0, compute=1.0, push=0.25, pull=0.5)
                await master.report_metrics(MetricBatch(trainer="t1", steps=(share,), times=times))
                late = times.model_copy(update={"timeline": 7})
                await master.report_metrics(MetricBatch(trainer="t1", steps=(), times=late))
                await asyncio.sleep(0.5)
            series = master.term.series.table.by_name
            found = {
                name: [(bucket.step, bucket.value.total / bucket.value.weight) for bucket in series[name]]
                for name in series
            }
            assert found == {
                "loss": [(0, 0.5), (1, 0.5), (2, 0.5)],
                "lr": [(0, 0.5), (1, 0.25)],
                "lr.0": [(2, 0.25)],
                "lr.1": [(2, 0.125)],
                "nonfinite": [(0, 0.0), (1, 1.0), (2, 2.0)],
                "time.compute": [(0, 0.5), (1, 0.5), (2, 0.5)],
                "time.push": [(0, 0.125), (1, 0.125), (2, 0.125)],
                "time.pull": [(0, 0.25), (1, 0.25), (2, 0.25)],
                "records_per_second": [(1, 4.0), (2, 4.0)],
            }

    run_virtually(main)


async def test_files_of_metrics_lie_beside_the_checkpoints(tmp_path: Path) -> None:
    stored = StoredSeries(str(tmp_path))
    assert await stored.names() == []
    await stored.write("a.json", b"1")
    await stored.write("b.json", b"2")
    assert (
        sorted(path.name for path in (tmp_path / "metrics").iterdir())
        == await stored.names()
        == ["a.json", "b.json"]
    )
    assert await stored.read("b.json") == b"2"
    await stored.remove(["a.json", "gone.json"])
    assert await stored.names() == ["b.json"]


@pytest.mark.parametrize("leads", [True, False])
def test_what_is_left_at_the_end_of_a_term_is_written_only_while_its_lease_holds(leads: bool) -> None:
    """A master that was frozen: the next one has read all files already, and this one would stand before its
    own."""

    async def main() -> None:
        files = Files()
        keeper = SeriesKeeper(files, 1, leads=lambda: leads)
        run = asyncio.ensure_future(keeper.run())
        await asyncio.sleep(0.1)
        keeper.add("accuracy", 0, 0, Value(1.0, 1, 1.0, 1.0))
        run.cancel()
        await asyncio.wait([run])
        assert bool(files.contents) == leads

    run_virtually(main)
