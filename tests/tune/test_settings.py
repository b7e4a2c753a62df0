from __future__ import annotations

from pathlib import Path

import pytest

from malmen.errors import UsageError
from malmen.tune.settings import SPACES, LayerSet, Range, load_sweep, parse_sweep


def write(folder: Path, text: str) -> Path:
    file = folder / "space.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def test_a_space_in_short_forms_is_read_in_full(tmp_path: Path) -> None:
    file = write(
        tmp_path, "layer_sets: [last:4, every:2]\nparameters: {locality_coef: {low: 0.1, high: 10, log: true}}"
    )
    found = load_sweep(file)
    assert found.layer_sets == {"last:4": LayerSet(layers="last:4"), "every:2": LayerSet(layers="every:2")}
    assert found.parameters == {"training.locality_coef": Range(low=0.1, high=10, log=True)}


def test_a_layer_set_has_a_name_a_rule_or_modules_and_its_own_linear_of_the_ffn(tmp_path: Path) -> None:
    file = write(tmp_path, "layer_sets: {top: last:2, two: [a.b, c.d], first: {layers: last:2, ffn: first}}")
    assert load_sweep(file).layer_sets == {
        "top": LayerSet(layers="last:2"),
        "two": LayerSet(layers=["a.b", "c.d"]),
        "first": LayerSet(layers="last:2", ffn="first"),
    }


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, "trials: 3\nlayer_sets: [all]")
    found = load_sweep(file, ["trials=5", "parameters={rank: [8, 16]}"])
    assert found.trials == 5
    assert found.parameters == {"editor.rank": [8, 16]}


def test_numbers_that_yaml_takes_for_texts_are_numbers(tmp_path: Path) -> None:
    file = write(tmp_path, "parameters: {edit_lr: [1e-5, 0.1], meta_lr: {low: 1e-6, high: 1}, tokens: [all]}")
    assert load_sweep(file).parameters == {
        "editor.edit_lr": [1e-5, 0.1],
        "training.meta_lr": Range(low=1e-6, high=1),
        "editor.tokens": ["all"],
    }


@pytest.mark.parametrize("name", sorted(path.stem for path in SPACES.glob("*.yaml")))
def test_every_shipped_space_is_read(name: str) -> None:
    assert load_sweep(SPACES / f"{name}.yaml").space


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"trails": 3}, "did you mean trials"),
        ({"trials": 0}, "trials"),
        ({"search": "magic"}, "'random', 'grid' or 'optuna'"),
        ({"score": ["edit_sucess"]}, "unknown edit_sucess; expected some of edit_success"),
        ({"score": []}, "score"),
        ({"parameters": {"editor.rank": {"low": 4, "high": 2}}}, "low must be below high, given 4 and 2"),
        ({"parameters": {"editor.edit_lr": {"low": 0, "high": 2, "log": True}}}, "must begin above 0"),
        ({"layer_sets": {"a": {"layers": "last:2", "fnn": "first"}}}, "fnn"),
        ({"alias": "no spaces"}, "alias"),
        ({"reduction_factor": 1}, "reduction_factor"),
    ],
)
def test_what_is_wrong_is_named(raw: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=r"space\.yaml") as found:
        parse_sweep(raw, "space.yaml")
    assert said in str(found.value)


def test_a_file_that_is_none_says_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no space .*none\.yaml.: neither a file nor"):
        load_sweep(tmp_path / "none.yaml")
    with pytest.raises(UsageError, match="is not YAML"):
        load_sweep(write(tmp_path, "a: [1"))
    with pytest.raises(UsageError, match="holds a list"):
        load_sweep(write(tmp_path, "- 1"))
