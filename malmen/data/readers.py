"""Edit records from files and Hugging Face datasets: zsRE, CounterFact, FEVER and our own rows."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from malmen.data.formats import ParsedFile, parse_rows
from malmen.data.records import EditRecord, Fact
from malmen.data.rows import Rows, read_rows
from malmen.errors import EditError
from malmen.runs.files import atomic_file

if TYPE_CHECKING:
    from datasets import Dataset

_MAX_ERRORS = 5  # in a message


def read_records(path: str | Path, format: str = "auto") -> list[EditRecord]:
    """The edit records of a file; EditError with the lines of the rows that are not records."""
    return _records(parse_rows(read_rows(path), format), str(path))


def read_dataset(path: str | Path, format: str = "auto") -> Dataset:
    """The file as a typed Hugging Face dataset with the columns of our own format.

    The rows are parsed here and not by `load_dataset("json")`, which refuses columns of mixed type (an equivalent is a
    string or an object, a label a word or a number), names no lines, and caches.
    """
    from datasets import Dataset, Features, List, Value  # takes a second to import

    text = Value("string")
    pairs = List({"prompt": text, "answer": text})
    columns = {"prompt": text, "answer": text, "subject": text, "equivalents": pairs, "unrelated": pairs, "id": text}
    rows = [_as_row(record) for record in read_records(path, format)]
    further = {"portability": pairs, "reversal": pairs, "neighbours": List(text)}
    columns |= {name: kind for name, kind in further.items() if any(name in row for row in rows)}
    rows = [{name: row.get(name, []) for name in columns} for row in rows]
    return Dataset.from_list(rows, features=Features(columns))


def write_records(path: Path, records: Iterable[EditRecord]) -> None:
    """A file of our own rows, which `read_records` reads as the same records; complete or not at all."""
    atomic_file(path, "".join(json.dumps(_as_row(record), ensure_ascii=False) + "\n" for record in records))


def records_from_dataset(dataset: Dataset, format: str = "auto") -> list[EditRecord]:
    """The edit records of any dataset that has the columns of one of the formats."""
    from datasets import Dataset

    if not isinstance(dataset, Dataset):
        kind = type(dataset).__name__
        raise EditError(f"expected a datasets.Dataset, not a {kind}; of a DatasetDict pass a split: dataset['train']")
    rows = Rows("row", dict(enumerate(dataset.with_format(None).to_list(), start=1)))
    return _records(parse_rows(rows, format), "the dataset")


def _records(parsed: ParsedFile, source: str) -> list[EditRecord]:
    errors = [problem for problem in parsed.problems if problem.severity == "error"]
    if errors:
        first = [f"{error.place(parsed.unit)}{error.message}. {error.remedy}" for error in errors[:_MAX_ERRORS]]
        more = [f"and {len(errors) - _MAX_ERRORS} more errors"] if len(errors) > _MAX_ERRORS else []
        raise EditError("\n  ".join([f"{source} cannot be read:", *first, *more]))
    return [row.record for row in parsed.rows if row.record is not None]


def _as_row(record: EditRecord) -> dict[str, object]:
    others = {"equivalents": _as_pairs(record.equivalents), "unrelated": _as_pairs(record.unrelated)}
    further = {
        "portability": _as_pairs(record.portability),
        "reversal": _as_pairs(record.reversal),
        "neighbours": list(record.neighbours),
    }
    return {**asdict(record.edit), **others, "id": record.id, **{name: row for name, row in further.items() if row}}


def _as_pairs(facts: Iterable[Fact]) -> list[dict[str, str]]:
    return [{"prompt": fact.prompt, "answer": fact.answer} for fact in facts]
