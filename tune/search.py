"""Which trial comes next: those that a killed sweep had begun, in order of their numbers, then new ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ray.tune.search import Searcher

from malmen.tune.settings import Choices, Params, Range, SweepConfig
from malmen.tune.space import draw, is_integer, number_of_trials
from malmen.tune.sweep_folder import SweepFolder, TrialRecord

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution


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
            trial = TrialRecord(number, params)
            self.folder.put(trial)
        elif self._optuna:
            self._optuna.add(trial)
            if trial.ended:  # at once, so that the next ones are drawn as if the sweep had not been interrupted
                self._optuna.tell(number, trial.last.score if trial.last and trial.status != "failed" else None)
        self._numbers[trial_id] = number
        return {"number": number}

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Tell Optuna the score of a trial that has ended, or that it failed."""
        number = self._numbers.pop(trial_id, None)
        if self._optuna and number is not None:
            failed = error or not result or bool(result.get("failed"))
            self._optuna.tell(number, None if failed else result["score"])  # type: ignore[index]

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

    def ask(self, number: int) -> Params:
        """Draw the parameters of a new trial."""
        from optuna.samplers import TPESampler

        # constant_liar: trials under way count as bad, so that concurrent ones try other parameters.
        self.study.sampler = TPESampler(seed=1_000_003 * self.sweep.seed + number, constant_liar=True)
        self.trials[number] = self.study.ask(self.space)
        return dict(self.trials[number].params)

    def add(self, trial: TrialRecord) -> None:
        """Add a trial whose parameters are known."""
        self.study.enqueue_trial(trial.params)
        self.trials[trial.number] = self.study.ask(self.space)

    def tell(self, number: int, score: float | None) -> None:
        """Report the score of a trial, None if it failed. Only the first report of a trial counts."""
        from optuna.trial import TrialState

        trial = self.trials.pop(number, None)
        if trial is not None:
            self.study.tell(trial, score, TrialState.FAIL if score is None else TrialState.COMPLETE)


def _distribution(name: str, values: Range | Choices) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(values, list):
        return CategoricalDistribution(values)
    if is_integer(name):
        return IntDistribution(int(values.low), int(values.high), log=values.log)
    return FloatDistribution(float(values.low), float(values.high), log=values.log)
