"""The rules of names of Prometheus metrics, and the names in queries of a dashboard."""

from __future__ import annotations

import re

from prometheus_client.parser import text_string_to_metric_families

NAME = re.compile(r"(trireme|process|python)(_[a-z][a-z0-9]*)+")
# each has few values
LABELS = {"job", "phase", "stage", "kind", "state", "standing", "pserver", "cause", "table"}
NOT_BASE_UNITS = {
    "milliseconds",
    "ms",
    "minutes",
    "hours",
    "kilobytes",
    "megabytes",
    "kb",
    "mb",
    "mib",
    "percent",
}
MOST_SERIES = 200  # of one name


def wrong_metrics(text: str) -> list[str]:
    """What breaks a rule in an exposition."""
    wrong = []
    for family in text_string_to_metric_families(text):
        parts = family.name.split("_")
        if not NAME.fullmatch(family.name):
            wrong.append(f"{family.name}: not trireme_ and lower-case words")
        if not family.documentation.strip() or family.documentation.replace(" ", "_") == family.name:
            wrong.append(f"{family.name}: no help")
        if NOT_BASE_UNITS & set(parts) or "per" in parts:
            wrong.append(f"{family.name}: no base unit, or a rate")
        if {"seconds", "bytes"} & set(parts[:-1]):
            wrong.append(f"{family.name}: the unit is not at the end")
        if family.type == "counter" and not all(sample.name.endswith("_total") for sample in family.samples):
            wrong.append(f"{family.name}: a counter without _total")
        if family.type == "gauge" and family.name.endswith(("_total", "_count", "_sum")):
            wrong.append(f"{family.name}: a gauge with the name of a counter")
        if family.type not in ("counter", "gauge"):
            wrong.append(f"{family.name}: is of type {family.type}")
        if unknown := {label for sample in family.samples for label in sample.labels} - LABELS:
            wrong.append(f"{family.name}: labels {sorted(unknown)}")
        if len(family.samples) > MOST_SERIES:
            wrong.append(f"{family.name}: {len(family.samples)} samples")
    return wrong


def names_in(text: str) -> set[str]:
    """Names of samples in an exposition."""
    return {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}


def names_asked_for(query: str) -> set[str]:
    return {found.group() for found in re.finditer(r"\b(trireme|process)_[a-z0-9_]+", query)}
