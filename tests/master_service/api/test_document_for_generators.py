"""What generators of clients need of the document: each made a client that does not build, or that takes one
answer for another."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from clients.write_openapi import OPENAPI
from master_service.api.openapi.document import operations

DOCUMENT: dict[str, Any] = json.loads(OPENAPI.read_bytes())
SCHEMAS: dict[str, Any] = DOCUMENT["components"]["schemas"]


def schemas_in(part: Any, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema of the document, but no example."""
    if isinstance(part, dict):
        if {"type", "$ref", "oneOf", "anyOf", "default"} & part.keys():
            yield where, part
        for name, inner in part.items():
            if name not in ("example", "examples"):
                yield from schemas_in(inner, f"{where}/{name}")
    elif isinstance(part, list):
        for number, inner in enumerate(part):
            yield from schemas_in(inner, f"{where}/{number}")


def test_every_number_says_how_wide_it_is():
    """Go takes 32 bits where nothing is said, and cannot read the id of an event."""
    found = [
        (where, schema)
        for where, schema in schemas_in(DOCUMENT, "#")
        if schema.get("type") in ("integer", "number")
    ]
    assert len(found) > 100
    assert [where for where, schema in found if schema.get("format") not in ("int64", "double")] == []


def test_no_property_has_an_object_as_its_default():
    """Go's generator writes it into the program as it is."""
    for name, schema in SCHEMAS.items():
        for each, value in schema.get("properties", {}).items():
            assert not isinstance(value.get("default"), dict), f"{name}.{each}"


def test_what_tells_the_kinds_of_a_union_apart_is_required_of_each():
    """Else Go tries them all, and JSON lines look like lines of text."""
    unions = [schema for _, schema in schemas_in(DOCUMENT, "#") if "discriminator" in schema]
    assert unions
    for union in unions:
        for kind in union["oneOf"]:
            assert (
                union["discriminator"]["propertyName"] in SCHEMAS[kind["$ref"].rpartition("/")[2]]["required"]
            ), kind


def test_states_in_answers_may_get_new_values():
    """Python's and Go's clients refuse a whole answer for a value that an enum does not list."""
    closed = {name for name, schema in SCHEMAS.items() if "enum" in schema}
    chosen, reported = {"Dispatch", "JobStrategy", "Mode", "Strategy"}, {"Reduction"}
    assert closed == chosen | reported, (
        "what users choose, and what a trainer's report says: no state of ours"
    )
    found = {
        f"{name}.{each}": value
        for name, schema in SCHEMAS.items()
        for each, value in schema.get("properties", {}).items()
        if "x-extensible-enum" in str(value)
    }
    assert {
        "JobView.stage",
        "Operation.state",
        "Operation.kind",
        "ResizeView.phase",
        "Cause.code",
    } <= found.keys()
    for where, value in found.items():
        assert value["description"].endswith("There may be new values."), where
    for _, path, operation in operations(DOCUMENT):
        assert "x-extensible-enum" not in str(operation), path


def test_an_operation_has_one_kind_of_answer():
    """Go takes all good answers for the first one; other languages get a union that each caller must take
    apart."""
    for method, path, operation in operations(DOCUMENT):
        good = {status: answer for status, answer in operation["responses"].items() if status.startswith("2")}
        assert len(good) == 1, (method, path, list(good))
        assert "anyOf" not in str(good), (method, path)
