"""From settings to a JobSpec: flag > environment (TRIREME_*) > trireme.toml > the script's config > default.

sources (strongest first) --merge--> {field: Setting(value, origin)} --job_spec--> JobSpec | UsageError
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trireme.config import Config
from trireme.validation import AUTO, field_problems, problems_of, without_auto
from trireme_shared.platform.runtime.variables import without_service_links
from trireme_shared.platform.storage import files
from trireme_shared.protocol.errors import InvalidArgument
from trireme_shared.protocol.records import JobSpec, Strategy
from trireme_shared.protocol.records.job_choices import RENAMED, allowed_name
from trireme_shared.protocol.records.job_spec import check_size

SETTINGS = tuple(field.name for field in fields(Config))
ETCD_SETTINGS = ("etcd", "etcd_user", "etcd_password_file", "etcd_ca", "etcd_cert", "etcd_key")
LAUNCHER_SETTINGS = (
    "data_dir",
    "host",
    "advertise",
    "port",
    "standbys",
    "spare_pservers",
    "storage",
    *ETCD_SETTINGS,
)
_OPTIMIZER = "the optimizer has it: give it in optimizer(model) of the script, {example}"
_SCHEDULER = (
    "the script's scheduler(optimizer) has it, for example torch.optim.lr_scheduler.CosineAnnealingLR"
)
ELSEWHERE = {
    "lr": _OPTIMIZER.format(example="for example torch.optim.AdamW(model.parameters(), lr=0.001)"),
    **dict.fromkeys(
        ("learning_rate", "base_lr"),
        _OPTIMIZER.format(example="as lr, for example torch.optim.AdamW(..., lr=0.001)"),
    ),
    **dict.fromkeys(
        ("weight_decay", "momentum", "betas", "eps", "nesterov", "amsgrad", "beta1", "beta2"),
        _OPTIMIZER.format(example="for example torch.optim.AdamW(model.parameters(), weight_decay=0.01)"),
    ),
    **dict.fromkeys(
        ("optimizer", "optim"), "the script defines it: optimizer(model) returns one of torch.optim"
    ),
    **dict.fromkeys(
        ("scheduler", "lr_scheduler", "warmup", "warmup_steps", "gamma", "step_size", "min_lr", "max_lr"),
        _SCHEDULER,
    ),
    **dict.fromkeys(
        ("workers", "pin_memory", "sampler", "batch_sampler"),
        "dataset() in the script says how records are read; the number of trainers is the setting trainers",
    ),
    **dict.fromkeys(("dropout", "hidden_size", "num_layers"), "model() in the script has it"),
}
"""What users look for among the settings, and where it is instead."""
CALLED = {
    "batch_size": "global_batch_size", "batch": "global_batch_size", "train_batch_size": "global_batch_size",
    "num_epochs": "epochs", "n_epochs": "epochs", "max_epochs": "epochs", "random_seed": "seed",
    "gradient_clip_val": "clip_grad_norm", "max_grad_norm": "clip_grad_norm", "amp": "precision",
    "grad_clip": "clip_grad_norm", "bf16": "precision", "mixed_precision": "precision",
    "num_workers": "data_workers",
    "early_stopping": "stop_early", "save_steps": "checkpoint_every_steps", "eval_steps": "evaluate_every",
    "save_total_limit": "keep_checkpoints", "resume": "job", "name": "job", "output_dir": "storage",
}  # fmt: skip
"""Other names of settings: those of Lightning, of Transformers, or of habit."""
TOML = "trireme.toml"
FLAGS = "--{}"  # how settings are spelled on the command line


class UsageError(InvalidArgument):
    """Invalid settings or arguments: the command ends with exit code 2."""

    code = "USAGE"


@dataclass(frozen=True, slots=True)
class Source:
    """One place that settings come from. `spelled`: a field's name there, for example `--lanes` or
    `TRIREME_LANES`."""

    values: Mapping[str, Any]
    spelling: str = "{}"

    def spelled(self, setting: str) -> str:
        if self.spelling.isupper():
            return self.spelling.format(setting.upper())
        return self.spelling.format(setting.replace("_", "-") if self.spelling == FLAGS else setting)


@dataclass(frozen=True, slots=True)
class Setting:
    value: Any
    origin: str


def from_flags(values: Mapping[str, Any], spelling: str = FLAGS) -> Source:
    return Source(_given(values), spelling)


def from_set(assignments: Sequence[str]) -> Source:
    """`["records_per_task=64"]`, the --set flags. A setting's own flag is stronger; many settings have none.
    Raises UsageError."""
    return Source(from_assignments(assignments), "--set {}")


def from_call(values: Mapping[str, Any], function: str) -> Source:
    """The arguments of a Python function. Raises UsageError for one that is no setting."""
    _refuse_unknown(values, (*SETTINGS, *LAUNCHER_SETTINGS), function)
    return Source(_given(values))


def from_environment(environment: Mapping[str, str] = os.environ) -> Source:
    names = {f"TRIREME_{name.upper()}": name for name in (*SETTINGS, *LAUNCHER_SETTINGS)}
    _refuse_renamed(
        (name for name in RENAMED if environment.get(f"TRIREME_{name.upper()}")), "the environment"
    )
    given = without_service_links(environment)
    return Source({names[key]: value for key, value in given.items() if key in names and value}, "TRIREME_{}")


def from_toml(path: Path) -> Source:
    """`path` may be missing; a broken file or an unknown key raises UsageError."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Source({})
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        msg = f"{path} cannot be read: {error}"
        raise UsageError(msg) from error
    _refuse_unknown(document, (*SETTINGS, *LAUNCHER_SETTINGS), str(path))
    return Source(document, path.name + " {}")


