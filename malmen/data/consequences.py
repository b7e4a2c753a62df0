"""What follows from an edit, and what lies next to it, in the fields of public benchmarks.

KnowEdit nests lists under `portability` and `locality`, RippleEdits has a list of tests for each of its criteria,
CounterFact has lists of prompts. What cannot be used is left out and counted: public files have empty answers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from malmen.data.records import Fact

# RippleEdits' criteria, which KnowEdit took over. Its README and some files spell the second of `_STAYS` so.
_FOLLOWS = ("Logical_Generalization", "Compositionality_I", "Compositionality_II", "Subject_Aliasing", "Reasoning")
_STAYS = ("Relation_Specificity", "Relation_Specifity", "Forgetfulness")
_PROMPTS = (
    "neighborhood_prompts",
    "attribute_prompts",
)  # CounterFact's: other subjects, of which the edit says nothing
_FIELDS = ("portability", "reversal", "locality", *_FOLLOWS, *_STAYS, *_PROMPTS)


@dataclass
class Consequences:
    """Of one row."""

    portability: list[Fact] = field(default_factory=list)
    reversal: list[Fact] = field(default_factory=list)
    neighbours: list[str] = field(default_factory=list)
    unread: dict[str, int] = field(default_factory=dict)  # items left out, by field


def read_consequences(row: Mapping[str, object], subject: str = "") -> Consequences:
    """What the row has of `_FIELDS`. `{}` in a prompt is the subject."""
    consequences = Consequences()
    for name in _FIELDS:
        for group, item in _items(name, row.get(name)):
            prompt, answer = _first(_prompt(item)).replace("{}", subject or "{}"), _first(_answer(item))
            stays = group in (*_STAYS, *_PROMPTS) or name == "locality"
            if not prompt.strip() or not (stays or answer.strip()):
                consequences.unread[name] = consequences.unread.get(name, 0) + 1
            elif stays:
                consequences.neighbours.append(prompt)
            else:
                reverses = re.match(r"revers|invers", group, re.IGNORECASE)
                (consequences.reversal if reverses else consequences.portability).append(Fact(prompt, answer))
    return consequences


def _items(name: str, value: object) -> Iterator[tuple[str, object]]:
    """Each item of a field, with the innermost name above it."""
    if isinstance(value, Mapping) and "New Question" in value:  # KnowEdit's first files: one question
        yield name, {"prompt": value["New Question"], "answer": value.get("New Answer")}
    elif isinstance(value, Mapping) and not _prompt(value):
        for group, inner in value.items():
            yield from _items(str(group), inner)
    elif isinstance(value, list):
        for item in value:
            yield name, item
    elif value is not None:
        yield name, value


def _prompt(item: object) -> object:
    if not isinstance(item, Mapping):
        return item
    return _query(item).get("prompt")


def _answer(item: object) -> object:
    query = _query(item) if isinstance(item, Mapping) else {}
    return next((query[name] for name in ("ground_truth", "answers", "answer") if query.get(name) is not None), None)


def _query(item: Mapping[str, object]) -> Mapping[str, object]:
    """Of a test of RippleEdits, the first query: the others are other ways to pass it."""
    queries = item.get("test_queries")
    first = queries[0] if isinstance(queries, list) and queries else item
    return first if isinstance(first, Mapping) else {}


def _first(value: object) -> str:
    """A text, the first of a list of accepted ones, or a value with aliases."""
    if isinstance(value, list):
        return _first(value[0]) if value else ""
    if isinstance(value, Mapping):
        return _first(value.get("value"))
    return value if isinstance(value, str) else ""
