"""Where the exports of a store lie, and how they are fetched by name."""

from __future__ import annotations

import re
from pathlib import Path

from malmen.serve.ledger_view import LedgerView
from malmen.serve.problems import Problem


def export_folder(store: str, version: str, kind: str) -> Path:
    """Where an export lies."""
    return Path(store) / "exports" / f"{version}-{kind}"


def exported_file(ledger: LedgerView, store: str, version: str, kind: str, name: str) -> Path:
    """A file of an export; the name is one of those there, never a path."""
    folder = export_folder(store, ledger.resolve(version).id, kind)
    known = {path.name for path in folder.iterdir() if path.is_file()} if folder.is_dir() else set()
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name) or name not in known:
        raise Problem(404, f"there is no file {name!r} of a {kind} export of {version}; POST …/export makes one")
    return folder / name
