"""openapi.json is what the code serves, and says of everything what it means. Who changes the API sees the
change in the file's diff."""

from __future__ import annotations

import ast
import difflib
import json
import re
from collections.abc import Iterator
from functools import cache
from itertools import combinations
from typing import Any

from jsonschema import Draft202012Validator

from clients.write_openapi import OPENAPI, current
from master_service.api.app import api_of
from master_service.api.openapi.descriptions import PARAMETERS, PROPERTIES, TAGS
from master_service.api.openapi.document import FOLLOWED, PROBLEMS, operations
from tests.tidy.sources import ROOT
from trireme_shared.protocol import errors

Json = dict[str, Any]
SUCCESS = re.compile(r"2\d\d")
LISTS = re.compile(r"list[A-Z]\w+")
NOT_OF_HTTP = {"LockLost"}  # ends a term


@cache
def document() -> Json:
    return api_of(clustered=True).openapi()


@cache
def schemas() -> Json:
    return document()["components"]["schemas"]


def properties() -> Iterator[tuple[str, str, Json]]:
    for name, schema in schemas().items():
        for each, value in schema.get("properties", {}).items():
            yield name, each, value


def test_the_committed_document_is_what_the_code_serves() -> None:
    committed, now = OPENAPI.read_text(encoding="utf-8"), current()
    changes = difflib.unified_diff(
        committed.splitlines(), now.splitlines(), "openapi.json", "the code", lineterm="", n=2
    )
    assert committed == now, "the API has changed; run `make openapi`, and read the diff:\n" + "\n".join(
        changes
    )


def test_a_jobs_own_master_serves_the_same_operations_but_those_of_a_cluster() -> None:
    own = {(method, path): each for method, path, each in operations(api_of(clustered=False).openapi())}
    leaders = {(method, path): each for method, path, each in operations(document())}
    assert own.keys() < leaders.keys()
    for key, operation in own.items():  # the words about getJob and what can follow it differ
        assert shared_of(operation) == shared_of(leaders[key])


def shared_of(operation: Json) -> Json:
    answers = {
        status: {name: part for name, part in answer.items() if name != "links"}
        for status, answer in operation["responses"].items()
    }
    return {**operation, "description": "", "responses": answers}


def test_every_operation_is_named_verb_noun_has_one_tag_and_a_description() -> None:
    names = [operation["operationId"] for _, _, operation in operations(document())]
    assert len(names) == len(set(names)) > 45
    for method, path, operation in operations(document()):
        assert re.fullmatch(r"[a-z]+([A-Z][a-z]+)+", operation["operationId"]), path
        [tag] = operation["tags"]
        assert tag in TAGS, (method, path)
        assert operation.get("description"), f"{operation['operationId']} has no docstring"


def test_every_property_schema_and_parameter_has_a_description() -> None:
    silent = [f"{name}.{each}" for name, each, value in properties() if not value.get("description")]
    assert not silent, (
        "say what these mean, in their Field, or in master_service/api/openapi/descriptions.py if "
        f"several schemas share them: {silent}"
    )
    silent = [name for name, schema in schemas().items() if not schema.get("description")]
    assert not silent, f"these classes have no docstring: {silent}"
    for _, path, operation in operations(document()):
        silent = [each["name"] for each in operation.get("parameters", []) if not each.get("description")]
        assert not silent, (path, silent)


def test_no_description_is_left_over() -> None:
    named = {f"{name}.{each}" for name, each, _ in properties()} | {each for _, each, _ in properties()}
    assert not PROPERTIES.keys() - named
    parameters = {
        each["name"] for _, _, operation in operations(document()) for each in operation.get("parameters", [])
    }
    assert not PARAMETERS.keys() - parameters
    assert not TAGS.keys() - {tag for _, _, operation in operations(document()) for tag in operation["tags"]}


def bodies() -> Iterator[tuple[str, Json]]:
    """Where, and the schema of each body that is JSON."""
    for method, path, operation in operations(document()):
        contents = [operation.get("requestBody", {}).get("content", {})]
        contents += [
            answer.get("content", {})
            for status, answer in operation["responses"].items()
            if SUCCESS.match(status)
        ]
        for content in contents:
            if "application/json" in content:
                yield f"{method} {path}", content["application/json"]["schema"]


def test_every_body_has_an_example_that_its_schema_accepts() -> None:
    local = json.loads(json.dumps(schemas()).replace("#/components/schemas/", "#/$defs/"))
    names = set()
    for where, schema in bodies():
        found = re.findall(r"#/components/schemas/(\w+)", str(schema))
        assert found, where
        names |= set(found)
    assert len(names) > 35
    for name in sorted(names):
        assert schemas()[name].get("examples"), (
            f"{name} has no example in master_service/api/openapi/descriptions.py"
        )
        [example] = schemas()[name]["examples"]
        Draft202012Validator({"$defs": local, "$ref": f"#/$defs/{name}"}).validate(example)


