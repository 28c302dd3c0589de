"""The summary of a run: what was trained, how well, where the model is; or what failed, with the user's
traceback on top. And the lines of one in this process."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trireme_shared.platform.runtime import clock
from trireme_shared.protocol.evaluations import evaluated_point
from trireme_shared.protocol.records import JobSpec, JobState, Mode, Phase, UserFailure

LISTED = 100  # discarded tasks in the document
SHOWN = 5  # and in the summary
SHOWN_EPOCHS = 8  # in the summary
REPORT_SECONDS = 2.0
FACTS = ("task_id", "kind", "epoch", "file", "first", "count", "failures", "cause")
# as trireme_shared.platform.runtime.ids.new_id makes them, one for each start; not the end of a UUID
_TOKEN = re.compile(r"(?<=[\w])(?<![0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4})-[0-9a-f]{12}\b")


@dataclass(frozen=True, slots=True)
class Counts:
    """Facts that only the launcher and the master's metrics know at the end. `records` and `epochs`: trained
    so far; those of a completed job are in its state. `by_epoch`: `number`, `loss` and `records` of each
    epoch."""

    restarts: Mapping[str, int]
    loss: float | None = None
    steps: int | None = None
    records: int = 0
    epochs: int = 0
    discarded: Sequence[Mapping[str, Any]] = ()
    by_epoch: Sequence[Mapping[str, Any]] = ()


def result_document(
    spec: JobSpec, state: JobState, counts: Counts, seconds: float, folder: Path, *, resumable: bool = False
) -> dict[str, Any]:
    """What --json prints; the summary is made from it. `restarts` and `seconds` are those of all runs that
    resumed each other. `resumable`: the same command goes on from the newest checkpoint of this failed
    job."""
    result, completed = state.result, state.phase is Phase.COMPLETED
    return {
        "job": spec.job,
        "state": state.phase.value,
        "phase": state.phase.value,
        "reason": state.reason,
        "cause": state.cause.value if state.cause else None,
        "resumable": resumable,
        "mode": spec.mode.value,
        "epochs": spec.epochs,
        "epochs_done": (spec.epochs if result.stopped_epochs is None else result.stopped_epochs)
        if completed
        else counts.epochs,
        "seconds": round(seconds, 3),
        "metrics": result.metrics,
        "loss": counts.loss,
        "loss_by_epoch": [{"epoch": each["number"], "loss": each["loss"]} for each in counts.by_epoch],
        "steps": counts.steps,
        "records": result.trained_records if completed else counts.records,
        "discarded": {
            "tasks": result.discarded_tasks or len(counts.discarded),
            "records": result.discarded_records or sum(int(task["count"]) for task in counts.discarded),
            "list": [{name: task[name] for name in FACTS} for task in counts.discarded[:LISTED]],
        },
        "losses": result.losses.model_dump(),
        "generation": state.generation,
        "restarts": dict(counts.restarts),
        "exports": result.exports,
        "best": result.best.model_dump() if result.best else None,
        "history": [change.model_dump() for change in spec.history],
        "stopped_step": result.stopped_step,
        "failure": state.failure.model_dump() if state.failure else None,
        "logs": str(folder / "logs"),
    }


def summary_text(document: Mapping[str, Any], *, reason: bool = False) -> str:
    """The summary for the user, one fact a line; with the `reason` of its end, and the traceback of the
    script's error."""
    restarts = ", ".join(f"{name} {count}" for name, count in document["restarts"].items()) or "none"
    discarded = document["discarded"]
    rows = [
        (
            "job",
            f"{document['job']} {document['phase']} after {document['seconds']:.1f} s ({document['mode']})",
        ),
        ("records", f"{document['records']:,} in {epochs_of(document)}"),
        ("restarts", restarts),
        *[(name, number(value)) for name, value in document["metrics"].items()],
        *_best(document.get("best"), document["mode"]),
        *[(f"model ({kind})", path) for kind, path in document["exports"].items()],
    ]
    if document.get("stopped_step") is not None:
        rows.insert(
            2,
            ("stopped early", f"at {point(document['mode'], document['stopped_step'])}, as stop_early says"),
        )
    if document["loss"] is not None:
        rows.insert(1, ("training loss", f"{number(document['loss'])} (mean of {_loss_epoch(document)})"))
        rows[2:2] = _by_epoch(document.get("loss_by_epoch", ()))
    if discarded["tasks"]:
        rows.append(("discarded", f"{discarded['tasks']} tasks, {discarded['records']:,} records"))
        rows += [("", _lost(task)) for task in discarded["list"][:SHOWN]]
        if discarded["tasks"] > SHOWN:
            rows.append(("", f"and {discarded['tasks'] - SHOWN} more: trireme run --json lists them"))
    rows += loss_rows(document["losses"])
    rows += [("reason", document["reason"])] if reason else []
    width = max(len(name) for name, _ in rows)
    failed = (
        failure_lines(UserFailure.model_validate(document["failure"]))
        if reason and document.get("failure")
        else []
    )
    return "\n".join([*(f"{name:<{width}}  {value}" for name, value in rows), *failed])


