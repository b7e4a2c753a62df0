"""The experiments, small, on the tests' Ray: every number is there, a killed run goes on, a failure is told."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from platform_runs import make_platform_config
from tiny_models import tiny_lm
from torch.testing import assert_close

from malmen.data.splits import validation_records
from malmen.errors import EditError, UsageError
from malmen.lm.model import load_lm
from malmen.lm.overlay import edited
from malmen.methods.ultraedit import UltraEdit
from malmen.training import make_editor
from malmen.tune.experiments import work
from malmen.tune.experiments.cells import Cell, Cells, cells_of, code_version
from malmen.tune.experiments.memory import measure_memory
from malmen.tune.experiments.report import write_report
from malmen.tune.experiments.results import write_results
from malmen.tune.experiments.runner import (
    ExperimentListener,
    base_config,
    begin_folder,
    run_experiments,
)
from malmen.tune.experiments.settings import ExperimentConfig, load_experiment
from malmen.tune.experiments.variants import Variant, all_variants, method_variant

SMALL = [
    "training.steps=2", "training.num_edits=4", "training.min_edits=2", "editor.layers=last:1", "editor.rank=4",
    "tracking.enabled=false",
    "experiment.seeds=[0, 1]", "experiment.edits=[2, 4]", "experiment.ablation_edits=4", "experiment.rounds=2",
    "experiment.memory_edits=[4]", "experiment.ablations=[sum, no_regularisation]", "baselines.ft.epochs=1",
    "baselines.memit.steps=2", "experiment.failures=3",
]  # fmt: skip


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> ExperimentConfig:
    moments = tmp_path_factory.mktemp("moments")
    return load_experiment(
        "fast", [*SMALL, f"baselines.memit.cache_dir={moments}", "baselines.memit.corpus_tokens=2000"]
    )


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_all_experiments_give_numbers_pictures_and_a_page_and_nothing_is_done_twice(
    settings: ExperimentConfig, tmp_path: Path
) -> None:
    folder, heard = tmp_path / "experiment", []
    listener = ExperimentListener(lambda done, total: heard.append((done, total)))
    kinds = ("scaling", "ablation", "cancellation", "rounds", "failures")
    written = run_experiments(settings, kinds, folder, listener=listener)
    assert [path.stem for path in written] == sorted(kinds) and heard[-1][0] == heard[-1][1] > 20
    scaling = json.loads((folder / "results" / "scaling.json").read_text())
    assert {(row["variant"], row["edits"]) for row in scaling["rows"]} == {
        (method, edits) for method in ("malmen", "mend", "ft", "memit", "ultraedit") for edits in (2, 4)
    }
    for row in scaling["rows"]:
        assert row["seeds"] == 2 and len(row["edit_success"]["values"]) == 2 and row["errors"] == []
        assert 0 <= row["locality_agreement"]["mean"] <= 1
    ablation = json.loads((folder / "results" / "ablation.json").read_text())["rows"]
    assert [row["variant"] for row in ablation] == ["sum", "no_regularisation", "malmen"]
    residuals = json.loads((folder / "results" / "cancellation.json").read_text())["rows"]
    summed = next(row for row in ablation if row["variant"] == "sum")  # the same editor, and not trained again
    same = next(row for row in residuals if (row["variant"], row["edits"]) == ("sum_answer", 4))
    assert summed["errors"] == [] and summed["edit_success"] == same["edit_success"]
    failed = next(row for row in ablation if row["variant"] == "no_regularisation")
    assert failed["seeds"] == 2 or "damping 0 is not positive definite" in failed["errors"][0]
    assert all(row["mean_residual"]["mean"] > 0 for row in residuals)
    page = write_report(folder).read_text()
    assert page.count("data:image/svg+xml") == 4 and not re.search(r"(src|href)=\"http", page)

    good = [path for path in (folder / "cells").iterdir() if "error" not in json.loads(path.read_text())]
    cells = {path: path.stat().st_mtime_ns for path in good}
    (folder / "cells" / "ft-seed1-4.json").unlink()  # as if it had been killed there
    run_experiments(settings, kinds, folder)
    after = {path: path.stat().st_mtime_ns for path in good}
    assert {path.name for path in cells if cells[path] != after[path]} == {"ft-seed1-4.json"}
    elsewhere = settings.model_copy(update={"cpus": 0.5, "settings": {**settings.settings, "batch.cache_mb": 5}})
    run_experiments(elsewhere, ("scaling",), folder)  # another machine, the same numbers
    with pytest.raises(UsageError, match=r"another experiment.generate; choose another --out"):
        run_experiments(settings.model_copy(update={"generate": not settings.generate}), kinds, folder)


def test_a_cell_is_the_same_edit_made_by_hand(settings: ExperimentConfig, tmp_path: Path) -> None:
    from malmen.data.subjects import edits_of
    from malmen.evaluate import evaluate
    from malmen.methods.fine_tune import FineTune
    from malmen.training import check_enough

    variant = method_variant("ft", base_config(settings))
    work.do_cells(variant, 1, [Cell("ft", 1, 4)], settings, tmp_path)
    found = Cells(tmp_path).get(Cell("ft", 1, 4))
    config = variant.seeded(1)
    lm, records = load_lm(config.model), check_enough(validation_records(config), 4)
    shifts = FineTune(lm, config).edit(lm, edits_of(records)).shifts
    scores = evaluate(lm, records, shifts, config, generate=False).scores()
    assert found is not None and found["scores"] == scores


@pytest.mark.parametrize("kind", ["t5", "bert"])
def test_the_methods_are_compared_on_other_kinds_of_models_too(kind: str, tmp_path: Path) -> None:
    config = make_platform_config(kind, tmp_path, training={"steps": 1})
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    layers = {"baselines.ultraedit.layers": "last:2"}
    chosen = ExperimentConfig(
        config=str(tmp_path / "config.yaml"), settings=layers, seeds=[0], edits=[4], generate=False
    )
    for variant in all_variants(chosen, base_config(chosen), {"scaling"}):
        work.do_cells(variant, 0, [Cell(variant.name, 0, 4)], chosen, tmp_path)
    scaling, failures = write_results(chosen, base_config(chosen), tmp_path, ["scaling", "failures"])[::-1]
    rows = {row["variant"]: row for row in json.loads(scaling.read_text())["rows"]}
    assert {name for name, row in rows.items() if row["seeds"]} == {"malmen", "mend", "ft", "ultraedit"}
    assert "decoder" in rows["memit"]["errors"][0]
    shown = json.loads(failures.read_text())["rows"]
    assert shown and all(row["after"] and row["after"] != row["answer"] for row in shown), shown[:3]


def test_recipes_stand_beside_malmen_as_it_is(settings: ExperimentConfig, tmp_path: Path) -> None:
    chosen = settings.model_copy(update={"seeds": [0], "recipes": {"less_damping": {"editor.damping": 0.01}}})
    config = base_config(chosen)
    for variant in all_variants(chosen, config, {"recipes"}):
        work.do_cells(variant, 0, list(cells_of(variant, 0, chosen, {"recipes"})), chosen, tmp_path)
    (path,) = write_results(chosen, config, tmp_path, ["recipes"])
    found = json.loads(path.read_text())
    assert [(row["label"], row["edits"]) for row in found["rows"]] == [
        ("MALMEN", 2), ("less damping", 2), ("MALMEN", 4), ("less damping", 4),
    ]  # fmt: skip
    assert found["rows"][0]["mean_residual"]["mean"] > found["rows"][1]["mean_residual"]["mean"]
    assert path.with_suffix(".png").exists() and found["recipes"] == chosen.recipes


def test_a_recipe_is_measured_as_malmen_is_whatever_it_was_trained_with(
    settings: ExperimentConfig, tmp_path: Path
) -> None:
    chosen = settings.model_copy(
        update={"edits": [2], "recipes": {"as_it_is": {"batch.cache_mb": 7}, "ends": {"data.append_eos": True}}}
    )
    for variant in all_variants(chosen, base_config(chosen), {"recipes"}):
        work.do_cells(variant, 0, [Cell(variant.name, 0, 2)], chosen, tmp_path)
    plain, same, ends = (Cells(tmp_path).get(Cell(name, 0, 2)) for name in ("malmen", "as_it_is", "ends"))
    assert plain is not None and same is not None and ends is not None
    assert plain["scores"] == same["scores"] != ends["scores"]
    assert plain["scores"]["edit_success_before"] == ends["scores"]["edit_success_before"]  # the same tokens


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


def test_what_fails_is_kept_as_an_error_and_the_others_go_on(settings: ExperimentConfig, tmp_path: Path) -> None:
    variant = method_variant("ft", base_config(settings))
    work.do_cells(variant, 0, [Cell("ft", 0, 100_000), Cell("ft", 0, 2)], settings, tmp_path)
    assert "100000 held-out edits are needed" in Cells(tmp_path).get(Cell("ft", 0, 100_000))["error"]
    assert "scores" in Cells(tmp_path).get(Cell("ft", 0, 2))
    assert Cells(tmp_path).done(Cell("ft", 0, 2)) and not Cells(tmp_path).done(Cell("ft", 0, 100_000))  # tried again


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_a_task_that_is_lost_is_told_at_the_end_and_the_others_are_there(
    settings: ExperimentConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dying(variant: Variant, *rest: Any) -> None:
        if variant.name == "ultraedit":
            raise RuntimeError("out of some memory")
        work.do_cells(variant, *rest)

    monkeypatch.setattr("malmen.tune.experiments.runner.do_cells", dying)
    chosen = settings.model_copy(update={"methods": ["ft", "ultraedit"], "seeds": [0], "edits": [2]})
    with pytest.raises(EditError, match=r"UltraEdit, seed 0: .*out of some memory.*tries again"):
        run_experiments(chosen, ("scaling",), tmp_path / "experiment")
    rows = json.loads((tmp_path / "experiment" / "results" / "scaling.json").read_text())["rows"]
    assert {row["variant"]: row["seeds"] for row in rows} == {"ft": 1, "ultraedit": 0}
    monkeypatch.undo()
    run_experiments(chosen, ("scaling",), tmp_path / "experiment")
    rows = json.loads((tmp_path / "experiment" / "results" / "scaling.json").read_text())["rows"]
    assert {row["variant"]: row["seeds"] for row in rows} == {"ft": 1, "ultraedit": 1}


def test_a_model_that_has_changed_under_its_name_is_not_measured_into_the_same_folder(
    settings: ExperimentConfig, tmp_path: Path
) -> None:
    work.check_base_model(tiny_lm("gpt2"), tmp_path)
    work.check_base_model(tiny_lm("gpt2"), tmp_path)
    with pytest.raises(EditError, match=r"holds measurements of base model \w+; .* is now \w+: choose another --out"):
        work.check_base_model(tiny_lm("llama"), tmp_path)


def test_a_corpus_that_has_changed_needs_another_folder(settings: ExperimentConfig, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("a text")
    chosen = settings.model_copy(update={"settings": {**settings.settings, "baselines.memit.corpus": str(corpus)}})
    begin_folder(tmp_path / "experiment", chosen, base_config(chosen))
    begin_folder(tmp_path / "experiment", chosen, base_config(chosen))
    corpus.write_text("another text")
    with pytest.raises(UsageError, match="another corpus; choose another --out"):
        begin_folder(tmp_path / "experiment", chosen, base_config(chosen))


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


def test_held_out_facts_of_another_matter_are_refused_before_anything_runs(
    settings: ExperimentConfig, tmp_path: Path
) -> None:
    chosen = settings.model_copy(
        update={"settings": {**settings.settings, "model.name": "gpt2", "data.train": "facts.jsonl"}}
    )
    with pytest.raises(UsageError, match=r"data\.train is a file and data\.validation is not given"):
        run_experiments(chosen, ("scaling",), tmp_path / "experiment")


def test_an_editor_is_found_again_with_other_batches(settings: ExperimentConfig) -> None:
    other = settings.model_copy(update={"settings": {**settings.settings, "batch.cache_mb": 5}})
    one, two = (method_variant("malmen", base_config(some)) for some in (settings, other))
    assert one.run_name(0) == two.run_name(0) != one.run_name(1)


def test_in_rounds_the_union_is_the_edit_at_once_and_again_edits_the_edited_model(settings: ExperimentConfig) -> None:
    """Float64: the union to rounding; `again` against each round made by hand on a model that was really changed."""
    config = base_config(settings)
    config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": "float64"})})
    lm, facts = load_lm(config.model), [record.edit for record in validation_records(config)[:6]]
    editor = make_editor(lm, config)
    union = work._in_rounds(Cell("malmen", 0, 6, 3, "union"), lm, editor, facts)
    assert_close(union, editor.edit(lm, facts).shifts, rtol=1e-7, atol=1e-9)
    again = work._in_rounds(Cell("malmen", 0, 6, 3, "again"), lm, editor, facts)
    changed = load_lm(config.model)
    for first in range(3):
        for name, shift in editor.edit(changed, facts[first::3]).shifts.items():
            changed.model.get_parameter(f"{name}.weight").data += shift.T  # GPT-2's Conv1D
    for name, shift in again.items():
        weights = (some.model.get_parameter(f"{name}.weight") for some in (changed, lm))
        assert_close(shift, torch.sub(*weights).T, rtol=1e-7, atol=1e-9)
    assert any(float((again[name] - union[name]).norm()) > 1e-3 * float(union[name].norm()) for name in union)


def test_in_rounds_ultraedit_normalises_over_all_tokens_it_has_seen(settings: ExperimentConfig) -> None:
    config = base_config(settings)
    lm, facts = load_lm(config.model), [record.edit for record in validation_records(config)[:6]]
    found = work._in_rounds(Cell("ultraedit", 0, 6, 2, "again"), lm, UltraEdit(lm, config), facts)
    series = UltraEdit(lm, config).for_rounds()
    first = series.edit(lm, facts[::2]).shifts
    with edited(lm, first):
        second = series.edit(lm, facts[1::2]).shifts
        fresh = UltraEdit(lm, config).edit(lm, facts[1::2]).shifts
    for name, shift in found.items():
        assert_close(shift, first[name] + second[name])
    assert any(not torch.allclose(second[name], fresh[name]) for name in second)


def test_each_experiment_asks_only_for_what_it_needs(settings: ExperimentConfig) -> None:
    config = base_config(settings)
    wanted = {
        kind: {variant.name for variant in all_variants(settings, config, {kind})}
        for kind in ("scaling", "ablation", "cancellation", "rounds")
    }
    assert wanted["scaling"] == {"malmen", "mend", "ft", "memit", "ultraedit"}
    assert wanted["ablation"] == {"malmen", "sum", "no_regularisation"} and wanted["cancellation"] == {
        "squares_answer",
        "sum_answer",
    }
    assert wanted["rounds"] == {"malmen", "ft", "ultraedit"}
    cells = list(cells_of(method_variant("malmen", config), 0, settings, {"rounds"}))
    assert [(cell.rounds, cell.way) for cell in cells] == [(1, "at once"), (2, "union"), (2, "again")]


def test_a_folder_with_something_else_in_it_is_refused(settings: ExperimentConfig, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(UsageError, match="holds something else"):
        run_experiments(settings, ("scaling",), tmp_path)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_a_task_that_fits_nowhere_is_told_at_once(settings: ExperimentConfig, tmp_path: Path) -> None:
    with pytest.raises(EditError, match="each task asks for 999 CPU"):
        run_experiments(settings.model_copy(update={"cpus": 999}), ("scaling",), tmp_path / "experiment")


@pytest.mark.slow
def test_the_memory_of_a_step_is_measured_and_running_out_is_told(settings: ExperimentConfig) -> None:
    config = base_config(settings)
    training = config.training.model_copy(update={"min_edits": 2, "num_edits": 4})
    config = config.model_copy(update={"training": training})  # editors that have seen different numbers of edits
    found = measure_memory(config, "concatenated", 16, 0, 4.0)  # it asserts that the step has 16
    assert found["peak_mb"] >= found["before_mb"] > 50
    lost = measure_memory(config, "decomposed", 4, 1, 0.05)
    assert lost == {"way": "decomposed", "edits": 4, "seed": 1, "ran_out": 0.05}
