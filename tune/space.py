"""The trials of a space: each one's config, and the check of all of them against the model before the first starts."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping
from typing import Any, get_args

from torch import nn

from malmen.config import Config, Section, known_keys, parse_config, set_key
from malmen.errors import UsageError
from malmen.lm.layers import find_layers
from malmen.tune.settings import LAYERS, Choices, Range, SweepConfig

Params = dict[str, Any]  # by name of the parameter; LAYERS names a layer set

# Of these sections any setting can be swept, but for those that say how long and how often rather than what.
_SECTIONS = ("editor.", "training.")
_NOT_SWEPT = {
    "editor.layers": "name layer sets under `layer_sets`",
    "editor.ffn": "give the layer sets their `ffn`",
    "training.steps": "trials are compared after the same steps",
    **dict.fromkeys(("training.eval_every", "training.eval_edits"), "trials are compared by the same evaluations"),
    **dict.fromkeys(("training.checkpoint_every", "training.keep_checkpoints"), "no result depends on it"),
}


def trial_config(base: Config, sweep: SweepConfig, params: Mapping[str, Any]) -> Config:
    """The config of one trial."""
    raw = base.model_dump(mode="json")
    for name, value in params.items():
        if name != LAYERS:
            set_key(raw, name, value)
            continue
        chosen = sweep.layer_sets[value]
        raw["editor"]["layers"] = chosen.layers
        raw["editor"]["ffn"] = chosen.ffn or raw["editor"]["ffn"]
    shown = ", ".join(f"{name}={value}" for name, value in params.items())
    return parse_config(raw, f"the trial {shown}")


def check_space(base: Config, sweep: SweepConfig, model: nn.Module) -> None:
    """UsageError for whatever would make a trial fail that can be known now: names, values, layers."""
    if not sweep.space:
        raise UsageError("the space is empty: it needs `layer_sets` or `parameters`")
    for name, values in sweep.parameters.items():
        _check_key(name)
        if isinstance(values, list) and not values:
            raise UsageError(f"the space's parameter {name} has no choices")
        if isinstance(values, Range) and sweep.search == "grid":
            raise UsageError(f"a grid needs choices: give {name} a list instead of a range, or another `search`")
        if isinstance(values, Range) and not is_whole(name) and float not in _types(name):
            raise UsageError(f"{name} is no number: give it a list of choices instead of a range")
        for value in [values.low, values.high] if isinstance(values, Range) else values:
            trial_config(base, sweep, {name: value})
    if not sweep.layer_sets:
        find_layers(model, base.editor.layers, base.editor.ffn)
    for name in sweep.layer_sets:
        chosen = trial_config(base, sweep, {LAYERS: name}).editor
        try:
            find_layers(model, chosen.layers, chosen.ffn)
        except UsageError as error:
            raise UsageError(
                f"the layer set {name!r} of the space does not exist in {base.model.name}: {error}"
            ) from None


def _check_key(name: str) -> None:
    if name in _NOT_SWEPT:
        raise UsageError(f"{name} cannot be swept: {_NOT_SWEPT[name]}")
    sweepable = [key for key in known_keys() if key.startswith(_SECTIONS) and key not in _NOT_SWEPT] + ["seed"]
    if name not in sweepable:
        raise UsageError(f"{name} cannot be swept: the parameters that can are {', '.join(sweepable)}")


def with_evaluations(base: Config, sweep: SweepConfig) -> tuple[Config, int]:
    """The config with evaluations where early stopping looks at them, and the steps before it may stop a trial."""
    training = base.training
    every = training.eval_every
    grace = sweep.grace_steps or every or max(1, training.steps // 8)
    if not every:
        every = grace
    elif sweep.early_stopping == "asha" and grace % every:
        raise UsageError(
            f"grace_steps={grace} of the space is no multiple of training.eval_every={every}: trials are judged at "
            "their evaluations"
        )
    if sweep.early_stopping == "asha" and grace > training.steps:
        raise UsageError(f"grace_steps={grace} of the space is more than training.steps={training.steps}")
    raw = base.model_dump(mode="json")
    # A trial that ends at an evaluation, or is killed after it, has a checkpoint of that step.
    # All are asked about as many edits, whatever number each is trained on.
    edits = training.eval_edits or training.num_edits
    raw["training"] |= {"eval_every": every, "checkpoint_every": every, "eval_edits": edits}
    return parse_config(raw, "the sweep"), grace


# --- which trials -----------------------------------------------------------------------------------


def is_whole(name: str) -> bool:
    """Whether a setting is a number without a fraction."""
    return int in _types(name)


def _types(name: str) -> tuple[Any, ...]:
    """What a setting may be."""
    section, _, key = name.rpartition(".")
    fields = Config.model_fields
    if section:
        annotation = fields[section].annotation
        assert isinstance(annotation, type) and issubclass(annotation, Section)
        fields = annotation.model_fields
    return get_args(fields[key].annotation) or (fields[key].annotation,)


def number_of_trials(sweep: SweepConfig) -> int:
    """As many as asked for; a grid has no more than its points."""
    if sweep.search != "grid":
        return sweep.trials
    return min(sweep.trials, math.prod(len(values) for values in _grid(sweep).values()))


def draw(sweep: SweepConfig, number: int) -> Params:
    """The parameters of a trial of a random search or a grid: they depend on the seed and its number alone."""
    if sweep.search == "grid":
        grid = _grid(sweep)
        return dict(zip(grid, next(itertools.islice(itertools.product(*grid.values()), number, None)), strict=True))
    places = iter(_places(sweep, number))
    return {
        name: _at(name, values, next(places)) if isinstance(values, Range) else _choose(sweep, name, values, number)
        for name, values in sweep.space.items()
    }


def _grid(sweep: SweepConfig) -> dict[str, Choices]:
    return {name: values for name, values in sweep.space.items() if isinstance(values, list)}


def _places(sweep: SweepConfig, number: int) -> list[float]:
    """Where in each range, from 0 to 1: from a random start in steps of an irrational length (Roberts' sequence), so
    that a few trials are spread over the ranges as evenly as many would be."""
    ranges = [name for name, values in sweep.space.items() if isinstance(values, Range)]
    root = 2.0
    for _ in range(64):
        root = (1 + root) ** (1 / (len(ranges) + 1))
    starts = [random.Random(f"start/{sweep.seed}/{name}").random() for name in ranges]
    return [(start + (number + 1) * root ** -(place + 1)) % 1 for place, start in enumerate(starts)]


def _at(name: str, values: Range, place: float) -> float:
    if values.log:
        found = math.exp(math.log(values.low) + place * (math.log(values.high) - math.log(values.low)))
    else:
        found = values.low + place * (values.high - values.low)
    found = min(max(found, values.low), values.high)
    return round(found) if is_whole(name) else found


def _choose(sweep: SweepConfig, name: str, values: Choices, number: int) -> Any:
    """In rounds, so that a few trials try every choice as often as every other."""
    order = list(values)
    random.Random(f"round/{sweep.seed}/{name}/{number // len(order)}").shuffle(order)
    return order[number % len(order)]
