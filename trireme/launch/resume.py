"""What `trireme run` does if the job's folder holds an earlier run of the same job.

no earlier run      start
unfinished          resume from the last checkpoint, if no setting has changed that must not
                    (trireme_shared.protocol.records.setting_effects); with other hyperparameters, of the
                    settings or of the script's optimizer and scheduler, if the user accepts them
FAILED              its script was the cause, or nothing is saved: start from the beginning; the user has
                    probably corrected it.
                    else (members or storage were away): as unfinished
COMPLETED           say so, train nothing; with more epochs: go on from the last version
--fresh             start from the beginning
A start from the beginning moves all files of the earlier run to `previous/`, which keeps one run. Trained
models are never deleted unless the user asks for it.

The facts about the script's model and optimizer that an unfinished job depends on are kept in the folder,
too, and compared:
{"tensors": [[kind, name, shape, dtype, group], ...], "optimizer": {"name", "defaults", "groups"},
    "scheduler": {"name", "state"} or {}, "tables": [TableSpec, ...]}   (trainer_agent.script.inspect)
Tensors that are not contiguous have their strides after the group.
"""

from __future__ import annotations

import hashlib
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from itertools import zip_longest
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from master_service.core.decisions.lifecycle import stopped_early
from trainer_agent.own_loop.job_steps import UNCOUNTED
from trireme.launch.run_folder import read_json, write_json
from trireme_shared.platform.security import private_files
from trireme_shared.protocol.errors import Conflict
from trireme_shared.protocol.records import JobSpec, Mode, Phase
from trireme_shared.protocol.records.job_choices import CHANGES_CHARACTERS, MAX_CHANGES, AcceptedChange
from trireme_shared.protocol.records.layout import ELEMENT_BYTES, OptimizerSpec, TableSpec
from trireme_shared.protocol.records.record import shortened
from trireme_shared.protocol.records.setting_effects import ACCEPTED, FIXED, FREE, GROWS

SPEC_FILE, SCRIPT_FILE = "spec.json", "script.sha256"
RESULT_FILE = "result.json"  # what --json prints; it exists once the run is over
ETCD_FILE = "etcd.json"  # of a run with an etcd that it did not start: how to reach it
PREVIOUS = "previous"
NOT_MOVED = ("lock", PREVIOUS)
MODEL_FILE = "model.json"  # does not exist if the run was started with --no-check
KINDS = {"param": "parameter", "buffer": "buffer", "first": "buffer"}
FOLLOWS = {"buffer": "the mean over the lanes", "first": "the value of the first lane"}

