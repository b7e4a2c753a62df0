"""The four formats of rows that become edit records; problems are collected, so that a row reports all of them."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from malmen.data.consequences import read_consequences
from malmen.data.records import EditRecord, Fact
from malmen.data.rows import Problem, Rows, describe, names, quote
from malmen.errors import UsageError

MIN_JACCARD = 0.8  # word overlap below which a near-paraphrase often has another meaning
SUPPORTS, REFUTES = "SUPPORTS", "REFUTES"
_OPPOSITE = {SUPPORTS: REFUTES, REFUTES: SUPPORTS, "": ""}
_LABELS = {SUPPORTS: ("supports", "1", 1), REFUTES: ("refutes", "0", 0)}  # True is 1
_OWN_FIELDS = (
    "prompt", "answer", "subject", "equivalents", "unrelated", "portability", "reversal", "neighbours", "id",
)  # fmt: skip
Role = Literal["prompt", "answer"]


@dataclass(frozen=True)
class Text:
    """A text of the row and its field."""

    field: str
    role: Role
    value: str


class ParsedRow:
    """A row, read field by field. A wrong field yields an empty value and a problem; null counts as absent.

    `path` is put before the names of fields, for an object inside a row.
    """

    def __init__(self, line: int, values: Mapping[str, object], path: str = "") -> None:
        self.line, self.path = line, path
        self.values = {name: value for name, value in values.items() if value is not None}
        self.problems: list[Problem] = []
        self.texts: list[Text] = []
        self.record: EditRecord | None = None  # None if the row has a problem

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def complain(self, name: str, message: str, remedy: str, severity: Literal["error", "warning"] = "error") -> None:
        self.problems.append(Problem(self.line, self.path + name, message, remedy, severity))

    def first_of(self, *candidates: str) -> str:
        """The first of the names that the row has; the first name if it has none."""
        return next((name for name in candidates if name in self), candidates[0])

    def text(self, name: str, role: Role, without: str = "") -> str:
        """A string, without the prefix `without` that a file may put before it."""
        return self._text(name, role, self._required(name), without)

    def texts_of(self, name: str, role: Role) -> list[str]:
        """A string or a list of strings."""
        value = self._required(name)
        if not isinstance(value, list):
            return [self._text(name, role, value)]
        return [self._text(f"{name}[{i}]", role, "" if item is None else item) for i, item in enumerate(value)]

    def first_answer(self, name: str) -> str:
        """A string, or the first of a list of accepted answers."""
        value = self._required(name)
        if isinstance(value, list):
            return self._text(f"{name}[0]", "answer", value[0] if value else "")
        return self._text(name, "answer", value)

    def subject(self) -> str | None:
        """The subject, if the row names one; it must be in the prompt."""
        subject, prompt = self.text("subject", "prompt") if "subject" in self else "", self.values.get("prompt")
        if subject and isinstance(prompt, str) and subject not in prompt:
            self.complain("subject", f"{quote(subject)} is not in the prompt", "Write it as the prompt does.")
        return subject or None

    def subject_in(self, prompt: str) -> str | None:
        """The same for rows of public data sets: one that is not in the prompt is ignored."""
        subject = self.values.get("subject")
        return subject if isinstance(subject, str) and subject.strip() and subject in prompt else None

    def label(self, name: str) -> str:
        """SUPPORTS or REFUTES, from the word in any case, from 1 or 0, or from true or false."""
        value = self._required(name)
        key = value.strip().lower() if isinstance(value, str) else value
        label = next((label for label, words in _LABELS.items() if key in words), "")
        if value is not None and not label:
            message = f"is {describe(value)}, expected {SUPPORTS} or {REFUTES}, 1 or 0, true or false"
            remedy = "Give the row one of the two labels, or remove it: the classifier has no third."
            self.complain(name, message, remedy)
        return label

    def id(self, name: str = "id") -> str:
        """The row's identifier, a string or an integer; empty if it has none."""
        value = self.values.get(name, "")
        if isinstance(value, bool) or not isinstance(value, str | int) or not _encodable(str(value)):
            self.complain(name, f"is {describe(value)}, expected a string", "Write the id as a string in quotes.")
            return ""
        return str(value)

    def only(self, *known: str) -> None:
        """Refuse unknown keys: a misspelt one would be ignored silently."""
        for name in (name for name in self.values if name not in known):
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean `{close[0]}`? " if close else ""
            remedy = f"Rename it to `{close[0]}`." if close else "Remove it."
            self.complain(name, f"unknown key; {hint}the known keys are {names(known)}", remedy)

    def facts(self, name: str, default_answer: str | None = None) -> tuple[Fact, ...]:
        """A list of {prompt, answer}; with a default answer, an item may be the prompt alone."""
        items = self.values.get(name, [])
        if not isinstance(items, list):
            self.complain(name, f"is {describe(items)}, expected a list", f"Put the value of `{name}` between [ and ].")
            return ()
        return tuple(self._fact(f"{name}[{i}]", item, default_answer) for i, item in enumerate(items))

    def _fact(self, name: str, item: object, default_answer: str | None) -> Fact:
        if isinstance(item, str) and default_answer is not None:
            return Fact(self._text(name, "prompt", item), default_answer)
        if not isinstance(item, dict):
            alone = "" if default_answer is None else " or a prompt"
            message = f"is {describe(item)}, expected an object with `prompt` and `answer`{alone}"
            self.complain(name, message, 'Write it as {"prompt": ..., "answer": ...}.')
            return Fact("", "")
        part = ParsedRow(self.line, item, f"{name}.")
        part.only("prompt", "answer")
        fact = Fact(part.text("prompt", "prompt"), part.text("answer", "answer"))
        self.problems += part.problems
        self.texts += part.texts
        return fact

    def _required(self, name: str) -> object:
        if name not in self:
            given = f"given are {names(self.values)}" if self.values else "nothing is given"
            remedy = f"Add `{name}` to the row, or remove the row."
            self.complain(name, f"the field is missing or null; {given}", remedy)
        return self.values.get(name)

    def _text(self, name: str, role: Role, value: object, without: str = "") -> str:
        if value is None:  # already reported as missing
            return ""
        if not isinstance(value, str):
            remedy = f"Write the {role} as a string in quotes."
            self.complain(name, f"is {describe(value)}, expected a string", remedy)
            return ""
        value = value.removeprefix(without)
        if not value.strip():
            state = "is blank" if value else "is empty"
            self.complain(name, f"{state}, expected text", f"Write the {role}, or remove the row.")
        elif not _encodable(value):
            remedy = "Remove the broken character, which is half of a surrogate pair."
            self.complain(name, f"is {quote(value)}, which is not Unicode text", remedy)
        self.texts.append(Text(self.path + name, role, value))
        return value


