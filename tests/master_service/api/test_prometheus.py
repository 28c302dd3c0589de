"""Names of metrics keep the rules of the field, and the dashboard asks for names that exist."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from master_service.core.changes import Decision
from tests.equipment.metric_names import names_asked_for, names_in, wrong_metrics
from tests.equipment.virtual_loop import run_virtually
from tests.equipment.waiting import until
from tests.master_service.api.client import client_of
from tests.master_service.api.requests_by_key import WANTED, World, post
from trainer_agent.process import COUNTERS as OF_TRAINERS
from trireme.pool.host_status import HostMetrics
from trireme_shared.protocol.records.cluster import PoolMember
from trireme_shared.protocol.records.job import Losses
from trireme_shared.serving.core.calls import Counters
from trireme_shared.serving.data_plane.server import COUNTERS, Collector
from trireme_shared.serving.pserver import Pserver

DASHBOARD = Path(__file__).parents[3] / "docker" / "grafana" / "trireme.json"
TRAINERS = {f"trireme_trainer_{name}_total" for name, _ in OF_TRAINERS.values()}


async def job_exposition() -> str:
    world = World("tasks")
    await world.prepare()
    async with world.leading("m1") as master, client_of(master) as client:
        share = {"step": 0, "epoch": 0, "loss_sum": 2.0, "records": 4, "skipped": 1}
        await post(master, "/v1/metric-batches", {"trainer": "t1", "steps": [share]})
        losses = Losses(lost={"0": 3}, skipped={"0": 1})
        await master.writer.decide(lambda *_: Decision(None, (losses,)))
        return (await client.get("/metrics")).text


async def cluster_exposition() -> str:
    world = World("cluster")
    await world.prepare()
    async with world.leading("m1") as leader, client_of(leader) as client:
        await post(leader, "/v1/jobs", WANTED)
        await until(lambda: len(leader.state.jobs) == 4, "the job")
        return (await client.get("/metrics")).text


def pserver_exposition() -> str:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collector(Pserver("j", "ps-1")))
    return generate_latest(registry).decode()


def host_exposition() -> str:
    registry, metrics = CollectorRegistry(auto_describe=False), HostMetrics()
    member = PoolMember(member="h-trainer-0", kind="trainer", host="h", agent="h", pid=1)
    metrics.members = [member, member.model_copy(update={"running": "j"})]
    registry.register(metrics)
    return generate_latest(registry).decode()


def test_names_labels_and_help_keep_the_rules() -> None:
    texts = (
        run_virtually(job_exposition),
        run_virtually(cluster_exposition),
        pserver_exposition(),
        host_exposition(),
    )
    assert [wrong for text in texts for wrong in wrong_metrics(text)] == []
    assert 'trireme_epoch_loss{job="j"} 0.5' in texts[0]
    assert 'trireme_missed_minibatches_total{cause="lost",job="j",pserver="0"} 3.0' in texts[0]
    assert 'trireme_cluster_jobs{standing="queued"} 2.0' in texts[1]
    assert 'trireme_pool_members{kind="trainer",state="draining"} 1.0' in texts[1]
    assert set(COUNTERS) == set(Counters.__dataclass_fields__), "a counter without a metric"


@pytest.mark.parametrize(
    "text",
    [
        (
            "# HELP trireme_x_seconds_lasted h\n# TYPE trireme_x_seconds_lasted gauge\n"
            "trireme_x_seconds_lasted 1\n"
        ),
        "# HELP trireme_x_ms h\n# TYPE trireme_x_ms gauge\ntrireme_x_ms 1\n",
        (
            "# HELP trireme_records_per_second h\n# TYPE trireme_records_per_second gauge\n"
            "trireme_records_per_second 1\n"
        ),
        "# HELP trireme_x_total h\n# TYPE trireme_x_total gauge\ntrireme_x_total 1\n",
        "# HELP x h\n# TYPE x gauge\nx 1\n",
        "# HELP trireme_x \n# TYPE trireme_x gauge\ntrireme_x 1\n",
        '# HELP trireme_x h\n# TYPE trireme_x gauge\ntrireme_x{task="1"} 1\n',
    ],
)
def test_a_name_that_breaks_a_rule_is_found(text: str) -> None:
    assert wrong_metrics(text)


def queries(node: Any) -> list[str]:
    if isinstance(node, dict):
        own = [value for key, value in node.items() if key in ("expr", "query") and isinstance(value, str)]
        return own + [query for value in node.values() for query in queries(value)]
    return [query for value in node for query in queries(value)] if isinstance(node, list) else []


def test_the_dashboard_asks_for_metrics_that_exist_and_leaves_none_of_ours_out() -> None:
    board = json.loads(DASHBOARD.read_text())
    asked = {name for query in queries(board) for name in names_asked_for(query)}
    members = {"trireme_pserver_parameter_bytes", "trireme_trainer_lane_seconds", *TRAINERS}
    process = {"process_resident_memory_bytes", "process_cpu_seconds_total"}
    texts = (
        run_virtually(job_exposition),
        run_virtually(cluster_exposition),
        pserver_exposition(),
        host_exposition(),
    )
    there = {name for text in texts for name in names_in(text)} | members | process
    assert asked <= there, asked - there
    assert len(asked) >= 18
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
