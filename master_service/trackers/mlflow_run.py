"""The tracker `mlflow`: a run on an MLflow server, by MLflow's own client (`mlflow-skinny`).

The run is found again by its tag `trireme.run`, and what it has is asked of the server, so nothing is logged
twice, whatever died.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from master_service.trackers.tracker import Point, Run
from trireme_shared.platform.runtime import clock

MOST_METRICS, MOST_PARAMETERS = 1000, 100  # of one request, as MLflow limits them
MOST_TEXT = 5000
LIMITS = {  # else a server that is away would hold a call for many minutes
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
STATES = {"COMPLETED": "FINISHED", "FAILED": "FAILED", "CANCELLED": "KILLED"}


class MlflowRun:
    def __init__(self) -> None:
        self._client: Any = None
        self._run = ""

    def begin(self, run: Run) -> Mapping[str, int]:
        for name, value in LIMITS.items():
            os.environ.setdefault(name, value)
        from mlflow.entities import Param  # noqa: PLC0415  an extra
        from mlflow.tracking import MlflowClient  # noqa: PLC0415

        self._client = MlflowClient(tracking_uri=run.wanted.uri or None)
        experiment = self._experiment(run)
        before = self._client.search_runs(
            [experiment], filter_string=f"tags.`trireme.run` = '{run.id}'", max_results=1
        )
        name = run.wanted.run or os.environ.get("MLFLOW_RUN_NAME") or run.job
        found = before[0] if before else self._client.create_run(experiment, run_name=name, tags=run.tags)
        self._run = found.info.run_id
        if before:
            self._client.set_tag(self._run, "trireme.attempt", str(run.attempt))
            self._client.update_run(self._run, status="RUNNING")
        missing = [
            Param(name, value[:MOST_TEXT])
            for name, value in run.parameters.items()
            if value and name not in found.data.params  # MLflow refuses changes
        ]
        for first in range(0, len(missing), MOST_PARAMETERS):
            self._client.log_batch(self._run, params=missing[first : first + MOST_PARAMETERS])
        return {name: self._next(name) for name in found.data.metrics}

    def _experiment(self, run: Run) -> str:
        """By name, or as MLflow's own variables say. Made if it is not there."""
        if not run.wanted.experiment and (known := os.environ.get("MLFLOW_EXPERIMENT_ID")):
            return known
        name = run.wanted.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or run.job
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found is not None else self._client.create_experiment(name))

    def _next(self, name: str) -> int:
        return 1 + max(int(metric.step) for metric in self._client.get_metric_history(self._run, name))

    def log(self, points: Sequence[Point]) -> None:
        from mlflow.entities import Metric  # noqa: PLC0415

        now = int(clock.wall_time() * 1000)
        metrics = [Metric(point.name, point.value, now, point.step) for point in points]
        for first in range(0, len(metrics), MOST_METRICS):
            self._client.log_batch(self._run, metrics=metrics[first : first + MOST_METRICS])

    def end(self, result: Mapping[str, Any]) -> None:
        for name, value in result.items():
            if value not in (None, "", {}):
                self._client.set_tag(self._run, f"trireme.{name}", str(value)[:MOST_TEXT])
        self._client.set_terminated(self._run, STATES.get(str(result.get("phase")), "FINISHED"))

    def close(self) -> None:
        """Its requests are done when its methods return."""
