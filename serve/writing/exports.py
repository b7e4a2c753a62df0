"""Versions as files for users without malmen."""

from __future__ import annotations

from typing import Any

from malmen.errors import EditError
from malmen.export import export_edit
from malmen.serve.messages import Export
from malmen.serve.problems import Problem
from malmen.serve.settings import ServeConfig
from malmen.serve.writing.service import EditService


def export_version(service: EditService, request: Export, settings: ServeConfig) -> dict[str, Any]:
    """Write a version as a delta, a LoRA or a merged checkpoint, and return its manifest.

    Edits continue meanwhile: all that is read here is frozen (the model) or immutable (a version, its blob).
    """
    version = service.ledger.resolve(request.version)
    if version.shifts is None:
        raise Problem(422, f"version {version.id} is the unedited model: it has nothing to export")
    members = service.ledger.edits_by_id(sorted(service.ledger.members(version.id)))
    try:
        return export_edit(
            request.kind,
            settings.export_folder(version.id, request.kind),
            service.lm,
            service.blobs.get(version.shifts),
            facts=[{"id": edit.id, "prompt": edit.prompt, "answer": edit.answer} for edit in members],
            model_name=settings.model or service.editor.config.model.name,
            max_rank=request.max_rank,
            info={"version": version.id, "number": version.number, "at": version.at},
        )
    except EditError as error:
        raise Problem(422, str(error)) from error
    except OSError as error:
        raise Problem(503, f"the store cannot be written: {error.strerror or error}", retry_after=5) from error