def _encodable(text: str) -> bool:
    return text == text.encode(errors="ignore").decode()


@dataclass(frozen=True)
class Format:
    """A format of rows: how it is recognised, its fields, and how a row becomes a record."""

    marks: tuple[set[str], ...]  # a row with any of these sets of fields has the format
    layouts: tuple[tuple[str, ...], ...]
    unrelated: str  # the field with the unrelated prompts
    parse: Callable[[ParsedRow], EditRecord]


@dataclass(frozen=True)
class ParsedFile:
    """All rows of a file in one format; `problems` includes those of the rows, in file order."""

    format: str
    unit: str
    rows: list[ParsedRow]
    problems: list[Problem]


def parse_rows(rows: Rows, format: str) -> ParsedFile:
    """Rows to records. UsageError for an unknown format; everything else is a problem in the list."""
    if format not in ("auto", *FORMATS):
        raise UsageError(f"no format {format!r}; the formats are auto, {', '.join(FORMATS)}")
    problems = list(rows.problems)
    if format == "auto" and rows.rows:
        line, first = next(iter(rows.rows.items()))
        recognised = (name for name, known in FORMATS.items() if any(mark <= first.keys() for mark in known.marks))
        format = next(recognised, "auto")
        if format == "auto":
            problems.append(_not_recognised(line, first))
    parsed = [_parse(ParsedRow(*row), FORMATS[format]) for row in rows.rows.items()] if format != "auto" else []
    if format == "fever":
        _add_neighbours(parsed)
    problems += [problem for row in parsed for problem in row.problems]
    return ParsedFile(format, rows.unit, parsed, sorted(problems, key=lambda problem: problem.line))


def _not_recognised(line: int, values: Mapping[str, object]) -> Problem:
    known = {field for format in FORMATS.values() for layout in format.layouts for field in layout}
    strange = [name for name in values if name not in known]
    close = {name: difflib.get_close_matches(name, known - values.keys(), n=1, cutoff=0.75) for name in strange}
    guesses = [f"`{match[0]}` for `{name}`" for name, match in close.items() if match]
    hint = f" (did you mean {' and '.join(guesses)}?)" if guesses else ""
    given = f"has the fields {names(values)}" if values else "has no fields"
    formats = "; ".join(
        f"{name}: {' or '.join(', '.join(layout) for layout in format.layouts)}" for name, format in FORMATS.items()
    )
    message = f"the format is not recognised: the first row {given}{hint}; the formats and their fields are {formats}"
    return Problem(line, "", message, "Rename the fields to those of one of the formats.")