def _by_epoch(losses: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """The first and the last ones, of several."""
    values = [number(each["loss"]) for each in losses if each["loss"] is not None]
    if len(values) > SHOWN_EPOCHS:
        values = [values[0], "...", *values[1 - SHOWN_EPOCHS :]]
    return [("loss by epoch", "  ".join(values))] if len(values) > 1 else []


def _best(best: Mapping[str, Any] | None, mode: str) -> list[tuple[str, str]]:
    return (
        [("best", f"{best['metric']} {number(best['value'])} at {point(mode, best['step'])}")] if best else []
    )


def epochs_of(document: Mapping[str, Any]) -> str:
    """`1 epoch`, `5 epochs`, or `2 of 5 epochs`."""
    done, epochs = document.get("epochs_done", document["epochs"]), document["epochs"]
    begun = "" if done == epochs else f"{done} of "
    return f"{begun}{epochs} epoch{'' if epochs == 1 else 's'}"


def _loss_epoch(document: Mapping[str, Any]) -> str:
    """The newest loss is of the last epoch that has one; it may not be over."""
    done, epochs = document.get("epochs_done", document["epochs"]), document["epochs"]
    losses = document.get("loss_by_epoch", ())
    is_over = losses[-1]["epoch"] < done if losses else done == epochs
    return "the last epoch" if is_over else "the last epoch that was begun"


def _lost(task: Mapping[str, Any]) -> str:
    last = task["first"] + task["count"] - 1
    return f"{task['file']} records {task['first']}-{last}, epoch {task['epoch']}: {task['cause']}"


def loss_rows(losses: Mapping[str, Mapping[str, int]]) -> list[tuple[str, str]]:
    """Updates that parameter servers never got, one row for each cause: `pserver-1: 12 minibatches`."""
    return [
        (
            f"updates {cause}",
            ", ".join(f"pserver-{index}: {count:,} minibatches" for index, count in losses[cause].items()),
        )
        for cause in ("lost", "skipped")
        if losses.get(cause)
    ]


def point(mode: str, step: int) -> str:
    """`step 150`, `minibatch 150`."""
    return evaluated_point(Mode(mode), step)


def evaluation_line(facts: Mapping[str, Any] | None, mode: str) -> str:
    """`evaluation 3 (step 150): accuracy 0.91; number 4 (step 200) is under way, 2 of 8 tasks`; "" without
    any."""
    if not facts:
        return ""
    last, parts = facts.get("last"), []
    if last:
        values = ", ".join(f"{name} {number(value)}" for name, value in last["metrics"].items())
        parts.append(
            f"evaluation {last['number']} ({point(mode, last['step'])}): "
            f"{values or last.get('left_out') or 'no finite metric'}"
        )
        if (best := last.get("best")) and best["number"] != last["number"]:
            parts.append(
                f"the best one: {best['metric']} {number(best['value'])} at {point(mode, best['step'])}"
            )
        elif best:
            parts.append("it is the best so far")
    if facts.get("running") is not None:
        done = f"{facts['tasks_done']} of {facts['tasks_total']} tasks"
        parts.append(f"evaluation {facts['running']} ({point(mode, facts['step'])}) is under way, {done}")
    return "; ".join(parts)


def number(value: float) -> str:
    """`0.9722`, `93`."""
    return f"{value:.0f}" if float(value).is_integer() and abs(value) < 1e9 else f"{value:.4g}"


def failure_text(state: JobState, folder: Path, *, resumable: bool = False) -> str:
    """The user's traceback with its task, then why the job failed, and what the same command would do."""
    lines = failure_lines(state.failure) if state.failure else []
    again = (
        "it goes on from its newest checkpoint"
        if resumable
        else f"it starts from the beginning, and the files of this run move to {folder / 'previous'}"
    )
    lines += [f"error: job failed: {state.reason}", f"hint: started again with the same command, {again}"]
    return "\n".join([*lines, f"logs: {folder / 'logs'}"])


def failure_lines(failure: UserFailure) -> list[str]:
    """The traceback on top, then the task it happened in."""
    last = f"{failure.error_type}: {failure.message}" if failure.error_type else failure.message
    lines = [failure.traceback.rstrip()] if failure.traceback else []
    if not (failure.error_type and failure.error_type in failure.traceback):
        lines.append(last)
    if failure.task:
        lines.append(f"in {failure.task}" + (f" at {failure.trainer}" if failure.trainer else ""))
    return lines


def without_tokens(sentence: str) -> str:
    """Names of processes as people use them, and as `trireme chaos kill` takes them: `trainer-0-4da120b091a6
    joined` -> `trainer-0 joined`."""
    return _TOKEN.sub("", sentence)


class ProgressLines:
    """Of training in this process: a line every REPORT_SECONDS, and one at each epoch's end."""

    def __init__(self, spec: JobSpec, records: int, report: Any) -> None:
        self._spec, self._records, self._report = spec, records, report
        self._epoch_started = self._last = clock.monotonic()

    def update(
        self, epoch: int, step: int, records: int, means: Mapping[str, float], *, final: bool = False
    ) -> None:
        now = clock.monotonic()
        if not final and now - self._last < REPORT_SECONDS:
            return
        rate = records / max(now - self._epoch_started, 1e-9)
        shown = "  ".join(f"{name} {value:.4f}" for name, value in means.items())
        self._report(
            f"epoch {epoch + 1}/{self._spec.epochs}  step {step}  {shown}  "
            f"{records}/{self._records} records  {rate:.0f}/s"
        )
        self._last = now
        if final:
            self._epoch_started = now
