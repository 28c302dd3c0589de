"""What `trireme run` does if the job's folder holds an earlier run of the same job.

no earlier run      start
unfinished          resume from the last checkpoint, if no setting has changed that must not
                    (trireme_shared.protocol.records.setting_effects)
FAILED              its script was the cause, or nothing is saved: start from the beginning; the user has
                    probably corrected it.
                    else (members or storage were away): as unfinished
COMPLETED           say so, train nothing; with more epochs: go on from the last version
--fresh             start from the beginning
A start from the beginning moves all files of the earlier run to `previous/`, which keeps one run. Trained
models are never deleted unless the user asks for it.

The facts about the script's model and optimizer that an unfinished job depends on are kept in the folder,
too, and compared:
{"tensors": [[kind, name, shape, dtype, group], ...], "optimizer": {"name", "defaults", "groups"}, "tables":
    [TableSpec, ...]}   (trainer_agent.script.inspect)
Tensors that are not contiguous have their strides after the group.
"""

from __future__ import annotations

import hashlib
import math
import shutil
from dataclasses import dataclass
from enum import Enum
from itertools import zip_longest
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from master_service.core.decisions.lifecycle import stopped_early
from trireme.launch.run_folder import read_json, write_json
from trireme_shared.platform.security import private_files
from trireme_shared.protocol.errors import Conflict
from trireme_shared.protocol.records import JobSpec, Phase
from trireme_shared.protocol.records.layout import ELEMENT_BYTES, TableSpec
from trireme_shared.protocol.records.setting_effects import FIXED, GROWS

SPEC_FILE, SCRIPT_FILE = "spec.json", "script.sha256"
RESULT_FILE = "result.json"  # what --json prints; it exists once the run is over
ETCD_FILE = "etcd.json"  # of a run with an etcd that it did not start: how to reach it
PREVIOUS = "previous"
NOT_MOVED = ("lock", PREVIOUS)
MODEL_FILE = "model.json"  # does not exist if the run was started with --no-check
KINDS = {"param": "parameter", "buffer": "buffer", "first": "buffer"}
FOLLOWS = {"buffer": "the mean over the lanes", "first": "the value of the first lane"}

Facts = dict[str, Any]


class Start(Enum):
    NEW = "new"
    RESUME = "resume"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class PreviousRun:
    """`spec` None: nothing was started here, or its files cannot be read. `script`: digest of the script at
    that time."""

    spec: JobSpec | None = None
    script: str = ""
    model: Facts | None = None
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
        spec = JobSpec.from_bytes((folder / SPEC_FILE).read_bytes())
    except (OSError, ValidationError):
        return PreviousRun()
    result = read_json(folder / RESULT_FILE)
    if result is None and not (folder / "etcd").exists() and not (folder / ETCD_FILE).exists():
        return PreviousRun()
    script = folder / SCRIPT_FILE
    text = script.read_text(encoding="utf-8") if script.exists() else ""
    return PreviousRun(spec, text, read_json(folder / MODEL_FILE), result, read_json(folder / ETCD_FILE))


