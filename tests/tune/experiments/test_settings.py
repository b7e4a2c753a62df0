"""Presets and what may be changed in them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from malmen.errors import UsageError
from malmen.tune.experiments.runner import base_config
from malmen.tune.experiments.settings import PRESETS, ExperimentConfig, load_experiment
from malmen.tune.experiments.variants import ablation, all_variants, cancelling, method_variant

Run = Callable[..., tuple[int, str, str]]


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
        (["experiment.methods=[magic]"], "there is no method magic; the methods are malmen, mend"),
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


def test_variants_differ_in_one_thing_and_those_that_do_not_share_an_editor() -> None:
    settings = load_experiment("world", [])
    config = base_config(settings)
    found = {variant.name: variant for variant in all_variants(settings, config, {"scaling", "ablation"})}
    assert found["sum"].run_name(0) != found["mend"].run_name(0)  # MEND traces all tokens
    assert found["sum"].run_name(0) == cancelling(config)[1].run_name(0)
    assert found["malmen"].run_name(0) == cancelling(config)[0].run_name(0)
    names = {variant.run_name(0) for variant in found.values() if variant.trained}
    assert len(names) == 6 and found["malmen"].run_name(0) != found["malmen"].run_name(1)
    assert ablation("other_ffn", config).config.editor.ffn == "first"
    assert ablation("other_tokens", config).label() == "all tokens"
    assert not method_variant("ft", config).trained


def test_a_recipe_is_malmen_with_these_settings_and_the_rest_as_it_was() -> None:
    settings = load_experiment("world", ["experiment.recipes={slower: {meta_lr: 0.5, training.warmup_steps: 3}}"])
    config = base_config(settings)
    plain, slower = all_variants(settings, config, {"recipes"})
    assert (plain.name, slower.name, slower.label()) == ("malmen", "slower", "slower")
    changed = config.training.model_copy(update={"meta_lr": 0.5, "warmup_steps": 3})
    assert slower.config == config.model_copy(update={"training": changed})


def test_a_recipe_with_an_unknown_setting_is_told_before_anything_runs() -> None:
    settings = load_experiment("world", ["experiment.recipes={odd: {training.metalr: 0.5}}"])
    with pytest.raises(UsageError, match=r"the recipe 'odd': unknown key 'training.metalr'"):
        list(all_variants(settings, base_config(settings), {"recipes"}))


def test_every_setting_is_listed(malmen: Run) -> None:
    code, out, _ = malmen("experiment", "settings", "--json")
    listed = {row["key"]: row["default"] for row in json.loads(out)}
    assert code == 0 and set(listed) == {f"experiment.{name}" for name in ExperimentConfig.model_fields}
    assert listed["experiment.seeds"] == [0, 1, 2]
