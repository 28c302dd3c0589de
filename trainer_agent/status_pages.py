"""What a trainer answers by HTTP: /healthz tells a dead one from a slow one, /readyz says whether its model is built, /metrics is for
Prometheus."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from trainer_agent.agent import Agent
from trireme_shared.platform.membership.status_server import StatusServer
from trireme_shared.platform.security.access import Access

COUNTERS = {  # field of Done -> (name, help)
    "steps": ("steps", "shares of steps that were acknowledged (asynchronous: pushes)"),
    "records": ("records", "records in them"),
    "skipped_records": ("skipped_records", "records left out: their loss or gradient was not finite"),
    "tasks": ("tasks", "tasks that it has finished"),
}


class StatusPages:
    """`agent`: once there is one."""

    def __init__(self, access: Access) -> None:
        self.agent: Agent | None = None
        self._server = StatusServer(
            access, self, lambda: "" if self.agent is not None else "its model is not built yet"
        )

    def collect(self) -> Iterator[Metric]:
        agent = self.agent
        yield GaugeMetricFamily("trireme_trainer_ready", "1 once its model is built", value=int(agent is not None))
        if agent is None:
            return
        for field, (name, text) in COUNTERS.items():
            yield CounterMetricFamily(f"trireme_trainer_{name}", text, value=getattr(agent.done, field))
        if (lane_s := agent.pace.lane_s) is not None:
            text = "synchronous: forward and backward of one lane, the median of the last ones"
            yield GaugeMetricFamily("trireme_trainer_lane_seconds", text, value=lane_s)

    def serving(self, host: str, port: int, tls: ssl.SSLContext | None) -> AbstractAsyncContextManager[int]:
        """The port. `port` 0: a free one."""
        return self._server.serving(host, port, tls)
