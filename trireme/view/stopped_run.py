"""What the files of a local run tell of a job that ended or was stopped, and of processes that its launcher started."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trireme.view.child_events import read_events
from trireme_shared.checkpoints import stored
from trireme_shared.protocol.explanations import Cause, Code, Explanation, explanation_of
from trireme_shared.protocol.records import JobSpec, Phase
from trireme_shared.protocol.records.checkpoints import saved_point

TOLD = 3  # deaths of processes


def explain_ended(result: Mapping[str, Any]) -> Explanation:
    """`result`: the document that the run has left."""
    job, option = str(result["job"]), f"--job {result['job']}"
    if result["phase"] == Phase.COMPLETED:
        models = [f"The model ({kind}) is {path}." for kind, path in result["exports"].items()]
        cause = Cause(
            code=Code.JOB_COMPLETED,
            summary=f"Job {job} is completed: nothing is left to do.",
            details=(f"{result['records']:,} records were trained in {result['epochs']} epochs.", *models),
            hints=(f"trireme status {option}", "trireme run SCRIPT --fresh trains it again"),
        )
        return explanation_of(job, cause)
    failure, details = result.get("failure"), [f"The cause is {result.get('cause') or 'not recorded'}."]
    if failure:
        where = f" in {failure['task']}" if failure.get("task") else ""
        details.append(f"The error{where}: {failure['error_type']}: {failure['message']}")
        details += [failure["traceback"].rstrip()] if failure.get("traceback") else []
    if (discarded := result["discarded"])["tasks"]:
        details.append(f"{discarded['tasks']} tasks with {discarded['records']:,} records were left out.")
    if result.get("resumable"):
        details.append("It is resumable: started again, it goes on from its newest checkpoint.")
    else:
        details.append("It is not resumable: started again, it starts from the beginning.")
    return explanation_of(
        job,
        Cause(
            code=Code.JOB_FAILED,
            summary=f"Job {job} has failed: {result['reason']}",
            details=tuple(details),
            hints=(
                "correct the cause, then trireme run SCRIPT (the same command)",
                f"read the logs in {result['logs']}",
            ),
        ),
    )


def explain_stopped(folder: Path) -> Explanation:
    """Nobody runs the job, and it is unfinished."""
    script, saved = "SCRIPT", "It is not known which checkpoints it has."
    try:
        spec = JobSpec.model_validate_json((folder / "spec.json").read_bytes())
        script = shlex.quote(spec.script)
        refs, _ = stored.found(spec.storage)
    except (OSError, ValueError):
        pass
    else:
        newest = max(refs, key=lambda ref: (ref.timeline, ref.step), default=None)
        saved = (
            f"Its newest checkpoint is of {saved_point(spec.mode, newest.step)}: it goes on from there."
            if newest
            else f"It has no checkpoint in {spec.storage} yet: it begins with its first step."
        )
    return explanation_of(
        folder.name,
        Cause(
            code=Code.JOB_STOPPED,
            summary=f"Job {folder.name} was stopped before its end: its launcher does not run.",
            details=(saved, *told_by_launcher(folder)),
            hints=(
                f"trireme run {script} (the same command as before) resumes it",
                f"trireme checkpoint list --job {folder.name}",
            ),
        ),
    )


def told_by_launcher(folder: Path | None, role: str = "") -> list[str]:
    """How the last processes of that role ended (all roles if it is empty); nothing for a job that no launcher runs here."""
    if folder is None:
        return []
    ends = [
        event
        for event in read_events(folder)
        if event["what"] in ("died", "lost_lease", "given_up") and str(event["child"]).startswith(role)
    ]
    return [
        f"{event['child']} ended at {event['time']}: {event['cause'] or 'cause unknown'}." for event in ends[-TOLD:]
    ]
