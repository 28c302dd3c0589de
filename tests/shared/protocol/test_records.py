"""What records lose and keep on their way through etcd and requests."""

from __future__ import annotations

import importlib
import pkgutil
import types
from collections.abc import Iterator
from typing import Any, get_args

import trireme_shared.protocol.records
from trireme.client import CreateJob, CreateSchedule, JobSettings
from trireme.data import TextLines
from trireme_shared.protocol.records import JobSpec, Record
from trireme_shared.protocol.records.cluster import ClusterJob
from trireme_shared.protocol.rest import CreateCheckpoint, CreateResize

MODULES = [
    importlib.import_module(found.name)
    for found in pkgutil.walk_packages(
        trireme_shared.protocol.records.__path__, f"{trireme_shared.protocol.records.__name__}."
    )
]
REQUESTS = {CreateJob, CreateSchedule, CreateCheckpoint, CreateResize}
OFF: dict[str, Any] = {"checkpoint_every_seconds": None, "checkpoint_every_epochs": None, "mode": "async"}


def records_of(module: types.ModuleType) -> Iterator[type[Record]]:
    for each in vars(module).values():
        if isinstance(each, type) and issubclass(each, Record):
            yield each


def parts_of(annotation: Any) -> Iterator[Any]:
    """The annotation and all that it is made of."""
    yield annotation
    for part in get_args(annotation):
        yield from parts_of(part)


def loses_nulls(record: type[Record]) -> bool:
    """Whether a null in it, or in a record inside, would be read again as a default that is something
    else."""
    for field in record.model_fields.values():
        parts = [*parts_of(field.annotation)]
        if types.NoneType in parts and field.default is not None:
            return True
        inside = [
            part
            for part in parts
            if isinstance(part, type) and issubclass(part, Record) and part is not record
        ]
        if any(loses_nulls(part) for part in inside):
            return True
    return False


def test_a_record_for_which_null_is_no_default_keeps_its_nulls():
    records = REQUESTS.union(*map(records_of, MODULES))
    assert JobSpec in records
    assert [record.__name__ for record in records if loses_nulls(record) and not record.keeps_nulls] == []


def test_what_is_off_stays_off_on_its_way_to_a_master_and_through_etcd():
    settings = JobSettings(dataset=TextLines("t"), **OFF)
    spec = JobSpec(job="a", script="s.py", storage="s", **dict(settings))
    ways: list[tuple[Record, type[Any]]] = [
        (CreateJob(name="a", settings=settings, script="s.py"), CreateJob),
        (ClusterJob(job="a", spec=spec), ClusterJob),
    ]
    for sent, kind in ways:
        read = kind.model_validate_json(sent.to_bytes())
        assert read == sent
