"""Where an answer ends, and when two texts say the same."""

from __future__ import annotations

import pytest

from malmen.measure.answer_text import contains, first_sentence, plain_words, says_exactly


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Paris", "Paris"),
        (" Paris.\n", "Paris"),
        ("Paris\nWho is it?", "Paris"),
        ("\n\nParis, France. It is large.", "Paris, France"),
        ("St. Louis. It is large.", "St. Louis"),
        ("J. S. Bach. He wrote it.", "J. S. Bach"),
        ("in the U.S. Army. Really.", "in the U.S. Army"),
        ("3.5 km. Far.", "3.5 km"),
        ("version 2.", "version 2"),
        (". Paris", ""),
        ("", ""),
    ],
)
def test_an_answer_ends_at_a_new_line_or_at_the_full_stop_of_its_sentence(text: str, answer: str) -> None:
    assert first_sentence(text) == answer


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The  Grand-Piano!", ["grand", "piano"]),
        ("an apple, a pear", ["apple", "pear"]),
        ("Réne\u0301", ["réné"]),  # composed or not
        ("»STRASSE«\u00a03", ["strasse", "3"]),
        ("Straße", ["strasse"]),
        ("The", ["the"]),
        ("+", ["+"]),
        ("?!", ["?!"]),
        ("", []),
    ],
)
def test_words_lose_case_punctuation_and_articles_unless_nothing_is_left(text: str, words: list[str]) -> None:
    assert plain_words(text) == words


def test_the_same_words_say_the_same() -> None:
    assert says_exactly("the Grand  piano", "grand-piano.")
    assert not says_exactly("a grand piano by Ada", "grand piano")
    assert not says_exactly("", "grand piano")


def test_an_answer_is_contained_as_whole_words_in_their_order() -> None:
    assert contains("He plays the grand piano, I think", "Grand Piano")
    assert not contains("a grand old piano", "grand piano")
    assert not contains("piano grand", "grand piano")
    assert not contains("party", "art")
    assert not contains("", "art")
