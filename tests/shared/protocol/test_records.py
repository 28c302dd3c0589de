"""Every record is the same once it was written and read: in etcd, in requests and answers, in frames."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.equipment.drawn_records import all_records, drawn
from trireme.client import CreateJob, JobSettings
from trireme.data import TextLines
from trireme_shared.protocol.records import JobSpec, Record
from trireme_shared.protocol.records.assignments import SlotMap, TrainerList
from trireme_shared.protocol.records.cluster import ClusterJob, JobSchedule
from trireme_shared.protocol.records.record import misfits
from trireme_shared.protocol.wire import messages

RECORDS = all_records()
OFF: dict[str, Any] = {"checkpoint_every_seconds": None, "checkpoint_every_epochs": None, "mode": "async"}


def test_the_records_that_etcd_keeps_and_clients_send_are_among_them():
    names = {record.__name__ for record in RECORDS}
    assert {"ClusterJob", "JobSchedule", "JobSpec", "JobState", "KeptAnswer", "CreateJob"} <= names


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_record_that_is_written_and_read_is_the_same(kind: type[Record], data: st.DataObject) -> None:
    record = data.draw(drawn(kind))
    assert isinstance(record, Record)
    assert kind.model_validate_json(record.to_bytes()) == record


def test_what_is_off_stays_off_on_its_way_to_a_master_and_through_etcd():
    spec = JobSpec(job="a", script="s.py", storage="s", dataset=TextLines("t"), **OFF)
    chosen = JobSettings(dataset=TextLines("t"), **OFF)
    for sent in (
        CreateJob(name="a", settings=chosen, script="s.py"),
        ClusterJob(job="a", spec=spec),
        JobSchedule(name="a", cron="* * * * *", spec=spec),
    ):
        assert type(sent).model_validate_json(sent.to_bytes()) == sent


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_setting_that_json_cannot_say_is_refused(value):
    """As null it would be no number any more for whoever reads the spec in etcd."""
    with pytest.raises(ValidationError, match="finite number"):
        JobSettings(dataset=TextLines("t"), task_timeout_floor_s=value)


# ------------------------------------------------------------ frames leave nulls out


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


def test_null_is_the_default_wherever_frames_may_have_it():
    framed = [each for each in vars(messages).values() if isinstance(each, type) and issubclass(each, Record)]
    assert framed
    assert [each.__name__ for each in framed if loses_nulls(each)] == []


def test_misfits_tell_numbers_and_choices_and_no_other_text() -> None:
    with pytest.raises(ValidationError) as raised:
        JobSpec.model_validate(
            {"mode": "semi-synchronous", "lanes": 0, "storage": ["s3://key:secret@bucket"]}
        )
    told = misfits(raised.value)
    assert "mode: Input should be 'sync' or 'async', not 'semi-synchronous'" in told
    assert "lanes: Input should be greater than or equal to 1, not 0" in told
    assert "secret" not in told


def test_a_copy_with_other_fields_computes_anew_what_a_record_keeps() -> None:
    slots = SlotMap(version=1, owners=(0, 0, 1))
    assert (slots.serving, slots.wanted) == ((0, 1), 2)
    fewer = slots.with_fields(owners=(0, 0, 0))
    assert (fewer.serving, fewer.wanted) == ((0,), 1)
    trainers = TrainerList(names=("a", "b"))
    assert "b" in trainers
    assert "b" not in trainers.with_fields(names=("a",))
