"""The places of faults are read and drawn as they are meant."""

from __future__ import annotations

import pytest

from tests.soak.moments.schedule import KINDS, OF_JOBS, PHASES, Fault, drawn, drawn_of_jobs, parse


def test_a_schedule_is_read_as_it_is_written():
    text = "1:40:allreduce:during:kill,2:60:broadcast:before:stop"
    assert parse(text) == [
        Fault(1, 40, "allreduce", "during", "kill"),
        Fault(2, 60, "broadcast", "before", "stop"),
    ]
    assert ",".join(map(str, parse(text))) == text
    assert parse("") == []


@pytest.mark.parametrize(
    "text",
    ["1:40:allreduce:kill", "1:40:reduce:during:kill", "1:40:allreduce:in:kill", "a:4:barrier:after:cut"],
)
def test_what_is_no_schedule_is_refused(text):
    with pytest.raises(ValueError, match=r"."):
        parse(text)


@pytest.mark.parametrize(
    "text", ["1:40:allreduce:during:kill", "1:40:pull:before:size", "1:40:push:after:size"]
)
def test_what_is_no_schedule_of_a_job_is_refused(text):
    with pytest.raises(ValueError, match=r"form, push|wrong size"):
        parse(text, OF_JOBS)


def test_faults_of_jobs_are_drawn_of_all_operations_phases_and_kinds():
    faults = drawn_of_jobs(1, 4, 300)
    assert faults == drawn_of_jobs(1, 4, 300) != drawn_of_jobs(2, 4, 300)
    assert parse(",".join(map(str, faults)), OF_JOBS) == faults
    assert {(fault.operation, fault.phase) for fault in faults} == {
        (name, phase) for name in OF_JOBS for phase in PHASES
    }
    assert {fault.kind for fault in faults} == set(KINDS)
    assert faults[0].kind == "kill"


def test_drawn_faults_are_of_members_that_live_and_of_all_kinds():
    assert drawn(1, 4, 20) == drawn(1, 4, 20) != drawn(2, 4, 20)
    dead: set[int] = set()
    for fault in drawn(3, 4, 60):
        assert fault.member not in dead
        if fault.kind == "kill":
            dead.add(fault.member)
    assert {fault.kind for fault in drawn(3, 4, 60)} == set(KINDS)
