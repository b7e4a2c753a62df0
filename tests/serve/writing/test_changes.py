"""Plans: what a change comes to, given the facts that hold."""

from __future__ import annotations

import pytest
from endpoints import make_bench

from malmen.data.records import Fact
from malmen.data.tokens import FactEncoder
from malmen.lm.model import fact_encoder
from malmen.serve.ledger.tables import Edit, Version
from malmen.serve.messages import Change
from malmen.serve.problems import Problem
from malmen.serve.writing.changes import LiveFacts, make_plan

REPORT = {"holds": True, "tokens_right": 1, "tokens": 1}


def edit(name: str, prompt: str, answer: str) -> Edit:
    return Edit(name, prompt, answer, "", 0, REPORT, number=0, version="v1", actor="ann", at="")


@pytest.fixture
def live() -> LiveFacts:
    facts = LiveFacts()
    facts.add([edit("e1", "Who?", "Ann"), edit("e2", "Where?", "here"), edit("e3", "When?", "now")])
    return facts


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> FactEncoder:
    bench = make_bench(tmp_path_factory.mktemp("bench"))
    return fact_encoder(bench.lm, bench.editor.config.data)


def test_a_plan_tells_new_facts_from_those_that_hold_and_what_ends(live: LiveFacts, encoder: FactEncoder) -> None:
    facts = (Fact("Who?", "Bob"), Fact("Where?", "here"), Fact("Why?", "so"))
    plan = make_plan(Change("ann", facts, ("e3",)), live, "v1", encoder)
    assert [(new.index, new.fact, new.supersedes) for new in plan.new] == [(0, facts[0], "e1"), (2, facts[2], None)]
    assert {index: held.id for index, held in plan.unchanged.items()} == {1: "e2"}
    assert plan.ended == {"e3": "removed", "e1": "superseded"}
    version = Version("v2", 2, "v1", None, 3, {"max_shift_ratio": 0.5}, "ann", "")
    reply = plan.reply([new.report(new.encoded.targets) for new in plan.new], version)
    assert [result.status for result in reply.edits] == ["added", "unchanged", "added"]
    assert reply.removed == ["e3"] and all(result.holds for result in reply.edits)
    assert [result.id for result in reply.edits] == [plan.new[0].id, "e2", plan.new[1].id]


def test_a_fact_that_is_removed_and_given_again_is_new(live: LiveFacts, encoder: FactEncoder) -> None:
    plan = make_plan(Change("ann", (Fact("Who?", "Ann"),), ("e1",)), live, "v1", encoder)
    assert len(plan.new) == 1 and not plan.unchanged and plan.ended == {"e1": "removed"}


@pytest.mark.parametrize(
    ("change", "status"),
    [
        (Change("ann"), 422),
        (Change("ann", remove=("e9",)), 409),
        (Change("ann", (Fact("Who?", "Bob"),), base_version="v0"), 409),
        (Change("ann", (Fact("A?", "b"), Fact("A?", "c"))), 422),
    ],
)
def test_a_change_that_cannot_be_planned_is_refused(
    live: LiveFacts, encoder: FactEncoder, change: Change, status: int
) -> None:
    with pytest.raises(Problem) as problem:
        make_plan(change, live, "v1", encoder)
    assert problem.value.status == status


def test_plans_meet_at_prompts_edits_and_keys_and_nowhere_else(live: LiveFacts, encoder: FactEncoder) -> None:
    def touches(change: Change) -> set[str]:
        return make_plan(change, live, "v1", encoder).touches()

    first = touches(Change("ann", (Fact("Who?", "Bob"),), key="k"))
    assert first & touches(Change("bob", (Fact("Who?", "Eve"),)))
    assert first & touches(Change("bob", remove=("e1",)))
    assert first & touches(Change("ann", (Fact("Why?", "so"),), key="k"))
    assert not first & touches(Change("bob", (Fact("Why?", "so"),), ("e3",), key="k"))


def test_a_prompt_whose_newer_edit_is_discarded_does_not_bring_the_older_one_back(live: LiveFacts) -> None:
    live.add([edit("e4", "Who?", "Bob")])
    live.discard(["e1"])
    assert live.by_prompt["Who?"].id == "e4" and "e1" not in live.by_id
    live.discard(["e4"])
    assert "Who?" not in live.by_prompt
