"""Requests that schemathesis makes up from the API's document, valid ones and invalid ones, against a
cluster's leader that runs the jobs which they create, in virtual time: of each operation alone, and in
sequences that follow the document's links (a job is created, then listed, paused, resized, ...). Each answer
must be as the document says.

Not checked here: that every valid request is accepted (values that do not fit together are refused, which a
schema cannot say), and tokens (test_auth.py asks every route with each of them).
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis.errors import Unsatisfiable
from hypothesis.stateful import initialize
from schemathesis import GenerationMode
from schemathesis.core.transport import Response

from master_service.core.state.cluster import ClusterState
from tests.equipment.quick_draws import NUMBER, QUICKLY
from tests.master_service.api.fuzzed import Fuzzed, document, fuzzing, machine_of, schema_of
from trireme_shared.protocol.errors import NotFound
from trireme_shared.protocol.records.cluster import JobSchedule

EACH_WAY = 3  # requests for each operation, valid and invalid ones
# operations at most may never do what they are asked for: cancelResize needs a resize that runs, say
MISSED = 3
SCENARIOS, STEPS = 16, 30


@pytest.fixture
def fuzzed(tmp_path: Path) -> Iterator[Fuzzed]:
    with fuzzing(tmp_path) as made:
        yield made


def ask_each(fuzzed: Fuzzed, schema: Any, each_way: int = EACH_WAY) -> None:
    """Every operation by itself, each in a new world."""

    def ask(number: bytes, case: Any) -> None:
        fuzzed.ask(case)

    for found in schema.get_all_operations():
        fuzzed.renew()
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            cases = found.ok().as_strategy(generation_mode=mode)
            fuzz = settings(max_examples=each_way, **QUICKLY)(given(number=NUMBER, case=cases)(ask))
            try:
                fuzz()
            except Unsatisfiable:
                assert mode is GenerationMode.NEGATIVE  # without parameters, nothing can be wrong


def ask_in_sequence(fuzzed: Fuzzed, schema: Any, scenarios: int = SCENARIOS) -> None:
    """Sequences that follow from answers, each in a new world."""

    class Machine(machine_of(schema)):  # type: ignore[misc]
        @initialize(number=NUMBER)
        def begin(self, number: bytes) -> None:
            fuzzed.renew()

        def step(self, input: Any) -> Any:  # noqa: A002
            try:
                return super().step(input)
            except (
                Exception
            ):  # hypothesis repeats the scenario in the world as it is then, and tells of what happens there
                fuzzed.findings.append(traceback.format_exc())
                raise

        def call(self, case: Any, **_: Any) -> Response:
            fuzzed.place(case)
            return fuzzed.send(case)

        def validate_response(self, response: Response, case: Any, *_: Any, **__: Any) -> None:
            fuzzed.check(response, case, recorder=self.recorder)

    try:
        Machine.run(settings=settings(max_examples=scenarios, stateful_step_count=STEPS, **QUICKLY))
    except BaseException as error:
        raise AssertionError("\n\n".join(fuzzed.findings)) from error


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("scenarios", "least_in_sequence", "each_way", "least"),
    [(SCENARIOS, 450, EACH_WAY, 800), pytest.param(96, 2800, 20, 4800, marks=pytest.mark.soak)],
    ids=["few", "many"],
)
def test_schemathesis_finds_nothing(
    fuzzed: Fuzzed, scenarios: int, least_in_sequence: int, each_way: int, least: int
) -> None:
    schema = schema_of(document())
    ask_in_sequence(fuzzed, schema, scenarios)
    in_sequence = fuzzed.cases
    ask_each(fuzzed, schema, each_way)
    assert not fuzzed.findings, "\n\n".join(fuzzed.findings)
    assert in_sequence >= least_in_sequence
    assert fuzzed.cases >= least, fuzzed.cases
    assert {200, 201, 202, 404, 409, 410, 422} <= fuzzed.by_status.keys(), fuzzed.by_status
    for label in never_done(fuzzed, schema):  # few requests each: chance decides which of them are valid
        method, path = label.split(" ", 1)
        ask_each(fuzzed, schema.include(method=method, path=path), 5 * each_way)
    never = never_done(fuzzed, schema)
    assert len(never) <= MISSED, never


def never_done(fuzzed: Fuzzed, schema: Any) -> dict[str, dict[int, int]]:
    """How the operations answered that never did what they were asked for."""
    labels = [found.ok().label for found in schema.get_all_operations()]
    answers = {
        label: {status: count for (asked, status), count in fuzzed.answers.items() if asked == label}
        for label in labels
    }
    return {label: found for label, found in answers.items() if not found.keys() & {200, 201, 202}}


# ------------------------------------------------------------------ what it would find


def test_an_answer_that_the_document_does_not_describe_is_found(fuzzed: Fuzzed) -> None:
    described = document()
    described["components"]["schemas"]["Version"]["properties"]["version"]["type"] = "integer"
    ask_each(fuzzed, schema_of(described).include(path="/v1/version"), each_way=1)
    assert any("GET /v1/version: JsonSchemaError" in found for found in fuzzed.findings), fuzzed.findings


def test_a_bug_is_found(fuzzed: Fuzzed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("master_service.api.routes.jobs.pool_view", lambda term: term.no_such_thing)
    ask_each(fuzzed, schema_of(document()).include(path="/v1/pool"), each_way=1)
    assert any("GET /v1/pool: " in found and "INTERNAL" in found for found in fuzzed.findings), (
        fuzzed.findings
    )


def test_what_is_not_there_after_it_was_created_is_found_by_a_sequence(
    fuzzed: Fuzzed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(_: Any, schedule: str) -> JobSchedule:
        raise NotFound(f"there is no schedule {schedule}")

    monkeypatch.setattr(ClusterState, "schedule", lost)
    schema = schema_of(document()).include(path_regex="^/v1/schedules")
    ask_each(fuzzed, schema)
    assert not fuzzed.findings
    ask_in_sequence(fuzzed, schema, scenarios=12)
    assert any("EnsureResourceAvailability" in found for found in fuzzed.findings), fuzzed.findings
