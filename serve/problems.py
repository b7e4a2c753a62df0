"""What can be wrong with a request: an error with an HTTP status, raised anywhere behind the endpoint.

`malmen.serve.http.api` renders it as an RFC 9457 document.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from malmen.errors import EditError

TITLES = {
    400: "the request cannot be read",
    401: "no valid token was given",
    403: "this token does not allow it",
    404: "not found",
    405: "this address does not support the method",
    409: "the request conflicts with the current state",
    411: "the request has no Content-Length",
    412: "the resource was changed in the meantime",
    413: "the request is too large",
    415: "this content type is not supported",
    422: "the request was understood but cannot be carried out",
    428: "the request must name the state that it changes",
    429: "too many requests",
    503: "the service is not available now",
}


class Problem(EditError):
    """An error with an HTTP status; `more` are members of the document beyond the standard ones."""

    def __init__(self, status: int, detail: str, *, retry_after: int | None = None, **more: Any) -> None:
        """`retry_after`: seconds after which the caller may try again."""
        super().__init__(detail)
        assert status in TITLES, status
        self.status, self.detail, self.retry_after, self.more = status, detail, retry_after, more

    def __reduce__(self) -> tuple[Any, ...]:
        """It travels between Ray's processes."""
        return partial(type(self), retry_after=self.retry_after, **self.more), (self.status, self.detail)

    @classmethod
    def of(cls, error: EditError, status: int) -> Problem:
        """The error itself if it is a problem already, else one of this status."""
        return error if isinstance(error, Problem) else Problem(status, str(error))

    def document(self, instance: str | None = None) -> dict[str, Any]:
        """The members of the problem document (RFC 9457)."""
        document = {"type": "about:blank", "title": TITLES[self.status], "status": self.status, "detail": self.detail}
        optional = {"instance": instance or None, "retry_after": self.retry_after}
        return {**document, **{name: value for name, value in optional.items() if value is not None}, **self.more}


class Conflict(Problem):
    """Something else changed the ledger at the same time. The same request may succeed when it is repeated."""
