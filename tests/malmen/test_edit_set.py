"""The law of the set: whatever was added and taken back in between, the shift is the one of the facts that are left."""

from __future__ import annotations

import random
from typing import Any

import plain
import pytest
import torch
from tiny_models import Setup, make_setup, random_facts
from torch.testing import assert_close

from malmen.data.tokens import EncodedFact
from malmen.edit_set import EditSet, FactRows, fact_rows
from malmen.errors import EditError
from malmen.lm.trace import Traces

EXACT = {"rtol": 1e-8, "atol": 1e-10}


def plain_traces(setup: Setup, facts: list[EncodedFact]) -> Traces:
    return plain.plain_traces(setup.lm, setup.editor.layers, facts, setup.editor.config.editor.tokens)


@pytest.mark.parametrize(
    "editor",
    [
        {},
        {"aggregation": "sum"},
        {"preserved_weight": 2.0, "phrasing_weight": 3.0},
        {"preserved_null_space": 0.5},
        {"token_weights": "learned"},
    ],
    ids=lambda editor: next(iter(editor), "paper"),
)
def test_any_walk_of_additions_and_removals_ends_in_the_shift_from_scratch(kind: str, editor: dict[str, Any]) -> None:
    setup = make_setup(kind, **editor)
    facts = random_facts(setup.lm, 40, 1)
    setup.editor.observe(plain_traces(setup, facts[:20]))
    rows = [fact_rows(setup.lm, setup.editor, [fact]) for fact in facts]
    held: set[int] = set()
    draw = random.Random(5)
    current = EditSet(setup.editor)
    for _ in range(100):
        changed = set(draw.sample(range(len(facts)), draw.randint(1, 6)))
        added, removed = changed - held, changed & held
        current = current.changed([rows[fact] for fact in added], [rows[fact] for fact in removed])
        held = (held | added) - removed
    assert current.num_facts == len(held) > 5
    scratch = setup.editor.solve(plain_traces(setup, [facts[fact] for fact in sorted(held)])).shifts
    assert list(scratch) == [layer.name for layer in setup.editor.layers]
    assert_close(current.shifts(), scratch, **EXACT)


@pytest.mark.parametrize("editor", [{}, {"preserved_weight": 2.0}, {"preserved_null_space": 0.5}])
def test_a_small_set_keeps_rows_a_large_one_sums_and_both_give_the_same_shift(editor: dict[str, Any]) -> None:
    setup = make_setup("gpt2", **editor)
    facts = random_facts(setup.lm, 40, 1)
    rows = [fact_rows(setup.lm, setup.editor, [fact]) for fact in facts]
    small = EditSet(setup.editor).changed(rows[:4])
    assert small.equations is None and len(small.held) == 4
    large = small.changed(rows[4:])
    assert large.equations is not None and not large.held
    back = large.changed(removed=rows[4:])
    assert back.equations is not None
    assert_close(back.shifts(), small.shifts(), **EXACT)
    swapped, other = (
        small.changed([rows[5]], [rows[1]]),
        EditSet(setup.editor).changed([rows[index] for index in (5, 3, 0, 2)]),
    )
    assert swapped.equations is None
    assert_close(swapped.shifts(), other.shifts(), rtol=1e-12, atol=1e-14)


def test_of_a_fact_that_is_there_twice_one_can_be_taken_and_what_is_not_there_is_subtracted() -> None:
    setup = make_setup("gpt2")
    one, two, three = (fact_rows(setup.lm, setup.editor, [fact]) for fact in random_facts(setup.lm, 3, 1))
    twice = EditSet(setup.editor).changed([one, two, FactRows.joined([one, two])])
    assert_close(
        twice.changed(removed=[one, two]).shifts(), EditSet(setup.editor).changed([one, two]).shifts(), **EXACT
    )
    with pytest.raises(EditError, match="not positive definite"):
        twice.changed(removed=[three]).shifts()