def _parse(row: ParsedRow, format: Format) -> ParsedRow:
    record = format.parse(row)
    changing = {fact.prompt: "an equivalent" for fact in record.equivalents} | {record.edit.prompt: "the edit"}
    for fact in record.unrelated:
        if fact.prompt and fact.prompt in changing:
            message = f"an unrelated tuple has the prompt of {changing[fact.prompt]}: it cannot both stay and change"
            row.complain(format.unrelated, message, "Replace it by a prompt whose answer must stay.")
    broken = any(problem.severity == "error" for problem in row.problems)
    row.record = None if broken else record
    return row


def _parse_malmen(row: ParsedRow) -> EditRecord:
    row.only(*_OWN_FIELDS)
    edit = Fact(row.text("prompt", "prompt"), row.text("answer", "answer"), row.subject())
    neighbours = row.texts_of("neighbours", "prompt") if "neighbours" in row else []
    record = EditRecord(
        edit, row.facts("equivalents", edit.answer), row.facts("unrelated"), row.id(),
        row.facts("portability"), row.facts("reversal"), tuple(dict.fromkeys(neighbours)),
    )  # fmt: skip
    for prompt in set(neighbours) - set(_staying(record)):
        message = f"the neighbour {quote(prompt)} is a prompt of the record: it cannot both stay and change"
        row.complain("neighbours", message, "Replace it by a prompt whose answer must stay.")
    return record


def _with_consequences(row: ParsedRow, record: EditRecord, subject: str = "") -> EditRecord:
    """The record with what a row of a public benchmark says of what follows and of what stays."""
    consequences = read_consequences(row.values, subject)
    for name, number in consequences.unread.items():
        message = f"{number} of its items have no prompt or no answer and are left out"
        row.complain(name, message, "Complete them, or leave them out of the file.", "warning")
    record = replace(
        record,
        portability=tuple(consequences.portability),
        reversal=tuple(consequences.reversal),
        neighbours=tuple(dict.fromkeys(consequences.neighbours)),
    )
    return replace(record, neighbours=_staying(record))


def _staying(record: EditRecord) -> tuple[str, ...]:
    """The neighbours that the record itself does not change."""
    changed = (record.edit, *record.equivalents, *record.portability, *record.reversal)
    return tuple(prompt for prompt in record.neighbours if prompt not in {fact.prompt for fact in changed})


def _parse_zsre(row: ParsedRow) -> EditRecord:
    prompt, answer = row.text("src", "prompt"), row.first_answer(row.first_of("ans", "answers", "alt"))
    edit = Fact(prompt, answer, row.subject_in(prompt))
    rephrasings = row.texts_of("rephrase", "prompt") if "rephrase" in row or "rephrases" not in row else []
    rephrasings += row.texts_of("rephrases", "prompt") if row.values.get("rephrases") else []
    unrelated = Fact(
        row.text("loc", "prompt", without="nq question: "), row.text("loc_ans", "answer", without="nq answer: ")
    )
    record = EditRecord(edit, _same_answer(rephrasings, edit.answer), (unrelated,), row.id())
    return _with_consequences(row, record, edit.subject or "")


def _parse_counterfact(row: ParsedRow) -> EditRecord:
    if "requested_rewrite" in row:
        return _parse_rewrite(row)
    nested = isinstance(row.values.get("locality"), dict) or isinstance(row.values.get("portability"), dict)
    rephrasing = row.first_of("rephrase_prompt", "rephrase")
    prompt = row.text("prompt", "prompt")
    rephrasings = row.texts_of(rephrasing, "prompt") if rephrasing in row or not nested else []
    if any("{}" in text for text in [prompt, *rephrasings]):
        subject = row.text("subject", "prompt")
        prompt, *rephrasings = (text.replace("{}", subject) for text in [prompt, *rephrasings])
    edit = Fact(prompt, row.text("target_new", "answer"), row.subject_in(prompt))
    prompts, answers = [], []
    if "locality_prompt" in row or not nested:
        prompts, answers = row.texts_of("locality_prompt", "prompt"), row.texts_of("locality_ground_truth", "answer")
    answers = answers * len(prompts) if len(answers) == 1 else answers
    if len(answers) != len(prompts):
        message = f"has {len(answers)} answers for {len(prompts)} prompts in `locality_prompt`"
        row.complain("locality_ground_truth", message, "Give one answer for all prompts, or one for each.")
    unrelated = tuple(Fact(*pair) for pair in zip(prompts, answers, strict=False))
    record = EditRecord(edit, _same_answer(rephrasings, edit.answer), unrelated, row.id("case_id"))
    return _with_consequences(row, record, edit.subject or "")


