"""A trainer whose steps have no results and no times: what `--metrics` of benchmarks.steps compares with. No
member of a real job does this."""

from __future__ import annotations

from typing import Any

from trainer_agent.data_plane.pushes import NodeSink
from trainer_agent.loops.sync import SyncLoop
from trainer_agent.tasks.reports import Reports


def leave_out_metrics() -> None:
    """In this process, from now on."""
    begin = NodeSink.__init__
    report = SyncLoop.__dict__["_report"]

    def without_result(self: NodeSink, outboxes: Any, node: Any, compute: Any, *_: Any, **more: Any) -> None:
        begin(self, outboxes, node, compute, None, **more)

    def without_metrics(self: SyncLoop, step: Any, following: Any, _: int | None) -> None:
        step.counted.clear()
        report(self, step, following, None)

    replaced: list[tuple[Any, str, Any]] = [
        (NodeSink, "__init__", without_result),
        (SyncLoop, "_report", without_metrics),
        (Reports, "whole", lambda *_: None),
        (Reports, "spent", lambda *_: None),
    ]
    for kind, name, function in replaced:
        setattr(kind, name, function)
