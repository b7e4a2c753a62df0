"""Which trial comes next: those that a killed sweep had begun, in their order, then new ones."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from ray.tune.search import Searcher

from malmen.tune.settings import Choices, Range, SweepConfig
from malmen.tune.space import Params, draw, is_whole, number_of_trials
from malmen.tune.sweep_folder import SweepFolder, TrialRecord

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

logger = logging.getLogger(__name__)


class SweepSearch(Searcher):
    """A trial is written down before Ray Tune hears of it, so none is lost and none gets another's number."""

    def __init__(self, folder: SweepFolder, sweep: SweepConfig) -> None:
        super().__init__(metric="score", mode="max")
        self.folder, self.sweep = folder, sweep
        self._next = 0
        self._numbers: dict[str, int] = {}  # by Ray Tune's name of a trial
        self._optuna = _Optuna(sweep) if sweep.search == "optuna" else None

    def suggest(self, trial_id: str) -> Any:
        """The number of the next trial; its parameters stand in its record."""
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
            self._optuna.asked(trial)
            if trial.ended:  # at once, so that the next ones are drawn as if the sweep had never been away
                self._optuna.tell(number, trial.last.score if trial.last and trial.status != "failed" else None)
        self._numbers[trial_id] = number
        return {"number": number}

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """What was found by it; a trial that failed teaches nothing but that."""
        number = self._numbers.pop(trial_id, None)
        if self._optuna and number is not None:
            failed = error or not result or bool(result.get("failed"))
            self._optuna.tell(number, None if failed else result["score"])  # type: ignore[index]

    def save(self, checkpoint_path: str) -> None:
        """Nothing: the records are all there is to know."""

    def restore(self, checkpoint_path: str) -> None:
        """A sweep goes on from its records, not from Ray Tune's."""


class _Optuna:
    """Optuna's tree-structured Parzen estimator over the space. What it draws depends on the seed, the trial's number
    and what it has been told before."""

    def __init__(self, sweep: SweepConfig) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.sweep = sweep
        self.space = {name: _distribution(name, values) for name, values in sweep.space.items()}
        self.study = optuna.create_study(direction="maximize")
        self.trials: dict[int, Any] = {}

    def ask(self, number: int) -> Params:
        from optuna.samplers import TPESampler

        # constant_liar: trials that are under way count as bad, so that those beside them look elsewhere.
        self.study.sampler = TPESampler(seed=1_000_003 * self.sweep.seed + number, constant_liar=True)
        self.trials[number] = self.study.ask(self.space)
        return dict(self.trials[number].params)

    def asked(self, trial: TrialRecord) -> None:
        """The same for a trial whose parameters are known."""
        self.study.enqueue_trial(trial.params)
        self.trials[trial.number] = self.study.ask(self.space)

    def tell(self, number: int, score: float | None) -> None:
        from optuna.trial import TrialState

        trial = self.trials.pop(number, None)
        if trial is None:  # told already
            return
        if score is None:
            self.study.tell(trial, state=TrialState.FAIL)
        else:
            self.study.tell(trial, score)


def _distribution(name: str, values: Range | Choices) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(values, list):
        return CategoricalDistribution(values)
    if is_whole(name):
        return IntDistribution(int(values.low), int(values.high), log=values.log)
    return FloatDistribution(float(values.low), float(values.high), log=values.log)
