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
from malmen.serve.http.problems import Problem
from malmen.serve.messages import Change

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
    encoded = [[service.encoder.encode(fact) for fact in some] for some in cuts]
    whole = FactRows.joined([fact_rows(bench.lm, bench.editor, some) for some in encoded])
    expected = EditSet(bench.editor).changed([whole]).shifts()
    assert all(torch.equal(shift, expected[name]) for name, shift in service.shifts().items())


def test_a_request_that_the_memory_does_not_hold_is_told_to_be_smaller_and_the_others_are_done(
    bench: Bench, little_memory: LittleMemory
) -> None:
    service = bench.service()
    with little_memory(bench.lm, 4):
        found = service.apply([Change("ann", tuple(FACTS[:6])), Change("bob", tuple(FACTS[6:9]))])
    assert isinstance(found[0], Problem) and found[0].status == 422
    assert "6 facts" in found[0].detail and "send smaller parts" in found[0].detail
    assert isinstance(found[1], dict) and found[1]["num_facts"] == 3
    (again,) = service.apply([Change("ann", tuple(FACTS[:6]))])
    assert isinstance(again, dict) and again["num_facts"] == 9


def test_requests_that_the_memory_holds_one_by_one_are_done_one_by_one(
    bench: Bench, little_memory: LittleMemory
) -> None:
    """Each can be traced; to measure all of them at once is too much."""
    service = bench.service()
    with little_memory(bench.lm, 4):
        found = service.apply([Change("ann", tuple(FACTS[:3])), Change("bob", tuple(FACTS[3:6]))])
    assert [reply["num_facts"] for reply in found if isinstance(reply, dict)] == [3, 6]


def test_an_error_that_is_told_keeps_nothing_of_what_filled_the_memory(
    bench: Bench, little_memory: LittleMemory
) -> None:
    """Python's tracebacks hold all that their frames do."""
    with little_memory(bench.lm, 4):
        (problem,) = bench.service().apply([Change("ann", tuple(FACTS[:6]))])
    assert isinstance(problem, Problem)
    assert problem.__cause__ is None and problem.__context__ is None
