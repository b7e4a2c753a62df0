"""Candidates: which request is refused for what, and how a batch is halved."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from endpoints import Bench, make_bench, world_facts

from malmen.data.records import Fact
from malmen.edit_set import EditSet, fact_rows
from malmen.lm.model import LanguageModel
from malmen.serve.messages import Change, reply_or_raise
from malmen.serve.settings import GuardConfig
from malmen.serve.writing.candidate import Candidate
from malmen.serve.writing.changes import LiveFacts, Plan, make_plan
from malmen.serve.writing.fact_rows import stored_rows
from malmen.serve.writing.guards import Guards, Measured
from malmen.serve.writing.service import EditService

FACTS = world_facts(6)
LittleMemory = Callable[[LanguageModel, int], AbstractContextManager[None]]
STRICT = GuardConfig(min_success=1, max_shift_ratio=1, max_perplexity_ratio=2)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return make_bench(tmp_path, guard=STRICT)


def plan(service: EditService, *facts: Fact) -> Plan:
    return make_plan(Change("ann", facts), LiveFacts(), "v1", service.encoder)


def candidate(bench: Bench, plans: dict[int, Plan], measured: Measured) -> Candidate:
    return Candidate(plans, None, EditSet(bench.editor), {}, measured)


def test_the_halves_of_a_batch_have_the_rows_of_their_own_facts(tmp_path: Path, little_memory: LittleMemory) -> None:
    bench = make_bench(tmp_path)
    service, cuts = bench.service(), (FACTS[:1], FACTS[1:3], FACTS[3:6])
    with little_memory(bench.lm, 4):  # all of them at once are too many, and so are the last two
        outcomes = service.apply([Change("ann", tuple(facts)) for facts in cuts])
    assert [reply_or_raise(outcome).reply.num_facts for outcome in outcomes] == [1, 3, 6]
    edits = service.ledger.edits()[::-1]
    assert [edit.prompt for edit in edits] == [fact.prompt for fact in FACTS]
    for edit, fact in zip(edits, FACTS, strict=True):
        (rows,) = stored_rows(service.blobs, [edit], bench.lm.device)
        tensors, wanted = rows.tensors(), fact_rows(bench.lm, bench.editor, [service.encoder.encode(fact)]).tensors()
        assert tensors.keys() == wanted.keys() and wanted
        for name, tensor in wanted.items():
            torch.testing.assert_close(tensors[name], tensor)


def test_only_the_request_whose_facts_do_not_hold_is_refused_for_it(bench: Bench) -> None:
    service = bench.service()
    plans = {0: plan(service, FACTS[0]), 1: plan(service, FACTS[1])}
    right, wrong = plans[0].new[0].encoded.targets, [-1 for _ in plans[1].new[0].encoded.targets]
    found = candidate(bench, plans, Measured(True, 0.5, 1.0, [right, wrong]))
    refusals = found.refusals(service.guards)
    assert list(refusals) == [1] and "0 of 1 new facts would hold" in refusals[1][0]
    problem = found.refused(1, refusals[1])
    assert problem.status == 422 and problem.more["facts"][0]["prompt"] == FACTS[1].prompt
    assert problem.more["facts"][0]["tokens_right"] == 0
    version = found.version("v2", 2, "v1", None)
    replies = [plan.reply(found.reports()[index], version) for index, plan in plans.items()]
    assert [reply.edits[0].holds for reply in replies] == [True, False]


def test_limits_on_the_version_refuse_all_who_add_but_only_what_is_not_finite_refuses_a_removal(bench: Bench) -> None:
    service = bench.service()
    adds = {0: plan(service, FACTS[0])}
    removes = {0: Plan(Change("ann", remove=("e1",)), (), {}, {"e1": "removed"})}
    targets = [adds[0].new[0].encoded.targets]
    guards: Guards = service.guards
    assert candidate(bench, adds, Measured(True, 5.0, 1.0, targets)).refusals(guards)
    assert not candidate(bench, removes, Measured(True, 5.0, 9.0, [])).refusals(guards)
    assert candidate(bench, removes, Measured(False, 5.0, None, [])).refusals(guards)
