"""The folder of an experiment and the cells in it: one number of edits, one variant, one seed, one file each.

A folder belongs to one set of settings, one set of data and one base model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import malmen
from malmen.config import Config, flatten, stored_config
from malmen.data.splits import data_fingerprint
from malmen.errors import EditError, UsageError, same_base_model
from malmen.lm.model import LanguageModel
from malmen.runs.files import write_json
from malmen.tune.experiments.settings import KINDS, ExperimentConfig
from malmen.tune.experiments.variants import Row, Variant, rows_of

ABOUT = "experiment.json"
MEMORY = "memory.json"  # the only file of `cells` with a list: measurements of memory
# What may differ when an experiment is resumed: no number depends on it.
_FREE = (
    "experiment.cpus", "experiment.gpus", "experiment.settings", "experiment.recipes", "experiment.config",
    "experiment.seeds", "experiment.methods", "experiment.edits", "experiment.ablations", "experiment.ablation_edits",
    "experiment.rounds", "experiment.memory_edits",  # these choose the cells
    "config.cluster.", "config.tracking.", "config.batch.", "config.baselines.memit.cache_dir",
)  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """A measurement: an edit at once (rounds 1), or in several rounds, one after the other."""

    variant: str
    seed: int
    edits: int
    rounds: int = 1
    way: str = "at once"  # or how later rounds join earlier ones: malmen.methods.registry.Rounds

    @classmethod
    def of(cls, row: Row, seed: int) -> Cell:
        """The cell of a table's row and a seed."""
        return cls(row.variant.name, seed, row.edits, row.rounds, row.way)

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
        return f"{self.variant.label}, seed {self.seed}"


class Cells:
    """The cells in the folder of an experiment."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._files = folder, folder / "cells"
        self._files.mkdir(parents=True, exist_ok=True)

    def done(self, cell: Cell) -> bool:
        """Whether it was measured; the next command tries failures again."""
        return "scores" in self.get(cell)

    def put(self, cell: Cell, measured: dict[str, Any]) -> None:
        """Store numbers, or `{"error": …}`."""
        write_json(self._files / cell.name, {**asdict(cell), **measured, "code": code_version()})

    def get(self, cell: Cell) -> dict[str, Any]:
        """What was stored; {} if nothing was."""
        return dict(self._read(cell.name, {}))

    def put_memory(self, rows: Sequence[dict[str, Any]]) -> None:
        """Store all measurements of memory."""
        write_json(self._files / MEMORY, rows)

    def memory(self) -> list[dict[str, Any]]:
        """The measurements of memory."""
        return list(self._read(MEMORY, []))

    def codes(self) -> set[str]:
        """The versions of the code that measured these cells."""
        cells = [self._read(path.name, {}) for path in self._files.glob("*.json") if path.name != MEMORY]
        return {row.get("code", "unknown") for row in (*cells, *self.memory())}

    def _read(self, name: str, default: Any) -> Any:
        path = self._files / name
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else default


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
            needed = [Cell.of(row, seed) for row in rows if row.variant.name == name]
            cells = sorted(dict.fromkeys(needed), key=lambda cell: (cell.rounds, cell.edits))
            groups.append(Group(variant, seed, tuple(cells)))
    return groups


def begin_folder(folder: Path, settings: ExperimentConfig, config: Config) -> None:
    """Start an experiment or resume one; UsageError if its numbers would be mixed with those of other settings.

    Numbers of other code are kept, because it may differ in a comment; the runner and the report name it.
    """
    about: dict[str, Any] = {
        "experiment": settings.model_dump(mode="json"),
        "config": config.model_dump(mode="json"),
        "data": data_fingerprint(config),
        "corpus": _corpus_hash(config),
    }
    path = folder / ABOUT
    if path.exists():
        earlier = json.loads(path.read_text(encoding="utf-8"))
        experiment = ExperimentConfig.model_validate(earlier["experiment"])  # settings that are new since have defaults
        before = flatten({
            **about, **earlier,
            "experiment": experiment.model_dump(mode="json"),
            "config": stored_config(earlier["config"], ABOUT).model_dump(mode="json"),
        })  # fmt: skip
        now, recipes = flatten(about), {**experiment.recipes, **settings.recipes}
        changed = [key for key, value in now.items() if before.get(key) != value and not key.startswith(_FREE)]
        changed += [f"recipe {name}" for name, recipe in experiment.recipes.items() if recipes[name] != recipe]
        if changed:
            raise UsageError(f"{folder} holds experiments with another {', '.join(changed)}; choose another --out")
        about["experiment"]["recipes"] = recipes  # those of the folder too
    elif folder.exists() and any(not path.name.startswith(".writing-") for path in folder.iterdir()):
        raise UsageError(f"{folder} holds something else: choose another --out")
    folder.mkdir(parents=True, exist_ok=True)
    write_json(path, about)


def _corpus_hash(config: Config) -> str | None:
    """Of the text that MEMIT estimates the moments of keys from."""
    corpus = config.baselines.memit.corpus
    if corpus is None:
        return None
    try:
        with open(corpus, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
    except OSError as error:
        raise EditError(f"cannot read the corpus {corpus}: {error.strerror}") from error


def check_base_model(lm: LanguageModel, folder: Path) -> None:
    """EditError if the folder holds numbers of another model, even one that had the same name."""
    fingerprint = lm.fingerprint()
    marks = folder / "base_model"  # an empty file named by the fingerprint: several tasks may create it at once
    marks.mkdir(parents=True, exist_ok=True)
    if others := sorted(mark.name for mark in marks.iterdir() if not same_base_model(mark.name, fingerprint)):
        raise EditError(
            f"{folder} holds measurements of base model {others[0]}; the model of that name is now {fingerprint}: "
            "choose another --out"
        )
    (marks / fingerprint).touch()
