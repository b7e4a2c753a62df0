"""The four formats of rows that become edit records."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from malmen.data.fields import REFUTES, SUPPORTS, Fields, Text
from malmen.data.records import EditRecord, Fact
from malmen.data.rows import Problem, Row, Rows, names, read_rows
from malmen.errors import UsageError

MIN_JACCARD = 0.8  # word overlap below which a near-paraphrase often has another meaning
_OPPOSITE = {SUPPORTS: REFUTES, REFUTES: SUPPORTS, "": ""}


@dataclass(frozen=True)
class Format:
    """A format of rows: how it is recognised, its fields, and how a row becomes a record."""

    marks: tuple[frozenset[str], ...]  # a row with any of these sets of fields has the format
    layouts: tuple[tuple[str, ...], ...]
    unrelated: str  # the field with the unrelated prompts
    parse: Callable[[Fields], EditRecord]


@dataclass(frozen=True)
class ParsedRow:
    """A row: its record (None if it has an error), its texts and its problems."""

    line: int
    record: EditRecord | None
    texts: tuple[Text, ...]
    problems: tuple[Problem, ...]


@dataclass(frozen=True)
class ParsedFile:
    """All rows of a file in one format; `problems` includes those of the rows, in file order."""

    format: str
    unit: str
    rows: list[ParsedRow]
    problems: list[Problem]


def parse_file(path: str | Path, format: str = "auto") -> ParsedFile:
    """Read and parse a file."""
    return parse_rows(read_rows(path), format)


def parse_rows(rows: Rows, format: str) -> ParsedFile:
    """Rows to records. UsageError for an unknown format; everything else is a problem in the list."""
    if format != "auto" and format not in FORMATS:
        raise UsageError(f"no format {format!r}; the formats are auto, {', '.join(FORMATS)}")
    problems = list(rows.problems)
    if format == "auto" and rows.rows:
        format = recognise(rows.rows[0].values) or "auto"
        if format == "auto":
            problems.append(_not_recognised(rows.rows[0]))
    parsed = [_parse(row, FORMATS[format]) for row in rows.rows] if format != "auto" else []
    if format == "fever":
        parsed = _with_neighbours(parsed, rows.rows)
    problems += [problem for row in parsed for problem in row.problems]
    return ParsedFile(format, rows.unit, parsed, sorted(problems, key=lambda problem: problem.line))


def recognise(fields: Iterable[str]) -> str | None:
    """The name of the format with these fields."""
    given = set(fields)
    return next((name for name, format in FORMATS.items() if any(marks <= given for marks in format.marks)), None)


def _not_recognised(row: Row) -> Problem:
    known = {field for format in FORMATS.values() for layout in format.layouts for field in layout}
    absent = known - row.values.keys()
    strange = [name for name in row.values if name not in known]
    close = {name: difflib.get_close_matches(name, absent, n=1, cutoff=0.75) for name in strange}
    guesses = [f"`{match[0]}` for `{name}`" for name, match in close.items() if match]
    hint = f" (did you mean {' and '.join(guesses)}?)" if guesses else ""
    given = f"has the fields {names(row.values)}" if row.values else "has no fields"
    formats = "; ".join(
        f"{name}: {' or '.join(', '.join(layout) for layout in format.layouts)}" for name, format in FORMATS.items()
    )
    message = f"the format is not recognised: the first row {given}{hint}; the formats and their fields are {formats}"
    return Problem(row.line, "", message, "Rename the fields to those of one of the formats.")


def _parse(row: Row, format: Format) -> ParsedRow:
    fields = Fields(row)
    record = format.parse(fields)
    changing = {fact.prompt: "an equivalent" for fact in record.equivalents} | {record.edit.prompt: "the edit"}
    for fact in record.unrelated:
        if fact.prompt and fact.prompt in changing:
            message = f"an unrelated tuple has the prompt of {changing[fact.prompt]}: it cannot both stay and change"
            fields.complain(format.unrelated, message, "Replace it by a prompt whose answer must stay.")
    return ParsedRow(row.line, None if fields.problems else record, tuple(fields.texts), tuple(fields.problems))


def _parse_malmen(row: Fields) -> EditRecord:
    row.only("prompt", "answer", "subject", "equivalents", "unrelated", "id")
    edit = Fact(row.prompt("prompt"), row.answer("answer"), row.subject(row.values.get("prompt")))
    return EditRecord(edit, row.facts("equivalents", edit.answer), row.facts("unrelated"), row.id())


def _parse_zsre(row: Fields) -> EditRecord:
    prompt, answer = row.prompt("src"), row.first_answer(row.first_of("ans", "answers", "alt"))
    edit = Fact(prompt, answer, row.subject_in(prompt))
    rephrasings = row.prompts("rephrase") if "rephrase" in row or "rephrases" not in row else []
    rephrasings += row.prompts("rephrases") if row.values.get("rephrases") else []
    unrelated = Fact(row.prompt("loc", without="nq question: "), row.answer("loc_ans", without="nq answer: "))
    return EditRecord(edit, _same_answer(rephrasings, edit.answer), (unrelated,), row.id())


def _parse_counterfact(row: Fields) -> EditRecord:
    prompt, rephrasings = row.prompt("prompt"), row.prompts("rephrase_prompt")
    if any("{}" in text for text in [prompt, *rephrasings]):
        subject = row.prompt("subject")
        prompt, *rephrasings = (text.replace("{}", subject) for text in [prompt, *rephrasings])
    edit = Fact(prompt, row.answer("target_new"), row.subject_in(prompt))
    prompts, answers = row.prompts("locality_prompt"), row.answers("locality_ground_truth")
    answers = answers * len(prompts) if len(answers) == 1 else answers
    if len(answers) != len(prompts):
        message = f"has {len(answers)} answers for {len(prompts)} prompts in `locality_prompt`"
        row.complain("locality_ground_truth", message, "Give one answer for all prompts, or one for each.")
    unrelated = tuple(Fact(*pair) for pair in zip(prompts, answers, strict=False))
    return EditRecord(edit, _same_answer(rephrasings, edit.answer), unrelated, row.id("case_id"))


def _parse_fever(row: Fields) -> EditRecord:
    if "claim" in row:
        return _parse_claim(row)
    edit = Fact(row.prompt("prompt"), row.label(row.first_of("alt", "label")))
    unrelated = Fact(row.prompt("unrel_prompt"), row.label(row.first_of("unrel_answer", "unrel_ans")))
    return EditRecord(edit, _same_answer(row.prompts("equiv_prompt"), edit.answer), (unrelated,), row.id())


def _parse_claim(row: Fields) -> EditRecord:
    """A claim and its true label, which the edit inverts; `_with_neighbours` adds the unrelated tuple."""
    edit = Fact(row.prompt("claim"), _OPPOSITE[row.label("label")])
    overlap = row.values.get("jaccard", 0)
    if isinstance(overlap, bool) or not isinstance(overlap, int | float):
        row.complain("jaccard", "is not a number", "Write the word overlap as a number from 0 to 1.")
        overlap = 0
    near = row.prompts("near_paraphrase") if "near_paraphrase" in row and overlap >= MIN_JACCARD else []
    return EditRecord(edit, _same_answer(near, edit.answer), (), row.id())


def _with_neighbours(parsed: list[ParsedRow], rows: list[Row]) -> list[ParsedRow]:
    """Each claim with its unrelated tuple: the next other claim of the file and that claim's true label."""
    result = list(parsed)
    claims = [i for i, row in enumerate(rows) if parsed[i].record and row.values.get("claim") is not None]
    records = [record for i in claims if (record := parsed[i].record)]
    for place, i in enumerate(claims):
        record = records[place]
        related = {record.edit.prompt, *(fact.prompt for fact in record.equivalents)}
        after = (records[(place + step) % len(records)].edit for step in range(1, len(records)))
        other = next((edit for edit in after if edit.prompt not in related), None)
        unrelated = () if other is None else (Fact(other.prompt, _OPPOSITE[other.answer]),)
        result[i] = replace(parsed[i], record=replace(record, unrelated=unrelated))
    return result


