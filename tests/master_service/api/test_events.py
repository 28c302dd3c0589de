"""Events of jobs and of the cluster by REST."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import httpx

from master_service.api import server_sent
from master_service.api.app import make_api, make_app
from tests.equipment.replaced import replaced
from tests.equipment.virtual_loop import run_virtually
from tests.equipment.waiting import until
from tests.master_service.api.client import check_problem, client_of
from tests.master_service.cluster import MasterCluster, running, spec_of
from tests.master_service.many_jobs import Jobs, job_of
from trireme_shared.protocol.records.cluster import Standing


async def names_after(
    client: httpx.AsyncClient, path: str, after: int, **query: Any
) -> tuple[list[str], int]:
    answer = await client.get(path, params={"after": after, **query})
    assert answer.status_code == 200, answer.text
    page = answer.json()
    found = [event["event_id"] for event in page["events"]]
    assert found == list(range(found[0], found[0] + len(found))) if found else page["next_after"] == after
    assert not after or not found or found[0] == after + 1
    return [event["name"] for event in page["events"]], page["next_after"]


def test_events_of_a_job_are_there_before_while_and_after_it_is_led_the_clusters_outlive_its_leader() -> None:
    async def main() -> None:
        jobs = Jobs()
        async with jobs.leading("m1") as leader, client_of(leader) as client:
            await leader.create_job(job_of("a"), None)
            names, cluster_cursor = await names_after(client, "/v1/cluster/events", 0)
            assert names == ["leader_elected", "job_created"]
            assert await names_after(client, "/v1/jobs/a/events", 0) == ([], 0)
            check_problem(await client.get("/v1/jobs/b/events"), 404, "NOT_FOUND")
            check_problem(await client.get("/v1/cluster/events?after=3"), 410, "CURSOR_EXPIRED")
        async with jobs.leading("m2") as leader, client_of(leader) as client:
            waiting = asyncio.ensure_future(names_after(client, "/v1/jobs/a/events", 0, wait_s=30))
            await asyncio.sleep(3)
            async with jobs.pool(2, 1):
                names, begun = await waiting
                assert names[0] == "master_elected"
                await until(lambda: leader.state.job("a").standing is Standing.COMPLETED, "the job to end")
                await until(lambda: not leader.term.jobs, "its term to end")
                rest, cursor = await names_after(client, "/v1/jobs/a/events", begun)
                assert [name for name in names + rest if name == "job_completed"] == ["job_completed"]
                assert await names_after(client, "/v1/jobs/a/events", cursor, wait_s=3) == ([], cursor)
                names, _ = await names_after(client, "/v1/cluster/events", cluster_cursor)
                assert names[0] == "leader_elected"
                assert {"job_started", "job_completed"} <= set(names)

    run_virtually(main)


# ------------------------------------------------------------------ as a stream


def messages_in(text: str) -> list[tuple[int, dict[str, Any]]]:
    """(id, event) of each message of a stream."""
    found = re.findall(r"^id: (\d+)\ndata: (.*)\n\n", text, re.MULTILINE)
    return [(int(name), json.loads(data)) for name, data in found]


class Reader:
    """An ASGI client of one stream: it takes what is sent, until it does not any more."""

    def __init__(self, app: Any, path: str, *headers: tuple[bytes, bytes]) -> None:
        self.status, self.text, self.takes, self.ended = 0, "", True, False
        scope = {
            "type": "http",
            "method": "GET",
            "path": path,
            "query_string": b"",
            "raw_path": path.encode(),
        }
        scope |= {
            "headers": [(b"host", b"localhost"), *headers],
            "server": ("127.0.0.1", 1),
            "http_version": "1.1",
        }
        self._gone = asyncio.Event()
        self._asked = False
        self.running = asyncio.ensure_future(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if not self.takes:
            await asyncio.Event().wait()
        self.status = message.get("status", self.status)
        self.text += message.get("body", b"").decode()
        self.ended = message["type"] == "http.response.body" and not message.get("more_body", False)

    async def leave(self) -> None:
        self._gone.set()
        await self.running


def test_a_stream_goes_on_after_the_last_event_id_and_through_silence() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec_of())
        async with running(cluster, "t1") as master:
            app = make_app(master)
            reader = Reader(app, "/v1/jobs/j/events/stream")
            await until(lambda: "job_running" in reader.text, "what happened before")
            seen = messages_in(reader.text)
            assert [name for name, _ in seen] == list(range(seen[0][0], seen[0][0] + len(seen)))
            await cluster.add_trainer("t2")
            await until(lambda: "t2 joined" in reader.text, "what happens now")
            await asyncio.sleep(25)
            assert reader.text.count(": still here\n\n") == 2
            await reader.leave()
            again = Reader(app, "/v1/events/stream", (b"last-event-id", str(seen[-1][0]).encode()))
            await until(lambda: "t2 joined" in again.text, "what came after it")
            assert messages_in(again.text) == messages_in(reader.text)[len(seen) :]
            assert (again.status, again.text.split("\n\n")[0]) == (200, "retry: 1000")
            await again.leave()
            expired = Reader(app, "/v1/events/stream", (b"last-event-id", b"1"))
            await expired.running
            assert (expired.status, json.loads(expired.text)["code"]) == (410, "CURSOR_EXPIRED")

    run_virtually(main)


def test_a_stream_ends_with_the_term_and_after_its_time() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec_of())
        async with running(cluster, "t1") as master:
            app = make_app(master)
            with replaced(server_sent, "LIFE_S", 30.0):
                aged = Reader(app, "/v1/events/stream")
                await asyncio.sleep(29)
                assert not aged.ended
                await asyncio.sleep(2)
                assert aged.ended
            reader = Reader(app, "/v1/events/stream")
            await asyncio.sleep(1)
        await until(lambda: reader.ended, "the end of the stream", 1)
        refused = Reader(app, "/v1/events/stream")
        await refused.running
        assert (refused.status, json.loads(refused.text)["code"]) == (503, "NOT_LEADER")

    run_virtually(main)


def test_a_slow_reader_costs_one_page_for_a_bounded_time_and_streams_are_bounded() -> None:
    async def main() -> None:
        cluster = MasterCluster(spec_of())
        async with running(cluster, "t1") as master:
            api = make_api(master)
            api.state.streams.most = 2
            slow, other = Reader(api, "/v1/events/stream"), Reader(api, "/v1/events/stream")
            await until(lambda: "job_running" in slow.text and "job_running" in other.text, "both to begin")
            third = Reader(api, "/v1/events/stream")
            await third.running
            assert (third.status, json.loads(third.text)["code"]) == (429, "TOO_MANY_REQUESTS")
            slow.takes = False
            await cluster.add_trainer("t2")
            await until(lambda: "t2 joined" in other.text, "the other one to hear of it")
            await until(slow.running.done, "the slow one to be left", server_sent.SLOW_S + 1)
            assert api.state.streams.open == 1
            await other.leave()
            assert api.state.streams.open == 0

    run_virtually(main)
