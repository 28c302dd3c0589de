"""The OpenAPI document: FastAPI's, with what FastAPI does not say. openapi.json of the repository is that of
a cluster's leader.

FastAPI's document ─► problems by status ─► who may ask (security)
    ─► descriptions and examples of properties, parameters, schemas
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from master_service.api.middleware import role_needed
from master_service.api.openapi.descriptions import PARAMETERS, PROPERTIES, TAGS, examples
from master_service.api.problems import CONTENT_TYPE
from trireme_shared.protocol.rest import Problem

Json = dict[str, Any]

_MAKING = threading.Lock()
LICENSE = {"name": "Apache-2.0", "identifier": "Apache-2.0"}
# the first one is relative to where the document lies, so a proxy's prefix and Swagger UI need nothing else
SERVERS = [
    {"url": ".", "description": "The master that serves this document."},
    {
        "url": "http://{host}:{port}",
        "description": "A master at its address.",
        "variables": {"host": {"default": "127.0.0.1"}, "port": {"default": "8470"}},
    },
]
BEARER = {"type": "http", "scheme": "bearer", "description": "A token with the role viewer, member or admin."}
REQUEST_ID = {"description": "Id of the request, as in the master's log.", "schema": {"type": "string"}}
RETRY_AFTER = {"description": "Ask again after so many seconds.", "schema": {"type": "integer", "minimum": 0}}
CHALLENGE = {"description": "How to authenticate.", "schema": {"type": "string"}}
TAG = {
    "description": "`version` and a digest of the answer. With If-None-Match: 304 without a body while it is "
    "the same.",
    "schema": {"type": "string", "examples": ['"52b3a1c9d0e4f687.0ddba11ca5cade55"']},
}
LOCATION = {"description": "Path of what was created or begun.", "schema": {"type": "string"}}

# What answers tell and later versions may tell more of. Where a request names one, an unknown value is
# refused.
OPEN = (
    "Code",
    "OperationKind",
    "OperationState",
    "ResizePhase",
    "Stage",
    "Standing",
    "TaskKind",
    "TaskState",
)
NEW_VALUES = "There may be new values."
WIDTHS = {"integer": "int64", "number": "double"}
TAGGED = frozenset({"getJob", "getSchedule", "getPoolMember"})
FOLLOWED = frozenset({"listEvents", "listClusterEvents"})  # by a cursor
OF_FILES = frozenset({"listLogs", "getLog", "listMetricSeries", "queryMetric"})  # so many at once
# what each code means, by status; a test finds codes that are missing
PROBLEMS: dict[int, dict[str, str]] = {
    400: {"INVALID_ARGUMENT": "The request's values are invalid, or do not fit together."},
    401: {"UNAUTHENTICATED": "No token was sent, or one that is not known."},
    403: {
        "PERMISSION_DENIED": "The token's role does not include this.",
        "ORIGIN_NOT_ALLOWED": "A web page of another site sent the request.",
    },
    404: {"NOT_FOUND": "What the path names does not exist."},
    409: {
        "CONFLICT": "The present state does not allow it.",
        "STALE_ATTEMPT": "The attempt is not the pending one any more: fetch a new task.",
        "STALE_GENERATION": "The membership has changed: read lanes and addresses again.",
    },
    410: {
        "CURSOR_EXPIRED": "The next event after the cursor is forgotten; `details` has the ids that are kept."
    },
    412: {
        "PRECONDITION_FAILED": (
            "It has another version than If-Match says: it has changed. `details` has both."
        )
    },
    413: {"TOO_LARGE": "The body is too large."},
    415: {"UNSUPPORTED_MEDIA_TYPE": "The body is not JSON."},
    421: {"HOST_NOT_ALLOWED": "The request names a host that this service is not."},
    422: {
        "INVALID_ARGUMENT": "A value is not as the schema says; `errors` names each one.",
        "IDEMPOTENCY_KEY_REUSED": "The key was used for another request before.",
        "DATASET_INVALID": "The dataset cannot be read, is empty, or does not fit.",
        "CHECKPOINT_UNUSABLE": "The checkpoint is damaged, incomplete, or of another job.",
    },
    429: {
        "TOO_MANY_REQUESTS": (
            "As many streams, or reads of logs or of stored metrics, as the service allows are open."
        )
    },
    500: {
        "INTERNAL": "The master failed at this request; its log has the reason.",
        "STATE_UNREADABLE": "This version cannot read one of the job's keys in etcd.",
    },
    503: {
        "UNAVAILABLE": "Another process or machine does not answer.",
        "NOT_LEADER": "A standby answered; `details.leader` is the leader's URL when known.",
        "NOT_READY": "The master has not taken over yet.",
        "STORAGE_UNREACHABLE": "The job's storage does not answer.",
        "RESOURCE_EXHAUSTED": "The master may open no more files and sockets, or its machine lacks memory.",
    },
    504: {"DEADLINE_EXCEEDED": "etcd did not answer in time; send the same request again."},
}
RETRYABLE = frozenset({429, 503, 504})


def document_of(app: FastAPI) -> Json:
    """Made once for each application, however many threads ask."""
    with _MAKING:
        if not app.openapi_schema:
            app.openapi_schema = new_document(app)
        return app.openapi_schema


def new_document(app: FastAPI) -> Json:
    document = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes
    )
    document["info"]["license"] = LICENSE
    document["servers"] = SERVERS
    for method, path, operation in operations(document):
        _problems(method, path, operation)
        _security(method, path, operation)
        _answers(operation)
        for parameter in operation.get("parameters", []):
            _parameter(parameter)
    add_links(document)
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    model = Problem.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas.update(model.pop("$defs", {}))
    schemas["Problem"] = model
    for name, schema in schemas.items():
        _describe(name, schema)
    for name, example in examples().items():
        if name in schemas:
            schemas[name]["examples"] = [example.model_dump(mode="json", exclude_none=True)]
    _open_states(document)
    components["responses"] = {_name(status): _response(status) for status in PROBLEMS} | {
        "Problem": _response(None)
    }
    components["securitySchemes"] = {"bearer": BEARER}
    used = {tag for _, _, operation in operations(document) for tag in operation["tags"]}
    document["tags"] = [{"name": tag, "description": text} for tag, text in TAGS.items() if tag in used]
    _widths(document["paths"])
    _widths(components)
    return document


def operations(document: Json) -> Iterator[tuple[str, str, Json]]:
    """Method, path and operation of each."""
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation


def takes(operation: Json, header: str) -> bool:
    return any((each["in"], each["name"]) == ("header", header) for each in operation.get("parameters", []))


# ------------------------------------------------------------------ operations


def _problems(method: str, path: str, operation: Json) -> None:
    responses = operation["responses"]
    responses.pop("422", None)
    for status in sorted(_statuses(method, path, operation)):
        responses[str(status)] = {"$ref": f"#/components/responses/{_name(status)}"}
    responses["default"] = {"$ref": "#/components/responses/Problem"}


def _statuses(method: str, path: str, operation: Json) -> set[int]:
    """Of the problems that the operation may answer."""
    if role_needed(method, path) is None:
        return {422, 503} if method == "GET" else {401, 403, 421, 422, 500, 503}
    found = {400, 401, 403, 421, 422, 500, 503, 504}
    if "{" in path:
        found.add(404)
    if "{job}" in path:
        found.add(409)  # nobody leads the job now
    if operation["operationId"] in FOLLOWED:
        found.add(410)
    if operation["operationId"] in OF_FILES:
        found.add(429)
    if method != "GET":
        found |= {409, 415}
    if takes(operation, "If-Match"):
        found.add(412)
    if "requestBody" in operation:
        found.add(413)
    return found


def _security(method: str, path: str, operation: Json) -> None:
    """With the least role that may ask, as OpenAPI 3.1 allows for a bearer token."""
    role = role_needed(method, path)
    operation["security"] = [] if role is None else [{"bearer": [str(role)]}]


def _answers(operation: Json) -> None:
    for status, response in operation["responses"].items():
        if not status.startswith("2"):
            continue
        response["headers"] = {"X-Request-Id": REQUEST_ID, **response.get("headers", {})}
        if operation["operationId"] in TAGGED:
            response["headers"]["ETag"] = TAG
        if status == "202":
            response["description"] = "Begun; the answer tells how far it is."
            response["headers"] |= {"Location": LOCATION, "Retry-After": RETRY_AFTER}
        elif status == "201":
            response["description"] = "Created."
            response["headers"] |= {"Location": LOCATION}
        elif response["description"] == "Successful Response":
            response["description"] = "Done."


def _parameter(parameter: Json) -> None:
    description, example = PARAMETERS.get(parameter["name"], ("", None))
    if parameter.get("description") is None and description:
        parameter["description"] = description
    parameter["schema"].pop("description", None)
    if example is None:
        return
    if parameter.get("required"):
        parameter["example"] = example
    else:
        # Swagger UI fills `example` into its forms: a page that is not the first, or a key that was used
        # before
        parameter["schema"]["examples"] = [example]


# ------------------------------------------------------------------ components


def _widths(part: Any) -> None:
    """Every number says how wide it is, in place. Generators for Go, Java or C# take 32 bits where nothing is
    said: too few for ids of events, bytes and records."""
    if isinstance(part, dict):
        kind = part.get("type")
        if isinstance(kind, str) and kind in WIDTHS:
            part.setdefault("format", WIDTHS[kind])
        for name, inner in part.items():
            if name not in ("example", "examples"):
                _widths(inner)
    elif isinstance(part, list):
        for inner in part:
            _widths(inner)


def _open_states(document: Json) -> None:
    """A state is any text, with the values that this version knows: generated clients refuse whole answers
    for an unknown value of an `enum`. It stands where it is used: not all generators know names for mere
    texts."""
    schemas = document["components"]["schemas"]
    found = {f"#/components/schemas/{name}": schemas.pop(name) for name in OPEN if name in schemas}
    for _, _, operation in operations(document):
        for parameter in operation.get("parameters", []):
            _inline(parameter, {ref: {"type": "string", "enum": each["enum"]} for ref, each in found.items()})
    told = {ref: {"type": "string", "x-extensible-enum": each["enum"]} for ref, each in found.items()}
    for schema in schemas.values():
        for value in schema.get("properties", {}).values():
            if _inline(value, told):
                value["description"] = f"{value.get('description', '')} {NEW_VALUES}".strip()


def _inline(part: Any, values: Json) -> bool:
    """In place: references to `values` become these. Whether there were any."""
    changed = False
    if isinstance(part, dict):
        if (ref := part.get("$ref")) in values:
            del part["$ref"]
            part.update(values[ref] | part)
            changed = True
        for inner in part.values():
            changed |= _inline(inner, values)
    elif isinstance(part, list):
        for inner in part:
            changed |= _inline(inner, values)
    return changed


def _describe(name: str, schema: Json) -> None:
    for each, value in schema.get("properties", {}).items():
        text = PROPERTIES.get(f"{name}.{each}") or PROPERTIES.get(each)
        if "description" not in value and text:
            value["description"] = text


def _name(status: int) -> str:
    return HTTPStatus(status).phrase.title().replace(" ", "").replace("-", "")


def _response(status: int | None) -> Json:
    """None: of any status. RFC 9457 problem details, with an example for each code."""
    content: Json = {"schema": {"$ref": "#/components/schemas/Problem"}}
    if status is None:
        return {"description": "Any other problem.", "content": {CONTENT_TYPE: content}}
    codes = PROBLEMS[status]
    content["examples"] = {
        code: {"summary": text, "value": _problem(status, code, text).model_dump(mode="json")}
        for code, text in codes.items()
    }
    headers: Json = {"X-Request-Id": REQUEST_ID}
    if status in RETRYABLE:
        headers["Retry-After"] = RETRY_AFTER
    if status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = CHALLENGE
    text = "\n".join(f"- `{code}`: {meaning}" for code, meaning in codes.items())
    return {"description": text, "headers": headers, "content": {CONTENT_TYPE: content}}


def _problem(status: int, code: str, text: str) -> Problem:
    return Problem(
        title=HTTPStatus(status).phrase,
        status=status,
        detail=text,
        code=code,
        retryable=status in RETRYABLE,
        request_id="req-1a2b3c",
    )


# ------------------------- links: which operation can follow from an answer, and which of its values it takes
#     createJob ─► every operation about the job ─► createCheckpoint ─► getOperation
#     a list ─► its next page, and what can be asked about its first item
# They tell users and tools how operations belong together; schemathesis follows them.

OF_A_JOB = re.compile(r"/v1/jobs/\{job\}[^{}]*")  # asks for nothing but the job's name


@dataclass(frozen=True, slots=True)
class Follows:
    """`target` can be asked after `source`. `parameters`, `body`: name -> expression of OpenAPI. `about`:
    what it is asked about."""

    source: str
    target: str
    about: str
    parameters: dict[str, str]
    body: dict[str, str] = field(default_factory=dict)


def _of(name: str, pointer: str, about: str, sources: str, targets: str) -> list[Follows]:
    """From each of `sources` to each of `targets`, with a parameter from the answer, in the same job if it
    has one."""
    return [
        Follows(source, target, about, {name: f"$response.body#/{pointer}"})
        for source in sources.split()
        for target in targets.split()
    ]


def _unchanged(name: str, about: str, source: str, targets: str) -> list[Follows]:
    parameters = {name: f"$request.path.{name}", "If-Match": "$response.header.ETag"}
    return [Follows(source, target, about, parameters) for target in targets.split()]


_HELD = {
    "trainer": "$request.body#/trainer",
    "attempt": "$response.body#/task/attempt",
    "epoch": "$response.body#/task/epoch",
    "timeline": "$response.body#/task/timeline",
}
FOLLOWS = [
    *_unchanged(
        "job", "the job, if nobody has changed it since", "getJob", "pauseJob resumeJob cancelJob deleteJob"
    ),
    *_unchanged("schedule", "the schedule, if nobody has changed it since", "getSchedule", "deleteSchedule"),
    *_unchanged(
        "member",
        "the member, if nobody has changed it since",
        "getPoolMember",
        "drainPoolMember undrainPoolMember",
    ),
    *[
        Follows(source, target, "the same job", {})
        for source, target in (
            ("pauseJob", "resumeJob"),
            ("pauseJob", "cancelJob"),
            ("cancelJob", "deleteJob"),
        )
    ],
    *_of("schedule", "name", "the schedule", "createSchedule", "getSchedule deleteSchedule"),
    *_of("schedule", "schedules/0/name", "the first schedule", "listSchedules", "getSchedule deleteSchedule"),
    *_of(
        "member",
        "members/0/member_id",
        "the first member",
        "listPoolMembers",
        "getPoolMember drainPoolMember undrainPoolMember",
    ),
    *_of("member", "member_id", "the same member", "drainPoolMember", "undrainPoolMember"),
    *_of("task_id", "tasks/0/task_id", "the first task", "listTasks", "getTask retryTask skipTask"),
    *_of("task_id", "task_id", "the same task", "skipTask", "retryTask"),
    *_of("log", "logs/0/log", "the first log", "listLogs", "getLog"),
    *_of(
        "member_id",
        "members/0/member_id",
        "the first member",
        "listMembers",
        "getMember reportSuspect reportFailure",
    ),
    *_of(
        "checkpoint_id",
        "checkpoints/0/checkpoint_id",
        "the newest checkpoint",
        "listCheckpoints",
        "getCheckpoint verifyCheckpoint restoreCheckpoint",
    ),
    *_of(
        "operation_id",
        "operation_id",
        "the operation that was begun",
        "createCheckpoint verifyCheckpoint restoreCheckpoint createResize "
        "pauseJob resumeJob cancelJob deleteJob",
        "getOperation",
    ),
    *_of(
        "operation_id", "operations/0/operation_id", "the newest operation", "listOperations", "getOperation"
    ),
    *_of("resize_id", "operation_id", "the resize that was begun", "createResize", "getResize cancelResize"),
    *_of("resize_id", "resizes/0/resize_id", "the newest resize", "listResizes", "getResize cancelResize"),
    *_of("name", "series/0/name", "the first metric", "listMetricSeries", "queryMetric"),
    *[
        Follows("acquireTask", target, "the task", {"task_id": "$response.body#/task/task_id"}, _HELD)
        for target in ("reportTaskProgress", "completeTask", "failTask")
    ],
    *_of("task_id", "task/task_id", "the task", "acquireTask", "getTask skipTask"),
    Follows("getJob", "acquireTask", "a task of the job", {}, {"generation": "$response.body#/generation"}),
    Follows(
        "getLog", "getLog", "newer lines", {"log": "$request.path.log", "after": "$response.body#/next_after"}
    ),
    Follows("listEvents", "listEvents", "newer events", {"after": "$response.body#/next_after"}),
    Follows(
        "listClusterEvents", "listClusterEvents", "newer events", {"after": "$response.body#/next_after"}
    ),
]


def add_links(document: Json) -> None:
    """In place."""
    by_id = {
        operation["operationId"]: (path, operation)
        for path, methods in document["paths"].items()
        for operation in methods.values()
    }
    for follows in (*FOLLOWS, *_about_jobs(by_id), *_pages(by_id)):
        if follows.source in by_id and follows.target in by_id:
            _add(follows, by_id)


def _about_jobs(by_id: dict[str, tuple[str, Json]]) -> list[Follows]:
    """After a job was created or listed: all that asks for its name only. A created job may have no source:
    its script is a path then."""
    targets = [target for target, (path, _) in by_id.items() if OF_A_JOB.fullmatch(path)]
    return [
        follows
        for target in targets
        for follows in (
            *_of("job", "job", "the job that was created", "createJob", target),
            *_of("job", "jobs/0/job", "the first job", "listJobs", target),
        )
        if (follows.source, target) != ("createJob", "getJobSource")
    ]


def _pages(by_id: dict[str, tuple[str, Json]]) -> list[Follows]:
    return [
        Follows(source, source, "the next page", {"page_token": "$response.body#/next_page_token"})
        for source, (_, operation) in by_id.items()
        if any(each["name"] == "page_token" for each in operation.get("parameters", []))
    ]


def _add(follows: Follows, by_id: dict[str, tuple[str, Json]]) -> None:
    path, source = by_id[follows.source]
    target_path, _ = by_id[follows.target]
    [answer] = [answer for status, answer in source["responses"].items() if status.startswith("2")]
    parameters = dict(follows.parameters)
    if "{job}" in path and "{job}" in target_path:
        parameters.setdefault("job", "$request.path.job")
    link = {
        "operationId": follows.target,
        "description": f"Asks about {follows.about}.",
        "parameters": parameters,
    }
    if follows.body:
        link["requestBody"] = follows.body
    answer.setdefault("links", {})[follows.target] = link
