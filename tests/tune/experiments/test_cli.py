"""`malmen experiment`: a command for each experiment, the settings, the report."""

from __future__ import annotations

import json
from collections.abc import Callable

from malmen.tune.experiments.settings import KINDS, ExperimentConfig

Run = Callable[..., tuple[int, str, str]]


def test_every_experiment_is_a_command_with_its_own_help(malmen: Run) -> None:
    code, out, _ = malmen("experiment", "--help")
    assert code == 0 and all(kind in out for kind in (*KINDS, "report", "settings"))
    assert "Fig. 10" in malmen("experiment", "memory", "--help")[1]


def test_a_tradeoff_without_own_texts_is_refused(malmen: Run) -> None:
    code, _, err = malmen("experiment", "tradeoff", "--preset", "world", "experiment.own_texts=0")
    assert code == 2 and "experiment.own_texts above 0, here True and 0" in err


def test_recipes_without_any_are_refused(malmen: Run) -> None:
    code, _, err = malmen("experiment", "recipes", "--preset", "world", "experiment.recipes={}")
    assert code == 2 and "no recipes to compare" in err


def test_every_setting_is_listed(malmen: Run) -> None:
    code, out, _ = malmen("experiment", "settings", "--json")
    listed = {row["key"]: row["default"] for row in json.loads(out)}
    assert code == 0 and set(listed) == {f"experiment.{name}" for name in ExperimentConfig.model_fields}
    assert listed["experiment.seeds"] == [0, 1, 2]
