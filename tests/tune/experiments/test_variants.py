"""What experiments compare."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from malmen.errors import UsageError
from malmen.tune.experiments.settings import base_config, load_experiment
from malmen.tune.experiments.variants import ablation, cancelling, method_variant, rows_of

Run = Callable[..., tuple[int, str, str]]


def test_variants_differ_in_one_thing_and_those_that_do_not_share_an_editor() -> None:
    settings = load_experiment("world", [])
    config = base_config(settings)
    found = {
        row.variant.name: row.variant for kind in ("scaling", "ablation") for row in rows_of(kind, settings, config)
    }
    assert found["sum"].run_name(0) != found["mend"].run_name(0)  # MEND traces all tokens
    assert found["sum"].run_name(0) == cancelling(config)[1].run_name(0)
    assert found["malmen"].run_name(0) == cancelling(config)[0].run_name(0)
    names = {variant.run_name(0) for variant in found.values() if variant.trained}
    assert len(names) == 7 and found["malmen"].run_name(0) != found["malmen"].run_name(1)
    assert ablation("other_ffn", config).config.editor.ffn == "first"
    assert ablation("other_tokens", config).label == "all tokens"
    assert not method_variant("ft", config).trained


def test_a_recipe_is_malmen_with_these_settings_and_the_rest_as_it_was() -> None:
    settings = load_experiment("world", ["experiment.recipes={slower: {meta_lr: 0.5, training.warmup_steps: 3}}"])
    config = base_config(settings)
    plain, slower = (row.variant for row in rows_of("recipes", settings, config)[:2])
    assert (plain.name, slower.name, slower.label) == ("malmen", "slower", "slower")
    changed = config.training.model_copy(update={"meta_lr": 0.5, "warmup_steps": 3})
    assert slower.config == config.model_copy(update={"training": changed})


def test_a_recipe_with_an_unknown_setting_is_told_before_anything_runs() -> None:
    settings = load_experiment("world", ["experiment.recipes={odd: {training.metalr: 0.5}}"])
    with pytest.raises(UsageError, match=r"the recipe 'odd': unknown key 'training.metalr'"):
        rows_of("recipes", settings, base_config(settings))
