"""Metrics and evaluations of a job that nobody leads any more: from its storage and from etcd, in bounded
time and memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from master_service.core.state.series import SeriesTable, Value, WholeSteps
from master_service.storage import series_files
from master_service.storage.series_files import READ_S, SeriesReader, encoded, name_of
from tests.equipment.replaced import replaced
from tests.equipment.virtual_loop import run_virtually
from tests.equipment.waiting import until
from tests.master_service.api.client import check_problem, client_of
from tests.master_service.control.test_series import Files
from tests.master_service.many_jobs import Jobs, job_of
from trireme_shared.protocol.evaluations import Evaluation, EvaluationStatus
from trireme_shared.protocol.records import MetricBatch, StepMetrics, UserFailure
from trireme_shared.protocol.records.cluster import Standing

CHECKPOINT = "c" * 32


class Counted(Files):
    """`reads`: of files. `slow_s`: how long one takes."""

    def __init__(self) -> None:
        super().__init__()
        self.reads, self.slow_s = 0, 0.0

    async def read(self, name: str) -> bytes:
        self.reads += 1
        await asyncio.sleep(self.slow_s)
        return await super().read(name)


async def at_once(work: Callable[[], None]) -> None:
    work()


def evaluation(number: int, **values: Any) -> Evaluation:
    return Evaluation(number=number, step=10 * number, timeline=0, checkpoint=CHECKPOINT, **values)


def test_a_job_that_has_ended_still_shows_its_metrics_and_evaluations() -> None:
    async def main() -> None:
        jobs, files = Jobs(tasks=8), Counted()
        jobs.storage.series = files
        async with jobs.leading(series=SeriesReader(at_once)) as leader, client_of(leader) as client:
            await leader.create_job(job_of("a"), None)
            check_problem(await client.get("/v1/jobs/a/metric-series/loss"), 404, "NOT_FOUND")
            assert (await client.get("/v1/jobs/a/metric-series")).json()["series"] == [], "it has not begun"
            async with jobs.pool(1, 1):
                await until(lambda: leader.state.job("a").standing is Standing.ACTIVE, "the job to start")
                await until(
                    lambda: "a" in leader.term.jobs and leader.term.jobs["a"].master.current_term, "its term"
                )
                steps = [
                    StepMetrics(step=step, epoch=0, loss_sum=2.0 * step, records=2, lr=(0.1,))
                    for step in range(8)
                ]
                await asyncio.sleep(0.1)
                await leader.find("a").report_metrics(
                    MetricBatch(trainer="t0-1", steps=tuple(steps), whole=True)
                )
                led = (await client.get("/v1/jobs/a/metric-series/loss")).json()
                by_epoch = (await client.get("/v1/jobs/a/metric-series/loss?by=epoch")).json()
                assert [point["mean"] for point in led["points"]] == [float(step) for step in range(8)]
                assert [point["mean"] for point in by_epoch["points"]] == [3.5]
                for number in (1, 2, 3):
                    left_out = "its checkpoint is damaged" if number == 2 else ""
                    record = evaluation(
                        number, metrics={} if left_out else {"accuracy": 0.5}, left_out=left_out
                    )
                    await jobs.etcd.put(jobs.keys.keys_of("a").evaluation_result(number), record.to_bytes())
                status = EvaluationStatus(settled=3)  # later ones would be of steps that the job has left
                await jobs.etcd.put(jobs.keys.keys_of("a").evaluation_status, status.to_bytes())
                await until(lambda: leader.state.job("a").standing is Standing.COMPLETED, "the job to end")
                await until(lambda: not leader.term.jobs, "its term to end")
            assert (await client.get("/v1/jobs/a/metric-series/loss")).json() == led
            assert (await client.get("/v1/jobs/a/metric-series/loss?by=epoch")).json() == by_epoch
            names = [each["name"] for each in (await client.get("/v1/jobs/a/metric-series")).json()["series"]]
            assert names == ["loss", "lr"]
            reads = files.reads
            assert (await client.get("/v1/jobs/a/metric-series/lr")).json()["points"][0]["mean"] == 0.1
            assert files.reads == reads, "files are read once"
            check_problem(await client.get("/v1/jobs/a/metric-series/x"), 404, "NOT_FOUND")
            check_problem(await client.get("/v1/jobs/b/metric-series"), 404, "NOT_FOUND")

            page = (await client.get("/v1/jobs/a/evaluations?page_size=2")).json()
            told = [(each["number"], each["metrics"], each["left_out"]) for each in page["evaluations"]]
            assert told == [(3, {"accuracy": 0.5}, ""), (2, {}, "its checkpoint is damaged")]
            rest = await client.get(
                f"/v1/jobs/a/evaluations?page_size=2&page_token={page['next_page_token']}"
            )
            assert [each["number"] for each in rest.json()["evaluations"]] == [1]
            assert rest.json()["next_page_token"] == ""
            check_problem(await client.get("/v1/jobs/b/evaluations"), 404, "NOT_FOUND")

    run_virtually(main)


def test_a_list_tells_what_a_job_failed_with_and_the_job_has_the_traceback() -> None:
    async def main() -> None:
        jobs = Jobs(tasks=8)
        failure = UserFailure(
            error_type="ValueError", message="m" * 300, traceback="Traceback ...", trainer="t0-1", fatal=True
        )
        async with jobs.leading() as leader, client_of(leader) as client:

            async def listed() -> Any:
                [job] = (await client.get("/v1/jobs")).json()["jobs"]
                return job["failure"]

            await leader.create_job(job_of("a"), None)
            assert await listed() is None
            async with jobs.pool(1, 1):
                await until(lambda: leader.state.job("a").standing is Standing.ACTIVE, "the job to start")
                await until(
                    lambda: "a" in leader.term.jobs and leader.term.jobs["a"].master.current_term, "its term"
                )
                await asyncio.sleep(0.1)
                await leader.find("a").report_failure("t0-1", failure)
                await until(lambda: leader.state.job("a").standing is Standing.FAILED, "the job to end")
                await until(lambda: not leader.term.jobs, "its term to end")
            found = await listed()
            assert (found["error_type"], found["message"]) == ("ValueError", "m" * 200 + " …")
            assert found["traceback"] == ""
            whole = (await client.get("/v1/jobs/a")).json()["failure"]
            assert (whole["message"], whole["traceback"]) == ("m" * 300, "Traceback ...")

    run_virtually(main)


def stored(*steps: int) -> bytes:
    table = SeriesTable()
    for step in steps:
        table.add("loss", step, 0, Value(float(step), 1, step, step))
    return encoded(table, WholeSteps())


def test_a_storage_that_does_not_answer_is_told_and_asked_again() -> None:
    async def main() -> None:
        jobs, files = Jobs(), Counted()
        jobs.storage.series = files
        files.contents[name_of(1, 1, everything=False)] = stored(0, 1)
        async with jobs.leading(series=SeriesReader(at_once)) as leader, client_of(leader) as client:
            await leader.create_job(job_of("a"), None)
            files.away = True
            problem = check_problem(await client.get("/v1/jobs/a/metric-series"), 503, "STORAGE_UNREACHABLE")
            assert "the storage is away" in problem["detail"]
            assert problem["retryable"]
            files.away, files.slow_s = False, 2 * READ_S
            check_problem(await client.get("/v1/jobs/a/metric-series"), 504, "DEADLINE_EXCEEDED")
            await asyncio.sleep(2 * READ_S)  # the read goes on
            assert (await client.get("/v1/jobs/a/metric-series/loss")).json()["points"][1]["step"] == 1
            assert files.reads == 1

    run_virtually(main)


def test_who_asks_at_the_same_time_waits_for_one_read_and_few_jobs_are_read_at_once() -> None:
    async def main() -> None:
        reader, all_files = SeriesReader(at_once), [Counted() for _ in range(5)]
        for files in all_files:
            files.contents[name_of(1, 1, everything=False)] = stored(0)
            files.slow_s = 1.0
        asked = [
            asyncio.ensure_future(reader.read(str(number % 5), all_files[number % 5])) for number in range(10)
        ]
        await asyncio.sleep(0.5)
        assert [files.reads for files in all_files] == [1, 1, 0, 0, 0]
        with replaced(series_files, "MOST_WAITING", 5):
            problem = await asyncio.gather(reader.read("another", Counted()), return_exceptions=True)
            assert "the metrics of 5 jobs are being read here" in str(problem)
        found = await asyncio.gather(*asked)
        assert [files.reads for files in all_files] == [1] * 5
        assert found[0] is found[5]

    run_virtually(main)


def test_what_was_read_is_kept_in_bounded_memory_and_read_anew_when_there_are_other_files() -> None:
    async def main() -> None:
        reader, first, second = SeriesReader(at_once), Counted(), Counted()
        first.contents[name_of(1, 1, everything=False)] = stored(0, 1)
        second.contents[name_of(1, 1, everything=False)] = stored(0)
        with replaced(series_files, "MOST_BUCKETS", 3):
            for _ in range(2):
                await reader.read("first", first)
                await reader.read("second", second)
            assert (first.reads, second.reads) == (1, 1)
            first.contents[name_of(2, 1, everything=False)] = stored(2)  # it was led again
            found = await reader.read("first", first)
            assert [bucket.step for bucket in found.table.by_name["loss"]] == [0, 1, 2]
            assert first.reads == 3
            await reader.read("second", second)
            assert second.reads == 2, "it was forgotten for the other one, and is read again"

    run_virtually(main)
