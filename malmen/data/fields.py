"""Reading the fields of one row by type; problems are collected, so that a row reports all of them."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Literal

from malmen.data.records import Fact
from malmen.data.rows import Problem, Row, describe, names, quote

SUPPORTS, REFUTES = "SUPPORTS", "REFUTES"
_LABELS: dict[object, str] = {
    **dict.fromkeys(("supports", "1", 1), SUPPORTS),  # True is 1
    **dict.fromkeys(("refutes", "0", 0), REFUTES),
}


@dataclass(frozen=True)
class Text:
    """A text of the row and its field."""

    field: str
    role: Literal["prompt", "answer"]
    value: str


class Fields:
    """Reads one row. A wrong field yields an empty value and a problem; null counts as absent."""

    def __init__(self, row: Row) -> None:
        self.line = row.line
        self.values = {name: value for name, value in row.values.items() if value is not None}
        self.problems: list[Problem] = []
        self.texts: list[Text] = []

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def complain(self, name: str, message: str, remedy: str) -> None:
        self.problems.append(Problem(self.line, name, message, remedy))

    def first_of(self, *candidates: str) -> str:
        """The first of the names that the row has; the first name if it has none."""
        return next((name for name in candidates if name in self), candidates[0])

    def prompt(self, name: str, without: str = "") -> str:
        """A string, without the prefix `without` that a file may put before it."""
        return self._text(name, "prompt", self._required(name), without)

    def subject(self, prompt: object) -> str | None:
        """The subject, if the row names one; it must be in the prompt."""
        if "subject" not in self:
            return None
        subject = self.prompt("subject")
        if subject and isinstance(prompt, str) and subject not in prompt:
            self.complain("subject", f"{quote(subject)} is not in the prompt", "Write it as the prompt does.")
        return subject or None

    def subject_in(self, prompt: str) -> str | None:
        """The same for rows of public data sets: one that is not in the prompt is ignored."""
        subject = self.values.get("subject")
        return subject if isinstance(subject, str) and subject.strip() and subject in prompt else None

    def answer(self, name: str, without: str = "") -> str:
        return self._text(name, "answer", self._required(name), without)

    def first_answer(self, name: str) -> str:
        """A string, or the first of a list of accepted answers."""
        value = self._required(name)
        if isinstance(value, list):
            return self._text(f"{name}[0]", "answer", value[0] if value else "")
        return self._text(name, "answer", value)

    def prompts(self, name: str) -> list[str]:
        """A string or a list of strings."""
        return self._texts(name, "prompt")

    def answers(self, name: str) -> list[str]:
        """A string or a list of strings."""
        return self._texts(name, "answer")

    def label(self, name: str) -> str:
        """SUPPORTS or REFUTES, from the word in any case, from 1 or 0, or from true or false."""
        value = self._required(name)
        key = value.strip().lower() if isinstance(value, str) else value
        label = _LABELS.get(key) if isinstance(key, str | int | float) else None
        if value is not None and label is None:
            expected = f"expected {SUPPORTS} or {REFUTES}, 1 or 0, true or false"
            remedy = "Give the row one of the two labels, or remove it: the classifier has no third."
            self.complain(name, f"is {describe(value)}, {expected}", remedy)
        return label or ""

    def id(self, name: str = "id") -> str:
        """The row's identifier, a string or an integer; empty if it has none."""
        value = self.values.get(name, "")
        if isinstance(value, bool) or not isinstance(value, str | int) or not _encodable(str(value)):
            self.complain(name, f"is {describe(value)}, expected a string", "Write the id as a string in quotes.")
            return ""
        return str(value)

    def only(self, *known: str, path: str = "", values: dict[str, object] | None = None) -> None:
        """Refuse unknown keys: a misspelt one would be ignored silently."""
        for name in self.values if values is None else values:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean `{close[0]}`? " if close else ""
                remedy = f"Rename it to `{close[0]}`." if close else "Remove it."
                self.complain(f"{path}{name}", f"unknown key; {hint}the known keys are {names(known)}", remedy)

    def facts(self, name: str, default_answer: str | None = None) -> tuple[Fact, ...]:
        """A list of {prompt, answer}; with a default answer, an item may be the prompt alone."""
        items = self.values.get(name, [])
        if not isinstance(items, list):
            self.complain(name, f"is {describe(items)}, expected a list", f"Put the value of `{name}` between [ and ].")
            return ()
        return tuple(self._fact(f"{name}[{i}]", item, default_answer) for i, item in enumerate(items))

    def _fact(self, path: str, item: object, default_answer: str | None) -> Fact:
        if isinstance(item, str) and default_answer is not None:
            return Fact(self._text(path, "prompt", item), default_answer)
        if not isinstance(item, dict):
            alone = "" if default_answer is None else " or a prompt"
            message = f"is {describe(item)}, expected an object with `prompt` and `answer`{alone}"
            self.complain(path, message, 'Write it as {"prompt": ..., "answer": ...}.')
            return Fact("", "")
        self.only("prompt", "answer", path=f"{path}.", values=item)
        for role in ("prompt", "answer"):
            if item.get(role) is None:
                self._missing(f"{path}.{role}", item)
        prompt = self._text(f"{path}.prompt", "prompt", item.get("prompt"))
        return Fact(prompt, self._text(f"{path}.answer", "answer", item.get("answer")))

    def _required(self, name: str) -> object:
        if name not in self:
            self._missing(name, self.values)
        return self.values.get(name)

    def _missing(self, path: str, given: dict[str, object]) -> None:
        name = path.rpartition(".")[2]
        has = f"given are {names(given)}" if given else "nothing is given"
        self.complain(path, f"the field is missing or null; {has}", f"Add `{name}` to the row, or remove the row.")

    def _texts(self, name: str, role: Literal["prompt", "answer"]) -> list[str]:
        value = self._required(name)
        if not isinstance(value, list):
            return [self._text(name, role, value)]
        return [self._text(f"{name}[{i}]", role, "" if item is None else item) for i, item in enumerate(value)]

    def _text(self, path: str, role: Literal["prompt", "answer"], value: object, without: str = "") -> str:
        if value is None:  # already reported as missing
            return ""
        if not isinstance(value, str):
            remedy = f"Write the {role} as a string in quotes."
            self.complain(path, f"is {describe(value)}, expected a string", remedy)
            return ""
        value = value.removeprefix(without)
        if not value.strip():
            state = "is blank" if value else "is empty"
            self.complain(path, f"{state}, expected text", f"Write the {role}, or remove the row.")
        elif not _encodable(value):
            remedy = "Remove the broken character, which is half of a surrogate pair."
            self.complain(path, f"is {quote(value)}, which is not Unicode text", remedy)
        self.texts.append(Text(path, role, value))
        return value


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
