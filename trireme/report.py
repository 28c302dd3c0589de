"""The last words of a run: what was trained, how well, where the model is; or what failed, the user's traceback on top."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.records import JobSpec, JobState
from trireme.exits import failure_lines


@dataclass(frozen=True, slots=True)
class Counts:
    """What only the launcher and the master's metrics know at the end."""

    restarts: Mapping[str, int]
    loss: float | None = None
    steps: int | None = None


def result_document(spec: JobSpec, state: JobState, counts: Counts, seconds: float, folder: Path) -> dict[str, Any]:
    """What --json prints, and what the summary is made of."""
    result = state.result
    return {
        "job": spec.job,
        "phase": state.phase.value,
        "reason": state.reason,
        "mode": spec.mode.value,
        "epochs": spec.epochs,
        "seconds": round(seconds, 3),
        "metrics": result.metrics,
        "loss": counts.loss,
        "steps": counts.steps,
        "records": result.trained_records,
        "discarded": {"tasks": result.discarded_tasks, "records": result.discarded_records},
        "generations": state.generation,
        "restarts": dict(counts.restarts),
        "exports": result.exports,
        "failure": state.failure.model_dump() if state.failure else None,
        "logs": str(folder / "logs"),
    }


def summary_text(document: Mapping[str, Any]) -> str:
    """The same for people, one fact a line."""
    restarts = ", ".join(f"{name} {count}" for name, count in document["restarts"].items()) or "none"
    discarded = document["discarded"]
    rows = [
        ("job", f"{document['job']} {document['phase']} after {document['seconds']:.1f} s ({document['mode']})"),
        ("records", f"{document['records']:,} in {document['epochs']} epochs"),
        ("restarts", f"{restarts}; {document['generations']} generations of members"),
        *[(name, number(value)) for name, value in document["metrics"].items()],
        *[(f"model ({kind})", path) for kind, path in document["exports"].items()],
    ]
    if document["loss"] is not None:
        rows.insert(1, ("loss", f"{number(document['loss'])} (mean of the last epoch)"))
    if discarded["tasks"]:
        rows.append(("discarded", f"{discarded['tasks']} tasks, {discarded['records']:,} records"))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def number(value: float) -> str:
    """`0.9722`, `93`."""
    return f"{value:.0f}" if float(value).is_integer() else f"{value:.4g}"


def failure_text(state: JobState, folder: Path) -> str:
    """The user's traceback once, on top, with the task it happened in; then why the job failed."""
    lines = failure_lines(state.failure) if state.failure else []
    return "\n".join([*lines, f"error: job failed: {state.reason}", f"logs: {folder / 'logs'}"])
