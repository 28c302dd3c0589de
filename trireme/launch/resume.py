"""What an earlier run of the same job left in its folder, and what the same command does about it.

nothing                        start
unfinished                     go on from the last checkpoint, if everything but the number of members is the same
FAILED                         start anew: what made it fail was probably mended
COMPLETED                      say so, train nothing
--fresh                        start anew
"Anew" moves what there is to `previous/` (one run is kept that way); nothing that was trained is thrown away unasked.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shared.checkpoints.stored import ELASTIC
from shared.errors import Conflict
from shared.records import JobSpec, Phase
from trireme.launch import model_facts

SPEC_FILE, SCRIPT_FILE, RESULT_FILE = "spec.json", "script.sha256", "result.json"
PREVIOUS = "previous"
STAYS = ("lock", PREVIOUS)


class Start(Enum):
    NEW = "new"
    GO_ON = "go on"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Remains:
    """`spec` None: nothing was ever started here, or nobody can read it. `script`: digest of the script then."""

    spec: JobSpec | None = None
    script: str = ""
    model: model_facts.Facts | None = None
    result: dict[str, Any] | None = None

    @property
    def phase(self) -> Phase | None:
        """COMPLETED or FAILED; None while unfinished."""
        return Phase(self.result["phase"]) if self.result else None


@dataclass(frozen=True, slots=True)
class Plan:
    """`sentence`: for people, why it is done so; empty for a first start."""

    start: Start
    sentence: str = ""


def examine(folder: Path) -> Remains:
    try:
        spec = JobSpec.model_validate_json((folder / SPEC_FILE).read_bytes())
    except (OSError, ValidationError):
        return Remains()
    try:
        result = json.loads((folder / RESULT_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        result = None
    if result is None and not (folder / "etcd").exists():
        return Remains()
    script = folder / SCRIPT_FILE
    text = script.read_text(encoding="utf-8") if script.exists() else ""
    return Remains(spec, text, model_facts.read(folder), result)


def decide(
    remains: Remains,
    spec: JobSpec,
    script: str,
    folder: Path,
    *,
    fresh: bool,
    model: model_facts.Facts | None = None,
) -> Plan:
    """Raises Conflict where going on, or leaving it at that, is not what was asked for."""
    old = remains.spec
    aside = f"what it left is in {folder / PREVIOUS}"
    if old is None:
        return Plan(Start.NEW)
    if fresh:
        return Plan(Start.NEW, f"job {spec.job} starts anew; {aside}")
    if remains.phase is Phase.FAILED:
        reason = remains.result["reason"] if remains.result else ""
        return Plan(Start.NEW, f"job {spec.job} failed before ({reason}); it starts anew, {aside}")
    what = "is completed" if remains.phase else "is unfinished"
    choice = "use another name (--job NAME), the same values, or --fresh to start it anew"
    if different := differences(old, spec):
        name, before, now = different[0]
        more = f" (and {len(different) - 1} more)" if len(different) > 1 else ""
        msg = f"job {spec.job} in {folder} {what} with {name} = {before!r}; now {name} = {now!r} is asked for{more}"
        raise Conflict(msg, hint=choice, differing=[name for name, _, _ in different])
    changed = bool(remains.script) and remains.script != script
    if remains.phase is Phase.COMPLETED:
        if changed:
            msg = f"job {spec.job} in {folder} is completed with another version of {spec.script}"
            raise Conflict(msg, hint="use another name (--job NAME), or --fresh to train it anew")
        return Plan(Start.DONE, f"job {spec.job} is completed already; --fresh trains it anew")
    if spec.checkpoint_kind == "independent" and old.pservers != spec.pservers:
        msg = (
            f"job {spec.job} in {folder} was made with {old.pservers} parameter servers, {spec.pservers} are asked for: "
            "independent checkpoints load only with as many"
        )
        raise Conflict(msg, hint=f"use --pservers {old.pservers}, or --fresh to start it anew")
    if different_model := model_facts.difference(remains.model, model):
        msg = f"job {spec.job} in {folder} is unfinished and its model has changed: {different_model}"
        hint = "its checkpoints are of the old one: restore the script, use another name (--job NAME), or --fresh to start it anew"
        raise Conflict(msg, hint=hint)
    members = ", ".join(f"{getattr(old, n)} -> {getattr(spec, n)} {n}" for n in ELASTIC if _differ(old, spec, n))
    note = f"; {Path(spec.script).name} has changed since it began" if changed else ""
    return Plan(Start.GO_ON, f"job {spec.job} is unfinished: it goes on{f' ({members})' if members else ''}{note}")


def differences(old: JobSpec, new: JobSpec) -> list[tuple[str, Any, Any]]:
    """(setting, then, now) of all that may not change while a job is unfinished."""
    return [
        (name, getattr(old, name), getattr(new, name))
        for name in JobSpec.model_fields
        if name not in ELASTIC and _differ(old, new, name)
    ]


def script_digest(script: Path) -> str:
    return hashlib.sha256(script.read_bytes()).hexdigest()


def set_aside(folder: Path) -> None:
    """What there is goes to `previous/`, in place of what was there. Raises OSError."""
    left = [path for path in folder.iterdir() if path.name not in STAYS]
    if not left:
        return
    previous = folder / PREVIOUS
    if previous.exists():
        shutil.rmtree(previous)
    previous.mkdir()
    for path in left:
        path.rename(previous / path.name)


def write_start(folder: Path, script: str, model: model_facts.Facts | None = None) -> None:
    model_facts.write(folder, model)
    (folder / SCRIPT_FILE).write_text(script, encoding="utf-8")


def write_result(folder: Path, document: dict[str, Any]) -> None:
    """The run is over; whole or not there."""
    temporary = folder / f".{RESULT_FILE}"
    temporary.write_text(json.dumps(document), encoding="utf-8")
    temporary.replace(folder / RESULT_FILE)


def _differ(old: JobSpec, new: JobSpec, name: str) -> bool:
    return bool(getattr(old, name) != getattr(new, name))
