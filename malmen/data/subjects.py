"""The subject of a fact: the words that its prompt and its rephrasings share."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from malmen.data.records import EditRecord, Fact

_COMMON = (
    " a an and are as at be been by did do does for from had has have he her his how in is it its made name of on or "
    "she than that the their they this to was were what when where which who whose why will with year "
)
# What questions ask for, and how; part of a name where it has a capital ("Charles River").
_ASKED = (
    " after award belong belonged born capital cause city come constellation continent country cross crosses date "
    "die died end established family father first founded genre language live lived located location member mother "
    "named network nominated official originate part place play played position produced published record river sex "
    "spouse start started team type used written "
)


def edits_of(records: Iterable[EditRecord]) -> list[Fact]:
    """The facts to edit, each with its subject if the record names it or its rephrasings reveal it."""
    return [
        record.edit if record.edit.subject else replace(record.edit, subject=find_subject(record)) for record in records
    ]


def find_frame(record: EditRecord) -> tuple[str, str] | None:
    """The subject of an edit and the words around it, with {} in its place, both in lower case; None where no subject
    is found in the prompt."""
    (edit,) = edits_of([record])
    if not edit.subject or edit.subject not in edit.prompt:
        return None
    return edit.subject.casefold(), edit.prompt.replace(edit.subject, "{}", 1).casefold()


def find_subject(record: EditRecord) -> str | None:
    """The longest run of words in the prompt and every rephrasing; names and numbers win over other words."""
    others = [fact.prompt.casefold() for fact in record.equivalents]
    if not others:
        return None
    prompt = record.edit.prompt
    words = [match.span() for match in re.finditer(r"\w[\w'’.\-]*\w|\w", prompt)]
    best = (False, 0, "")
    for start in range(len(words)):
        for stop in range(start + 1, len(words) + 1):
            kept = _without_common(prompt, words[start:stop])
            rank = (_is_name(prompt, kept), len(kept), kept)
            occurrence = rf"(?<!\w){re.escape(kept.casefold())}(?!\w)"
            if rank[:2] > best[:2] and all(re.search(occurrence, other) for other in others):
                best = rank
    return best[2] or None


def _without_common(text: str, words: Sequence[tuple[int, int]]) -> str:
    """A run without the common words at its ends and without an 's before other words; empty if nothing remains."""
    runs = [(text[slice(*word)], word) for word in words]
    others = [word for run, word in runs if f" {run.casefold()} " not in _COMMON and f" {run} " not in _ASKED]
    if not others:
        return ""
    run, rest = text[others[0][0] : others[-1][1]], text[others[-1][1] :]
    followed = re.search(r"\w", rest)  # by what it possesses, else it is a name such as McDonald's
    return re.sub(r"['’]s$", "", run) if followed else run


def _is_name(prompt: str, run: str) -> bool:
    """Whether it has a digit, or a capital that is not the first letter of the sentence."""
    inside = run[1:] if prompt.startswith(run) else run
    return any(letter.isdigit() or letter.isupper() for letter in inside)
