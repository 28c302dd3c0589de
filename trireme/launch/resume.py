"""What `trireme run` does if the job's folder holds an earlier run of the same job.

no earlier run      start
unfinished          resume from the last checkpoint, if no setting has changed that must not (trireme_shared.protocol.records.setting_effects)
FAILED              its script was the cause, or nothing is saved: start from the beginning; the user has probably corrected it.
                    else (members or storage were away): as unfinished
COMPLETED           say so, train nothing; with more epochs: go on from the last version
--fresh             start from the beginning
A start from the beginning moves all files of the earlier run to `previous/`, which keeps one run. Trained models are never deleted
unless the user asks for it.
"""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from master_service.core.decisions.lifecycle import stopped_early
from trireme.launch import model_facts
from trireme.launch.run_folder import read_json, write_json
from trireme_shared.platform.security import private_files
from trireme_shared.protocol.errors import Conflict
from trireme_shared.protocol.records import JobSpec, Phase
from trireme_shared.protocol.records.setting_effects import FIXED, GROWS

SPEC_FILE, SCRIPT_FILE = "spec.json", "script.sha256"
RESULT_FILE = "result.json"  # what --json prints; it exists once the run is over
ETCD_FILE = "etcd.json"  # of a run with an etcd that it did not start: how to reach it
PREVIOUS = "previous"
NOT_MOVED = ("lock", PREVIOUS)


class Start(Enum):
    NEW = "new"
    RESUME = "resume"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class PreviousRun:
    """`spec` None: nothing was started here, or its files cannot be read. `script`: digest of the script at that time."""

    spec: JobSpec | None = None
    script: str = ""
    model: model_facts.Facts | None = None
    result: dict[str, Any] | None = None
    etcd: dict[str, Any] | None = None  # facts of an etcd that it did not start

    @property
    def phase(self) -> Phase | None:
        """COMPLETED or FAILED; None while unfinished, also if it failed and can go on."""
        return Phase(self.result["phase"]) if self.result and not self.resumable else None

    @property
    def resumable(self) -> bool:
        """Whether it failed and goes on from its newest checkpoint."""
        return bool(self.result and self.result.get("resumable"))


@dataclass(frozen=True, slots=True)
class Plan:
    """`sentence`: the reason, for the user; empty for a first start."""

    start: Start
    sentence: str = ""


def read_previous_run(folder: Path) -> PreviousRun:
    try:
        spec = JobSpec.model_validate_json((folder / SPEC_FILE).read_bytes())
    except (OSError, ValidationError):
        return PreviousRun()
    result = read_json(folder / RESULT_FILE)
    if result is None and not (folder / "etcd").exists() and not (folder / ETCD_FILE).exists():
        return PreviousRun()
    script = folder / SCRIPT_FILE
    text = script.read_text(encoding="utf-8") if script.exists() else ""
    return PreviousRun(spec, text, read_json(folder / model_facts.FILE), result, read_json(folder / ETCD_FILE))


def decide(
    previous: PreviousRun,
    spec: JobSpec,
    script: str,
    folder: Path,
    *,
    fresh: bool,
    model: model_facts.Facts | None = None,
) -> Plan:
    """Raises Conflict if the earlier run differs from what is asked for now."""
    old = previous.spec
    aside = f"its earlier files are in {folder / PREVIOUS}"
    if old is None:
        return Plan(Start.NEW)
    reason = previous.result["reason"] if previous.result else ""
    if fresh:
        return Plan(Start.NEW, f"job {spec.job} starts from the beginning; {aside}")
    if previous.phase is Phase.FAILED:
        return Plan(Start.NEW, f"job {spec.job} failed before ({reason}); it starts from the beginning, {aside}")
    what = "is completed" if previous.phase else "is unfinished"
    changes = differences(old, spec)
    _refuse_changes(old, changes, f"job {spec.job} in {folder} {what}")
    longer = spec.epochs > old.epochs
    changed = _script_changed(previous, spec, script)
    if previous.phase is Phase.COMPLETED and not longer:
        if changed:
            msg = f"job {spec.job} in {folder} is completed with another version of {spec.script}"
            raise Conflict(msg, hint="use another name (--job NAME), or --fresh to train it again")
        return Plan(
            Start.DONE, f"job {spec.job} is completed; --epochs with a higher number trains it longer, --fresh again"
        )
    if longer:
        _refuse_longer(previous, spec, folder)
    if spec.checkpoint_kind == "independent" and old.pservers != spec.pservers:
        msg = (
            f"job {spec.job} in {folder} was made with {old.pservers} parameter servers, {spec.pservers} are asked for: "
            "independent checkpoints load only with as many"
        )
        raise Conflict(msg, hint=f"use --pservers {old.pservers}, or --fresh to start from the beginning")
    if different_model := model_facts.difference(previous.model, model):
        msg = f"job {spec.job} in {folder} {what} and its model has changed: {different_model}"
        hint = "its checkpoints hold the old model: restore the script, use another name (--job NAME), or --fresh to start from the beginning"
        if model_facts.is_reordered(previous.model, model):
            hint = (
                "modules that are made from a set of names change their order with PYTHONHASHSEED: sort the names in the old order, start with the "
                "PYTHONHASHSEED that the job began with, or use --fresh to start from the beginning"
            )
        raise Conflict(msg, hint=hint)
    untold = ("sources", "trackers")
    told = ", ".join(f"{before} -> {now} {name}" for name, before, now in changes if name not in untold)
    note = f"; {Path(spec.script).name} has changed since the job began" if changed else ""
    what = f"failed before ({reason})" if previous.resumable else what
    verb = "goes on" if previous.phase else "resumes"
    return Plan(Start.RESUME, f"job {spec.job} {what}: it {verb}{f' ({told})' if told else ''}{note}")


