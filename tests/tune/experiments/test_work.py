"""The work of one variant and seed, cell by cell."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from platform_runs import make_platform_config
from torch.testing import assert_close

from malmen.data.splits import validation_records
from malmen.lm.model import load_lm
from malmen.lm.overlay import edited
from malmen.methods.ultraedit import UltraEdit
from malmen.training import make_editor
from malmen.tune.experiments import work
from malmen.tune.experiments.cells import Cell, Cells, Group, groups_of
from malmen.tune.experiments.results import write_results
from malmen.tune.experiments.settings import ExperimentConfig, base_config
from malmen.tune.experiments.variants import method_variant


@pytest.mark.parametrize("name", ["ft", "retrieval"])
def test_a_cell_is_the_same_edit_made_by_hand(settings: ExperimentConfig, tmp_path: Path, name: str) -> None:
    from malmen.data.subjects import edits_of
    from malmen.evaluate import evaluate
    from malmen.methods.registry import METHODS
    from malmen.training import check_enough

    variant, make = method_variant(name, base_config(settings)), METHODS[name].make
    work.do_cells(Group(variant, 1, (Cell(name, 1, 4),)), settings, tmp_path)
    found = Cells(tmp_path).get(Cell(name, 1, 4))
    config = variant.seeded(1)
    lm, records = load_lm(config.model), check_enough(validation_records(config), 4)
    assert make is not None
    edit = make(lm, config).edit(lm, edits_of(records))
    scores = evaluate(lm, records, edit.shifts, config, generate=False, rewrite=edit.rewrite).scores()
    assert found is not None and found["scores"] == scores


@pytest.mark.parametrize("kind", ["t5", "bert"])
def test_the_methods_are_compared_on_other_kinds_of_models_too(kind: str, tmp_path: Path) -> None:
    config = make_platform_config(kind, tmp_path, training={"steps": 1})
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    layers = {"baselines.ultraedit.layers": "last:2", "baselines.lora.epochs": 2}
    chosen = ExperimentConfig(
        config=str(tmp_path / "config.yaml"), settings=layers, seeds=[0], edits=[4], generate=False
    )
    for group in groups_of(chosen, base_config(chosen), {"scaling"}):
        work.do_cells(group, chosen, tmp_path)
    scaling, failures = write_results(chosen, base_config(chosen), tmp_path, ["scaling", "failures"])[::-1]
    rows = {row["variant"]: row for row in json.loads(scaling.read_text())["rows"]}
    reading = {"retrieval"} if kind == "t5" else set()  # a classifier has no answer to write
    assert {name for name, row in rows.items() if row["seeds"]} == {
        "malmen",
        "mend",
        "rledit",
        "ft",
        "ultraedit",
        "lora",
    } | reading
    for name in ("memit", "memit_history", "alphaedit"):
        assert "decoder" in rows[name]["errors"][0]
    shown = json.loads(failures.read_text())["rows"]
    assert shown and all(row["after"] and row["after"] != row["answer"] for row in shown), shown[:3]


def test_a_recipe_is_measured_as_malmen_is_whatever_it_was_trained_with(
    settings: ExperimentConfig, tmp_path: Path
) -> None:
    chosen = settings.model_copy(
        update={"edits": [2], "recipes": {"as_it_is": {"batch.cache_mb": 7}, "ends": {"data.append_eos": True}}}
    )
    for group in groups_of(chosen, base_config(chosen), {"recipes"}):
        if group.seed == 0:
            work.do_cells(group, chosen, tmp_path)
    plain, same, ends = (Cells(tmp_path).get(Cell(name, 0, 2)) for name in ("malmen", "as_it_is", "ends"))
    assert plain is not None and same is not None and ends is not None
    assert plain["scores"] == same["scores"] != ends["scores"]
    assert plain["scores"]["edit_success_before"] == ends["scores"]["edit_success_before"]  # the same tokens


def test_what_fails_is_kept_as_an_error_and_the_others_go_on(settings: ExperimentConfig, tmp_path: Path) -> None:
    variant = method_variant("ft", base_config(settings))
    work.do_cells(Group(variant, 0, (Cell("ft", 0, 100_000), Cell("ft", 0, 2))), settings, tmp_path)
    assert "100000 held-out edits are needed" in Cells(tmp_path).get(Cell("ft", 0, 100_000))["error"]
    assert "scores" in Cells(tmp_path).get(Cell("ft", 0, 2))
    assert Cells(tmp_path).done(Cell("ft", 0, 2)) and not Cells(tmp_path).done(Cell("ft", 0, 100_000))  # tried again


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
