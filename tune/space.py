"""The space of a sweep: its check against the model before any trial starts, and which trial comes next."""

from __future__ import annotations

import itertools
import math
import random
from typing import TYPE_CHECKING, Any, get_args

from ray.tune.search import Searcher
from torch import nn

from malmen.config import Config, Section, known_keys
from malmen.errors import UsageError
from malmen.lm.layers import edited_layers
from malmen.tune.settings import LAYERS, Choices, Params, Range, SweepConfig
from malmen.tune.sweep_folder import SweepFolder, TrialRecord
from malmen.tune.trial import trial_config

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

# Any setting of these sections can be swept, except those of how long and how often.
_SECTIONS = ("editor.", "training.")
_NOT_SWEPT = {
    "editor.layers": "name layer sets under `layer_sets`",
    "editor.ffn": "give the layer sets their `ffn`",
    "editor.attention": "give the layer sets their `attention`",
    "training.steps": "trials are compared after the same steps",
    **dict.fromkeys(("training.eval_every", "training.eval_edits"), "trials are compared by the same evaluations"),
    **dict.fromkeys(("training.checkpoint_every", "training.keep_checkpoints"), "no result depends on it"),
}


def check_space(base: Config, sweep: SweepConfig, model: nn.Module) -> None:
    """UsageError for every name, value and layer of the space that would make a trial fail."""
    if not sweep.space:
        raise UsageError("the space is empty: it needs `layer_sets` or `parameters`")
    sweepable = [key for key in known_keys() if key.startswith(_SECTIONS) and key not in _NOT_SWEPT] + ["seed"]
    for name, values in sweep.parameters.items():
        if name not in sweepable:
            why = _NOT_SWEPT.get(name) or f"the settings that can be are {', '.join(sweepable)}"
            raise UsageError(f"{name} cannot be swept: {why}")
        if isinstance(values, Range):
            if sweep.search == "grid":
                raise UsageError(f"a grid needs choices: give {name} a list instead of a range, or another `search`")
            if not {int, float} & set(_types(name)):
                raise UsageError(f"{name} is not a number: give it a list of choices instead of a range")
        elif not values:
            raise UsageError(f"the space's parameter {name} has no choices")
        for value in [values.low, values.high] if isinstance(values, Range) else values:
            trial_config(base, sweep, {name: value})
    if not sweep.layer_sets:
        edited_layers(model, base.editor)
    for name in sweep.layer_sets:
        editor = trial_config(base, sweep, {LAYERS: name}).editor
        try:
            edited_layers(model, editor)
        except UsageError as error:
            raise UsageError(
                f"the layer set {name!r} of the space does not exist in {base.model.name}: {error}"
            ) from None


def with_evaluations(base: Config, sweep: SweepConfig) -> tuple[Config, int]:
    """The config that evaluates where early stopping judges, and the steps before early stopping may end a trial."""
    training = base.training
    grace = sweep.grace_steps or training.eval_every or max(1, training.steps // 8)
    every = training.eval_every or grace
    if sweep.early_stopping == "asha" and grace % every:
        raise UsageError(
            f"grace_steps={grace} of the space is not a multiple of training.eval_every={every}: trials are judged "
            "at their evaluations"
        )
    if sweep.early_stopping == "asha" and grace > training.steps:
        raise UsageError(f"grace_steps={grace} of the space is more than training.steps={training.steps}")
    # A trial that ends at an evaluation, or is killed after it, has a checkpoint of that step. All trials are
    # evaluated on as many edits, whatever number each is trained on.
    edits = training.eval_edits or training.num_edits
    training = training.model_copy(update={"eval_every": every, "checkpoint_every": every, "eval_edits": edits})
    return base.model_copy(update={"training": training}), grace


# --- which trial comes next: those that a killed sweep had begun, in order of their numbers, then new ones -----


class SweepSearch(Searcher):
    """Gives trials to Ray Tune. A trial's record is on disk before, so none is lost and no number is used twice."""

    def __init__(self, folder: SweepFolder, sweep: SweepConfig) -> None:
        super().__init__(metric="score", mode="max")
        self.folder, self.sweep = folder, sweep
        self._next = 0
        self._numbers: dict[str, int] = {}  # by Ray Tune's id of a trial
        self._optuna = _Optuna(sweep) if sweep.search == "optuna" else None

    def suggest(self, trial_id: str) -> Any:
        """The number of the next trial; its parameters are in its record."""
        number = self._next
        if number >= number_of_trials(self.sweep):
            return Searcher.FINISHED
        self._next += 1
        trial = self.folder.get(number)
        if trial is None:
            params = self._optuna.ask(number) if self._optuna else draw(self.sweep, number)
            self.folder.put(TrialRecord(number, params))
        elif self._optuna:
            self._optuna.ask(number, trial.params)
            if trial.ended:  # at once, so that the next ones are drawn as if the sweep had not been interrupted
                self._optuna.tell(number, trial.last.score if trial.last and trial.status != "failed" else None)
        self._numbers[trial_id] = number
        return {"number": number}

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Tell Optuna the score of a trial that has ended, or that it failed."""
        number = self._numbers.pop(trial_id, None)
        if self._optuna and number is not None:
            self._optuna.tell(number, None if error or not result or result.get("failed") else result["score"])

    def save(self, checkpoint_path: str) -> None:
        """Nothing: the trials' records hold the state."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing: a sweep resumes from its trials' records."""


class _Optuna:
    """Optuna's tree-structured Parzen estimator. Its draws depend on seed, number of the trial and earlier scores."""

    def __init__(self, sweep: SweepConfig) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.sweep = sweep
        self.space = {name: _distribution(name, values) for name, values in sweep.space.items()}
        self.study = optuna.create_study(direction="maximize")
        self.trials: dict[int, Any] = {}

    def ask(self, number: int, params: Params | None = None) -> Params:
        """Begin a trial with these parameters; without any they are drawn."""
        from optuna.samplers import TPESampler

        if params is not None:
            self.study.enqueue_trial(params)
        # constant_liar: trials under way count as bad, so that concurrent ones try other parameters.
        self.study.sampler = TPESampler(seed=1_000_003 * self.sweep.seed + number, constant_liar=True)
        self.trials[number] = self.study.ask(self.space)
        return dict(self.trials[number].params)

    def tell(self, number: int, score: float | None) -> None:
        """Report the score of a trial, None if it failed. Only the first report of a trial counts."""
        from optuna.trial import TrialState

        if trial := self.trials.pop(number, None):
            self.study.tell(trial, score, TrialState.FAIL if score is None else TrialState.COMPLETE)


def _distribution(name: str, values: Range | Choices) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(values, list):
        return CategoricalDistribution(values)
    if is_integer(name):
        return IntDistribution(int(values.low), int(values.high), log=values.log)
    return FloatDistribution(float(values.low), float(values.high), log=values.log)


def is_integer(name: str) -> bool:
    """Whether a setting takes an integer."""
    return int in _types(name)


def _types(name: str) -> tuple[Any, ...]:
    section, _, key = name.rpartition(".")
    settings: Section = getattr(Config(), section) if section else Config()
    annotation = type(settings).model_fields[key].annotation
    return get_args(annotation) or (annotation,)


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
    low, high = (math.log(values.low), math.log(values.high)) if values.log else (values.low, values.high)
    value = low + fraction * (high - low)
    value = min(max(math.exp(value) if values.log else value, values.low), values.high)
    return round(value) if is_integer(name) else value
