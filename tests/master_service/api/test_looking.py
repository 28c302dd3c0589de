"""What it costs a leader that others look at its jobs, and that nobody looks so much that others cannot."""

from __future__ import annotations

import asyncio
import json
import random
import resource
from pathlib import Path
from typing import Any

import pytest

from master_service.api import rendered
from master_service.api.app import make_api, make_app
from master_service.api.middleware import Guarded
from master_service.api.routes.jobs import leader_view, listed_view
from master_service.cluster import term as cluster_term
from master_service.cluster.store import RESTING_S
from master_service.core.decisions.scheduling.schedule import schedule
from master_service.core.state.cluster import ClusterState, DropAssignment, Place, PutAssignment, PutJob
from master_service.store.schema import read_events
from tests.equipment.replaced import replaced
from tests.equipment.tokens import access_by_role
from tests.equipment.virtual_loop import run_virtually
from tests.equipment.waiting import until
from tests.master_service.api.client import check_problem, client_of
from tests.master_service.api.test_auth import client_with
from tests.master_service.api.test_cluster_rest import wanted
from tests.master_service.api.test_events import Reader
from tests.master_service.cluster import MasterCluster, running, spec_of
from tests.master_service.core.cluster_jobs import active
from tests.master_service.many_jobs import Jobs, job_of
from trireme_shared.platform.runtime import service
from trireme_shared.platform.security.access import Access
from trireme_shared.protocol.records.cluster import Assignment, ClusterJob, Kind, PoolMember, Standing
from trireme_shared.protocol.rest import JobPage, MasterView


def test_the_places_of_a_job_are_found_by_its_name_whatever_was_assigned_before() -> None:
    drawn, state = random.Random(3), ClusterState()
    for name in ("a", "b", "c"):
        state.apply(PutJob(active(name)), 0.0)
    places: list[Place] = [("trainer", f"t{n}") for n in range(9)] + [("pserver", f"p{n}") for n in range(4)]
    for _ in range(3000):
        place, job = drawn.choice(places), drawn.choice("abc")
        before = {name: state.revision_of(name) for name in "abc"}
        held = state.assignments.get(place)
        if drawn.random() < 0.4:
            state.apply(DropAssignment(place), 0.0)
            changed = {held.job} if held else set()
        else:
            task = drawn.choice(("", "", "pre-0"))
            state.apply(PutAssignment(place, Assignment(job=job, epoch=1, task=task)), 0.0)
            changed = {job} | ({held.job} if held else set())
        for name in "abc":
            assert (state.revision_of(name) is not before[name]) is (name in changed)
            for kind in ("trainer", "pserver"):
                found = state.assigned_to(name, kind)  # type: ignore[arg-type]
                assert sorted(found) == sorted(
                    each
                    for each, has in state.assignments.items()
                    if (has.job, each[0], has.task) == (name, kind, "")
                )


def test_a_member_that_changes_changes_its_job() -> None:
    state = ClusterState()
    state.apply(PutJob(active("a")), 0.0)
    state.apply(PutAssignment(("trainer", "t0"), Assignment(job="a", epoch=1)), 0.0)
    kind: Kind = "trainer"
    member = PoolMember(member="t0", kind=kind, host="h", agent="a", pid=1)
    for seen in (member, member.with_fields(running="a", epoch=1), None):
        before = state.revision_of("a")
        state.see((kind, "t0"), seen, 0.0)
        assert state.revision_of("a") is not before


