"""Errors as RFC 9457 problem+json, from all sources: the service, the validation, the router, a bug."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.routing import compile_path

from master_service.api.resources import Problem, ProblemPart
from shared.errors import InvalidArgument, NotFound, TriremeError
from shared.runtime import ids

CONTENT_TYPE = "application/problem+json"
CODES = {404: NotFound.code, 405: "METHOD_NOT_ALLOWED", 422: InvalidArgument.code}


def request_id_of(headers: Mapping[bytes, bytes]) -> str:
    """The caller's id if it is short printable text, else a new one."""
    given = headers.get(b"x-request-id", b"").decode("latin-1")
    return given if given.isascii() and given.isprintable() and 0 < len(given) <= 64 else ids.new_id("req")


def problem_response(problem: Problem, headers: dict[str, str] | None = None) -> Response:
    return Response(problem.model_dump_json(), problem.status, headers, CONTENT_TYPE)


def problem_of(error: TriremeError, request_id: str) -> Problem:
    return Problem(
        title=HTTPStatus(error.status).phrase,
        status=error.status,
        detail=error.message,
        code=error.code,
        retryable=error.retryable,
        hint=error.hint,
        request_id=request_id,
        details=error.details,
    )


def problem_of_bug(request_id: str) -> Problem:
    """The answer to a request that met a bug; the log has the details."""
    hint = f"look for {request_id} in the master's log"
    return problem_of(TriremeError("the master failed at this request; its log has the reason", hint=hint), request_id)


def install(app: FastAPI) -> None:
    """Install exception handlers, and an OpenAPI document that describes their answers."""

    async def on_trireme(request: Request, error: Exception) -> Response:
        assert isinstance(error, TriremeError)
        return problem_response(problem_of(error, _request_id(request)))

    async def on_validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        parts = tuple(
            ProblemPart(location=".".join(str(part) for part in item["loc"]), message=item["msg"])
            for item in error.errors()
        )
        first = f"{parts[0].location}: {parts[0].message}" if parts else "the request is not valid"
        problem = Problem(
            title="Unprocessable Entity",
            status=422,
            detail=first,
            code=InvalidArgument.code,
            retryable=False,
            hint="see errors",
            request_id=_request_id(request),
            errors=parts,
        )
        return problem_response(problem)

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        headers = dict(error.headers or {})
        detail = str(error.detail)
        if error.status_code == 404:
            detail = f"{request.url.path} does not exist"
        elif error.status_code == 405:
            allowed = _allowed(app, request)
            headers = {**{k: v for k, v in headers.items() if k.lower() != "allow"}, "Allow": ", ".join(allowed)}
            detail = f"{request.method} is not possible on {request.url.path}; {', '.join(allowed)} are"
        problem = Problem(
            title=HTTPStatus(error.status_code).phrase,
            status=error.status_code,
            detail=detail,
            code=CODES.get(error.status_code, "HTTP_ERROR"),
            retryable=False,
            request_id=_request_id(request),
        )
        return problem_response(problem, headers)

    app.add_exception_handler(TriremeError, on_trireme)
    app.add_exception_handler(RequestValidationError, on_validation)
    app.add_exception_handler(HTTPException, on_http)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]


def _request_id(request: Request) -> str:
    return str(request.scope.get("request_id", ""))


def _allowed(app: FastAPI, request: Request) -> list[str]:
    """All methods of the path, from the OpenAPI document: Starlette names only those of the first route that matches. A path of the
    only job is documented with the job's name in it."""
    path, methods = request.url.path, set[str]()
    named = "/v1/jobs/_" + path.removeprefix("/v1").removeprefix("/job")
    for template, operations in _openapi(app)["paths"].items():
        pattern, _, _ = compile_path(template)
        if pattern.match(path) or pattern.match(named):
            methods |= {method.upper() for method in operations}
    return sorted(methods)


def _openapi(app: FastAPI) -> dict[str, Any]:
    """FastAPI documents its own validation error as application/json; here every error status answers a problem."""
    if app.openapi_schema:
        return app.openapi_schema
    document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    problem = {
        "description": "RFC 9457 problem details",
        "content": {CONTENT_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
    }
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
            operation["responses"]["default"] = problem
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    model = Problem.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas.update(model.pop("$defs", {}))
    schemas["Problem"] = model
    app.openapi_schema = document
    return document
