"""Access control: bearer tokens, the scope of each, and how often a caller may ask.

A file or the environment names the tokens; their scope is called `role` there.
"""

from __future__ import annotations

import hmac
import os
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from malmen.errors import UsageError
from malmen.serve.problems import Problem

Scope = Literal["read", "edit", "admin"]
SCOPES: tuple[Scope, ...] = ("read", "edit", "admin")  # each includes those before it
MIN_TOKEN_LENGTH = 16
VARIABLE = "MALMEN_TOKENS"  # name:role:token, separated by commas


@dataclass(frozen=True)
class Caller:
    """The holder of a token."""

    name: str
    scope: Scope

    def require(self, scope: Scope) -> None:
        """Raise a Problem 403 unless the caller's scope includes this one."""
        if SCOPES.index(self.scope) < SCOPES.index(scope):
            raise Problem(403, f"this needs a token with the role `{scope}`; {self.name} has `{self.scope}`")


class Access:
    """The known tokens."""

    def __init__(self, tokens: Mapping[str, Caller]) -> None:
        self._tokens = {token.encode(): caller for token, caller in tokens.items()}

    def caller(self, given: str | None) -> Caller:
        """The token's holder; a Problem 401 where there is none. The time taken tells nothing about the tokens."""
        matches = [
            caller for token, caller in self._tokens.items() if hmac.compare_digest(token, (given or "").encode())
        ]
        if not matches:
            raise Problem(401, "send `Authorization: Bearer TOKEN` with a token of this endpoint")
        return matches[0]


def load_access(path: Path, given: str | None = None) -> Access:
    """The tokens given, else the environment's, else the file's; creates the file if it does not exist."""
    if not given and not os.environ.get(VARIABLE) and not path.exists():
        create_tokens(path)
    return Access(_callers(path, given))


def create_tokens(path: Path) -> None:
    """Create a file with one new token for each scope, which only its owner can read."""
    rows = {scope: {"role": scope, "token": secrets.token_urlsafe(32)} for scope in SCOPES}
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "# Tokens of the endpoint. The role says what the holder may do; the name is recorded in the audit.\n"
    fresh = path.with_name(f".writing-{path.name}-{secrets.token_hex(4)}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text + yaml.safe_dump(rows, sort_keys=False))
        os.link(fresh, path)  # fails where another process was faster: then its tokens are used
    except FileExistsError:
        pass
    finally:
        fresh.unlink(missing_ok=True)


def token_of(path: Path, scope: Scope) -> str | None:
    """A token with this scope, for the person who started the endpoint."""
    return next((token for token, caller in _callers(path).items() if caller.scope == scope), None)


def _callers(path: Path, given: str | None = None) -> dict[str, Caller]:
    """The holders by token: of those given, else of the environment's, else of the file's."""
    text = given or os.environ.get(VARIABLE)
    source, entries = (VARIABLE, _split_entries(text)) if text else (str(path), _read_entries(path))
    callers: dict[str, Caller] = {}
    for name, scope, token in entries:
        if scope not in SCOPES or not isinstance(token, str) or len(token) < MIN_TOKEN_LENGTH or not name:
            raise UsageError(
                f"{source}: {name or 'an entry'} needs a role ({', '.join(SCOPES)}; given {scope!r}) "
                f"and a token of at least {MIN_TOKEN_LENGTH} characters"
            )
        if token in callers:
            raise UsageError(f"{source}: {name} and {callers[token].name} have the same token")
        callers[token] = Caller(name, scope)
    return callers


def _split_entries(text: str) -> list[tuple[str, Any, Any]]:
    """(name, scope, token) of each part `name:role:token`."""
    parts = ([*part.strip().split(":", 2), "", ""] for part in text.split(","))
    return [(name, scope, token) for name, scope, token, *_ in parts]


def _read_entries(path: Path) -> list[tuple[str, Any, Any]]:
    """(name, scope, token) of each row of the file."""
    try:
        rows = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the tokens in {path}: {error}") from error
    if not isinstance(rows, dict) or not rows:
        raise UsageError(f"{path} holds no tokens; expected NAME: {{role: read|edit|admin, token: …}}")
    fields = {str(name): row if isinstance(row, dict) else {} for name, row in rows.items()}
    return [(name, row.get("role"), row.get("token")) for name, row in fields.items()]


class RateLimit:
    """A number of requests a minute for each caller, in this process (a token bucket)."""

    def __init__(self, per_minute: int) -> None:
        self.per_minute = per_minute
        self._buckets: dict[str, tuple[float, float]] = {}  # caller -> (requests left, at which time)
        self._lock = threading.Lock()

    def count(self, name: str) -> None:
        """Count one request; raises a Problem 429 that says how long to wait."""
        rate, now = self.per_minute / 60, time.monotonic()
        with self._lock:
            left, when = self._buckets.get(name, (float(self.per_minute), now))
            left = min(float(self.per_minute), left + (now - when) * rate)
            self._buckets[name] = (max(0.0, left - 1) if left >= 1 else left, now)
        if left < 1:
            wait = max(1, round((1 - left) / rate + 0.5))
            raise Problem(429, f"more than {self.per_minute} requests a minute; wait {wait} s", retry_after=wait)
