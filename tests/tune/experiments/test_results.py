"""The numbers of cells become rows of results."""

from __future__ import annotations

import json
from pathlib import Path

from malmen.tune.experiments import work
from malmen.tune.experiments.cells import groups_of
from malmen.tune.experiments.results import write_results
from malmen.tune.experiments.settings import ExperimentConfig, base_config


def test_the_tradeoff_has_every_method_and_recipe_by_its_drift_along_own_texts(
    settings: ExperimentConfig, tmp_path: Path
) -> None:
    chosen = settings.model_copy(
        update={
            "seeds": [0], "edits": [2, 4], "methods": ["malmen", "ft"], "own_texts": 3, "generate": True,
            "recipes": {"local": {"training.locality_coef": 9}},
        }
    )  # fmt: skip
    config = base_config(chosen)
    for group in groups_of(chosen, config, {"tradeoff"}):
        work.do_cells(group, chosen, tmp_path)
    (path,) = write_results(chosen, config, tmp_path, ["tradeoff"])
    result = json.loads(path.read_text())
    assert [(row["variant"], row["edits"]) for row in result["rows"]] == [
        (name, edits) for name in ("malmen", "ft", "local") for edits in (2, 4)
    ]
    for row in result["rows"]:
        assert row["own_raw_kl"]["mean"] > 0 and 0 < row["own_raw_kl_floor"]["mean"] < 0.01
        assert 0 <= row["own_raw_unchanged_20"]["mean"] <= 1 and row["own_chat_kl"] is None  # it has no chat template
    assert "KL per token of its own texts, raw prompts" in path.with_suffix(".svg").read_text()
    assert result["recipes"] == chosen.recipes


def test_recipes_stand_beside_malmen_as_it_is(settings: ExperimentConfig, tmp_path: Path) -> None:
    chosen = settings.model_copy(update={"seeds": [0], "recipes": {"less_damping": {"editor.damping": 0.01}}})
    config = base_config(chosen)
    for group in groups_of(chosen, config, {"recipes"}):
        work.do_cells(group, chosen, tmp_path)
    (path,) = write_results(chosen, config, tmp_path, ["recipes"])
    result = json.loads(path.read_text())
    assert [(row["label"], row["edits"]) for row in result["rows"]] == [
        ("MALMEN", 2), ("less damping", 2), ("MALMEN", 4), ("less damping", 4),
    ]  # fmt: skip
    assert result["rows"][0]["mean_residual"]["mean"] > result["rows"][1]["mean_residual"]["mean"]
    assert path.with_suffix(".png").exists() and result["recipes"] == chosen.recipes
