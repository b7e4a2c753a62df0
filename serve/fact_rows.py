"""The rows of new facts: traced where the model is, and kept in the host's memory; callers are told if it is short."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from malmen.data.tokens import EncodedFact
from malmen.edit_set import FactRows, fact_rows
from malmen.editor import Editor
from malmen.lm.model import LanguageModel
from malmen.serve.changes import Plan
from malmen.serve.http.problems import Problem
from malmen.serve.ledger.blobs import BlobStore
from malmen.serve.ledger.view import Edit
from malmen.serve.messages import Change

log = logging.getLogger(__name__)
HOST = torch.device("cpu")
_Made = TypeVar("_Made")


def trace_rows(lm: LanguageModel, editor: Editor, facts: Sequence[EncodedFact], num_sent: int) -> FactRows:
    """The rows of some of a request's facts; the device, whose memory the model needs, does not keep them."""
    return within_memory(too_large(num_sent), lambda: fact_rows(lm, editor, facts).to(HOST))


def plan_rows(lm: LanguageModel, editor: Editor, plan: Plan) -> FactRows:
    """The rows of a request's new facts, which were traced before if it is a job; all of those are not copied."""
    known = plan.change.rows
    if known is None:
        return trace_rows(lm, editor, [new.encoded for new in plan.new], num_sent([plan.change]))
    return known if len(known) == len(plan.new) else known.select([new.index for new in plan.new])


def join_rows(parts: Sequence[FactRows]) -> FactRows | None:
    """The rows of several requests, one after the other; those of a single one are not copied."""
    return FactRows.joined(parts) if len(parts) > 1 else next(iter(parts), None)


def num_sent(changes: Sequence[Change]) -> int:
    """How many facts are to be added or taken back."""
    return sum(len(change.facts) + len(change.remove) for change in changes)


def too_large(num_facts: int) -> Problem:
    """What the caller of a request that does not fit can do."""
    return Problem(422, f"{num_facts} facts in one request are more than the writer's memory holds: send smaller parts")


def within_memory(problem: Problem, work: Callable[..., _Made], *args: Any) -> _Made:
    """Do it, or raise `problem` where the device has too little memory for it.

    It is raised when the first error is forgotten, whose traceback would keep what fills the memory.
    """
    try:
        return work(*args)
    except torch.OutOfMemoryError as error:
        log.warning("%s (%s)", problem.detail, str(error).splitlines()[0])
    raise problem


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
