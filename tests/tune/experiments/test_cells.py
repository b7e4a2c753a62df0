"""Cells: what is measured, whose code has measured it, and the folder of one set of settings, data and model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import tiny_lm

from malmen.errors import EditError, UsageError
from malmen.tune.experiments.cells import (
    Cell,
    Cells,
    begin_folder,
    check_base_model,
    code_version,
    groups_of,
    source_hash,
)
from malmen.tune.experiments.report import write_report
from malmen.tune.experiments.runner import run_experiments
from malmen.tune.experiments.settings import ExperimentConfig, base_config
from malmen.tune.experiments.variants import method_variant


def test_a_measurement_tells_whose_code_made_it(settings: ExperimentConfig, tmp_path: Path) -> None:
    begin_folder(tmp_path / "experiment", settings, base_config(settings))
    store = Cells(tmp_path / "experiment")
    store.put(Cell("malmen", 0, 4), {"error": "singular"})
    assert store.codes() == {code_version()}
    assert "malmen 0." in code_version()
    old = tmp_path / "experiment" / "cells" / "memory.json"  # of an earlier version, which told nothing
    old.write_text(json.dumps([{"way": "decomposed", "edits": 4, "code": "malmen 0.0.9, source abc"}, {"edits": 8}]))
    assert store.codes() == {code_version(), "malmen 0.0.9, source abc", "unknown"}
    page = write_report(tmp_path / "experiment").read_text()
    assert f"Measured by malmen 0.0.9, source abc; {code_version()}; unknown" in page


def test_an_editor_is_found_again_with_other_batches(settings: ExperimentConfig) -> None:
    other = settings.model_copy(update={"settings": {**settings.settings, "batch.cache_mb": 5}})
    one, two = (method_variant("malmen", base_config(some)) for some in (settings, other))
    assert one.run_name(0) == two.run_name(0) != one.run_name(1)


def test_each_experiment_asks_only_for_what_it_needs(settings: ExperimentConfig) -> None:
    config = base_config(settings)
    wanted = {
        kind: {group.variant.name for group in groups_of(settings, config, {kind})}
        for kind in ("scaling", "ablation", "cancellation", "rounds")
    }
    assert wanted["scaling"] == {
        "malmen", "mend", "rledit", "ft", "memit", "memit_history", "alphaedit", "ultraedit", "lora", "retrieval"
    }  # fmt: skip
    assert wanted["ablation"] == {"malmen", "sum", "no_regularisation"} and wanted["cancellation"] == {
        "squares_answer",
        "sum_answer",
    }
    assert wanted["rounds"] == {"malmen", "rledit", "ft", "memit", "memit_history", "alphaedit", "ultraedit", "lora"}
    (cells,) = (
        group.cells
        for group in groups_of(settings, config, {"rounds"})
        if (group.variant.name, group.seed) == ("malmen", 0)
    )
    assert [(cell.rounds, cell.way) for cell in cells] == [(1, "at once"), (2, "union"), (2, "again")]


def test_the_version_of_the_code_covers_modules_at_any_depth_but_no_other_room(tmp_path: Path) -> None:
    for name in ("editor.py", "lm/model.py", "serve/app.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x = 1")
    before = source_hash([tmp_path])
    (tmp_path / "serve/app.py").write_text("x = 2")  # where the package is installed, the other rooms lie in it
    assert source_hash([tmp_path]) == before
    (tmp_path / "lm/model.py").write_text("x = 2")
    assert source_hash([tmp_path]) != before


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
    with pytest.raises(EditError, match=r"measurements of base model [\w-]+; .* is now [\w-]+: choose another --out"):
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