def from_script(values: Mapping[str, Any]) -> Source:
    _refuse_unknown(values, SETTINGS, "the script's config")
    return Source(_given(values), "config {}")


def outside_script(
    flags: Mapping[str, Any], assignments: Sequence[str] = (), spelling: str = FLAGS
) -> dict[str, Setting]:
    """The settings of the command line, the environment and trireme.toml in the working directory. Raises
    UsageError."""
    return merge(
        [from_flags(flags, spelling), from_set(assignments), from_environment(), from_toml(Path(TOML))]
    )


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def from_assignments(assignments: Sequence[str]) -> dict[str, Any]:
    """`["records_per_task=64"]` (the --set flags) as a dict; raises UsageError for anything else. `name=`
    unsets: the value is the default, whatever weaker sources say."""
    values: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals:
            msg = f"--set {assignment}: write --set name=value"
            raise UsageError(msg)
        values[name.strip().replace("-", "_")] = value.strip()
    _refuse_unknown(values, SETTINGS, "--set")
    return {name: value or _default(name) for name, value in values.items()}


def _default(name: str) -> Any:
    """Raises UsageError for a setting that has none."""
    if name == "pservers":
        return AUTO
    field = JobSpec.model_fields[name]
    if field.is_required():
        msg = f"--set {name}= unsets it, and every job has one: leave it out"
        raise UsageError(msg)
    return field.get_default(call_default_factory=True)


def _refuse_renamed(names: Iterable[str], where: str) -> None:
    for name in names:
        if name in RENAMED:
            msg = f"{where}: {RENAMED[name]}"
            raise UsageError(msg)


def _refuse_unknown(values: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    _refuse_renamed(values, where)
    for name in values:
        if name not in known:
            msg = f"{where}: there is no setting {name!r}; {suggestion_for(name, known)}"
            raise UsageError(msg)


def suggestion_for(name: str, known: Sequence[str]) -> str:
    """Where the value belongs, or the setting that is meant, or all of them."""
    if name in ELSEWHERE:
        return ELSEWHERE[name]
    meant = CALLED.get(name, "")
    similar = [meant] if meant in known else difflib.get_close_matches(name, known, n=1)
    return f"did you mean {similar[0]}?" if similar else f"known settings: {', '.join(known)}"


def advice_on(option: str, own: Collection[str]) -> str:
    """A sentence about `--an-option` that a command with the options `own` does not have; "" if nothing is
    known of it."""
    name = option.lstrip("-").replace("-", "_")
    if name in SETTINGS:
        return f"{option} is a setting without a flag of its own: use --set {name}=VALUE"
    if name in ELSEWHERE:
        return f"there is no option {option}: {ELSEWHERE[name]}"
    flags = {option.lstrip("-").replace("-", "_"): option for option in own if option.startswith("--")}
    settings = [setting for setting in SETTINGS if setting not in flags]
    meant = CALLED.get(name) or next(iter(difflib.get_close_matches(name, [*flags, *settings], n=1)), "")
    if meant in flags:
        return f"there is no option {option}; did you mean {flags[meant]}?"
    return f"there is no option {option}; did you mean --set {meant}=VALUE?" if meant in settings else ""


def merge(sources: Sequence[Source]) -> dict[str, Setting]:
    """The strongest source of each setting; `sources` strongest first."""
    merged: dict[str, Setting] = {}
    for source in reversed(sources):
        for name, value in source.values.items():
            merged[name] = Setting(value, source.spelled(name))
    return merged


def origins_of(settings: Mapping[str, Setting]) -> dict[str, str]:
    return {name: setting.origin for name, setting in settings.items()}


def job_spec(settings: Mapping[str, Setting], **fixed: Any) -> JobSpec:
    """The validated spec. `fixed`: fields that are not settings (script, datasets, storage). Raises
    UsageError; TooLarge."""
    values = {name: setting.value for name, setting in settings.items() if name in SETTINGS}
    if isinstance(values.get("init_from"), str):  # members have other working directories
        values["init_from"] = files.absolute(values["init_from"])
    try:
        spec = JobSpec.model_validate({**without_auto(values), **fixed})
    except ValidationError as error:
        raise UsageError("; ".join(problems_of(error, origins_of(settings)))) from error
    check_size(spec)
    return spec


def check_fields(settings: Mapping[str, Setting]) -> None:
    """Raises UsageError for values that no script could make valid; used before the script is imported."""
    values = {name: setting.value for name, setting in settings.items() if name in SETTINGS}
    if problems := field_problems(values, origins_of(settings)):
        raise UsageError("; ".join(problems))


def has_pservers(settings: Mapping[str, Setting]) -> bool:
    """Whether a job with these settings has parameter servers."""
    return "strategy" not in settings or settings["strategy"].value != Strategy.COLLECTIVE


def job_name(script: Path) -> str:
    """The default name of a script's job: `my_model.py` -> `my-model`."""
    name = allowed_name(script.stem)
    return name if name.isascii() and name.replace("-", "").isalnum() else "job"
