"""What can be wrong with a request, as RFC 9457 problem details."""

from __future__ import annotations

from typing import Any

from malmen.errors import EditError

TITLES = {
    400: "the request cannot be read",
    401: "no valid token was given",
    403: "this token may not do that",
    404: "there is no such thing",
    405: "this address does not take that method",
    409: "the request contradicts what is there now",
    411: "the request does not say how long it is",
    412: "it was changed meanwhile",
    413: "the request is too large",
    415: "this kind of content is not taken",
    422: "the request was understood but cannot be done",
    428: "say which state you mean to change",
    429: "too much at once",
    503: "the service cannot do this now",
}


class Problem(EditError):
    """An answer with an error status; `more` are members of the problem document beyond the standard ones."""

    def __init__(self, status: int, detail: str, **more: Any) -> None:
        super().__init__(detail)
        assert status in TITLES, status
        self.status, self.detail, self.more = status, detail, more

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self.status, self.detail, self.more)  # it travels between Ray's processes

    def document(self, instance: str | None = None) -> dict[str, Any]:
        """The problem document."""
        own = {"type": "about:blank", "title": TITLES[self.status], "status": self.status, "detail": self.detail}
        return {**own, **({"instance": instance} if instance else {}), **self.more}


def _again(status: int, detail: str, more: dict[str, Any]) -> Problem:
    return Problem(status, detail, **more)
