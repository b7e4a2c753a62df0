"""Files and Hugging Face datasets to edit records: zsRE, CounterFact, FEVER and our own rows."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from malmen.data.formats import FORMATS, ParsedFile, parse_file, parse_rows
from malmen.data.records import EditRecord, Fact
from malmen.data.rows import Row, Rows
from malmen.errors import EditError
from malmen.runs.files import atomic_file

if TYPE_CHECKING:
    from datasets import Dataset, Features

__all__ = ["FORMATS", "read_dataset", "read_records", "records_from_dataset", "write_records"]

_SHOWN_ERRORS = 5


def read_records(path: str | Path, format: str = "auto") -> list[EditRecord]:
    """The edit records of a file; rows that cannot become records are an EditError with their lines."""
    parsed = parse_file(path, format)
    _refuse_errors(parsed, str(path))
    return [row.record for row in parsed.rows if row.record is not None]


def read_dataset(path: str | Path, format: str = "auto") -> Dataset:
    """The file as a typed Hugging Face dataset with the columns of our own format.

    The rows are parsed here and not by `load_dataset("json")`: that refuses columns of mixed type (an
    equivalent may be a string or an object, a label a word or a number), names no lines, and caches.
    """
    from datasets import Dataset  # takes a second to import, and only who reads data pays

    parsed = parse_file(path, format)
    _refuse_errors(parsed, str(path))
    rows = [_as_row(row.record) for row in parsed.rows if row.record is not None]
    return Dataset.from_list(rows, features=_features())


def write_records(path: Path, records: Iterable[EditRecord]) -> None:
    """A file of our own rows, which `read_records` reads as the same records; whole or not at all."""
    atomic_file(path, "".join(json.dumps(_as_row(record), ensure_ascii=False) + "\n" for record in records))


def records_from_dataset(dataset: Dataset, format: str = "auto") -> list[EditRecord]:
    """The edit records of any dataset that has the columns of one of the formats."""
    from datasets import Dataset

    if not isinstance(dataset, Dataset):
        kind = type(dataset).__name__
        raise EditError(f"expected a datasets.Dataset, not a {kind}; of a DatasetDict pass a split: dataset['train']")
    values = dataset.with_format(None).to_list()
    parsed = parse_rows(Rows("row", [Row(number, row) for number, row in enumerate(values, start=1)]), format)
    _refuse_errors(parsed, "the dataset")
    return [row.record for row in parsed.rows if row.record is not None]


def _refuse_errors(parsed: ParsedFile, source: str) -> None:
    errors = [problem for problem in parsed.problems if problem.severity == "error"]
    if errors:
        shown = [f"{error.place(parsed.unit)}{error.message}. {error.remedy}" for error in errors[:_SHOWN_ERRORS]]
        more = [f"and {len(errors) - _SHOWN_ERRORS} more errors"] if len(errors) > _SHOWN_ERRORS else []
        raise EditError("\n  ".join([f"{source} cannot be read:", *shown, *more]))


def _as_row(record: EditRecord) -> dict[str, object]:
    return {
        "prompt": record.edit.prompt,
        "answer": record.edit.answer,
        "subject": record.edit.subject,
        "equivalents": [_as_pair(fact) for fact in record.equivalents],
        "unrelated": [_as_pair(fact) for fact in record.unrelated],
        "id": record.id,
    }


def _as_pair(fact: Fact) -> dict[str, str]:
    return {"prompt": fact.prompt, "answer": fact.answer}


def _features() -> Features:
    from datasets import Features, List, Value

    text = Value("string")
    pairs = List({"prompt": text, "answer": text})
    return Features(
        {"prompt": text, "answer": text, "subject": text, "equivalents": pairs, "unrelated": pairs, "id": text}
    )
