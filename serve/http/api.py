"""The endpoint's HTTP interface: one FastAPI application, wherever the writer and the readers are."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.exceptions import HTTPException

import malmen
from malmen.errors import EditError
from malmen.serve.http.access import Access, Caller, RateLimit, Role
from malmen.serve.http.metrics import Meters
from malmen.serve.http.problems import TITLES, Problem
from malmen.serve.http.schemas import ProblemOut
from malmen.serve.ledger.jobs import JobBook
from malmen.serve.ledger.ledger import Ledger
from malmen.serve.messages import Roles
from malmen.serve.settings import ServeConfig

log = logging.getLogger(__name__)
_BEARER = HTTPBearer(auto_error=False, description="a token of the endpoint; its role says what it may")
CONSOLE = Path(__file__).parent.parent / "console"
_POLICY = "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'"


@dataclass
class Backend:
    """What the routes work with."""

    settings: ServeConfig
    ledger: Ledger
    access: Access
    roles: Roles
    meters: Meters = field(default_factory=Meters)

    def __post_init__(self) -> None:
        self.jobs = JobBook(self.ledger)
        self.rate = RateLimit(self.settings.limits.requests_per_minute)
        self.waiting = 0  # edits that this process has given to the writer


FindBackend = Callable[[], Backend]


def make_app(find: FindBackend) -> FastAPI:
    """The application; `find` gives the backend of the process that it runs in."""
    from malmen.serve.http import routes_edits, routes_models, routes_state

    app = FastAPI(
        title="malmen",
        version=malmen.__version__,
        description="Live edits of a language model: add facts, ask, take them back. Errors are RFC 9457 documents.",
        docs_url=None,  # their pages load scripts from other hosts
        redoc_url=None,
    )
    app.state.find = find
    for routes in (routes_edits, routes_models, routes_state):
        app.include_router(routes.router)
    app.add_exception_handler(EditError, _tell_problem)
    app.add_exception_handler(RequestValidationError, _tell_invalid)
    app.add_exception_handler(HTTPException, _tell_http)
    app.middleware("http")(_around)
    return app


def backend(request: Request) -> Backend:
    """The backend of this process."""
    found: Backend = request.app.state.find()
    return found


def allowed(role: Role) -> Any:
    """A dependency: the caller, if the token's role may do this."""

    def check(
        at: Annotated[Backend, Depends(backend)],
        given: Annotated[HTTPAuthorizationCredentials | None, Depends(_BEARER)],
    ) -> Caller:
        caller = at.access.caller(given.credentials if given else None)
        at.rate.take(caller.name)
        if not caller.may(role):
            raise Problem(403, f"this needs a token with the role `{role}`; {caller.name} has `{caller.role}`")
        return caller

    return Depends(check)


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """What a route may answer beside its result, for the OpenAPI document."""
    every = sorted({400, 401, 403, 411, 413, 422, 429, 503, *statuses})
    content = {"application/problem+json": {"schema": ProblemOut.model_json_schema()}}
    return {status: {"description": TITLES[status], "content": content} for status in every}


async def in_thread(work: Callable[..., Any], *args: Any) -> Any:
    """The ledger's calls block: they are made beside the event loop."""
    return await asyncio.to_thread(work, *args)


# --- around every request ------------------------------------------------------------------------------


async def _around(request: Request, call: Callable[[Request], Awaitable[Response]]) -> Response:
    """Count, time and limit a request; what is logged holds no token and no text."""
    at, began = backend(request), time.monotonic()
    name = uuid.uuid4().hex[:12]
    limit = at.settings.limits.body_bytes
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > limit:
        response: Response = problem_response(Problem(413, f"the body has {length} bytes; at most {limit} are taken"))
    elif "transfer-encoding" in request.headers and not length.isdigit():
        response = problem_response(Problem(411, "say the body's size in Content-Length"))
    else:
        response = await call(request)
    route = getattr(request.scope.get("route"), "path", "other")
    at.meters.count(request.method, route, response.status_code, time.monotonic() - began)
    response.headers["X-Request-Id"] = name
    response.headers["X-Content-Type-Options"] = "nosniff"
    response.headers["Content-Security-Policy"] = _POLICY
    log.info("%s %s %s %d %.3fs", name, request.method, route, response.status_code, time.monotonic() - began)
    return response


def problem_response(problem: Problem, instance: str | None = None) -> Response:
    """RFC 9457, with the member `error` that OpenAI's clients look for."""
    headers = {}
    if "retry_after" in problem.more:
        headers["Retry-After"] = str(problem.more["retry_after"])
    elif problem.status in (429, 503):
        headers["Retry-After"] = "2"
    if problem.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    error = {"message": problem.detail, "type": TITLES[problem.status], "code": str(problem.status)}
    document = {**problem.document(instance), "error": error}
    return JSONResponse(document, problem.status, headers, media_type="application/problem+json")


async def _tell_problem(request: Request, error: Exception) -> Response:
    problem = error if isinstance(error, Problem) else Problem(422, str(error))
    return problem_response(problem, request.url.path)


async def _tell_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    found = [{"at": ".".join(map(str, one["loc"])), "detail": one["msg"]} for one in error.errors()[:20]]
    unread = any(one["type"] == "json_invalid" for one in error.errors())
    said = "; ".join(f"{one['at']}: {one['detail']}" for one in found[:3])
    return problem_response(Problem(400 if unread else 422, said, errors=found), request.url.path)


async def _tell_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status = error.status_code if error.status_code in TITLES else 400
    response = problem_response(Problem(status, f"{request.method} {request.url.path}: {error.detail}"))
    response.headers.update(error.headers or {})
    return response
