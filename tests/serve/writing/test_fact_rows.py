"""The rows of new facts: exactly those of each request, and no more than the memory holds."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from endpoints import Bench, make_bench, world_facts

from malmen.edit_set import EditSet, FactRows, fact_rows
from malmen.lm.model import LanguageModel
from malmen.serve.messages import Change, Receipt
from malmen.serve.problems import Problem

FACTS = world_facts(20)
LittleMemory = Callable[[LanguageModel, int], AbstractContextManager[None]]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return make_bench(tmp_path)


def test_a_job_and_requests_that_come_together_are_the_sum_of_their_rows_to_the_last_bit(bench: Bench) -> None:
    service = bench.service()
    rows = service.prepare(FACTS[:10], lambda _: None, at_once=4)
    service.apply([Change("ann", tuple(FACTS[:10]), rows=rows), Change("bob", tuple(FACTS[10:13]))])
    cuts = (FACTS[:4], FACTS[4:8], FACTS[8:10], FACTS[10:13])
    encoded = [[service.encoder.encode(fact) for fact in facts] for facts in cuts]
    rows = FactRows.joined([fact_rows(bench.lm, bench.editor, facts) for facts in encoded])
    expected = EditSet(bench.editor).changed([rows]).shifts()
    shifts = service.edit_set.shifts()
    assert shifts.keys() == expected.keys() and expected
    assert all(torch.equal(shifts[name], shift) for name, shift in expected.items())


def test_a_request_that_the_memory_does_not_hold_is_told_to_be_smaller_and_the_others_are_done(
    bench: Bench, little_memory: LittleMemory
) -> None:
    service = bench.service()
    with little_memory(bench.lm, 4):
        large, small = service.apply([Change("ann", tuple(FACTS[:6])), Change("bob", tuple(FACTS[6:9]))])
    assert isinstance(large, Problem) and large.status == 422
    assert "6 facts" in large.detail and "send smaller parts" in large.detail
    assert isinstance(small, Receipt) and small.reply.num_facts == 3
    (again,) = service.apply([Change("ann", tuple(FACTS[:6]))])
    assert isinstance(again, Receipt) and again.reply.num_facts == 9


def test_requests_that_the_memory_holds_one_by_one_are_done_one_by_one(
    bench: Bench, little_memory: LittleMemory
) -> None:
    """Each can be traced; to measure all of them at once is too much."""
    service = bench.service()
    with little_memory(bench.lm, 4):
        outcomes = service.apply([Change("ann", tuple(FACTS[:3])), Change("bob", tuple(FACTS[3:6]))])
    assert [outcome.reply.num_facts for outcome in outcomes if isinstance(outcome, Receipt)] == [3, 6]


def test_an_error_that_is_told_keeps_nothing_of_what_filled_the_memory(
    bench: Bench, little_memory: LittleMemory
) -> None:
    """Python's tracebacks hold all that their frames do."""
    with little_memory(bench.lm, 4):
        (problem,) = bench.service().apply([Change("ann", tuple(FACTS[:6]))])
    assert isinstance(problem, Problem)
    assert problem.__cause__ is None and problem.__context__ is None
