"""Messages between the endpoint's processes."""

from __future__ import annotations

import pickle

import pytest

from malmen.data.records import Fact
from malmen.serve.messages import (
    Change,
    EditReply,
    Export,
    FactResult,
    GuardReport,
    Prompt,
    Receipt,
    Sampling,
    WakeJobs,
    reply_or_raise,
)
from malmen.serve.problems import Problem


def result(index: int, status: str) -> FactResult:
    return FactResult(index=index, id="e1", status=status, supersedes=None, holds=True, tokens_right=2, tokens=2)


REPLY = EditReply(
    version="v1", number=1, parent="v0", dry_run=False, edits=[result(0, "added"), result(1, "unchanged")],
    removed=["e0"], num_facts=2, guard=GuardReport(max_shift_ratio=0.5),
)  # fmt: skip


def test_only_what_is_safe_to_repeat_is_repeatable() -> None:
    fact = Fact("Who?", "Ann")
    assert not Change("ann", (fact,)).repeatable and Change("ann", (fact,), key="k").repeatable
    assert not Export("v1", "delta", 8).repeatable and not WakeJobs().repeatable
    assert Prompt("Who?", None, Sampling()).repeatable


def test_a_reply_survives_json_and_the_way_between_processes() -> None:
    assert EditReply.model_validate_json(REPLY.model_dump_json()) == REPLY
    assert pickle.loads(pickle.dumps(Receipt(REPLY, replayed=True))) == Receipt(REPLY, replayed=True)
    assert set(REPLY.model_dump()) == {
        "version", "number", "parent", "dry_run", "edits", "removed", "num_facts", "guard"
    }  # fmt: skip
    assert REPLY.num_added == 1


def test_a_problem_that_came_as_a_value_is_raised() -> None:
    assert reply_or_raise(REPLY) is REPLY
    with pytest.raises(Problem, match="lost"):
        reply_or_raise(Problem(503, "lost"))
