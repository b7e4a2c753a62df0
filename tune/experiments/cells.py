"""One number of edits, one variant, one seed: the smallest piece of an experiment, kept in a file once it is done."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import malmen
from malmen.methods.registry import METHODS
from malmen.runs.files import atomic_file
from malmen.tune.experiments.settings import ExperimentConfig
from malmen.tune.experiments.variants import Variant, round_methods

MEMORY = "memory.json"  # the one file of `cells` that is a list, of measurements of memory


@dataclass(frozen=True)
class Cell:
    """What is measured: an edit at once (rounds 1), or in several rounds, one after the other."""

    variant: str
    seed: int
    edits: int
    rounds: int = 1
    way: str = "at once"  # or `union` and `again`: how later rounds are merged with earlier ones

    @property
    def name(self) -> str:
        """Of its file."""
        rest = "" if self.rounds == 1 else f"-{self.rounds}-{self.way}"
        return f"{self.variant}-seed{self.seed}-{self.edits}{rest}.json"


class Cells:
    """The folder of an experiment."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._files = folder, folder / "cells"
        self._files.mkdir(parents=True, exist_ok=True)

    def done(self, cell: Cell) -> bool:
        """Whether there is a number; what failed is tried again by the next command."""
        found = self.get(cell)
        return found is not None and "error" not in found

    def put(self, cell: Cell, found: dict[str, Any]) -> None:
        """Keep a result, or `{"error": …}`."""
        content = {**asdict(cell), **found, "code": code_version()}
        atomic_file(self._files / cell.name, json.dumps(content, indent=1, ensure_ascii=False) + "\n")

    def get(self, cell: Cell) -> dict[str, Any] | None:
        """What was found, if it was."""
        if not (self._files / cell.name).exists():
            return None
        found: dict[str, Any] = json.loads((self._files / cell.name).read_text(encoding="utf-8"))
        return found

    def codes(self) -> set[str]:
        """Whose code has measured what is here."""
        found = [json.loads(path.read_text(encoding="utf-8")) for path in self._files.glob("*.json")]
        rows = [row for one in found for row in (one if isinstance(one, list) else [one])]
        return {row.get("code", "unknown") for row in rows}


@cache
def code_version() -> str:
    """The package's version, and a hash of the source that numbers depend on: in a checkout the version stays."""
    found = hashlib.sha256()
    for room in (Path(malmen.__file__).parent, Path(__file__).parent):
        for path in sorted(room.rglob("*.py")):
            found.update(path.relative_to(room).as_posix().encode() + path.read_bytes())
    return f"malmen {malmen.__version__}, source {found.hexdigest()[:12]}"


def cells_of(variant: Variant, seed: int, settings: ExperimentConfig, kinds: set[str]) -> Iterator[Cell]:
    """All that these experiments ask of a variant, the quickest first."""
    numbers: set[int] = set()
    if variant.name in settings.methods and kinds & {"scaling", "failures"}:
        numbers |= set(settings.edits)
    if variant.name in ("squares_answer", "sum_answer") and "cancellation" in kinds:
        numbers |= set(settings.edits)
    if "ablation" in kinds and (variant.name == "malmen" or variant.name in settings.ablations):
        numbers.add(settings.ablation_edits)
    if "recipes" in kinds and (variant.name == "malmen" or variant.name in settings.recipes):
        numbers |= set(settings.edits)
    in_rounds = "rounds" in kinds and variant.name in round_methods(settings)
    if in_rounds:
        numbers.add(settings.ablation_edits)
    for number in sorted(numbers):
        yield Cell(variant.name, seed, number)
    if in_rounds:
        for way in METHODS[variant.name].rounds:
            yield Cell(variant.name, seed, settings.ablation_edits, settings.rounds, way)