Facts = dict[str, Any]
Change = tuple[str, Any, Any]  # name, old value, new value
OPTIMIZER, SCHEDULER = "optimizer", "scheduler"
#: Options that count only where the optimizer's state begins.
OF_BEGINNING = ("initial_accumulator_value",)
#: torch makes the state of this option in the first step alone.
OF_FIRST_STEP = ("RMSprop", "momentum")
#: Parts of a scheduler's state that follow from the optimizer's rate, and are told there if that has changed.
FROM_OPTIMIZER = ("base_lrs",)
#: What users give a scheduler, under a name that torch keeps private.
PRIVATE = ("_schedulers", "_milestones")


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
    """`sentence`: the reason, for the user; empty for a first start. `accepted`: hyperparameters that change
    because the user said so, each with both values. `options`: whether some of them are the optimizer's or
    the scheduler's."""

    start: Start
    sentence: str = ""
    accepted: tuple[str, ...] = ()
    options: bool = False


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
    accept: bool = False,
    model: Facts | None = None,
) -> Plan:
    """`accept`: the user accepts other hyperparameters. Raises Conflict if the earlier run differs from what
    is asked for now."""
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
    where = f"job {spec.job} in {folder} {what}"
    _refuse_changes(old, changes, where)
    longer = spec.epochs > old.epochs
    changed = _script_changed(previous, spec, script)
    done = previous.phase is Phase.COMPLETED and not longer
    if not done:
        _refuse_another_model(previous.model, model, where)
    asked = _hyperparameters(old, spec, changes, previous.model, model)
    kept = asked.lengths if longer and not accept else ()  # of a schedule that is made for all epochs
    asked = replace(asked, scheduler=tuple(each for each in asked.scheduler if each not in kept))
    if asked.names and not accept:
        raise _unaccepted(asked, where, done=done)
    if asked.names:
        _refuse_unacceptable(old, asked, model, where)
    if done:
        if asked.names:
            msg = f"{where} with {old.epochs} epochs: it is not trained any more, so no change has an effect"
            raise Conflict(msg, hint="give more --epochs as well; training goes on with the new values then")
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
    untold = ("sources", "trackers", *ACCEPTED)
    free = [f"{before} -> {now} {name}" for name, before, now in changes if name not in untold]
    told = ", ".join((*free, *asked.texts))
    note = f"; {Path(spec.script).name} has changed since the job began" if changed else ""
    what = f"failed before ({reason})" if previous.resumable else what
    verb = "goes on" if previous.phase else "resumes"
    if kept:
        values = ", ".join(f"{name.removeprefix(SCHEDULER).strip()} {_shown(was)}" for name, was, _ in kept)
        note += f"; its scheduler keeps {values}, and --accept-changes takes the new values"
    sentence = f"job {spec.job} {what}: it {verb}{f' ({told})' if told else ''}{note}"
    return Plan(Start.RESUME, sentence, asked.texts, asked.concern_options)


@dataclass(frozen=True, slots=True)
class _Asked:
    """Hyperparameters that are other ones than before: (name, old value, new value) of each. `rescaled`:
    learning rates are another multiple of the script's."""

    settings: tuple[Change, ...] = ()
    optimizer: tuple[Change, ...] = ()
    scheduler: tuple[Change, ...] = ()
    rescaled: bool = False

    @property
    def names(self) -> list[str]:
        return [name for name, _, _ in (*self.settings, *self.optimizer, *self.scheduler)]

    @property
    def texts(self) -> tuple[str, ...]:
        everything = (*self.settings, *self.optimizer, *self.scheduler)
        return tuple(f"{name} {_shown(before)} -> {_shown(now)}" for name, before, now in everything)

    @property
    def lengths(self) -> tuple[Change, ...]:
        """Numbers of the same scheduler."""
        return tuple(change for change in self.scheduler if change[0] != SCHEDULER)

    @property
    def concern_options(self) -> bool:
        """Whether the steps to come have other options of the optimizer than its old schedule gives them."""
        counts_otherwise = any(name == "schedule_per" for name, _, _ in self.settings)
        return bool(self.optimizer or self.scheduler) or self.rescaled or counts_otherwise


def _hyperparameters(
    old: JobSpec, new: JobSpec, changes: list[Change], then: Facts | None, now: Facts | None
) -> _Asked:
    settings = [change for change in changes if change[0] in ACCEPTED]
    rescaled = old.lr_factor != new.lr_factor
    if then is None or now is None or difference(then, now):  # of another model nothing is compared
        return _Asked(tuple(settings), rescaled=rescaled)
    optimizer = _option_changes(then["optimizer"], now["optimizer"])
    return _Asked(tuple(settings), tuple(optimizer), tuple(_scheduler_changes(then, now)), rescaled)


def _unaccepted(asked: _Asked, where: str, *, done: bool) -> Conflict:
    """`done`: the job is not trained any more."""
    texts = asked.texts
    what = f"{len(texts)} changes are" if len(texts) > 1 else "a change is"
    msg = f"{where}, and {what} asked for: {', '.join(texts)}; the steps that are done were made without"
    more = " with more --epochs" if done else ""
    hint = (
        f"--accept-changes{more} goes on from the last checkpoint with the new values; else use the old "
        "ones, another name (--job NAME), or --fresh to start from the beginning"
    )
    return Conflict(msg, hint=hint, differing=asked.names)


