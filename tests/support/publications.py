"""Publications for a ledger, without a model."""

from __future__ import annotations

from malmen.serve.ledger.ledger import AcceptedChange, Ledger
from malmen.serve.ledger.tables import NewEdit, Version
from malmen.serve.messages import Change, EditReply, GuardReport

BLOB = "ab" * 32


def make_reply(number: int) -> EditReply:
    return EditReply(
        version=f"v{number:016d}", number=number, parent=None, dry_run=False, edits=[], removed=[], num_facts=number,
        guard=GuardReport(),
    )  # fmt: skip


def make_publication(ledger: Ledger, number: int, *prompts: str, ended: tuple[str, ...] = (), key: str | None = None):
    """What `publish` is given before the epoch."""
    live = ledger.alias("live")
    added = tuple(NewEdit(f"e{number}-{at}", prompt, "yes", BLOB, at, {}) for at, prompt in enumerate(prompts))
    removed = tuple((name, "removed") for name in ended)
    accepted = AcceptedChange(Change("ann", remove=ended, key=key), added, removed, make_reply(number))
    members = len(ledger.members(live.version)) + len(added) - len(ended)
    version = Version(f"v{number:016d}", number, live.version, BLOB, members, {}, "ann", "2026-01-01T00:00:00.000Z")
    return version, (accepted,), live.revision
