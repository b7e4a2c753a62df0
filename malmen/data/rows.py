"""The rows of a JSONL file or a JSON array, each with its number; problems are collected, not raised."""

from __future__ import annotations

import codecs
import difflib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

NO_LINE = 0  # instead of a line number, where a problem concerns the whole file


@dataclass(frozen=True)
class Problem:
    """A problem at one place of a file, and a sentence on how to solve it."""

    line: int
    field: str
    message: str
    remedy: str
    severity: Literal["error", "warning"] = "error"

    def place(self, unit: str) -> str:
        """`line 3, src: `, as far as it is known."""
        parts = [f"{unit} {self.line}"] if self.line != NO_LINE else []
        parts += [self.field] if self.field else []
        return ", ".join(parts) + ": " if parts else ""


@dataclass
class Rows:
    """The JSON objects of a file by their number from 1, and its problems; `unit` says what is counted."""

    unit: Literal["line", "element", "row"] = "line"
    rows: dict[int, dict[str, object]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def add(self, line: int, value: object) -> None:
        """Add a decoded JSON value; a problem if it is no object."""
        if isinstance(value, dict):
            self.rows[line] = value
        else:
            message = f"the {self.unit} is {describe(value)}, expected a JSON object"
            self.problems.append(Problem(line, "", message, 'Write the row as an object: {"prompt": ..., ...}.'))


def describe(value: object) -> str:
    """A JSON value in words, short enough for a message."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, int | float):
        return f"the number {value!r:.40}"
    if isinstance(value, str):
        return f"the string {quote(value)}"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return f"an object with the keys {names(value)}" if value else "an empty object"
    return f"a {type(value).__name__}"


def quote(text: str, limit: int = 60) -> str:
    """The text in quotes, cut to `limit` characters."""
    return json.dumps(text if len(text) <= limit else text[: limit - 1] + "…", ensure_ascii=not text.isprintable())


def names(fields: Iterable[str]) -> str:
    """`a`, `b`, `c`: at most twelve of them."""
    listed = [f"`{name:.40}`" if name.isprintable() else f"{name!a:.40}" for name in fields]
    return ", ".join(listed[:12]) + (f" and {len(listed) - 12} more" if len(listed) > 12 else "")


def read_rows(path: str | Path) -> Rows:
    """Every row of the file; `[` as its first character makes it a JSON array instead of JSONL."""
    path = Path(path)
    try:
        if (broken := _cannot_open(path)) is not None:
            return broken
        data = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    except OSError as error:
        return _broken(f"{path} cannot be read: {error.strerror}", "Make the file readable for this user.")
    if not data.strip():
        return _broken("the file is empty", "Write one JSON object a line into it.")
    if (nul := data.find(0)) >= 0:
        line = data.count(b"\n", 0, nul) + 1
        message = f"byte {nul + 1} of the file is zero: it is not UTF-8 text but UTF-16, compressed or binary"
        return _broken(message, "Convert the file to UTF-8 JSONL.", line)
    return (_read_array(data) if data.lstrip().startswith(b"[") else None) or _read_lines(data)


def _cannot_open(path: Path) -> Rows | None:
    if path.is_dir():
        inside = sorted(entry.name for entry in path.iterdir() if entry.suffix in {".json", ".jsonl"})
        remedy = f"Give a file in it, such as {names(inside[:5])}." if inside else "Give a JSONL file."
        return _broken(f"{path} is a directory, expected a file", remedy)
    if not path.exists():
        siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        close = difflib.get_close_matches(path.name, siblings, n=1)
        remedy = f"Did you mean `{close[0]}`?" if close else "Check the path; it is relative to the current folder."
        return _broken(f"{path} does not exist", remedy)
    return None


def _broken(message: str, remedy: str, line: int = NO_LINE) -> Rows:
    return Rows(problems=[Problem(line, "", message, remedy)])


def _read_lines(data: bytes) -> Rows:
    rows, undecodable = Rows(), []
    for line, content in enumerate(data.split(b"\n"), start=1):
        if not content.strip():
            continue
        try:
            rows.add(line, json.loads(content.decode()))
        except UnicodeDecodeError as error:
            undecodable.append(_not_utf8(line, content, error))
        except (ValueError, RecursionError) as error:
            if line == 1 and _is_one_object(data):
                message = "the file is one JSON object written over several lines, expected one object a line"
                return _broken(message, "Put the object on one line, or put it between [ and ].", line)
            rows.problems.append(_not_json(line, error))
    if undecodable:  # a wrong encoding breaks many lines, and one conversion repairs all
        first, count = undecodable[0], len(undecodable)
        more = f" (the first of {count} such lines)" if count > 1 else ""
        rows.problems.insert(0, Problem(first.line, "", first.message + more, first.remedy))
    return rows


def _read_array(data: bytes) -> Rows | None:
    """The elements of the array; None if the bracket only opens the first row of a JSONL file."""
    try:
        values = json.loads(data.decode())
    except UnicodeDecodeError as error:
        before = data.rfind(b"\n", 0, error.start) + 1
        line = data.count(b"\n", 0, error.start) + 1
        error.start -= before
        return Rows(problems=[_not_utf8(line, data[before:], error)])
    except json.JSONDecodeError as error:
        return None if error.msg == "Extra data" else Rows(problems=[_not_json(error.lineno, error)])
    except (ValueError, RecursionError) as error:
        return Rows(problems=[_not_json(NO_LINE, error)])
    if not values:
        return _broken("the file is an empty array", "Write at least one JSON object into it.")
    rows = Rows(unit="element")
    for number, value in enumerate(values, start=1):
        rows.add(number, value)
    return rows


def _is_one_object(data: bytes) -> bool:
    try:
        return isinstance(json.loads(data.decode()), dict)
    except (ValueError, RecursionError):
        return False


def _not_utf8(line: int, content: bytes, error: UnicodeDecodeError) -> Problem:
    message = f"byte {error.start + 1} of the line, 0x{content[error.start]:02x}, is not UTF-8"
    return Problem(line, "", message, "Convert the file to UTF-8, for example with `iconv -f LATIN1 -t UTF-8`.")


def _not_json(line: int, error: ValueError | RecursionError) -> Problem:
    where = f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
    reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
    remedy = "Write the row with a JSON library, such as `json.dumps(row)`, rather than by hand."
    return Problem(line, "", f"invalid JSON{where}: {reason}", remedy)