def _refuse_unacceptable(old: JobSpec, asked: _Asked, now: Facts | None, where: str) -> None:
    """Raises Conflict for changes that this job cannot take, although the user accepts them."""
    if "global_batch_size" in asked.names and old.mode is Mode.ASYNC:
        raise Conflict(
            f"{where}, and {', '.join(asked.texts)} is asked for: the ledgers of an asynchronous job count "
            "minibatches of the old size",
            hint="train a new job that starts with its parameters: --init-from JOB --job NAME",
        )
    scheduler = (now or {}).get(SCHEDULER) or {}
    if "global_batch_size" in asked.names and scheduler.get("counts_steps"):
        raise Conflict(
            f"{where}, and {', '.join(asked.texts)} is asked for: the scheduler is made for the steps of the "
            "job (trireme.total_steps()), and those that are done had other batches",
            hint="give the scheduler a number of steps of your own, or train a new job that starts with the "
            "parameters of this one: --init-from JOB --job NAME",
        )
    if asked.concern_options and "ReduceLROnPlateau" in str(scheduler):
        raise Conflict(
            f"{where}, and {', '.join(asked.texts)} is asked for: the learning rate of ReduceLROnPlateau "
            "follows the evaluations that were made, so it is not known what it would be with other values",
            hint="train a new job that starts with its parameters: --init-from JOB --job NAME",
        )


def _refuse_another_model(then: Facts | None, now: Facts | None, where: str) -> None:
    """Raises Conflict if the checkpoints do not fit what the script makes."""
    if not (different := difference(then, now)):
        return
    hint = (
        "its checkpoints hold the old model: restore the script, use another name (--job NAME), or "
        "--fresh to start from the beginning"
    )
    if is_reordered(then, now):
        hint = (
            "modules that are made from a set of names change their order with PYTHONHASHSEED: "
            "sort the names in the old order, start with the "
            "PYTHONHASHSEED that the job began with, or use --fresh to start from the beginning"
        )
    raise Conflict(f"{where} and its model has changed: {different}", hint=hint)


def accepted_in(spec: JobSpec, history: tuple[AcceptedChange, ...], plan: Plan, time: str) -> JobSpec:
    """`spec` with the history of the job's earlier runs, and what the plan adds to it."""
    if not plan.accepted:
        return spec.with_fields(history=history)
    number = history[-1].number + 1 if history else 1
    options = number if plan.options else history[-1].options if history else 0
    text = shortened(", ".join(plan.accepted), CHANGES_CHARACTERS)
    made = AcceptedChange(number=number, options=options, time=time, text=text)
    return spec.with_fields(history=(*history, made)[-MAX_CHANGES:])


def optimizer_in(facts: Facts | None) -> OptimizerSpec | None:
    """None: nobody has tried the script."""
    return OptimizerSpec.model_validate(facts["optimizer"]) if facts is not None else None


def _script_changed(previous: PreviousRun, spec: JobSpec, script: str) -> bool:
    """The script, or a module beside it; an earlier version of this program kept no digests of those."""
    known = bool(previous.spec and previous.spec.sources)
    other = known and previous.spec is not None and previous.spec.sources != spec.sources
    return (bool(previous.script) and previous.script != script) or other


def _refuse_changes(old: JobSpec, changes: list[Change], where: str) -> None:
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
    rest = [change for change in changes if change[0] not in (name, *FREE)]
    others = ", ".join(f"{each} {_shown(was)} -> {_shown(is_now)}" for each, was, is_now in rest)
    more = f" (and {len(rest)} more: {others})" if rest else ""
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