def decide(
    previous: PreviousRun,
    spec: JobSpec,
    script: str,
    folder: Path,
    *,
    fresh: bool,
    model: Facts | None = None,
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
        return Plan(
            Start.NEW, f"job {spec.job} failed before ({reason}); it starts from the beginning, {aside}"
        )
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
            Start.DONE,
            f"job {spec.job} is completed; --epochs with a higher number trains it longer, --fresh again",
        )
    if longer:
        _refuse_longer(previous, spec, folder)
    if spec.checkpoint_kind == "independent" and old.pservers != spec.pservers:
        msg = (
            f"job {spec.job} in {folder} was made with {old.pservers} parameter servers, "
            f"{spec.pservers} are asked for: "
            "independent checkpoints load only with as many"
        )
        raise Conflict(msg, hint=f"use --pservers {old.pservers}, or --fresh to start from the beginning")
    if different_model := difference(previous.model, model):
        msg = f"job {spec.job} in {folder} {what} and its model has changed: {different_model}"
        hint = (
            "its checkpoints hold the old model: restore the script, use another name (--job NAME), or "
            "--fresh to start from the beginning"
        )
        if is_reordered(previous.model, model):
            hint = (
                "modules that are made from a set of names change their order with PYTHONHASHSEED: "
                "sort the names in the old order, start with the "
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
        (name, *values)
        for name, *values in changes
        if name in FIXED or (name == GROWS and values[1] < values[0])
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
        msg = (
            f"{where}, and its checkpoints are independent: none of them holds its last parameters, so "
            "it cannot get more epochs"
        )
        raise Conflict(
            msg, hint="train a new job that starts with its parameters: --init-from JOB --job NAME"
        )


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


def write_start(folder: Path, script: str, model: Facts | None = None) -> None:
    if model is not None:
        write_json(folder / MODEL_FILE, model)
    private_files.write_text(folder / SCRIPT_FILE, script)


def parameter_bytes(facts: Facts) -> int:
    """Of the parameters that the optimizer steps, in bytes."""
    trained = [tensor for tensor in facts["tensors"] if tensor[0] == "param" and tensor[4] >= 0]
    return sum(
        math.prod(shape) * ELEMENT_BYTES[dtype.removeprefix("torch.")] for _, _, shape, dtype, *_ in trained
    )


def difference(then: Facts | None, now: Facts | None) -> str:
    """The first difference, with both values; "" if there is none or one side is not known."""
    if then is None or now is None:
        return ""
    if is_reordered(then, now):
        old, new = next((a[1], b[1]) for a, b in zip(then["tensors"], now["tensors"], strict=True) if a != b)
        return f"the same parameters and buffers are in another order ({new} is where {old} was)"
    for old, new in zip_longest(then["tensors"], now["tensors"]):
        if old != new:
            return _tensors(old, new)
    return _optimizers(then["optimizer"], now["optimizer"]) or _tables(then, now)


def is_reordered(then: Facts | None, now: Facts | None) -> bool:
    """Whether both have the same parameters and buffers, in another order."""
    if then is None or now is None or then["tensors"] == now["tensors"]:
        return False
    return sorted(map(str, then["tensors"])) == sorted(map(str, now["tensors"]))


def tables_in(facts: Facts) -> dict[str, TableSpec]:
    """By name; none in the file of an earlier version, which did not tell of them."""
    return {table["name"]: TableSpec.model_validate(table) for table in facts.get("tables", ())}


def _tables(then: Facts, now: Facts) -> str:
    if "tables" not in then or "tables" not in now:
        return ""
    old, new = tables_in(then), tables_in(now)
    gone = [f"embedding table {name} does not exist any more" for name in old if name not in new]
    gone += [f"embedding table {name} is new" for name in new if name not in old]
    if gone:
        return " and ".join(gone[:2])
    changed = [(name, *one) for name, table in old.items() for one in table.differences(new[name])]
    return "".join(
        f"{what} of embedding table {name} was {was!r}, now it is {now!r}"
        for name, what, was, now in changed[:1]
    )


def _tensors(old: list[Any] | None, new: list[Any] | None) -> str:
    if old is None or new is None:
        there, when = (new, "is new") if old is None else (old, "does not exist any more")
        assert there is not None
        return f"{KINDS[there[0]]} {there[1]} {_text(there)} {when}"
    if old[1] != new[1]:
        return (
            f"{KINDS[old[0]]} {old[1]} {_text(old)} was in the place of {KINDS[new[0]]} {new[1]} {_text(new)}"
        )
    if old[0] != new[0] and KINDS[old[0]] == KINDS[new[0]]:
        return (
            f"buffer {old[1]} took {FOLLOWS[old[0]]}, now the script's `buffers` gives it {FOLLOWS[new[0]]}"
        )
    if old[2:4] != new[2:4]:
        return f"{KINDS[old[0]]} {old[1]} was {_text(old)}, now it is {_text(new)}"
    if old[5:] != new[5:]:
        return f"{KINDS[old[0]]} {old[1]} was {_order(old)}, now it is {_order(new)}"
    return f"{KINDS[old[0]]} {old[1]} was in optimizer group {old[4]}, now it is in {new[4]}"


def _text(tensor: list[Any]) -> str:
    return f"{str(tensor[3]).removeprefix('torch.')} {tensor[2]}"


def _order(tensor: list[Any]) -> str:
    return f"laid out with strides {tensor[5]}" if tensor[5:] else "contiguous"


def _optimizers(old: Facts, new: Facts) -> str:
    if old["name"] != new["name"]:
        return f"the optimizer was {old['name']}, now it is {new['name']}"
    if len(old["groups"]) != len(new["groups"]):
        return f"the optimizer had {len(old['groups'])} groups, now it has {len(new['groups'])}"
    for number, (before, after) in enumerate(zip(old["groups"], new["groups"], strict=True)):
        for option in before.keys() & after.keys():
            if before[option] != after[option]:
                return (
                    f"the optimizer's {option} was {before[option]!r}, now it is {after[option]!r} "
                    f"(group {number})"
                )
    for option in old["defaults"].keys() & new["defaults"].keys():  # another torch may know more of them
        if old["defaults"][option] != new["defaults"][option]:
            return (
                f"the optimizer's {option} was {old['defaults'][option]!r}, now it is "
                f"{new['defaults'][option]!r}"
            )
    return ""
