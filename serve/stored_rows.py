"""The rows of corrections as they were stored when the facts were added: what is subtracted is what was added."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from malmen.edit_set import FactRows
from malmen.serve.blobs import BlobStore
from malmen.serve.ledger_view import Edit

_AT_ONCE = 256  # the rows of so many requests make one equation, which is as large for one fact as for many


def stored_rows(blobs: BlobStore, edits: Sequence[Edit], device: torch.device) -> list[FactRows]:
    """The rows of these corrections, those of many requests together."""
    places: dict[str, list[int]] = {}
    for edit in edits:
        places.setdefault(edit.rows, []).append(edit.position)
    parts = list(places.items())
    return [
        FactRows.joined([_of(blobs, *place) for place in parts[first : first + _AT_ONCE]]).to(device)
        for first in range(0, len(parts), _AT_ONCE)
    ]


def _of(blobs: BlobStore, name: str, positions: list[int]) -> FactRows:
    return FactRows.of_tensors(blobs.get(name)).select(positions)