def differences(old: JobSpec, new: JobSpec) -> list[Change]:
    """(setting, old value, new value) of every change."""
    values = [(name, getattr(old, name), getattr(new, name)) for name in JobSpec.model_fields]
    return [(name, before, now) for name, before, now in values if before != now and name != "history"]


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
    """What the next run compares with. `model` None: nobody has tried the script."""
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
    """The first difference that no step can take up."""
    if old["name"] != new["name"]:
        return f"the optimizer was {old['name']}, now it is {new['name']}"
    if len(old["groups"]) != len(new["groups"]):
        return f"the optimizer had {len(old['groups'])} groups, now it has {len(new['groups'])}"
    classes = new.get("classes") or [new["name"]] * len(new["groups"])
    if (before := old.get("classes")) and before != classes:
        return f"the optimizers of the groups were {', '.join(before)}, now they are {', '.join(classes)}"
    for number, option, before, after in _options(old, new):
        if not _may_change(classes[number], option, before, after):
            return f"the optimizer's {option} was {before!r}, now it is {after!r} (group {number})"
    of_groups = {option for group in new["groups"] for option in group}
    for option in (old["defaults"].keys() & new["defaults"].keys()) - of_groups:
        if old["defaults"][option] != new["defaults"][option]:  # another torch may know more of them
            return (
                f"the optimizer's {option} was {old['defaults'][option]!r}, now it is "
                f"{new['defaults'][option]!r}"
            )
    return ""


def _options(old: Facts, new: Facts) -> Iterator[tuple[int, str, Any, Any]]:
    """(group, option, old value, new value) of each that differs."""
    for number, (before, after) in enumerate(zip(old["groups"], new["groups"], strict=True)):
        for option in before:
            if option in after and before[option] != after[option]:
                yield number, option, before[option], after[option]


def _may_change(optimizer: str, option: str, before: Any, after: Any) -> bool:
    """Whether a step takes the option from whoever makes it: numbers, and lists of them (betas)."""
    if option in OF_BEGINNING or ((optimizer, option) == OF_FIRST_STEP and not before):
        return False
    return _is_numeric(before) and _is_numeric(after)


def _is_numeric(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_numeric, value))
    return isinstance(value, int | float) and not isinstance(value, bool)


def _option_changes(old: Facts, new: Facts) -> list[Change]:
    """`optimizer lr` for all groups, or `optimizer lr (group 1)`."""
    found = list(_options(old, new))  # those that may not change are refused before
    groups = len(new["groups"])
    told: list[Change] = []
    for number, option, before, after in found:
        same = [each for each in found if each[1:] == (option, before, after)]
        if len(same) < groups:
            told.append((f"{OPTIMIZER} {option} (group {number})", before, after))
        elif same[0][0] == number:
            told.append((f"{OPTIMIZER} {option}", before, after))
    return told


def _scheduler_changes(then: Facts, now: Facts) -> list[Change]:
    old, new = then.get(SCHEDULER), now.get(SCHEDULER)
    if old is None or new is None:  # of an earlier version, which did not tell of them
        return []
    names = [each.get("name", "none") for each in (old, new)]
    if names[0] != names[1]:
        return [(SCHEDULER, *names)]
    before, after = dict(_flat(old.get("state"))), dict(_flat(new.get("state")))
    rates = [[group.get("lr") for group in facts["optimizer"]["groups"]] for facts in (then, now)]
    told = FROM_OPTIMIZER if rates[0] != rates[1] else ()
    counted = f" (at {UNCOUNTED} steps an epoch)" if new.get("counts_steps") else ""
    return [
        (f"{SCHEDULER} {name}{counted}", value, after[name])
        for name, value in before.items()
        if name in after and value != after[name] and name.rpartition(".")[2] not in told
    ]


def _flat(state: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The parts of a state by their paths, for example `_schedulers.0.gamma`, without torch's own notes."""
    parts: list[tuple[str, Any]] = []
    if isinstance(state, dict) and not any(name.startswith("__") for name in state):  # else a tagged value
        parts = [(name, value) for name, value in state.items() if name[:1] != "_" or name in PRIVATE]
    elif isinstance(state, list) and any(isinstance(each, dict) for each in state):
        parts = [(str(number), value) for number, value in enumerate(state)]
    else:
        yield prefix, state
    for name, value in parts:
        yield from _flat(value, f"{prefix}.{name}" if prefix else name)
