"""What is compared: the methods, and MALMEN with one thing changed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from malmen.config import Config, DataConfig, full_key, parse_config, set_key
from malmen.methods.mend import mend_config
from malmen.methods.registry import UNTRAINED
from malmen.tune.experiments.settings import CANCELLING, Ablation, ExperimentConfig

LABELS = {
    "malmen": "MALMEN", "mend": "MEND", "ft": "FT", "memit": "MEMIT", "ultraedit": "UltraEdit",
    "sum": "sum of shifts", "no_regularisation": "no regularisation",
    "squares_answer": "least squares", "sum_answer": "sum of shifts",
}  # fmt: skip


# How later rounds of editing may be merged with earlier ones.
ROUNDS: dict[str, tuple[str, ...]] = {"malmen": ("union", "again"), "ultraedit": ("again",), "ft": ("again",)}


@dataclass(frozen=True)
class Variant:
    """A way of editing with its whole config, except for the seed."""

    name: str
    config: Config
    data: DataConfig | None = None  # what it is measured by, where that is not its own

    @property
    def trained(self) -> bool:
        """Whether it needs a hyper-network."""
        return self.name not in UNTRAINED

    def seeded(self, seed: int) -> Config:
        """Its config with this seed."""
        return self.config.model_copy(update={"seed": seed})

    def run_name(self, seed: int) -> str:
        """Of its editor's folder: two variants that come to the same config share it."""
        free = {"tracking", "baselines", "cluster", "batch"}
        values = self.seeded(seed).model_dump(mode="json", exclude=free, exclude_defaults=True)
        return f"seed{seed}-{hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]}"

    def label(self) -> str:
        """For pictures and tables."""
        editor = self.config.editor
        if self.name == "other_ffn":
            return f"{editor.ffn} FC of the FFN"
        if self.name == "other_tokens":
            return "all tokens" if editor.tokens == "all" else "answer tokens only"
        return LABELS.get(self.name) or self.name.replace("_", " ")  # a recipe's name is its own


def method_variant(name: str, config: Config) -> Variant:
    """A method."""
    return Variant(name, mend_config(config) if name == "mend" else config)


def ablation(name: Ablation, config: Config) -> Variant:
    """MALMEN with one thing changed: the other FFN linear, the other choice of tokens, …"""
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
    return Variant(name, parse_config(raw, f"the recipe {name!r}"), config.data)  # one measure for all of them


def all_variants(settings: ExperimentConfig, config: Config, kinds: set[str]) -> Iterator[Variant]:
    """Those that some experiments need, each once."""
    names = list(settings.methods) if kinds & {"scaling", "failures"} else []
    wanted = ["malmen"] if kinds & {"ablation", "rounds", "recipes"} else []
    if "rounds" in kinds:
        wanted += [name for name in ROUNDS if name in settings.methods]
    names += [name for name in dict.fromkeys(wanted) if name not in names]
    yield from (method_variant(name, config) for name in names)
    if "cancellation" in kinds:
        yield from cancelling(config)
    if "ablation" in kinds:
        yield from (ablation(name, config) for name in settings.ablations)
    if "recipes" in kinds:
        yield from (recipe(name, settings, config) for name in settings.recipes)
