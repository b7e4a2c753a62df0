"""The rows of facts: traced on the model's device, held in the host's memory, stored as blobs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from malmen.data.tokens import EncodedFact
from malmen.edit_set import FactRows, fact_rows
from malmen.editor import Editor
from malmen.lm.model import LanguageModel
from malmen.serve.ledger.blobs import BlobStore
from malmen.serve.ledger.tables import Edit
from malmen.serve.problems import Problem
from malmen.serve.writing.changes import Plan

log = logging.getLogger(__name__)
HOST = torch.device("cpu")
_Result = TypeVar("_Result")
_FACTS_PER_BLOB = 64  # bounds what is read to remove one of them
_FACTS_PER_EQUATION = 256  # at least: an equation is as large for one fact as for many


def trace_rows(lm: LanguageModel, editor: Editor, facts: Sequence[EncodedFact], num_sent: int) -> FactRows:
    """The rows of facts of a request with `num_sent` facts, in the host's memory: the model needs the device's."""
    return within_memory(too_large(num_sent), lambda: fact_rows(lm, editor, facts).to(HOST))


def plan_rows(lm: LanguageModel, editor: Editor, plan: Plan) -> FactRows:
    """The rows of a request's new facts; a job has traced them before. Copies only where some are left out."""
    traced = plan.change.rows
    if traced is None:
        return trace_rows(lm, editor, [new.encoded for new in plan.new], plan.change.size)
    return traced if len(traced) == len(plan.new) else traced.select([new.index for new in plan.new])


def too_large(num_facts: int) -> Problem:
    """The refusal of a request that the memory does not hold."""
    return Problem(422, f"{num_facts} facts in one request are more than the writer's memory holds: send smaller parts")


def within_memory(problem: Problem, work: Callable[..., _Result], *args: Any) -> _Result:
    """`work(*args)`; raises `problem` where the device has too little memory for it.

    It is raised outside the handler: the first error's traceback would keep alive what fills the memory.
    """
    try:
        return work(*args)
    except torch.OutOfMemoryError as error:
        log.warning("%s (%s)", problem.detail, str(error).splitlines()[0])
    raise problem


def store_rows(blobs: BlobStore, rows: FactRows) -> list[tuple[str, int]]:
    """Store rows; returns the blob of each fact and its position in it."""
    places = []
    for first in range(0, len(rows), _FACTS_PER_BLOB):
        part = range(first, min(first + _FACTS_PER_BLOB, len(rows)))
        name = blobs.put(rows.select(part).tensors())
        places += [(name, position) for position in range(len(part))]
    return places


def stored_rows(blobs: BlobStore, edits: Sequence[Edit], device: torch.device) -> Iterator[FactRows]:
    """The rows of these edits, a few hundred facts at a time: they need not all fit in memory."""
    places: dict[str, list[int]] = {}
    for edit in edits:
        places.setdefault(edit.rows, []).append(edit.position)
    waiting: list[FactRows] = []
    for name, positions in places.items():
        waiting.append(FactRows.of_tensors(blobs.get(name)).select(positions))
        if sum(map(len, waiting)) >= _FACTS_PER_EQUATION:
            yield FactRows.joined(waiting).to(device)
            waiting = []
    if waiting:
        yield FactRows.joined(waiting).to(device)
