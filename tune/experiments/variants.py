"""What experiments compare: the methods, and MALMEN with one setting changed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from malmen.config import Config, DataConfig, full_key, parse_config, set_key
from malmen.methods.registry import METHODS
from malmen.tune.experiments.settings import CANCELLING, Ablation, ExperimentConfig

_LABELS = {  # of variants whose names do not read well
    "sum": "sum of shifts",
    "squares_answer": "least squares",
    "sum_answer": "sum of shifts",
}


@dataclass(frozen=True)
class Variant:
    """A way of editing with all its settings except the seed."""

    name: str
    config: Config
    data: DataConfig | None = None  # what it is measured on; None: its own

    @property
    def trained(self) -> bool:
        """Whether it needs a meta-trained editor: all do but the rivals that are made as they are."""
        return self.name not in METHODS or METHODS[self.name].trained

    def seeded(self, seed: int) -> Config:
        """Its config with this seed."""
        return self.config.model_copy(update={"seed": seed})

    def run_name(self, seed: int) -> str:
        """The name of its editor's folder; variants whose configs train the same editor share it."""
        free = {"tracking", "baselines", "cluster", "batch"}
        values = self.seeded(seed).model_dump(mode="json", exclude=free, exclude_defaults=True)
        return f"seed{seed}-{hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]}"

    def label(self) -> str:
        """Its name in pictures and tables; a recipe's is its own."""
        editor = self.config.editor
        if self.name == "other_ffn":
            return f"{editor.ffn} FC of the FFN"
        if self.name == "other_tokens":
            return "all tokens" if editor.tokens == "all" else "answer tokens only"
        if self.name in METHODS:
            return METHODS[self.name].label
        return _LABELS.get(self.name) or self.name.replace("_", " ")


def method_variant(name: str, config: Config) -> Variant:
    """A method of the registry."""
    return Variant(name, METHODS[name].training_config(config))


def round_methods(settings: ExperimentConfig) -> list[str]:
    """The methods that `rounds` compares: MALMEN, and those of the experiment that can edit in rounds."""
    return [name for name, method in METHODS.items() if method.rounds and name in ("malmen", *settings.methods)]


def ablation(name: Ablation, config: Config) -> Variant:
    """MALMEN with one setting changed: the other FFN linear, the other choice of tokens, …"""
    editor = config.editor
    changes: dict[Ablation, dict[str, Any]] = {
        "sum": {"aggregation": "sum"},
        "no_regularisation": {"regularisation": False},
        "other_ffn": {"ffn": "first" if editor.ffn == "second" else "second"},
        "other_tokens": {"tokens": "all" if editor.tokens == "answer" else "answer"},
    }
    return Variant(name, config.model_copy(update={"editor": editor.model_copy(update=changes[name])}))


def cancelling(config: Config) -> list[Variant]:
    """Least squares and a sum over the same tokens, those of the answers, as in the paper's Fig. 9."""
    editor = config.editor.model_copy(update={"tokens": "answer"})
    return [
        Variant(name, config.model_copy(update={"editor": editor.model_copy(update={"aggregation": way})}))
        for name, way in CANCELLING.items()
    ]


def recipe(name: str, settings: ExperimentConfig, config: Config) -> Variant:
    """MALMEN with other settings."""
    raw = config.model_dump(mode="json")
    for key, value in settings.recipes[name].items():
        set_key(raw, full_key(key), value)
    return Variant(name, parse_config(raw, f"the recipe {name!r}"), config.data)  # all are measured on the same


def all_variants(settings: ExperimentConfig, config: Config, kinds: set[str]) -> Iterator[Variant]:
    """The variants that these experiments need, each once."""
    names = list(settings.methods) if kinds & {"scaling", "failures"} else []
    wanted = ["malmen"] if kinds & {"ablation", "rounds", "recipes"} else []
    if "rounds" in kinds:
        wanted += [name for name in round_methods(settings) if name != "malmen"]
    names += [name for name in dict.fromkeys(wanted) if name not in names]
    yield from (method_variant(name, config) for name in names)
    if "cancellation" in kinds:
        yield from cancelling(config)
    if "ablation" in kinds:
        yield from (ablation(name, config) for name in settings.ablations)
    if "recipes" in kinds:
        yield from (recipe(name, settings, config) for name in settings.recipes)
