"""Versions as files for those who do not have malmen."""

from __future__ import annotations

from typing import Any

from malmen.errors import EditError
from malmen.export import ExportKind, export_edit
from malmen.serve.export_files import export_folder
from malmen.serve.problems import Problem
from malmen.serve.service import EditService


def export_version(
    service: EditService, version: str, kind: ExportKind, max_rank: int, store: str, model_name: str
) -> dict[str, Any]:
    """Write a version as a delta, a LoRA or a merged checkpoint; gives its manifest.

    The writer goes on meanwhile: what is read here is frozen (the model) or never changed (a version, its blob).
    """
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
