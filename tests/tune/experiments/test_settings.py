"""Presets and what may be changed in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from malmen.errors import UsageError
from malmen.tune.experiments.settings import PRESETS, base_config, load_experiment


@pytest.mark.parametrize("path", sorted(PRESETS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_preset_names_a_config_that_loads(path: Path) -> None:
    settings = load_experiment(path.stem, [])
    assert base_config(settings).training.steps > 0


def test_settings_of_the_config_and_of_the_experiment_are_told_apart() -> None:
    settings = load_experiment("world", ["training.steps=7", "experiment.seeds=[5]", "experiment.edits=[2, 4]"])
    assert settings.seeds == [5] and settings.edits == [2, 4]
    assert base_config(settings).training.steps == 7


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["experiment.methods=[magic]"], "no method magic; the methods are malmen, mend"),
        (["experiment.seed=1"], "unknown key 'seed'"),
        (["experiment.ablations=[nothing]"], "ablations.0"),
        (["experiment.seeds=[]"], "seeds"),
        (["experiment.recipes={malmen: {}}"], "'malmen' cannot be the name of a recipe"),
        (["experiment.recipes={a/b: {}}"], "'a/b' cannot be the name of a recipe"),
        (["experiment.recipes={sum_answer: {}}"], "'sum_answer' cannot be the name of a recipe"),
        (["experiment.recipes={slow: {training: {meta_lr: 1}}}"], "the recipe 'slow' holds a section 'training'"),
    ],
)
def test_wrong_settings_are_told(overrides: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message.replace("[", r"\[")):
        load_experiment("world", overrides)


def test_an_unknown_preset_is_told_with_those_there_are() -> None:
    with pytest.raises(UsageError, match=r"no preset 'moon'.*beyond, default, fast, world"):
        load_experiment("moon", [])