@pytest.mark.parametrize("editor", [{}, {"aggregation": "sum"}, {"preserved_weight": 2.0}])
@pytest.mark.parametrize("others", [1, 30], ids=["rows", "sums"])
def test_a_fact_of_weight_three_is_a_fact_added_three_times(kind: str, editor: dict[str, Any], others: int) -> None:
    setup = make_setup(kind, **editor)
    rows = fact_rows(setup.lm, setup.editor, random_facts(setup.lm, 2 + others, 1))
    rest, pair = rows.select(range(2, 2 + others)), rows.select([0, 1])
    weighed = EditSet(setup.editor).changed([pair.weighed([3.0, 0.5]), rest])
    assert weighed.num_facts == 2 + others
    often = EditSet(setup.editor).changed([pair, pair.select([0, 0]), rest]).changed(removed=[pair.select([1])])
    assert_close(weighed.shifts(), often.changed([pair.select([1]).weighed([0.5])]).shifts(), **EXACT)
    plain = EditSet(setup.editor).changed([pair, rest])
    assert_close(weighed.changed([pair], [pair.weighed([3.0, 0.5])]).shifts(), plain.shifts(), **EXACT)


def test_the_more_a_fact_weighs_the_less_of_it_is_missed() -> None:
    setup = make_setup("gpt2")
    rows = fact_rows(setup.lm, setup.editor, random_facts(setup.lm, 3, 1))
    missed = []
    for weight in (1.0, 4.0, 100.0):
        shifts = EditSet(setup.editor).changed([rows.weighed([weight, 1.0, 1.0])]).shifts()
        missed.append([float((keys @ shifts[name].T - diffs).norm())
                       for name, (keys, diffs) in rows.select([0]).targets.items()])  # fmt: skip
    assert all(first > second > third for first, second, third in zip(*missed, strict=True))


@pytest.mark.parametrize("weights", [[1.0], [1.0, 0.0], [1.0, float("inf")], [1.0, float("nan")]])
def test_weights_that_are_not_positive_or_too_few_are_a_clear_error(weights: list[float]) -> None:
    setup = make_setup("gpt2")
    with pytest.raises(EditError, match=r"2 facts need as many positive weights, not \[1\.0"):
        fact_rows(setup.lm, setup.editor, random_facts(setup.lm, 2, 1)).weighed(weights)


def test_a_set_that_was_emptied_is_the_unedited_model_to_the_last_bit() -> None:
    setup = make_setup("gpt2")
    rows = fact_rows(setup.lm, setup.editor, random_facts(setup.lm, 7, 1))
    full = EditSet(setup.editor).changed([rows])
    assert full.shifts()
    assert full.changed(removed=[rows]).shifts() == {}


def test_the_rows_of_one_fact_do_not_depend_on_the_facts_beside_it(kind: str) -> None:
    setup = make_setup(kind, budget=30)
    facts = random_facts(setup.lm, 9, 3)
    together = fact_rows(setup.lm, setup.editor, facts)
    assert len(together) == 9
    alone = fact_rows(setup.lm, setup.editor, [facts[4], facts[7]])
    chosen = together.select([4, 7])
    assert chosen.counts == alone.counts
    assert set(chosen.targets) == set(alone.targets) == {layer.name for layer in setup.editor.layers}
    for name, targets in alone.targets.items():
        assert_close(tuple(chosen.targets[name]), tuple(targets), rtol=1e-9, atol=1e-10)


def test_rows_go_through_plain_tensors_unchanged() -> None:
    setup = make_setup("t5")
    rows = fact_rows(setup.lm, setup.editor, random_facts(setup.lm, 5, 3))
    back = FactRows.of_tensors(rows.tensors())
    assert back.counts == rows.counts
    for name, targets in rows.targets.items():
        assert all(torch.equal(one, other) for one, other in zip(back.targets[name], targets, strict=True))


def test_a_change_leaves_the_set_it_began_from_as_it_was() -> None:
    setup = make_setup("llama")
    first, second = (fact_rows(setup.lm, setup.editor, random_facts(setup.lm, 4, seed)) for seed in (1, 2))
    one = EditSet(setup.editor).changed([first])
    before = one.shifts()
    one.changed([second], [first])
    after = one.shifts()
    assert set(after) == set(before) == {layer.name for layer in setup.editor.layers}
    for name, shift in before.items():
        assert torch.equal(after[name], shift)


def test_more_facts_than_there_are_cannot_be_removed() -> None:
    setup = make_setup("gpt2")
    rows = fact_rows(setup.lm, setup.editor, random_facts(setup.lm, 3, 1))
    with pytest.raises(EditError, match="a set that holds none"):
        EditSet(setup.editor).changed(removed=[rows])
    with pytest.raises(EditError, match="cannot remove 3 facts from a set of 1"):
        EditSet(setup.editor).changed([rows.select([0])]).changed(removed=[rows])
