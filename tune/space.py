"""The space of a sweep: its check against the model before any trial starts, and the parameters of each trial."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any, get_args

from torch import nn

from malmen.config import Config, Section, known_keys, parse_config
from malmen.errors import UsageError
from malmen.lm.layers import find_layers
from malmen.tune.settings import LAYERS, Choices, Params, Range, SweepConfig
from malmen.tune.trial import trial_config

# Any setting of these sections can be swept, except those of how long and how often.
_SECTIONS = ("editor.", "training.")
_NOT_SWEPT = {
    "editor.layers": "name layer sets under `layer_sets`",
    "editor.ffn": "give the layer sets their `ffn`",
    "training.steps": "trials are compared after the same steps",
    **dict.fromkeys(("training.eval_every", "training.eval_edits"), "trials are compared by the same evaluations"),
    **dict.fromkeys(("training.checkpoint_every", "training.keep_checkpoints"), "no result depends on it"),
}


def check_space(base: Config, sweep: SweepConfig, model: nn.Module) -> None:
    """UsageError for every name, value and layer of the space that would make a trial fail."""
    if not sweep.space:
        raise UsageError("the space is empty: it needs `layer_sets` or `parameters`")
    for name, values in sweep.parameters.items():
        _check_key(name)
        if isinstance(values, list) and not values:
            raise UsageError(f"the space's parameter {name} has no choices")
        if isinstance(values, Range) and sweep.search == "grid":
            raise UsageError(f"a grid needs choices: give {name} a list instead of a range, or another `search`")
        if isinstance(values, Range) and not is_integer(name) and float not in _types(name):
            raise UsageError(f"{name} is not a number: give it a list of choices instead of a range")
        for value in [values.low, values.high] if isinstance(values, Range) else values:
            trial_config(base, sweep, {name: value})
    if not sweep.layer_sets:
        find_layers(model, base.editor.layers, base.editor.ffn)
    for name in sweep.layer_sets:
        editor = trial_config(base, sweep, {LAYERS: name}).editor
        try:
            find_layers(model, editor.layers, editor.ffn)
        except UsageError as error:
            raise UsageError(
                f"the layer set {name!r} of the space does not exist in {base.model.name}: {error}"
            ) from None


def _check_key(name: str) -> None:
    if name in _NOT_SWEPT:
        raise UsageError(f"{name} cannot be swept: {_NOT_SWEPT[name]}")
    sweepable = [key for key in known_keys() if key.startswith(_SECTIONS) and key not in _NOT_SWEPT] + ["seed"]
    if name not in sweepable:
        raise UsageError(f"{name} cannot be swept; the settings that can be are {', '.join(sweepable)}")


def with_evaluations(base: Config, sweep: SweepConfig) -> tuple[Config, int]:
    """The config that evaluates where early stopping judges, and the steps before early stopping may end a trial."""
    training = base.training
    every = training.eval_every
    grace = sweep.grace_steps or every or max(1, training.steps // 8)
    if not every:
        every = grace
    elif sweep.early_stopping == "asha" and grace % every:
        raise UsageError(
            f"grace_steps={grace} of the space is not a multiple of training.eval_every={every}: trials are judged "
            "at their evaluations"
        )
    if sweep.early_stopping == "asha" and grace > training.steps:
        raise UsageError(f"grace_steps={grace} of the space is more than training.steps={training.steps}")
    raw = base.model_dump(mode="json")
    # A trial that ends at an evaluation, or is killed after it, has a checkpoint of that step. All trials are
    # evaluated on as many edits, whatever number each is trained on.
    edits = training.eval_edits or training.num_edits
    raw["training"] |= {"eval_every": every, "checkpoint_every": every, "eval_edits": edits}
    return parse_config(raw, "the sweep"), grace


# --- parameters of trials --------------------------------------------------------------------------


def is_integer(name: str) -> bool:
    """Whether a setting takes an integer."""
    return int in _types(name)


def _types(name: str) -> tuple[Any, ...]:
    section, _, key = name.rpartition(".")
    fields = Config.model_fields
    if section:
        annotation = fields[section].annotation
        assert isinstance(annotation, type) and issubclass(annotation, Section)
        fields = annotation.model_fields
    return get_args(fields[key].annotation) or (fields[key].annotation,)


def number_of_trials(sweep: SweepConfig) -> int:
    """The sweep's `trials`; a grid has at most one for each of its points."""
    if sweep.search != "grid":
        return sweep.trials
    return min(sweep.trials, math.prod(len(values) for values in _grid(sweep).values()))


def draw(sweep: SweepConfig, number: int) -> Params:
    """The parameters of a trial of a random search or a grid: a function of the seed and the trial's number alone.

    Optuna's random, grid and quasi-random samplers are not used: their draws are others, so a sweep begun with these
    would be resumed with other trials.
    """
    if sweep.search == "grid":
        grid = _grid(sweep)
        return dict(zip(grid, next(itertools.islice(itertools.product(*grid.values()), number, None)), strict=True))
    ranges = [name for name, values in sweep.space.items() if isinstance(values, Range)]
    root = 2.0
    for _ in range(64):
        root = (1 + root) ** (1 / (len(ranges) + 1))
    params: Params = {}
    for name, values in sweep.space.items():
        if isinstance(values, Range):
            # From a random start in steps of an irrational length (Roberts' sequence): few trials are spread over the
            # ranges as evenly as many.
            start = random.Random(f"start/{sweep.seed}/{name}").random()
            fraction = (start + (number + 1) * root ** -(1 + ranges.index(name))) % 1
            params[name] = _range_value(name, values, fraction)
        else:  # in shuffled rounds: few trials try every choice equally often
            order = list(values)
            random.Random(f"round/{sweep.seed}/{name}/{number // len(order)}").shuffle(order)
            params[name] = order[number % len(order)]
    return params


def _grid(sweep: SweepConfig) -> dict[str, Choices]:
    return {name: values for name, values in sweep.space.items() if isinstance(values, list)}


def _range_value(name: str, values: Range, fraction: float) -> float:
    if values.log:
        value = math.exp(math.log(values.low) + fraction * (math.log(values.high) - math.log(values.low)))
    else:
        value = values.low + fraction * (values.high - values.low)
    value = min(max(value, values.low), values.high)
    return round(value) if is_integer(name) else value
