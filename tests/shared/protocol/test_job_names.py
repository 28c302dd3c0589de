"""Names that jobs can have, and what is said of others."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter, ValidationError

from trireme_shared.protocol.records.job_choices import JobName, allowed_name, name_problem

NAMES: TypeAdapter[str] = TypeAdapter(JobName)


@pytest.mark.parametrize("name", ["a", "my-model", "7b", "a" * 63])
def test_a_possible_name_is_taken_as_it_is(name: str) -> None:
    assert (name_problem(name), allowed_name(name), NAMES.validate_python(name)) == ("", name, name)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("my_model", "my-model"),
        ("My Model.v2", "my-model-v2"),
        ("_a_", "a"),
        ("a\n", "a"),
        ("a" * 64, "a" * 63),
        ("../etc", "etc"),
    ],
)
def test_another_one_is_refused_with_the_nearest_that_is_possible(name: str, nearest: str) -> None:
    told = (
        f"a job's name has lower-case letters, digits and hyphens, at most 63; the nearest one is {nearest}"
    )
    assert name_problem(name) == told
    with pytest.raises(ValidationError) as refused:
        NAMES.validate_python(name)
    assert told in str(refused.value)


@pytest.mark.parametrize("name", ["", "???", "日本"])
def test_where_nothing_can_stay_no_other_name_is_said(name: str) -> None:
    assert name_problem(name).endswith("at most 63")
    with pytest.raises(ValidationError):
        NAMES.validate_python(name)


def test_the_documents_schema_keeps_the_pattern() -> None:
    assert NAMES.json_schema()["pattern"].startswith("^[a-z0-9]")
