"""What an experiment is made of: methods, numbers of edits, seeds; presets by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import Field, ValidationError, field_validator

from malmen.config import Section, describe_settings, explain, read_override, read_yaml, set_key
from malmen.errors import UsageError
from malmen.methods.registry import METHODS

PRESETS = Path(__file__).parent / "presets"
KINDS = ("scaling", "ablation", "cancellation", "rounds", "memory", "failures", "recipes")
CANCELLING = {"squares_answer": "least_squares", "sum_answer": "sum"}  # ways of merging that `cancellation` compares
PREFIX = "experiment."
Ablation = Literal["sum", "no_regularisation", "other_ffn", "other_tokens"]


class ExperimentConfig(Section):
    """All experiments on one model and its data."""

    config: str = Field(default="builtin", description="of model, data and editor: a YAML file, or a shipped config")
    settings: dict[str, Any] = Field(default={}, description="settings of that config, as section.key: value")
    seeds: list[int] = Field(default=[0, 1, 2], min_length=1, description="of training, facts and order")
    methods: list[str] = Field(default=list(METHODS), min_length=1, description="compared by `scaling`")
    edits: list[int] = Field(default=[16, 64, 256], min_length=1, description="numbers of edits, made at once")
    ablations: list[Ablation] = Field(
        default=["sum", "no_regularisation", "other_ffn", "other_tokens"], description="changes of MALMEN"
    )
    ablation_edits: int = Field(default=256, gt=0, description="edits at which they are compared")
    recipes: dict[str, dict[str, Any]] = Field(
        default={}, description="other settings of the editor, as NAME: {section.key: value}, compared by `recipes`"
    )
    rounds: int = Field(default=8, gt=1, description="rounds of sequential editing, together ablation_edits edits")
    memory_edits: list[int] = Field(default=[32, 64, 128, 256, 512], description="edits of a step whose peak is taken")
    memory_gb: float = Field(default=4.0, gt=0, description="a step that needs more counts as having run out")
    failures: int = Field(default=10, gt=0, description="rows shown of each kind of failure")
    cpus: float = Field(default=1, gt=0, description="of Ray, for each method and seed")
    gpus: float | None = Field(default=None, ge=0, description="the same; default: 1 where the cluster has any")
    generate: bool = Field(default=True, description="also compare freely generated answers")

    @field_validator("methods")
    @classmethod
    def _known(cls, methods: list[str]) -> list[str]:
        if unknown := set(methods) - set(METHODS):
            raise ValueError(f"there is no method {', '.join(sorted(unknown))}; the methods are {', '.join(METHODS)}")
        return methods

    @field_validator("recipes")
    @classmethod
    def _named(cls, recipes: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        taken = {*METHODS, *get_args(Ablation), *CANCELLING}
        if wrong := [name for name in recipes if not re.fullmatch("[a-z0-9_]+", name) or name in taken]:
            raise ValueError(
                f"{', '.join(map(repr, wrong))} cannot be the name of a recipe: expected small letters, digits and _, "
                f"and none of {', '.join(sorted(taken))}"
            )
        for name, settings in recipes.items():
            if nested := [key for key, value in settings.items() if isinstance(value, dict)]:
                raise ValueError(f"the recipe {name!r} holds a section {nested[0]!r}; expected section.key: value")
        return recipes


def load_experiment(preset: str, overrides: list[str]) -> ExperimentConfig:
    """A preset; `experiment.key=value` changes it, any other `key=value` changes the config that it names."""
    path = Path(preset) if Path(preset).is_file() else PRESETS / f"{preset}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(found.stem for found in PRESETS.glob("*.yaml")))
        raise UsageError(f"no preset {preset!r}: neither a file nor one of those shipped ({known})")
    raw = read_yaml(path, "preset")
    for key, value in map(read_override, overrides):
        if key.startswith(PREFIX):
            set_key(raw, key.removeprefix(PREFIX), value)
        else:
            raw.setdefault("settings", {})[key] = value
    try:
        return ExperimentConfig.model_validate(raw)
    except ValidationError as error:
        known_keys = [row["key"] for row in describe_settings(ExperimentConfig)]
        lines = [explain(problem, known_keys) for problem in error.errors()]
        raise UsageError(f"{path}: " + "; ".join(lines)) from error
