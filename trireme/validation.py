"""What is wrong with the values of a job's settings, as sentences for the user."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from trireme_shared.platform.runtime.telemetry import hidden
from trireme_shared.protocol.records import JobSpec, Strategy
from trireme_shared.protocol.records.job_choices import allowed_name
from trireme_shared.protocol.records.job_spec import OF_NATIVE

AUTO = "auto"
_DATASET = {"kind": "text_lines", "urls": ("-",)}
_PLACEHOLDERS = {
    "job": "job",
    "script": "-",
    "storage": "-",
    "dataset": _DATASET,
    "evaluation_dataset": _DATASET,
}
_COLLECTIVE = ("min_members", "exchange", *OF_NATIVE)
_SYNCHRONOUS = (
    "mode",
    "strategy",
    *_COLLECTIVE,
    "evaluate_every",
    "keep_best",
    "stop_early",
    "plateau_metric",
    "drop_last",
)


def without_auto(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of settings without those that are found out later: `pservers = "auto"`
    (trireme.launch.cluster)."""
    return {name: value for name, value in values.items() if (name, value) != ("pservers", AUTO)}


def field_problems(values: Mapping[str, Any], origins: Mapping[str, str] = MappingProxyType({})) -> list[str]:
    """What is wrong with single fields, whatever values the others get (the command line may still change
    them)."""
    problems: list[str] = []
    values = without_auto(values)
    if "job" in values:
        values = {**values, "job": allowed_name(str(values["job"]))}
    alone = {name: values[name] for name in _SYNCHRONOUS if name in values}
    if not alone.keys().isdisjoint(("keep_best", "stop_early", "plateau_metric")):
        alone.setdefault("evaluate_every", "epoch")  # it may be set elsewhere
    if not alone.keys().isdisjoint(OF_NATIVE):
        alone.setdefault("exchange", "native")
    if not alone.keys().isdisjoint(_COLLECTIVE):  # so may the strategy
        alone = {"strategy": "collective", **alone}
    others = {name: value for name, value in values.items() if name not in _SYNCHRONOUS}
    if not others.keys().isdisjoint(("init_partial", "init_optimizer")):
        others.setdefault("init_from", "values.pt")  # so may the file
    if values.get("strategy") == Strategy.COLLECTIVE and "pservers" in others:
        alone["pservers"] = others.pop("pservers")
    # async: the sizes need not fit lanes that are not known yet
    for candidate in (alone, {**others, "mode": "async"}):
        try:
            JobSpec.model_validate({**_PLACEHOLDERS, **candidate})
        except ValidationError as error:
            problems += [text for text in problems_of(error, origins) if text not in problems]
    return problems


def problems_of(error: ValidationError, origins: Mapping[str, str]) -> list[str]:
    """One sentence for each problem; `origins`: where each setting was given."""
    sentences = []
    for problem in error.errors(include_url=False):
        message = problem["msg"].removeprefix("Value error, ")
        message = message[:1].lower() + message[1:]
        if not problem["loc"]:
            sentences.append(with_origins(message, origins))
            continue
        name = str(problem["loc"][0])
        sentences.append(f"{origins.get(name, name)} = {hidden(repr(problem['input']))}: {message}")
    return sentences


def with_origins(sentence: str, origins: Mapping[str, str]) -> str:
    """`sentence`, and where the settings that it names were given."""
    named = [origin for name, origin in origins.items() if re.search(rf"\b{name}\b", sentence)]
    return sentence + (f" (from {', '.join(named)})" if named else "")
