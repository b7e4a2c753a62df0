"""The rows of corrections as they were stored when the facts were added: what is subtracted is what was added."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from malmen.edit_set import FactRows
from malmen.serve.blobs import BlobStore
from malmen.serve.ledger_view import Edit

_PER_BLOB = 64  # facts: what is read to take one of them back
_AT_ONCE = 256  # facts at least that make one equation, which is as large for one fact as for many


def store_rows(blobs: BlobStore, rows: FactRows) -> list[tuple[str, int]]:
    """Keep the rows of some facts; gives for each the blob and its place in it."""
    places = []
    for first in range(0, len(rows), _PER_BLOB):
        some = range(first, min(first + _PER_BLOB, len(rows)))
        name = blobs.put(rows.select(some).tensors())
        places += [(name, index) for index in range(len(some))]
    return places


def stored_rows(blobs: BlobStore, edits: Sequence[Edit], device: torch.device) -> Iterator[FactRows]:
    """The rows of these corrections, some hundreds at a time, so that they need not all be in memory."""
    places: dict[str, list[int]] = {}
    for edit in edits:
        places.setdefault(edit.rows, []).append(edit.position)
    waiting: list[FactRows] = []
    for name, positions in places.items():
        waiting.append(FactRows.of_tensors(blobs.get(name)).select(positions))
        if sum(map(len, waiting)) >= _AT_ONCE:
            yield FactRows.joined(waiting).to(device)
            waiting = []
    if waiting:
        yield FactRows.joined(waiting).to(device)
