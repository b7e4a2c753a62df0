"""Whom or what a fact is about."""

from __future__ import annotations

from dataclasses import replace

import pytest

from malmen.data.records import EditRecord, Fact
from malmen.data.subjects import edits_of, find_frame


@pytest.mark.parametrize(
    ("prompt", "rephrasing", "subject"),
    [
        ("What is the language Taras Bulba is written in?", "In which language is Taras Bulba?", "Taras Bulba"),
        ("Of which constellation is 5 Tauri a part?", "Which constellation has 5 Tauri?", "5 Tauri"),
        ("The town where Ann lives is", "Ann lives in the town of", "Ann lives"),
        ("Who is it?", "Name them", None),
        ("Who was Jonathan Brewster's mother?", "Who is the mother of Jonathan Brewster?", "Jonathan Brewster"),
        ("Who is Dorus's father?", "Who is Dorus's dad?", "Dorus"),
        ("Who founded McDonald's?", "The founder of McDonald's is", "McDonald's"),
        ("Who discovered Maas's law?", "Maas's law was found by whom?", "Maas's law"),
        (
            "What does Al Garhoud Bridge cross?",
            "What river does Al Garhoud Bridge cross?",
            "Al Garhoud Bridge",
        ),
        ("What does Charles River cross?", "What country does Charles River cross?", "Charles River"),
        (
            "What family is Mormyrus macrocephalus?",
            "Family of Mormyrus macrocephalus?",
            "Mormyrus macrocephalus",
        ),
    ],
)
def test_a_subject_is_found_by_what_the_rephrasings_share(prompt: str, rephrasing: str, subject: str | None) -> None:
    record = EditRecord(Fact(prompt, "x"), (Fact(rephrasing, "x"),))
    assert edits_of([record])[0].subject == subject
    assert edits_of([replace(record, equivalents=())])[0].subject is None
    assert edits_of([replace(record, edit=replace(record.edit, subject="given"))])[0].subject == "given"


def test_a_frame_is_what_a_question_asks_of_whatever_subject() -> None:
    asked = EditRecord(Fact("Where was Ann Lee born?", "x"), (Fact("Ann Lee was born in", "x"),))
    named = EditRecord(Fact("WHERE was Bo Dal born?", "x", subject="Bo Dal"))
    assert find_frame(asked) == ("ann lee", "where was {} born?")
    assert find_frame(named) == ("bo dal", "where was {} born?")
    assert find_frame(EditRecord(Fact("Where was she born?", "x", subject="Ann Lee"))) is None
    assert find_frame(EditRecord(Fact("Where was Ann Lee born?", "x"))) is None