def _script_changed(previous: PreviousRun, spec: JobSpec, script: str) -> bool:
    """The script, or a module beside it; an earlier version of this program kept no digests of those."""
    known = bool(previous.spec and previous.spec.sources)
    other = known and previous.spec is not None and previous.spec.sources != spec.sources
    return (bool(previous.script) and previous.script != script) or other


def _refuse_changes(old: JobSpec, changes: list[tuple[str, Any, Any]], where: str) -> None:
    """Raises Conflict if a setting has changed that must not, with the reason."""
    choice = "use another name (--job NAME), the same values, or --fresh to start from the beginning"
    different = [
        (name, *values) for name, *values in changes if name in FIXED or (name == GROWS and values[1] < values[0])
    ]
    if not different:
        return
    name, before, now = different[0]
    reason = FIXED.get(name, f"a job can only get more epochs than its {old.epochs}")
    more = (
        f" (and {len(different) - 1} more: {', '.join(name for name, *_ in different[1:])})"
        if len(different) > 1
        else ""
    )
    msg = f"{where} with {name} = {_shown(before)}; now {name} = {_shown(now)} is asked for{more}: {reason}"
    raise Conflict(msg, hint=choice, differing=[name for name, *_ in different])


def _shown(value: Any) -> str:
    """As it would be written in trireme.toml or a script: 'sync', and not the name of a class."""
    return repr(value.value if isinstance(value, Enum) else value)


def _refuse_longer(previous: PreviousRun, spec: JobSpec, folder: Path) -> None:
    """Raises Conflict if more epochs cannot follow what the job has done."""
    where = f"job {spec.job} in {folder} is completed"
    if previous.result and previous.result.get("stopped_step") is not None:
        early = stopped_early(int(previous.result["stopped_step"]))
        raise Conflict(f"{where}: {early.message}", hint=early.hint)
    if previous.phase and spec.checkpoint_kind == "independent":
        msg = f"{where}, and its checkpoints are independent: none of them holds its last parameters, so it cannot get more epochs"
        raise Conflict(msg, hint="train a new job that starts with its parameters: --init-from JOB --job NAME")


def differences(old: JobSpec, new: JobSpec) -> list[tuple[str, Any, Any]]:
    """(setting, old value, new value) of every change."""
    values = [(name, getattr(old, name), getattr(new, name)) for name in JobSpec.model_fields]
    return [(name, before, now) for name, before, now in values if before != now]


def script_digest(script: Path) -> str:
    return hashlib.sha256(script.read_bytes()).hexdigest()


def set_aside(folder: Path) -> None:
    """Move all files to `previous/` and delete what was there before. Raises OSError."""
    left = [path for path in folder.iterdir() if path.name not in NOT_MOVED]
    if not left:
        return
    previous = folder / PREVIOUS
    if previous.exists():
        shutil.rmtree(previous)
    private_files.make_folder(previous)
    for path in left:
        path.rename(previous / path.name)


def write_start(folder: Path, script: str, model: model_facts.Facts | None = None) -> None:
    if model is not None:
        write_json(folder / model_facts.FILE, model)
    private_files.write_text(folder / SCRIPT_FILE, script)
