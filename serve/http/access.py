"""Who may do what: bearer tokens with roles, from a file or the environment."""

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
from malmen.serve.http.problems import Problem

Role = Literal["read", "edit", "admin"]
ROLES: tuple[Role, ...] = ("read", "edit", "admin")  # each may do what those before it may
VARIABLE = "MALMEN_TOKENS"  # name:role:token, separated by commas


@dataclass(frozen=True)
class Caller:
    """Somebody with a token."""

    name: str
    role: Role

    def may(self, role: Role) -> bool:
        """Whether this role is theirs or below theirs."""
        return ROLES.index(self.role) >= ROLES.index(role)


class Access:
    """The known tokens."""

    def __init__(self, tokens: Mapping[str, Caller]) -> None:
        self._tokens = {token.encode(): caller for token, caller in tokens.items()}

    def caller(self, given: str | None) -> Caller:
        """Whose token this is. All are compared, in time that tells nothing of how far one was right."""
        found: Caller | None = None
        for token, caller in self._tokens.items():
            if hmac.compare_digest(token, (given or "").encode()):
                found = caller
        if found is None:
            raise Problem(401, "send `Authorization: Bearer TOKEN` with a token of this endpoint")
        return found


def load_access(path: Path, given: str | None = None) -> Access:
    """Those that were given, else the environment's, else the file's, which is made at the first start."""
    if text := given or os.environ.get(VARIABLE):
        return Access(_from_variable(text))
    if not path.exists():
        make_tokens(path)
    return Access(_from_file(path))


def make_tokens(path: Path) -> None:
    """A file with one new token for each role, readable by its owner alone."""
    rows = {role: {"role": role, "token": secrets.token_urlsafe(32)} for role in ROLES}
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "# Tokens of the endpoint: whoever has one may do what its role may. Names stand in the audit.\n"
    fresh = path.with_name(f".writing-{path.name}-{secrets.token_hex(4)}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text + yaml.safe_dump(rows, sort_keys=False))
        os.link(fresh, path)  # fails where another process was faster: then its tokens count
    except FileExistsError:
        pass
    finally:
        fresh.unlink(missing_ok=True)


def token_of(path: Path, role: Role) -> str | None:
    """A token with this role, to be shown to the person who started the endpoint."""
    tokens = _from_variable(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else _from_file(path)
    return next((token for token, caller in tokens.items() if caller.role == role), None)


def _from_variable(text: str) -> dict[str, Caller]:
    found: dict[str, Caller] = {}
    for part in text.split(","):
        name, _, rest = part.strip().partition(":")
        role, _, token = rest.partition(":")
        _take(found, name, role, token, VARIABLE)
    return found


def _from_file(path: Path) -> dict[str, Caller]:
    try:
        rows = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the tokens in {path}: {error}") from error
    if not isinstance(rows, dict) or not rows:
        raise UsageError(f"{path} holds no tokens; expected NAME: {{role: read|edit|admin, token: …}}")
    found: dict[str, Caller] = {}
    for name, row in rows.items():
        row = row if isinstance(row, dict) else {}
        _take(found, str(name), row.get("role"), row.get("token"), str(path))
    return found


def _take(found: dict[str, Caller], name: str, role: Any, token: Any, source: str) -> None:
    if role not in ROLES or not isinstance(token, str) or len(token) < 16 or not name:
        raise UsageError(
            f"{source}: {name or 'an entry'} needs a role ({', '.join(ROLES)}; given {role!r}) "
            "and a token of at least 16 signs"
        )
    if token in found:
        raise UsageError(f"{source}: {name} and {found[token].name} have the same token")
    found[token] = Caller(name, role)


class RateLimit:
    """So many requests a minute for each caller, in this process; a bucket that fills up steadily."""

    def __init__(self, per_minute: int) -> None:
        self.per_minute = per_minute
        self._buckets: dict[str, tuple[float, float]] = {}  # caller -> (tokens left, when)
        self._lock = threading.Lock()

    def take(self, name: str) -> None:
        """One request; a Problem 429 that says how long to wait."""
        rate, now = self.per_minute / 60, time.monotonic()
        with self._lock:
            left, when = self._buckets.get(name, (float(self.per_minute), now))
            left = min(float(self.per_minute), left + (now - when) * rate)
            self._buckets[name] = (max(0.0, left - 1) if left >= 1 else left, now)
        if left < 1:
            wait = max(1, round((1 - left) / rate + 0.5))
            raise Problem(429, f"more than {self.per_minute} requests a minute; wait {wait} s", retry_after=wait)
