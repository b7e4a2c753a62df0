"""A folder of experiments holds the numbers of one set of settings, data and model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import tiny_lm

from malmen.errors import EditError, UsageError
from malmen.tune.experiments.cells import begin_folder, check_base_model
from malmen.tune.experiments.runner import run_experiments
from malmen.tune.experiments.settings import ExperimentConfig, base_config


def test_a_folder_is_gone_on_with_by_more_seeds_or_recipes_but_not_by_changed_ones(
    settings: ExperimentConfig, tmp_path: Path
) -> None:
    config, folder = base_config(settings), tmp_path / "experiment"

    def begin(recipes: dict[str, Any]) -> None:
        begin_folder(folder, settings.model_copy(update={"recipes": recipes}), config)

    begin({"one": {"editor.damping": 1, "training.warmup_steps": 2}})
    begin({"two": {"editor.damping": 3}})
    begin({})
    begin_folder(folder, settings.model_copy(update={"seeds": [0, 1, 2, 3], "edits": [8], "methods": ["ft"]}), config)
    about = json.loads((folder / "experiment.json").read_text())
    assert set(about["experiment"]["recipes"]) == {"one", "two"}
    with pytest.raises(UsageError, match="another recipe one; choose another --out"):
        begin({"one": {"editor.damping": 1}})
    (folder / "experiment.json").write_text(json.dumps({**about, "data": "other rows"}))
    with pytest.raises(UsageError, match="another data; choose another --out"):
        begin({})
    del about["config"]["training"]["warmup_steps"], about["data"]  # written before there were such things
    (folder / "experiment.json").write_text(json.dumps(about))
    begin({})


def test_a_model_that_has_changed_under_its_name_is_not_measured_into_the_same_folder(
    settings: ExperimentConfig, tmp_path: Path
) -> None:
    check_base_model(tiny_lm("gpt2"), tmp_path)
    check_base_model(tiny_lm("gpt2"), tmp_path)
    with pytest.raises(EditError, match=r"holds measurements of base model \w+; .* is now \w+: choose another --out"):
        check_base_model(tiny_lm("llama"), tmp_path)


def test_a_corpus_that_has_changed_needs_another_folder(settings: ExperimentConfig, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("a text")
    chosen = settings.model_copy(update={"settings": {**settings.settings, "baselines.memit.corpus": str(corpus)}})
    begin_folder(tmp_path / "experiment", chosen, base_config(chosen))
    begin_folder(tmp_path / "experiment", chosen, base_config(chosen))
    corpus.write_text("another text")
    with pytest.raises(UsageError, match="another corpus; choose another --out"):
        begin_folder(tmp_path / "experiment", chosen, base_config(chosen))


def test_a_folder_with_something_else_in_it_is_refused(settings: ExperimentConfig, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(UsageError, match="holds something else"):
        run_experiments(settings, ("scaling",), tmp_path)
