"""Entries of the ledger; each contains the hash of the one before."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any

from sqlalchemy import String

GENESIS = "0" * 64


@dataclass(frozen=True)
class Entry:
    """Who did what, and when."""

    seq: int
    at: Annotated[str, String(32)]
    actor: Annotated[str, String(200)]
    kind: Annotated[str, String(20)]  # begin, edit or alias
    body: dict[str, Any]
    previous: Annotated[str, String(64)]
    hash: Annotated[str, String(64)]


def chain_entry(seq: int, at: str, actor: str, kind: str, body: dict[str, Any], previous: str) -> Entry:
    """An entry with its hash, which covers all its fields and the previous hash."""
    covered: dict[str, Any] = {"seq": seq, "at": at, "actor": actor, "kind": kind, "body": body, "previous": previous}
    return Entry(**covered, hash=digest(covered))


def is_intact(entry: Entry, previous: str, seq: int) -> bool:
    """Whether an entry is as it was written, after an entry with the hash `previous` and with the number `seq`."""
    return entry == chain_entry(seq, entry.at, entry.actor, entry.kind, entry.body, previous)


def canonical(value: Any) -> str:
    """JSON with exactly one text for each value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def digest(value: Any) -> str:
    """The SHA-256 of a value's canonical JSON, in hex."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()


def now() -> str:
    """The current time in UTC, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