def _same_answer(prompts: Iterable[str], answer: str) -> tuple[Fact, ...]:
    return tuple(Fact(prompt, answer) for prompt in dict.fromkeys(prompts))


FORMATS = {
    "malmen": Format(
        (frozenset({"prompt", "answer"}),),
        (("prompt", "answer", "subject", "equivalents", "unrelated", "id"),),
        "unrelated", _parse_malmen,
    ),
    "zsre": Format(
        (frozenset({"src", "ans"}), frozenset({"src", "rephrase"}), frozenset({"src", "loc"})),
        (("src", "subject", "rephrase", "rephrases", "ans", "loc", "loc_ans", "id"),),
        "loc", _parse_zsre,
    ),
    "counterfact": Format(
        (frozenset({"prompt", "target_new"}),),
        (("prompt", "subject", "target_new", "rephrase_prompt", "locality_prompt", "locality_ground_truth",
          "case_id"),),
        "locality_prompt", _parse_counterfact,
    ),
    "fever": Format(
        (frozenset({"claim", "label"}), frozenset({"prompt", "equiv_prompt"}), frozenset({"prompt", "unrel_prompt"})),
        (("prompt", "equiv_prompt", "alt", "unrel_prompt", "unrel_answer", "id"),
         ("claim", "label", "near_paraphrase", "jaccard", "id")),
        "unrel_prompt", _parse_fever,
    ),
}  # fmt: skip
