"""Errors as RFC 9457 problem+json, from all sources: the service, the validation, the router, a bug."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from http import HTTPStatus

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from master_service.api.openapi.documentation import DocumentedPaths
from trireme_shared.platform.runtime import ids
from trireme_shared.protocol.errors import InvalidArgument, NotFound, TriremeError
from trireme_shared.protocol.rest import Problem, ProblemPart

CONTENT_TYPE = "application/problem+json"
RETRY_AFTER_S = 1  # where nothing better is known
LONGEST_RETRY_AFTER_S = 60
CODES = {404: NotFound.code, 405: "METHOD_NOT_ALLOWED", 422: InvalidArgument.code}


def request_id_of(headers: Mapping[bytes, bytes]) -> str:
    """The caller's id if it is short printable text, else a new one."""
    given = headers.get(b"x-request-id", b"").decode("latin-1")
    return given if given.isascii() and given.isprintable() and 0 < len(given) <= 64 else ids.new_id("req")


def retry_after_s(problem: Problem) -> int:
    """Whole seconds, not too early: what the error knows (`details`), else RETRY_AFTER_S."""
    known = float(problem.details.get("retry_after_s", RETRY_AFTER_S))
    return min(LONGEST_RETRY_AFTER_S, max(0, math.ceil(known)))


def problem_response(problem: Problem, headers: Mapping[str, str] | None = None) -> Response:
    more = {"Retry-After": str(retry_after_s(problem))} if problem.retryable else {}
    return Response(problem.model_dump_json(), problem.status, {**more, **(headers or {})}, CONTENT_TYPE)


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
    return problem_of(
        TriremeError("the master failed at this request; its log has the reason", hint=hint), request_id
    )


def invalid(parts: Sequence[ProblemPart], request_id: str) -> Problem:
    """The request is not as the schema says."""
    return Problem(
        title="Unprocessable Entity",
        status=422,
        detail=f"{parts[0].location}: {parts[0].message}" if parts else "the request is not valid",
        code=InvalidArgument.code,
        retryable=False,
        hint="see errors",
        request_id=request_id,
        errors=tuple(parts),
    )


def install(app: FastAPI, paths: DocumentedPaths) -> None:
    """Install exception handlers."""

    async def on_trireme(request: Request, error: Exception) -> Response:
        assert isinstance(error, TriremeError)
        return problem_response(problem_of(error, _request_id(request)))

    async def on_validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        parts = tuple(
            ProblemPart(location=".".join(str(part) for part in item["loc"]), message=item["msg"])
            for item in error.errors()
        )
        return problem_response(invalid(parts, _request_id(request)))

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        headers = dict(error.headers or {})
        detail = str(error.detail)
        if error.status_code == 404:
            detail = f"{request.url.path} does not exist"
        elif error.status_code == 405:
            await paths.ready()
            allowed = paths.allowed(request.url.path)
            headers = {
                **{k: v for k, v in headers.items() if k.lower() != "allow"},
                "Allow": ", ".join(allowed),
            }
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


def _request_id(request: Request) -> str:
    return str(request.scope.get("request_id", ""))
