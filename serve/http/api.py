"""The FastAPI application: what happens around every request. The routes are in `routes_*`.

A route that only asks the ledger is a plain function: FastAPI runs it in a thread.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from http import HTTPMethod
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from fastapi.staticfiles import StaticFiles
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.exceptions import HTTPException

import malmen
from malmen.errors import EditError
from malmen.serve.http.access import Access, Caller, RateLimit, Scope
from malmen.serve.http.schemas import ProblemOut
from malmen.serve.ledger.jobs import JobBook
from malmen.serve.ledger.ledger import Ledger
from malmen.serve.messages import Workers
from malmen.serve.problems import TITLES, Problem
from malmen.serve.settings import ServeConfig

log = logging.getLogger(__name__)
_BEARER = HTTPBearer(auto_error=False, description="a token of the endpoint; its role says what it allows")
CONSOLE = Path(__file__).parent.parent / "console"
DEFAULT_RETRY_SECONDS = 2
_POLICY = "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'"


class Metrics:
    """This process's numbers for Prometheus."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter("malmen_requests", "Requests", ["method", "route", "status"], registry=self.registry)
        self.seconds = Histogram("malmen_request_seconds", "Their duration", ["route"], registry=self.registry)
        self.facts = Counter("malmen_facts", "Facts published", registry=self.registry)
        self.tokens = Counter("malmen_completion_tokens", "Tokens answered", registry=self.registry)
        self.waiting = Gauge("malmen_edits_waiting", "Edits given to the writer", registry=self.registry)
        self.live_facts = Gauge("malmen_live_facts", "Facts in the live version", registry=self.registry)
        self.live_number = Gauge("malmen_live_version_number", "Number of the live version", registry=self.registry)


@dataclass
class Backend:
    """What the routes work with."""

    settings: ServeConfig
    ledger: Ledger
    access: Access
    workers: Workers
    metrics: Metrics = field(default_factory=Metrics)

    def __post_init__(self) -> None:
        self.jobs = JobBook(self.ledger)
        self.rate = RateLimit(self.settings.limits.requests_per_minute)
        self.waiting = 0  # edits that the writer has not yet answered to this process


def make_app(find: Callable[[], Backend]) -> FastAPI:
    """The application; `find` returns the backend of the process that it runs in."""
    from malmen.serve.http import routes_edits, routes_models, routes_state

    app = FastAPI(
        title="malmen",
        version=malmen.__version__,
        description="Live edits of a language model: add facts, ask, remove them. Errors are RFC 9457 documents.",
        docs_url=None,  # these pages load scripts from other hosts
        redoc_url=None,
    )
    app.state.find = find
    for routes in (routes_edits, routes_models, routes_state):
        app.include_router(routes.router)
    app.mount("/console", StaticFiles(directory=CONSOLE))
    for kind in (EditError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _on_error)
    app.middleware("http")(_around_request)
    return app


def find_backend(request: Request) -> Backend:
    """The backend of this process."""
    backend: Backend = request.app.state.find()
    return backend


BackendDep = Annotated[Backend, Depends(find_backend)]


def requires(scope: Scope) -> Any:
    """A dependency: the caller, if the token has this scope."""

    def check(backend: BackendDep, given: Annotated[HTTPAuthorizationCredentials | None, Depends(_BEARER)]) -> Caller:
        caller = backend.access.caller(given.credentials if given else None)
        backend.rate.count(caller.name)
        caller.require(scope)
        return caller

    return Depends(check)


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The problems that a route may answer with, for the OpenAPI document: these and those of every route."""
    every = sorted({400, 401, 403, 411, 413, 422, 429, 503, *statuses})
    content = {"application/problem+json": {"schema": ProblemOut.model_json_schema()}}
    return {status: {"description": TITLES[status], "content": content} for status in every}


def check_number(number: int, what: str, limit: int) -> None:
    """Raise a Problem 413 if a request has more of something than the limit."""
    if number > limit:
        raise Problem(413, f"{number} {what}; the limit is {limit}")


def check_length(backend: Backend, name: str, *texts: str) -> None:
    """Raise a Problem 413 if a text is longer than the endpoint's limit."""
    check_number(max(map(len, texts)), f"characters in {name}", backend.settings.limits.text_chars)


async def _around_request(request: Request, call: Callable[[Request], Awaitable[Response]]) -> Response:
    """Limit, count, time and log a request. The log contains no token and no text."""
    backend, began = find_backend(request), time.monotonic()
    name = uuid.uuid4().hex[:12]
    limit = backend.settings.limits.body_bytes
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > limit:
        response = problem_response(Problem(413, f"the body has {length} bytes; the limit is {limit}"))
    elif "transfer-encoding" in request.headers and not length.isdigit():
        response = problem_response(Problem(411, "send the body's size as Content-Length"))
    else:
        response = await call(request)
    route = getattr(request.scope.get("route"), "path", "other")
    method = request.method if request.method in HTTPMethod.__members__ else "other"  # a client may send any word
    seconds, status = time.monotonic() - began, response.status_code
    backend.metrics.requests.labels(method, route, str(status)).inc()
    backend.metrics.seconds.labels(route).observe(seconds)
    response.headers["X-Request-Id"] = name
    response.headers["X-Content-Type-Options"] = "nosniff"
    response.headers["Content-Security-Policy"] = _POLICY
    log.info("%s %s %s %d %.3fs", name, request.method, route, status, seconds)
    return response


def problem_response(problem: Problem, instance: str | None = None) -> Response:
    """The problem as an RFC 9457 document, with the member `error` that OpenAI's clients read."""
    headers = {}
    if problem.retry_after is not None or problem.status in (429, 503):
        headers["Retry-After"] = str(problem.retry_after or DEFAULT_RETRY_SECONDS)
    if problem.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    error = {"message": problem.detail, "type": TITLES[problem.status], "code": str(problem.status)}
    document = {**problem.document(instance), "error": error}
    return JSONResponse(document, problem.status, headers, media_type="application/problem+json")


async def _on_error(request: Request, error: Exception) -> Response:
    match error:
        case EditError():
            problem = Problem.of(error, 422)
        case RequestValidationError():
            errors = [{"at": ".".join(map(str, row["loc"])), "detail": row["msg"]} for row in error.errors()[:20]]
            unreadable = any(row["type"] == "json_invalid" for row in error.errors())
            detail = "; ".join(f"{row['at']}: {row['detail']}" for row in errors[:3])
            problem = Problem(400 if unreadable else 422, detail, errors=errors)
        case HTTPException():
            status = error.status_code if error.status_code in TITLES else 400
            problem = Problem(status, f"{request.method} {request.url.path}: {error.detail}")
        case _:
            raise error
    response = problem_response(problem, request.url.path)
    response.headers.update(getattr(error, "headers", None) or {})
    return response
