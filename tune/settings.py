"""The file of a sweep: what is tried, how it is searched, and what counts as better."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, field_validator, model_validator

from malmen.config import Section, full_key, read_override, read_yaml, usage_error
from malmen.metrics import EXACT, METRICS, SCORE_PARTS
from malmen.platform.cli.options import shipped_file

LAYERS = "layers"  # the parameter that names a layer set
SPACES = Path(__file__).parent / "spaces"

Params = dict[str, Any]  # of a trial, by name of the parameter; LAYERS names a layer set

# What a sweep can maximise: shares of right answers.
KNOWN_SCORES = (*SCORE_PARTS, "locality_agreement", "locality_success", *(metric.name + EXACT for metric in METRICS))


class Range(Section):
    """Numbers from `low` to `high`; integers where the setting is an integer."""

    low: int | float
    high: int | float
    log: bool = Field(default=False, description="drawn uniformly in the logarithm")

    @model_validator(mode="after")
    def _ordered(self) -> Range:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise ValueError(f"low must be below high, given {self.low} and {self.high}")
        if self.log and self.low <= 0:
            raise ValueError(f"a logarithmic range must begin above 0, given {self.low}")
        return self


class LayerSet(Section):
    """Layers that are edited together."""

    layers: str | list[str] = Field(description="a rule such as `last:4`, or module names")
    ffn: Literal["first", "second"] | None = Field(default=None, description="default: the config's")
    attention: bool | None = Field(default=None, description="default: the config's")


def _number(value: Any) -> Any:
    """YAML reads `1e-5` as a text; in a list of choices it is a number."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


Choices = list[Annotated[bool | int | float | str, BeforeValidator(_number)]]


class SweepConfig(Section):
    """What is tried, how it is searched, and what counts as better."""

    trials: int = Field(default=16, gt=0, description="how many; a grid has one for each of its points, at most these")
    search: Literal["random", "grid", "optuna"] = Field(
        default="random", description="how parameters are chosen; `optuna` learns from the trials that have ended"
    )
    seed: int = Field(default=0, description="of the drawn parameters; the trials' own seed is the config's")
    score: list[str] = Field(default=list(SCORE_PARTS), min_length=1, description="maximised: their harmonic mean")
    early_stopping: Literal["asha", "none"] = Field(default="asha", description="whether weak trials end early")
    grace_steps: int | None = Field(
        default=None, gt=0, description="steps before a trial may stop; default: training.eval_every, else steps / 8"
    )
    reduction_factor: int = Field(default=2, ge=2, description="one trial of so many continues at each rung")
    concurrent: int | None = Field(
        default=None, gt=0, description="trials at the same time; default: as many as the cluster has room for"
    )
    trial_seconds: float = Field(default=86400, gt=0, description="seconds after which a trial fails")
    retrain_steps: int | None = Field(
        default=None, gt=0, description="steps of training the best trial's config again; default: its editor is used"
    )
    alias: str = Field(default="champion", pattern=r"^[\w.-]+$", description="of the best editor in the registry")
    layer_sets: dict[str, LayerSet] = Field(default={}, description="by name; a rule or a list stands for itself")
    parameters: dict[str, Range | Choices] = Field(default={}, description="by name, a list of choices or a range")
    settings: dict[str, Any] = Field(default={}, description="settings of all trials, in place of the config's")

    @field_validator("layer_sets", mode="before")
    @classmethod
    def _short_forms(cls, value: Any) -> Any:
        """The full form of `[last:4, every:2]` and `{name: last:4}`."""
        if isinstance(value, list):
            value = {str(rule): rule for rule in value}
        if not isinstance(value, dict):
            return value
        return {str(name): item if isinstance(item, dict) else {"layers": item} for name, item in value.items()}

    @field_validator("score")
    @classmethod
    def _known_score(cls, value: list[str]) -> list[str]:
        if unknown := [name for name in value if name not in KNOWN_SCORES]:
            raise ValueError(f"unknown {', '.join(unknown)}; expected some of {', '.join(KNOWN_SCORES)}")
        return value

    @property
    def space(self) -> dict[str, Range | Choices]:
        """Every parameter with its full name; the layer set is one of them."""
        named: dict[str, Range | Choices] = {LAYERS: list(self.layer_sets)} if self.layer_sets else {}
        return named | self.parameters


def load_sweep(space: str | Path = "default", overrides: Sequence[str] = ()) -> SweepConfig:
    """A YAML file or a shipped space, with `key=value` on top. The default fits every model of four blocks."""
    path = shipped_file(SPACES, str(space), "space")
    raw = read_yaml(path, "space")
    raw |= dict(map(read_override, overrides))
    for section in ("parameters", "settings"):
        if isinstance(raw.get(section), dict):
            raw[section] = {full_key(str(name)): value for name, value in raw[section].items()}
    return parse_sweep(raw, str(path))


def parse_sweep(raw: Mapping[str, Any], source: str) -> SweepConfig:
    """A sweep from plain values; UsageError lists the problems."""
    try:
        return SweepConfig.model_validate(raw)
    except ValidationError as error:
        raise usage_error(source, error, list(SweepConfig.model_fields)) from error
