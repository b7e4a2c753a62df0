"""The text of an answer: where it ends, and when two texts say the same."""

from __future__ import annotations

import re
import unicodedata

_ARTICLES = {"a", "an", "the"}
# Words before a full stop that does not end a sentence, beside single letters ("J. S. Bach", "the U.S.").
_ABBREVIATIONS = {"dr", "jr", "mr", "mrs", "ms", "mt", "no", "prof", "sr", "st", "vs"}
_STOP = re.compile(r"\.(?=\s|$)")


def first_sentence(text: str) -> str:
    """The text before its first new line and its first full stop. One after an initial or an abbreviation ends
    nothing, nor does one inside a number."""
    line = text.strip().partition("\n")[0].strip()
    for stop in _STOP.finditer(line):
        before = line[: stop.start()]
        if not _abbreviates(re.split(r"[\s.]", before)[-1]):
            return before
    return line


def _abbreviates(word: str) -> bool:
    return (len(word) == 1 and word.isalpha() and word.isupper()) or word.casefold() in _ABBREVIATIONS


def plain_words(text: str) -> list[str]:
    """The words of a text without case, punctuation and articles. A text that is nothing else keeps them."""
    folded = unicodedata.normalize("NFC", text).casefold()
    spaced = "".join(" " if unicodedata.category(letter)[0] in "PZ" else letter for letter in folded)
    words = [word for word in spaced.split() if word not in _ARTICLES]
    return words or folded.split()


def says_exactly(text: str, answer: str) -> bool:
    """Whether the text has the answer's words, and no others."""
    return plain_words(text) == plain_words(answer)


def contains(text: str, answer: str) -> bool:
    """Whether the answer's words stand in the text, one behind the other: whole words, so that `art` is not in
    `party`."""
    words, wanted = plain_words(text), plain_words(answer)
    return any(words[start : start + len(wanted)] == wanted for start in range(len(words) - len(wanted) + 1))
