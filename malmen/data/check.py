"""Checking a data file before use: every problem with its line, its field and its remedy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from malmen.data.formats import ParsedFile, ParsedRow, parse_rows
from malmen.data.records import EditRecord, Fact
from malmen.data.rows import NO_LINE, Problem, quote, read_rows

LONG_ANSWER = 400  # characters; facts are short, so a longer answer is rarely intended


@dataclass(frozen=True)
class Report:
    """The content of a file and its problems, whose `line` counts `unit`s."""

    path: str
    format: str
    unit: str
    records: int
    equivalents: int
    unrelated: int
    problems: list[Problem]
    portability: int = 0
    reversal: int = 0
    neighbours: int = 0

    @property
    def ok(self) -> bool:
        """No errors; warnings are allowed."""
        return not self.errors

    @property
    def errors(self) -> list[Problem]:
        return [problem for problem in self.problems if problem.severity == "error"]

    @property
    def warnings(self) -> list[Problem]:
        return [problem for problem in self.problems if problem.severity == "warning"]

    def as_dict(self) -> dict[str, object]:
        """All fields and `ok`, for JSON."""
        return {"ok": self.ok} | asdict(self)

    def as_text(self, limit: int = 20) -> str:
        """The first `limit` problems with their remedies, errors before warnings, and a line of totals."""
        lines = []
        for problem in [*self.errors, *self.warnings][:limit]:
            lines += [f"{problem.severity}: {problem.place(self.unit)}{problem.message}", f"  {problem.remedy}"]
        if len(self.problems) > limit:
            lines.append(f"... and {len(self.problems) - limit} more problems")
        counts = {"record": self.records, "equivalent": self.equivalents, "unrelated tuple": self.unrelated}
        further = {
            "consequence": self.portability,
            "reversed fact": self.reversal,
            "neighbour": self.neighbours,
        }
        counts |= {noun: number for noun, number in further.items() if number}
        content = ", ".join(_count(number, noun) for noun, number in counts.items())
        problems = f"{_count(len(self.errors), 'error')}, {_count(len(self.warnings), 'warning')}"
        return "\n".join([*lines, f"{self.path} ({self.format}): {content}; {problems}"])


def check_file(path: str | Path, format: str = "auto", max_chars: int = 2000) -> Report:
    """All problems of the file: in its rows, in their texts, and between rows."""
    parsed = parse_rows(read_rows(path), format)
    records = [row.record for row in parsed.rows if row.record is not None]
    problems = [
        *_check_bare(records),
        *parsed.problems,
        *(problem for row in parsed.rows for problem in _check_texts(row, max_chars)),
        *_check_repeats(parsed),
    ]
    problems.sort(key=lambda problem: problem.line)
    return Report(
        str(path), parsed.format, parsed.unit, len(records),
        equivalents=sum(len(record.equivalents) for record in records),
        unrelated=sum(len(record.unrelated) for record in records),
        problems=problems,
        portability=sum(len(record.portability) for record in records),
        reversal=sum(len(record.reversal) for record in records),
        neighbours=sum(len(record.neighbours) for record in records),
    )  # fmt: skip


def _check_texts(row: ParsedRow, max_chars: int) -> Iterator[Problem]:
    for text in row.texts:
        length = len(text.value)
        if length > max_chars:
            message = f"the {text.role} has {length} characters, at most {max_chars} are allowed"
            yield Problem(row.line, text.field, message, f"Shorten the {text.role}, or remove the row.")
        elif text.role == "answer" and length > LONG_ANSWER:
            message = f"the answer has {length} characters, more than {LONG_ANSWER}"
            yield Problem(row.line, text.field, message, "Shorten the answer to the fact itself.", "warning")
        if text.role == "answer" and text.value.strip() and text.value != text.value.strip():
            message = f"the answer {quote(text.value)} begins or ends with white space, which becomes part of the edit"
            yield Problem(row.line, text.field, message, "Remove the white space around the answer.", "warning")


def _check_repeats(parsed: ParsedFile) -> Iterator[Problem]:
    """A prompt that several rows edit: a duplicate, or a contradiction."""
    first: dict[str, tuple[int, Fact]] = {}
    for row in parsed.rows:
        if row.record is None:
            continue
        edit = row.record.edit
        line, before = first.setdefault(edit.prompt.strip(), (row.line, edit))
        if line == row.line:
            continue
        if edit.answer.strip() == before.answer.strip():
            message = f"the prompt and its answer are already on {parsed.unit} {line}"
            yield Problem(row.line, "", message, "Remove one of the two rows.", "warning")
        else:
            answers = f"{quote(edit.answer)}, but {quote(before.answer)} on {parsed.unit} {line}"
            message = f"the prompt {quote(edit.prompt)} has the answer {answers}"
            yield Problem(row.line, "", message, "Choose one answer and remove the other row.")


def _check_bare(records: list[EditRecord]) -> Iterator[Problem]:
    """One warning for all records without equivalents or unrelated tuples, which no score can use."""
    counts = {
        "equivalents": sum(not record.equivalents for record in records),
        "unrelated tuples": sum(not record.unrelated for record in records),
    }
    lacking = [f"{count} have no {what}" for what, count in counts.items() if count]
    if lacking:
        message = f"of {len(records)} records, {' and '.join(lacking)}"
        remedy = "Add both where you can: training and evaluating an editor need them."
        yield Problem(NO_LINE, "", message, remedy, "warning")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
