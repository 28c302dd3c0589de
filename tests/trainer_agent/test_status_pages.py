"""What a trainer answers by HTTP: health to everybody, metrics to who has a token."""

from __future__ import annotations

import aiohttp

from tests.equipment.metric_names import names_in, wrong_metrics
from trainer_agent.process import COUNTERS, StatusPages
from trainer_agent.tasks.activity import Activity, LanePace
from trainer_agent.tasks.reports import Done, Reports
from trireme_shared.platform.security.access import Access
from trireme_shared.platform.security.tokens import Role, TokenRecord, Tokens, TokenTable, digest_of
from trireme_shared.protocol.records import CompleteTask, StepMetrics, Task, TaskKind

VIEWER = TokenRecord(name="v", role=Role.VIEWER, sha256=digest_of("reads"))


class Agent:
    """Its reports and its pace are all that the pages ask for."""

    def __init__(self) -> None:
        self.reports, self.pace = Reports(None, "t1", Activity()), LanePace(0.25)

    @property
    def done(self) -> Done:
        return self.reports.done


async def test_metrics_need_a_viewers_token_and_count_what_was_trained():
    pages = StatusPages(Access(Tokens(table=TokenTable(tokens=(VIEWER,)))))
    async with pages.serving("127.0.0.1", 0, None) as port, aiohttp.ClientSession() as session:

        async def get(path, token="", **headers):
            headers |= {"Authorization": f"Bearer {token}"} if token else {}
            async with session.get(f"http://127.0.0.1:{port}{path}", headers=headers) as answer:
                return answer.status, await answer.text(), answer.headers

        assert (await get("/healthz"))[:2] == (200, '{"status": "ok"}')
        assert (await get("/readyz"))[0] == 503
        for token in ("", "wrong"):
            status, text, headers = await get("/metrics", token)
            assert (status, headers["WWW-Authenticate"]) == (401, 'Bearer realm="trireme"')
            assert "trireme_trainer" not in text
        assert (await get("/metrics", "reads", Host="evil.example"))[0] == 421
        assert (await get("/metrics", "reads", Origin="http://evil.example"))[0] == 403
        status, text, headers = await get("/metrics", "reads")
        assert (status, wrong_metrics(text)) == (200, [])
        assert "Server" not in headers
        assert "trireme_trainer_ready 0.0" in text
        pages.agent = agent = Agent()
        assert (await get("/readyz"))[:2] == (200, '{"status": "ready"}')
        agent.reports.share(StepMetrics(step=0, epoch=0, loss_sum=1.0, records=6, skipped=2))
        agent.reports.share(StepMetrics(step=1, epoch=0, loss_sum=1.0, records=4))
        agent.reports.complete(
            Task(task_id="0", kind=TaskKind.TRAIN, attempt=1), CompleteTask(trainer="t1", attempt=1)
        )
        _, text, _ = await get("/metrics", "reads")
        assert wrong_metrics(text) == []
        for line in (
            "ready 1.0",
            "steps_total 2.0",
            "records_total 10.0",
            "skipped_records_total 2.0",
            "tasks_total 1.0",
        ):
            assert f"trireme_trainer_{line}" in text
        assert "trireme_trainer_lane_seconds 0.25" in text
        assert "process_resident_memory_bytes" in names_in(text)
    assert set(COUNTERS) == set(Done.__dataclass_fields__), "a counter without a metric"
