"""What experiments compare: the methods, MALMEN with one setting changed, and the rows of each table."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from malmen.config import Config, DataConfig, full_key, parse_config, set_key
from malmen.methods.registry import METHODS
from malmen.tune.experiments.settings import CANCELLING, Ablation, ExperimentConfig


@dataclass(frozen=True)
class Variant:
    """A way of editing with all its settings except the seed."""

    name: str
    label: str  # in pictures and tables
    config: Config
    data: DataConfig | None = None  # what it is measured on; None: its own

    @property
    def trained(self) -> bool:
        """Whether it needs a meta-trained editor; only the untrained methods of the registry do not."""
        return self.name not in METHODS or METHODS[self.name].trained

    def seeded(self, seed: int) -> Config:
        """Its config with this seed."""
        return self.config.model_copy(update={"seed": seed})

    def run_name(self, seed: int) -> str:
        """The name of its editor's folder; variants whose configs train the same editor share it."""
        free = {"tracking", "baselines", "cluster", "batch"}
        values = self.seeded(seed).model_dump(mode="json", exclude=free, exclude_defaults=True)
        return f"seed{seed}-{hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]}"


def method_variant(name: str, config: Config) -> Variant:
    """A method of the registry."""
    return Variant(name, METHODS[name].label, METHODS[name].training_config(config))


def ablation(name: Ablation, config: Config) -> Variant:
    """MALMEN with one setting changed: the other FFN linear, the other choice of tokens, …"""
    ffn = "first" if config.editor.ffn == "second" else "second"
    tokens, of_tokens = ("all", "all tokens") if config.editor.tokens == "answer" else ("answer", "answer tokens only")
    label, setting, value = {
        "sum": ("sum of shifts", "aggregation", "sum"),
        "no_regularisation": ("no regularisation", "regularisation", False),
        "other_ffn": (f"{ffn} FC of the FFN", "ffn", ffn),
        "other_tokens": (of_tokens, "tokens", tokens),
    }[name]
    return Variant(name, label, _with_editor(config, {setting: value}))


def cancelling(config: Config) -> list[Variant]:
    """Least squares and a sum over the same tokens, those of the answers, as in the paper's Fig. 9."""
    labels = {"least_squares": "least squares", "sum": "sum of shifts"}
    return [
        Variant(name, labels[way], _with_editor(config, {"tokens": "answer", "aggregation": way}))
        for name, way in CANCELLING.items()
    ]


def _with_editor(config: Config, changes: dict[str, Any]) -> Config:
    return config.model_copy(update={"editor": config.editor.model_copy(update=changes)})


def recipe(name: str, settings: ExperimentConfig, config: Config) -> Variant:
    """MALMEN with other settings."""
    raw = config.model_dump(mode="json")
    for key, value in settings.recipes[name].items():
        set_key(raw, full_key(key), value)
    changed = parse_config(raw, f"the recipe {name!r}")
    return Variant(name, name.replace("_", " "), changed, config.data)  # all are measured on the same


@dataclass(frozen=True)
class Row:
    """A row of an experiment's table: a variant makes so many edits, at once or in rounds. Each seed has a cell."""

    variant: Variant
    edits: int
    rounds: int = 1
    way: str = "at once"


def rows_of(kind: str, settings: ExperimentConfig, config: Config) -> list[Row]:
    """The rows of an experiment, in the order of its table; none for `memory`, which evaluates no edit."""
    malmen, number = method_variant("malmen", config), settings.ablation_edits
    if kind in ("scaling", "failures"):
        return [Row(method_variant(name, config), edits) for name in settings.methods for edits in settings.edits]
    if kind == "cancellation":
        return [Row(variant, edits) for variant in cancelling(config) for edits in settings.edits]
    if kind == "ablation":
        return [Row(variant, number) for variant in (*(ablation(name, config) for name in settings.ablations), malmen)]
    if kind == "recipes":
        variants = [malmen, *(recipe(name, settings, config) for name in settings.recipes)]
        return [Row(variant, edits) for edits in settings.edits for variant in variants]
    if kind == "tradeoff":
        variants = [method_variant(name, config) for name in settings.methods]
        variants += [recipe(name, settings, config) for name in settings.recipes]
        return [Row(variant, edits) for variant in variants for edits in settings.edits]
    rows = []
    if kind == "rounds":
        for name in METHODS:
            if METHODS[name].rounds and name in ("malmen", *settings.methods):
                variant = method_variant(name, config)
                rows.append(Row(variant, number))
                rows += [Row(variant, number, settings.rounds, way) for way in METHODS[name].rounds]
    return rows