class CountedViews:
    """listed_view, and how often it was asked for each job."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def __call__(self, term: Any, job: ClusterJob, leader: MasterView) -> Any:
        self.made.append(job.job)
        return listed_view(term, job, leader)

    def take(self) -> list[str]:
        made, self.made = self.made, []
        return sorted(made)


def test_a_job_is_rendered_again_only_when_what_it_shows_has_changed() -> None:
    async def main() -> None:
        jobs, views = Jobs(task_s=5.0, tasks=40), CountedViews()
        names = [f"j{number}" for number in range(5)]
        async with jobs.leading() as leader:
            api = make_api(leader)
            api.state.rendered_jobs = rendered.RenderedJobs(views)
            async with client_with(Guarded(api, Access()), None, Host="localhost") as client:

                async def listed() -> list[str]:
                    """The jobs that were rendered for it."""
                    answer = await client.get("/v1/jobs")
                    page = JobPage(
                        jobs=tuple(
                            listed_view(leader.term, leader.state.jobs[name], leader_view(leader))
                            for name in names
                        )
                    )
                    found = JobPage.model_validate_json(answer.text)
                    if not leader.term.jobs:  # nothing trains
                        assert (found, answer.text) == (page, page.model_dump_json())
                    assert [each.job for each in found.jobs] == names
                    return views.take()

                for name in names:
                    await leader.create_job(job_of(name), None)
                await until(lambda: all(job.reason for job in leader.state.jobs.values()), "their reasons")
                assert await listed() == names
                assert await listed() == []
                await leader.pause_job("j2")
                assert "j2" in await listed()
                for name in names[1:]:
                    await leader.cancel_job(name)
                await listed()
                async with jobs.pool(2, 1):
                    await until(lambda: "j0" in leader.term.jobs, "the job to start")
                    await until(lambda: leader.term.jobs["j0"].master.current_term is not None, "its term")
                    await asyncio.sleep(2.0)
                    await listed()
                    assert await listed() == [], "twenty dashboards see the same progress"
                    await asyncio.sleep(rendered.SHOWN_S)
                    assert await listed() == ["j0"]
                    await leader.pause_job("j0")
                    answer = (await client.get("/v1/jobs")).json()["jobs"][0]
                    assert answer["wanted"] == "pause", "whoever changed something sees it"
                    views.take()
                    await until(lambda: not leader.term.jobs, "its term to end")
                assert await listed() == ["j0"]
                assert await listed() == []

    run_virtually(main)


def test_other_requests_get_their_turns_while_many_jobs_are_rendered() -> None:
    async def main() -> None:
        jobs, turns = Jobs(), 0

        async def count_turns() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        async with jobs.leading() as leader:
            for number in range(3 * rendered.AT_ONCE + 1):
                await leader.create_job(job_of(f"j{number}"), None)
            found = list(leader.state.jobs.values())
            counting = asyncio.ensure_future(count_turns())
            await asyncio.sleep(0)
            before = turns
            page = await rendered.RenderedJobs(listed_view).page(leader.term, leader_view(leader), found, "7")
            assert turns - before == 3
            counting.cancel()
            assert json.loads(page)["next_page_token"] == "7"
            assert len(json.loads(page)["jobs"]) == len(found)

    run_virtually(main)


async def test_jobs_are_listed_from_the_newest_on_also_while_others_come_and_go() -> None:
    async with Jobs().leading() as leader, client_of(leader) as client:

        async def page(token: str = "") -> tuple[list[str], str]:
            query = {"newest_first": "true", "page_size": "3", **({"page_token": token} if token else {})}
            found = (await client.get("/v1/jobs", params=query)).json()
            return [job["job"] for job in found["jobs"]], found["next_page_token"]

        for number in range(8):
            await leader.create_job(job_of(f"j{number}"), None)
        first, token = await page()
        assert first == ["j7", "j6", "j5"]
        await leader.create_job(job_of("j8"), None)
        second, token = await page(token)
        assert second == ["j4", "j3", "j2"]
        assert await page(token) == (["j1", "j0"], "")
        assert (await page())[0] == ["j8", "j7", "j6"]


def test_any_number_of_viewers_of_ended_jobs_costs_a_reading_now_and_then() -> None:
    async def main() -> None:
        jobs = Jobs()
        async with jobs.leading() as leader:
            app = make_app(leader)
            await leader.create_job(job_of("a"), None)
            async with jobs.pool(1, 1):
                await until(lambda: leader.state.job("a").standing is Standing.COMPLETED, "the job to end")
                await until(lambda: not leader.term.jobs, "its term to end")
            await asyncio.sleep(2.0)
            viewers = [Reader(app, "/v1/jobs/a/events/stream") for _ in range(30)]
            await until(lambda: all("job_completed" in each.text for each in viewers), "what happened")
            before = jobs.simulated.calls
            await asyncio.sleep(2 * RESTING_S)
            # leases, and the schedule's looks, are asked for as well
            assert jobs.simulated.calls - before < 60
            for each in viewers:
                await each.leave()

    run_virtually(main)


def test_who_follows_a_job_that_rests_misses_nothing_when_it_is_led_again() -> None:
    async def main() -> None:
        jobs, ids = Jobs(task_s=0.5, tasks=20), []
        async with jobs.leading() as leader, client_of(leader) as client:

            async def follow() -> None:
                cursor = 0
                while True:
                    answer = await client.get(f"/v1/jobs/a/events?after={cursor}&wait_s=20")
                    if answer.status_code != 200:  # a term begins or ends
                        await asyncio.sleep(0.1)
                        continue
                    ids.extend(event["event_id"] for event in answer.json()["events"])
                    cursor = answer.json()["next_after"]

            await leader.create_job(job_of("a"), None)
            following = asyncio.ensure_future(follow())
            async with jobs.pool(1, 1):
                for _ in range(3):
                    await asyncio.sleep(3.0)
                    await leader.pause_job("a")
                    await until(lambda: leader.state.job("a").standing is Standing.PAUSED, "it to pause")
                    await asyncio.sleep(3.0)
                    await leader.resume_job("a")
                await asyncio.sleep(3.0)
                await leader.cancel_job("a")
                await until(lambda: leader.state.job("a").standing is Standing.CANCELLED, "the job to end")
                await until(lambda: not leader.term.jobs, "its term to end")
                await asyncio.sleep(RESTING_S + 2.0)
            following.cancel()
            log = await read_events(jobs.etcd, jobs.keys.keys_of("a").events)
            assert ids == list(range(log.oldest, log.newest + 1))

    run_virtually(main)


def test_one_token_may_hold_its_share_of_the_streams_and_no_more(tmp_path: Path) -> None:
    async def main() -> None:
        access = access_by_role(tmp_path / "tokens")
        cluster = MasterCluster(spec_of())
        async with running(cluster, "t1") as master:
            api = make_api(master)
            api.state.streams.most, api.state.streams.share = 6, 3
            app = Guarded(api, access)

            def reader(token: str) -> Reader:
                return Reader(app, "/v1/events/stream", (b"authorization", f"Bearer {token}".encode()))

            viewers = [reader("viewer") for _ in range(3)]
            await until(lambda: all("job_running" in each.text for each in viewers), "the viewers")
            refused = reader("viewer")
            await refused.running
            assert refused.status == 429
            assert "has 3 streams of events open here, at most 3 of one token may be" in refused.text
            others = [reader("member"), reader("admin"), reader("admin")]
            await until(lambda: all("job_running" in each.text for each in others), "the others")
            full = reader("admin")
            await full.running
            assert "6 streams of events are open here" in full.text
            await viewers[0].leave()
            again = reader("viewer")
            await until(lambda: "job_running" in again.text, "a place that is free again")
            for each in [*viewers[1:], *others, again]:
                await each.leave()
            assert api.state.streams.open == 0

    run_virtually(main)


@pytest.mark.parametrize("gather_s", [cluster_term.GATHER_S, 0.0])
def test_while_many_members_join_there_is_no_schedule_for_each(gather_s: float) -> None:
    async def main() -> None:
        jobs, schedules = Jobs(), 0

        def counted(*arguments: Any) -> Any:
            nonlocal schedules
            schedules += 1
            asyncio.get_running_loop().spend(0.02)  # type: ignore[attr-defined]
            return schedule(*arguments)

        async with jobs.leading() as leader:
            await leader.create_job(job_of("a"), None)
            await asyncio.sleep(1.0)
            lease = await jobs.etcd.grant(3600)
            with (
                replaced(cluster_term, "schedule", counted),
                replaced(cluster_term, "GATHER_S", gather_s),
            ):
                for number in range(100):
                    member = PoolMember(member=f"t{number}", kind="trainer", host="h", agent="a", pid=1)
                    key = jobs.keys.member("trainer", f"t{number}")
                    asyncio.ensure_future(jobs.etcd.put(key, member.to_bytes(), lease.id))  # noqa: RUF006
                    await asyncio.sleep(0.01)
                await until(lambda: len(leader.state.members) == 100, "all members")
                await asyncio.sleep(0.5)
            assert (schedules <= 60) is (gather_s > 0), schedules

    run_virtually(main)


def test_a_master_that_may_open_no_more_files_refuses_a_job_with_a_sentence() -> None:
    async def main() -> None:
        async with Jobs().leading() as leader, client_of(leader) as client:
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            most = service.open_files()[0] + 20
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            try:
                refused = await client.post("/v1/jobs", json=wanted("a"))
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            problem = check_problem(refused, 503, "RESOURCE_EXHAUSTED")
            assert f"of {most} files and sockets open that it may have" in problem["detail"]
            assert "ulimit -Hn" in problem["hint"]
            assert (await client.post("/v1/jobs", json=wanted("a"))).status_code == 201

    run_virtually(main)


def test_open_files_are_counted() -> None:
    before, most = service.open_files()
    with Path("/proc/self/status").open() as _:
        found, _most = service.open_files()
    assert (found, _most) == (before + 1, most)


@pytest.mark.parametrize("path", ["/v1/jobs"])
def test_the_page_of_jobs_is_documented_as_before(path: str) -> None:
    schema = make_api(Jobs().master()).openapi()["paths"][path]["get"]["responses"]["200"]
    assert schema["content"]["application/json"]["schema"]["$ref"].endswith("/JobPage")
