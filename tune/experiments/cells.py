"""Cells: one number of edits, one variant, one seed. The smallest piece of an experiment, one file each."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import malmen
from malmen.config import Config
from malmen.runs.files import atomic_file
from malmen.tune.experiments.settings import KINDS, ExperimentConfig
from malmen.tune.experiments.variants import Variant, rows_of

MEMORY = "memory.json"  # the only file of `cells` with a list: measurements of memory


@dataclass(frozen=True)
class Cell:
    """A measurement: an edit at once (rounds 1), or in several rounds, one after the other."""

    variant: str
    seed: int
    edits: int
    rounds: int = 1
    way: str = "at once"  # or how later rounds join earlier ones: malmen.methods.registry.Rounds

    @property
    def name(self) -> str:
        """The name of its file."""
        rest = "" if self.rounds == 1 else f"-{self.rounds}-{self.way}"
        return f"{self.variant}-seed{self.seed}-{self.edits}{rest}.json"


@dataclass(frozen=True)
class Group:
    """The cells of one variant and seed; they share an editor."""

    variant: Variant
    seed: int
    cells: tuple[Cell, ...]

    @property
    def editor(self) -> str | None:
        """The name of its editor's folder; None if it has none."""
        return self.variant.run_name(self.seed) if self.variant.trained else None

    def __str__(self) -> str:
        return f"{self.variant.label()}, seed {self.seed}"


class Cells:
    """The cells in the folder of an experiment."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._files = folder, folder / "cells"
        self._files.mkdir(parents=True, exist_ok=True)

    def done(self, cell: Cell) -> bool:
        """Whether it was measured; the next command tries failures again."""
        measured = self.get(cell)
        return measured is not None and "error" not in measured

    def put(self, cell: Cell, measured: dict[str, Any]) -> None:
        """Store numbers, or `{"error": …}`."""
        content = {**asdict(cell), **measured, "code": code_version()}
        atomic_file(self._files / cell.name, json.dumps(content, indent=1, ensure_ascii=False) + "\n")

    def get(self, cell: Cell) -> dict[str, Any] | None:
        """What was stored; None if nothing was."""
        path = self._files / cell.name
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None

    def codes(self) -> set[str]:
        """The versions of the code that measured these cells."""
        contents = [json.loads(path.read_text(encoding="utf-8")) for path in self._files.glob("*.json")]
        rows = [row for content in contents for row in (content if isinstance(content, list) else [content])]
        return {row.get("code", "unknown") for row in rows}


@cache
def code_version() -> str:
    """The package's version, and a hash of the source that numbers depend on: a checkout changes without it."""
    rooms = (Path(malmen.__file__).parent, Path(__file__).parent)
    return f"malmen {malmen.__version__}, source {source_hash(rooms)}"


def source_hash(rooms: Sequence[Path]) -> str:
    """Of all modules below these folders, at any depth; platform, serve and tune lie in `malmen` when installed."""
    digest = hashlib.sha256()
    for room in rooms:
        for path in sorted(room.rglob("*.py")):
            name = path.relative_to(room)
            if name.parts[0] not in ("platform", "serve", "tune"):
                digest.update(name.as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def groups_of(settings: ExperimentConfig, config: Config, kinds: Collection[str]) -> list[Group]:
    """The cells that these experiments need, by variant and seed; in each group the quickest first."""
    rows = [row for kind in KINDS if kind in kinds for row in rows_of(kind, settings, config)]
    variants = {row.variant.name: row.variant for row in rows}
    groups = []
    for name, variant in variants.items():
        for seed in settings.seeds:
            needed = [Cell(name, seed, row.edits, row.rounds, row.way) for row in rows if row.variant.name == name]
            cells = sorted(dict.fromkeys(needed), key=lambda cell: (cell.rounds, cell.edits))
            groups.append(Group(variant, seed, tuple(cells)))
    return groups
