"""Versions as files for those who do not have malmen."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from malmen.errors import EditError
from malmen.serve.http.problems import Problem
from malmen.serve.ledger.view import LedgerView

if TYPE_CHECKING:  # an ingress fetches exported files, and has no torch
    from malmen.export import ExportKind
    from malmen.serve.service import EditService


def export_version(
    service: EditService, version: str, kind: ExportKind, max_rank: int, store: str, model_name: str
) -> dict[str, Any]:
    """Write a version as a delta, a LoRA or a merged checkpoint; gives its manifest.

    The writer goes on meanwhile: what is read here is frozen (the model) or never changed (a version, its blob).
    """
    from malmen.export import export_edit

    found = service.ledger.resolve(version)
    if found.shifts is None:
        raise Problem(422, f"version {found.id} is the unedited model: there is nothing to export")
    members = service.ledger.edits_by_id(sorted(service.ledger.members(found.id)))
    facts = [{"id": edit.id, "prompt": edit.prompt, "answer": edit.answer} for edit in members]
    info = {"version": found.id, "number": found.number, "at": found.at}
    try:
        return export_edit(
            kind, export_folder(store, found.id, kind), service.lm, service.blobs.get(found.shifts), facts=facts,
            model_name=model_name, max_rank=max_rank, info=info,
        )  # fmt: skip
    except EditError as error:
        raise Problem(422, str(error)) from error
    except OSError as error:
        raise Problem(503, f"the store cannot be written: {error.strerror or error}", retry_after=5) from error


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
