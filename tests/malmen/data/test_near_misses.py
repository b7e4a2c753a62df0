"""Near misses resemble an edit, and no edit of the step changes them."""

from __future__ import annotations

import random

from malmen.config import Config
from malmen.data.near_misses import NearMisses, Question, near_miss_questions
from malmen.data.records import EditRecord, Fact
from malmen.data.tokens import EncodedFact
from malmen.data.world import world_records


def _record(relation: str, name: str, answer: str = "x") -> EditRecord:
    return EditRecord(Fact(f"Where was {name} {relation}?", answer), (Fact(f"{name} was {relation} in", answer),))


def _pool(records: list[EditRecord]) -> tuple[NearMisses, dict[int, str]]:
    """Each question answered with a token of its own, and the prompts by that token."""
    questions = [Question.of(record) for record in records]
    answered = [(question, EncodedFact([1], 0, [place])) for place, question in enumerate(questions)]
    return NearMisses(answered), {place: question.prompt for place, question in enumerate(questions)}


def _drawn(records: list[EditRecord], edits: list[EditRecord], number: int, seed: int = 0) -> list[str]:
    near, prompts = _pool(records)
    return [prompts[fact.targets[0]] for fact in near.draw(edits, edits, number, random.Random(seed))]


PEOPLE = [f"{given} {family}" for given in ("Ada", "Bo", "Cy") for family in ("Dal", "Ek", "Fox")]


def test_a_near_miss_asks_the_same_of_another_subject() -> None:
    records = [_record(relation, name) for relation in ("born", "buried") for name in PEOPLE]
    edits = [_record("born", "Ada Dal"), _record("buried", "Bo Ek")]
    for seed in range(20):
        first, second = _drawn(records, edits, 1, seed)
        assert first.endswith("born?") and second.endswith("buried?")
        assert not any(name in first + second for name in ("Ada Dal", "Bo Ek"))
    assert len({tuple(_drawn(records, edits, 1, seed)) for seed in range(20)}) > 5
    assert _drawn(records, edits, 3, 4) == _drawn(records, edits, 3, 4)
    assert len(set(_drawn(records, edits, 3))) == 6
    assert _drawn(records, edits, 0) == []


def test_nothing_that_the_step_edits_is_a_near_miss_in_whatever_words() -> None:
    edited = EditRecord(Fact("Where was Ada Dal born?", "x"), (Fact("Ada Dal was born in", "x"),))
    other_words = EditRecord(Fact("Ada Dal was born in", "y"), (Fact("Where was Ada Dal born?", "y"),))
    same_subject = _record("buried", "Ada Dal")
    nameless = [EditRecord(Fact("Where?", "x"), ()), EditRecord(Fact("Ada Dal was born in", "x"), ())]
    records = [edited, other_words, same_subject, *nameless]
    assert _drawn(records, [edited], 5) == ["Where?"]


def test_where_no_other_question_is_worded_alike_another_takes_its_place() -> None:
    records = [_record("born", name) for name in PEOPLE[:3]] + [_record("buried", "Cy Fox")]
    edits = [_record("crowned", "Bo Fox"), _record("born", "Ada Dal")]
    found = _drawn(records, edits, 2)
    assert sorted(found[:2]) == sorted(record.edit.prompt for record in records[1:3])  # those worded alike come first
    assert found[2:] == ["Where was Cy Fox buried?"]  # there are no more than three


def test_the_questions_are_different_ones_that_the_seed_fixes_and_those_with_a_common_frame_come_first() -> None:
    alone = [EditRecord(Fact(f"Who {number}?", "x")) for number in range(5)]
    records = [*alone, *(_record("born", name) for name in PEOPLE), _record("born", PEOPLE[0], "y")]
    config = Config.model_validate({"own_text": {"texts": 11}})
    found = near_miss_questions(config, records)
    assert len({question.prompt for question in found}) == 11
    assert {question.frame for question in found[:9]} == {"where was {} born?"}
    assert {question.subject for question in found[:9]} == {name.casefold() for name in PEOPLE}
    assert found[9:] == [question for question in found if question.frame is None]
    assert found == near_miss_questions(config, records)
    assert found != near_miss_questions(config.model_copy(update={"seed": 1}), records)


def test_the_built_in_world_has_near_misses_for_every_edit_of_a_step() -> None:
    records = world_records("train", seed=0)
    edits = world_records("train", seed=1)[:64]  # another epoch: other wordings, other answers
    near, _ = _pool(records)
    drawn = [near.answered[fact.targets[0]][0] for fact in near.draw(edits, edits, 1, random.Random(0))]
    asked = [Question.of(record) for record in edits]
    assert [question.frame for question in drawn] == [question.frame for question in asked]
    assert not {question.subject for question in drawn} & {question.subject for question in asked}
