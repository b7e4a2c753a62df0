"""The folder of an experiment: it belongs to one set of settings, one set of data and one base model."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from malmen.config import Config, flatten, stored_config
from malmen.data.splits import data_fingerprint
from malmen.errors import EditError, UsageError
from malmen.lm.model import LanguageModel
from malmen.runs.files import atomic_file
from malmen.tune.experiments.settings import ExperimentConfig

ABOUT = "experiment.json"
# What may differ when an experiment is resumed: no number depends on it.
_FREE = (
    "experiment.cpus", "experiment.gpus", "experiment.settings", "experiment.recipes", "experiment.config",
    "experiment.seeds", "experiment.methods", "experiment.edits", "experiment.ablations", "experiment.ablation_edits",
    "experiment.rounds", "experiment.memory_edits",  # these choose the cells
    "config.cluster.", "config.tracking.", "config.batch.", "config.baselines.memit.cache_dir",
)  # fmt: skip


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
        about["experiment"]["recipes"] = _check_same(folder, about, settings)
    elif folder.exists() and any(not path.name.startswith(".writing-") for path in folder.iterdir()):
        raise UsageError(f"{folder} holds something else: choose another --out")
    folder.mkdir(parents=True, exist_ok=True)
    atomic_file(path, json.dumps(about, indent=1) + "\n")


def _check_same(folder: Path, about: dict[str, Any], settings: ExperimentConfig) -> dict[str, dict[str, Any]]:
    """All recipes of the folder and of these settings; UsageError if anything else differs."""
    earlier = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
    experiment = ExperimentConfig.model_validate(earlier["experiment"])  # settings that are new since have defaults
    before = flatten({
        **about, **earlier,
        "experiment": experiment.model_dump(mode="json"),
        "config": stored_config(earlier["config"], ABOUT).model_dump(mode="json"),
    })  # fmt: skip
    changed = [key for key, value in flatten(about).items() if before.get(key) != value and not key.startswith(_FREE)]
    recipes = {**experiment.recipes, **settings.recipes}
    changed += [f"recipe {name}" for name, recipe in experiment.recipes.items() if recipes[name] != recipe]
    if changed:
        raise UsageError(f"{folder} holds experiments with another {', '.join(changed)}; choose another --out")
    return recipes


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
    if others := sorted(mark.name for mark in marks.iterdir() if mark.name != fingerprint):
        raise EditError(
            f"{folder} holds measurements of base model {others[0]}; the model of that name is now {fingerprint}: "
            "choose another --out"
        )
    (marks / fingerprint).touch()
