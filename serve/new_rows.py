"""The rows of new facts: traced where the model is, and kept in the host's memory; callers are told if it is short."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from malmen.data.tokens import EncodedFact
from malmen.edit_set import FactRows, fact_rows
from malmen.editor import Editor
from malmen.lm import LanguageModel
from malmen.serve.changes import Plan
from malmen.serve.messages import Change
from malmen.serve.problems import Problem

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