def _parse_rewrite(row: ParsedRow) -> EditRecord:
    """ROME's CounterFact: the edit is an object of its own, and nothing unrelated has an answer of its own."""
    rewrite = row.values["requested_rewrite"]
    if not isinstance(rewrite, dict):
        row.complain("requested_rewrite", f"is {describe(rewrite)}, expected an object", "Take the row as it was.")
        return EditRecord(Fact("", ""))
    part = ParsedRow(row.line, rewrite, "requested_rewrite.")
    subject = part.text("subject", "prompt")
    target = part.values.get("target_new")
    new = ParsedRow(row.line, target if isinstance(target, dict) else {"str": target}, "requested_rewrite.target_new.")
    prompt = part.text("prompt", "prompt").replace("{}", subject)
    edit = Fact(prompt, new.text("str", "answer"), part.subject_in(prompt))
    for inner in (part, new):
        row.problems += inner.problems
        row.texts += inner.texts
    rephrasings = row.texts_of("paraphrase_prompts", "prompt") if "paraphrase_prompts" in row else []
    record = EditRecord(edit, _same_answer(rephrasings, edit.answer), (), row.id("case_id"))
    return _with_consequences(row, record, subject)


def _parse_fever(row: ParsedRow) -> EditRecord:
    if "claim" in row:
        return _parse_claim(row)
    edit = Fact(row.text("prompt", "prompt"), row.label(row.first_of("alt", "label")))
    unrelated = Fact(row.text("unrel_prompt", "prompt"), row.label(row.first_of("unrel_answer", "unrel_ans")))
    return EditRecord(edit, _same_answer(row.texts_of("equiv_prompt", "prompt"), edit.answer), (unrelated,), row.id())


def _parse_claim(row: ParsedRow) -> EditRecord:
    """A claim and its true label, which the edit inverts; `_add_neighbours` adds the unrelated tuple."""
    edit = Fact(row.text("claim", "prompt"), _OPPOSITE[row.label("label")])
    overlap = row.values.get("jaccard", 0)
    if isinstance(overlap, bool) or not isinstance(overlap, int | float):
        row.complain("jaccard", "is not a number", "Write the word overlap as a number from 0 to 1.")
        overlap = 0
    near = row.texts_of("near_paraphrase", "prompt") if "near_paraphrase" in row and overlap >= MIN_JACCARD else []
    return EditRecord(edit, _same_answer(near, edit.answer), (), row.id())


def _add_neighbours(rows: list[ParsedRow]) -> None:
    """Give each claim its unrelated tuple: the next other claim of the file and that claim's true label."""
    claims = [(row, row.record) for row in rows if row.record and "claim" in row]
    edits = [record.edit for _, record in claims]
    for place, (row, record) in enumerate(claims):
        related = {record.edit.prompt, *(fact.prompt for fact in record.equivalents)}
        after = (edits[(place + step) % len(edits)] for step in range(1, len(edits)))
        other = next((edit for edit in after if edit.prompt not in related), None)
        if other is not None:
            row.record = replace(record, unrelated=(Fact(other.prompt, _OPPOSITE[other.answer]),))


def _same_answer(prompts: Iterable[str], answer: str) -> tuple[Fact, ...]:
    return tuple(Fact(prompt, answer) for prompt in dict.fromkeys(prompts))


FORMATS = {
    "malmen": Format(({"prompt", "answer"},), (_OWN_FIELDS,), "unrelated", _parse_malmen),
    "zsre": Format(
        ({"src", "ans"}, {"src", "rephrase"}, {"src", "loc"}),
        (("src", "subject", "rephrase", "rephrases", "ans", "loc", "loc_ans", "id"),),
        "loc", _parse_zsre,
    ),
    "counterfact": Format(
        ({"prompt", "target_new"}, {"requested_rewrite"}),
        (("prompt", "subject", "target_new", "rephrase_prompt", "locality_prompt", "locality_ground_truth",
          "case_id"),
         ("requested_rewrite", "paraphrase_prompts", "neighborhood_prompts", "case_id")),
        "locality_prompt", _parse_counterfact,
    ),
    "fever": Format(
        ({"claim", "label"}, {"prompt", "equiv_prompt"}, {"prompt", "unrel_prompt"}),
        (("prompt", "equiv_prompt", "alt", "unrel_prompt", "unrel_answer", "id"),
         ("claim", "label", "near_paraphrase", "jaccard", "id")),
        "unrel_prompt", _parse_fever,
    ),
}  # fmt: skip
