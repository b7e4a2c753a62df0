"""Entries of the ledger; each contains the hash of the one before."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
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


def first_break(entries: Iterable[Entry], previous: str = GENESIS, seq: int = 0) -> int | None:
    """The number of the first entry that is not as it was written, or None."""
    for entry in entries:
        expected = chain_entry(entry.seq, entry.at, entry.actor, entry.kind, entry.body, entry.previous)
        if entry.seq != seq or entry.previous != previous or entry.hash != expected.hash:
            return seq
        previous, seq = entry.hash, seq + 1
    return None


def canonical(value: Any) -> str:
    """JSON with exactly one text for each value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def digest(value: Any) -> str:
    """The SHA-256 of a value's canonical JSON, in hex."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()


def now() -> str:
    """The current time in UTC, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
