"""The settings of experiments: methods, numbers of edits, seeds; presets by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import Field, ValidationError, field_validator

from malmen.config import (
    Config,
    Section,
    absolute_paths,
    load_config,
    parse_config,
    read_override,
    read_yaml,
    set_key,
    usage_error,
)
from malmen.methods.registry import METHODS
from malmen.platform.cli.options import resolve_config, shipped_file

PRESETS = Path(__file__).parent / "presets"
KINDS = ("scaling", "ablation", "cancellation", "rounds", "memory", "failures", "recipes", "tradeoff")
CANCELLING = {"squares_answer": "least_squares", "sum_answer": "sum"}  # ways of merging that `cancellation` compares
KEY_PREFIX = "experiment."  # of overrides that are not the config's
Ablation = Literal["sum", "no_regularisation", "other_ffn", "other_tokens"]


class ExperimentConfig(Section):
    """All experiments on one model and its data."""

    config: str = Field(default="builtin", description="of model, data and editor: a YAML file, or a shipped config")
    settings: dict[str, Any] = Field(default={}, description="settings of that config, as section.key: value")
    seeds: list[int] = Field(default=[0, 1, 2], min_length=1, description="of training, facts and order")
    methods: list[str] = Field(default=list(METHODS), min_length=1, description="compared by `scaling`")
    edits: list[int] = Field(default=[16, 64, 256], min_length=1, description="numbers of edits, made at once")
    ablations: list[Ablation] = Field(default=list(get_args(Ablation)), description="changes of MALMEN")
    ablation_edits: int = Field(default=256, gt=0, description="edits at which they are compared")
    recipes: dict[str, dict[str, Any]] = Field(
        default={}, description="NAME: {section.key: value}, for `recipes` and `tradeoff`"
    )
    rounds: int = Field(default=8, gt=1, description="rounds of sequential editing, together ablation_edits edits")
    memory_edits: list[int] = Field(default=[32, 64, 128, 256, 512], description="edits of a step whose peak is taken")
    memory_gb: float = Field(default=4.0, gt=0, description="a step that needs more counts as having run out")
    failures: int = Field(default=10, gt=0, description="rows of each kind of failure in the report")
    cpus: float = Field(default=1, gt=0, description="of Ray, for each method and seed")
    gpus: float | None = Field(default=None, ge=0, description="the same; default: 1 where the cluster has any")
    generate: bool = Field(default=True, description="also compare freely generated answers")
    own_texts: int = Field(
        default=48,
        ge=0,
        description="texts of the model's own in each form, along which drift is measured where `generate` is on",
    )

    @field_validator("methods")
    @classmethod
    def _known(cls, methods: list[str]) -> list[str]:
        if unknown := set(methods) - set(METHODS):
            raise ValueError(f"no method {', '.join(sorted(unknown))}; the methods are {', '.join(METHODS)}")
        return methods

    @field_validator("recipes")
    @classmethod
    def _named(cls, recipes: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        taken = {*METHODS, *get_args(Ablation), *CANCELLING}
        if wrong := [name for name in recipes if not re.fullmatch("[a-z0-9_]+", name) or name in taken]:
            raise ValueError(
                f"{', '.join(map(repr, wrong))} cannot be the name of a recipe: expected lower-case letters, digits "
                f"and _, and none of {', '.join(sorted(taken))}"
            )
        for name, settings in recipes.items():
            if nested := [key for key, value in settings.items() if isinstance(value, dict)]:
                raise ValueError(f"the recipe {name!r} holds a section {nested[0]!r}; expected section.key: value")
        return recipes


def load_experiment(preset: str, overrides: list[str]) -> ExperimentConfig:
    """A preset; `experiment.key=value` changes it, any other `key=value` changes the config that it names."""
    path = shipped_file(PRESETS, preset, "preset")
    raw = read_yaml(path, "preset")
    for key, value in map(read_override, overrides):
        if key.startswith(KEY_PREFIX):
            set_key(raw, key.removeprefix(KEY_PREFIX), value)
        else:
            raw.setdefault("settings", {})[key] = value
    try:
        return ExperimentConfig.model_validate(raw)
    except ValidationError as error:
        raise usage_error(str(path), error, list(ExperimentConfig.model_fields)) from error


def base_config(settings: ExperimentConfig) -> Config:
    """The config that all variants start from, with absolute paths, because tasks run elsewhere."""
    config = load_config(resolve_config(settings.config), (), settings.settings)
    raw = absolute_paths(config).model_dump(mode="json")
    for name, method in METHODS.items():
        for key in method.paths:
            value = raw["baselines"][name][key]
            raw["baselines"][name][key] = value and str(Path(value).absolute())
    return parse_config(raw, settings.config)