def test_every_list_is_paged_and_says_what_a_page_token_looks_like() -> None:
    for _, path, operation in operations(document()):
        parameters = {
            each["name"]: each["schema"] for each in operation.get("parameters", []) if each["in"] == "query"
        }
        if LISTS.fullmatch(operation["operationId"]) and operation["operationId"] not in {
            *FOLLOWED,
            "listJobTasks",
        }:
            assert {"page_size", "page_token"} <= parameters.keys(), path
            assert parameters["page_token"]["pattern"] == "^[A-Za-z0-9_-]{0,3000}$", path
            assert parameters["page_size"]["maximum"] == 1000, path


def test_every_problem_is_documented_as_problem_json() -> None:
    components = document()["components"]["responses"]
    for method, path, operation in operations(document()):
        answers = {
            status: each for status, each in operation["responses"].items() if not SUCCESS.match(status)
        }
        assert {"default", "503"} <= answers.keys(), path
        if operation["security"]:
            assert {"400", "401", "403", "421", "422", "500", "503", "504", "default"} <= answers.keys(), path
        assert ("404" in answers) == ("{" in path), path
        for each in answers.values():
            found = components[each["$ref"].rpartition("/")[2]]
            assert list(found["content"]) == ["application/problem+json"], (method, path)
            assert found["description"], path


def test_every_code_that_masters_raise_is_documented() -> None:
    documented = {code for codes in PROBLEMS.values() for code in codes}
    classes = {kind.__name__: kind for kind in errors.subclasses(errors.TriremeError).values()}
    raised = set()
    for source in sorted((ROOT / "master_service").rglob("*.py")):
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in classes:
                raised.add(node.func.id)
    assert len(raised) > 10
    missing = {
        name: classes[name].code for name in raised - NOT_OF_HTTP if classes[name].code not in documented
    }
    assert not missing, f"add them to master_service/api/openapi/document.py: {missing}"
    for status, codes in PROBLEMS.items():
        for code in codes:
            kind = next((each for each in classes.values() if each.code == code), errors.TriremeError)
            assert kind.status == status or (code, status) == ("INVALID_ARGUMENT", 422), code


def test_who_may_ask_is_documented() -> None:
    assert document()["components"]["securitySchemes"]["bearer"]["scheme"] == "bearer"
    needed = {operation["operationId"]: operation["security"] for _, _, operation in operations(document())}
    assert needed["checkHealth"] == needed["checkReadiness"] == needed["createLogin"] == []
    assert needed["getJob"] == [{"bearer": ["viewer"]}]
    assert needed["acquireTask"] == [{"bearer": ["member"]}]
    assert needed["cancelJob"] == [{"bearer": ["admin"]}]
    assert sum(not each for each in needed.values()) == 3


def pointed(schema: Json, steps: list[str]) -> Json | None:
    """The schema of what a JSON pointer names in an answer; None: there is no such thing."""
    while "$ref" in schema:
        schema = schemas()[schema["$ref"].rpartition("/")[2]]
    if not steps:
        return schema
    for kind in schema.get("anyOf", []):
        if (found := pointed(kind, steps)) is not None:
            return found
    inner = schema.get("items") if steps[0].isdigit() else schema.get("properties", {}).get(steps[0])
    return pointed(inner, steps[1:]) if inner else None


def test_every_link_names_what_there_is() -> None:
    named = {operation["operationId"]: operation for _, _, operation in operations(document())}
    linked = set()
    for source in named.values():
        for answer in source["responses"].values():
            for link in answer.get("links", {}).values():
                target = named[link["operationId"]]
                linked.add(link["operationId"])
                assert link["description"], link
                assert link["parameters"].keys() <= {each["name"] for each in target["parameters"]}, link
                needed = {each["name"] for each in target["parameters"] if each["in"] == "path"}
                assert needed <= link["parameters"].keys(), link
                [content] = answer["content"].values()
                body = link.get("requestBody", {})
                if body:
                    [wanted] = target["requestBody"]["content"].values()
                    assert all(pointed(wanted["schema"], [name]) for name in body), link
                for expression in (*link["parameters"].values(), *body.values()):
                    where, _, pointer = expression.partition("#/")
                    if where.startswith("$request.path."):
                        assert where.rpartition(".")[2] in {each["name"] for each in source["parameters"]}, (
                            link
                        )
                    elif where.startswith("$response.header."):
                        assert where.rpartition(".")[2] in answer["headers"], link
                    else:
                        assert where in ("$response.body", "$request.body"), link
                    if where == "$response.body":
                        assert pointed(content["schema"], pointer.split("/")), link
    unlinked = {each["operationId"] for _, path, each in operations(document()) if "{" in path} - linked
    assert not unlinked, (
        f"say in master_service/api/openapi/document.py after which answer these can be asked: {unlinked}"
    )


def test_no_schema_repeats_what_another_one_has() -> None:
    """JobSettings and JobSpec were nearly the same 20 KB."""
    parts = {
        name: {
            each: json.dumps(value, sort_keys=True) for each, value in schema.get("properties", {}).items()
        }
        for name, schema in schemas().items()
    }
    repeated = {
        (one, other): sum(len(text) for each, text in parts[one].items() if parts[other].get(each) == text)
        for one, other in combinations(parts, 2)
    }
    assert max(repeated.values()) < 4000, max(repeated, key=lambda pair: repeated[pair])
